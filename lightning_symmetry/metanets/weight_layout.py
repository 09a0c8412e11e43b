"""What stands where in a flat vector of weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor, nn

from lightning_symmetry.metanets.zoo_layout import ZooLayout, fixed_entries


class WeightLayout:
    """Names and shapes of the tensors that stand one after the other in a flat vector of P weights.

    Args:
        shapes: Shape of each tensor by name, in order.
        fixed: Which of the P entries are constants that all networks share, booleans of shape ``(P,)``. Default: none.

    Raises:
        ValueError: If there is no tensor, a tensor has no entry, ``fixed`` has another shape, or all entries are fixed.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], fixed: Tensor | None = None) -> None:
        self.shapes = {name: torch.Size(shape) for name, shape in shapes.items()}
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        if not sizes or min(sizes) < 1:
            raise ValueError(f"Expected a layout of tensors with entries but got {dict(self.shapes)}.")
        self.num_features = sum(sizes)
        self.offsets = dict(zip(self.shapes, accumulate([0, *sizes[:-1]]), strict=True))
        self.fixed = torch.zeros(self.num_features, dtype=torch.bool) if fixed is None else fixed.detach().cpu().bool()
        if self.fixed.shape != (self.num_features,):
            raise ValueError(
                f"Expected `fixed` to have shape ({self.num_features},), one value a weight, "
                f"but got {tuple(self.fixed.shape)}."
            )
        if bool(self.fixed.all()):
            raise ValueError("All weights are fixed: there is nothing to read.")

    @classmethod
    def of(cls, network: nn.Module) -> WeightLayout:
        """Return the layout of a network's rows in a zoo, with the constants of asymmetric layers as fixed entries.

        Args:
            network: A network of the architecture. Parameters and floating point buffers stand in a row in the order
                of its ``state_dict``.
        """
        layout = ZooLayout.of(network)
        return cls.of_rows(layout, fixed_entries(network, layout))

    @classmethod
    def of_rows(cls, layout: ZooLayout, fixed: Tensor) -> WeightLayout:
        """Return the layout of a zoo's rows.

        Args:
            layout: ``zoo.layout``.
            fixed: ``zoo.fixed``, which entries are constants, booleans of shape ``(P,)``.
        """
        return cls({entry.name: entry.shape for entry in layout.in_rows}, fixed)

    @classmethod
    def make(cls, layout: WeightLayout | Mapping[str, Sequence[int]]) -> WeightLayout:
        """Return any description of a layout as one of these.

        Raises:
            TypeError: If it is that of a zoo, which does not say what is fixed.
        """
        if isinstance(layout, ZooLayout):
            raise TypeError(
                "A ZooLayout does not say which weights are constants of asymmetric layers: give "
                "WeightLayout.of_rows(zoo.layout, zoo.fixed), or the `layout` of ZooData."
            )
        return layout if isinstance(layout, WeightLayout) else cls(layout)

    @property
    def names(self) -> list[str]:
        """Names of the tensors in order."""
        return list(self.shapes)

    @cached_property
    def tensor_of(self) -> Tensor:
        """Number of the tensor to which each entry belongs, int64 of shape ``(P,)``."""
        sizes = torch.tensor([math.prod(shape) for shape in self.shapes.values()])
        return torch.repeat_interleave(torch.arange(len(sizes)), sizes)

    @cached_property
    def free(self) -> Tensor:
        """Places of the entries that are not fixed, int64 of shape ``(Q,)``."""
        return (~self.fixed).nonzero().squeeze(1)

    @cached_property
    def free_counts(self) -> dict[str, int]:
        """For each tensor that is not fixed as a whole the number of its entries that are not."""
        counts = torch.bincount(self.tensor_of[self.free], minlength=len(self.shapes)).tolist()
        return {name: count for name, count in zip(self.shapes, counts, strict=True) if count > 0}

    def check(self, weights: Tensor) -> None:
        """Check that weights are rows of this layout.

        Raises:
            ValueError: If they are not of shape ``(B, P)``.
        """
        if weights.ndim != 2 or weights.shape[1] != self.num_features:
            raise ValueError(
                f"Expected rows of {self.num_features} weights, shape (B, {self.num_features}), "
                f"but got shape {tuple(weights.shape)}."
            )

    def flatten(self, state: Mapping[str, Tensor]) -> Tensor:
        """Return tensors by name, each of its shape with any leading axes, as rows of shape ``(..., P)``.

        Args:
            state: A ``state_dict``, or one of stacked tensors; names that are not in the layout are left out.

        Raises:
            ValueError: If a tensor is missing or has another shape.
        """
        rows = []
        for name, shape in self.shapes.items():
            if name not in state or state[name].shape[state[name].ndim - len(shape) :] != shape:
                found = tuple(state[name].shape) if name in state else "nothing"
                raise ValueError(f"Expected {name} to have shape (..., *{tuple(shape)}) but got {found}.")
            lead = state[name].shape[: state[name].ndim - len(shape)]
            rows.append(state[name].reshape(*lead, -1))
        return torch.cat(rows, dim=-1)
