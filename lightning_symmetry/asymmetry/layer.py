"""The base of the layers with fixed entries: ``W' = M * W + (1 - M) * F``."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Self

from lightning_symmetry.asymmetry.constants import (
    in_plain_eager_mode,
    with_constants,
    with_mask,
    write_constants,
)
from lightning_symmetry.asymmetry.masks import check_counts, distinct_subsets, draw_constants, layer_generator
from lightning_symmetry.surgery import HasConstants, ReparametrizedLayer

Layout = Literal["entries", "filters"]


class AsymmetricLayer(ReparametrizedLayer, HasConstants):
    r"""Base of the layers with fixed entries.

    .. math:: W' = M \odot W + (1 - M) \odot F, \qquad F_{ij} \sim N(0, \kappa^2)

    The rows of the mask M are pairwise distinct (within a group, for grouped convolutions: rows of different
    groups read different channels) and each has at least one trainable and one fixed entry, as Theorem 1 asks.

    The parameter ``weight`` has the shape of the plain layer's. What an optimizer's weight decay does to its
    fixed entries never shows: the forward pass and the ``state_dict`` hold the constants. Read
    :meth:`canonical_weight` where the exact weight is wanted between an optimizer step and the next forward.

    Attributes:
        weight: The trainable entries, and the constants between them.
        bias: The bias, never fixed.
        mask: Boolean, true where trainable; shape ``(rows, inputs)``, where an input is an entry of the
            flattened fan-in (layout ``"entries"``) or an input channel (layout ``"filters"``).
        fixed: The constants, row by row in the order of the mask; shape ``(rows, n_fix)``, times the number of
            entries of a filter for layout ``"filters"``.
        n_fix: Number of fixed entries, or filters, in a row.
        kappa: Standard deviation of the constants.
        layout: ``"entries"`` or ``"filters"``.

    Source: The Empirical Impact of Neural Parameter Symmetries, or Lack Thereof (2024), section 4.1, eq. 2,
    figure 2.
    """

    affine = True
    weight: nn.Parameter
    bias: nn.Parameter | None
    mask: Tensor
    fixed: Tensor
    _index: Tensor
    _places: tuple[Tensor, Tensor, Tensor, Tensor]
    _own: tuple[Tensor, Tensor, Tensor]

    @classmethod
    def check(cls, layer: nn.Module, n_fix: int, kappa: float, layout: Layout, name: str = "") -> None:
        """Check that a plain layer can take these settings, without changing it; arguments as in ``from_layer``.

        Raises:
            ValueError: If rows cannot be made distinct with at least one trainable entry each, kappa is negative or
                the layout unknown.
        """
        title = f"Layer {name!r}" if name else cls.__name__
        if layout not in ("entries", "filters"):
            raise ValueError(f"{title}: expected `layout` to be 'entries' or 'filters' but got {layout!r}.")
        if not kappa >= 0 or not math.isfinite(kappa):
            raise ValueError(f"{title}: kappa must be positive (or exactly 0, fixed zeros), but got {kappa}.")
        rows, units = rows_and_units(layer.weight, layout)
        what = "filters" if layout == "filters" else "entries"
        check_counts(
            rows // getattr(layer, "groups", 1),
            units,
            n_fix,
            title,
            f"Choose another n_fix ({what} of each row), give this layer its own with overrides, or skip it.",
        )

    @classmethod
    def from_layer(
        cls,
        layer: nn.Module,
        n_fix: int,
        kappa: float,
        layout: Layout = "entries",
        seed: int = 0,
        name: str = "",
    ) -> Self:
        """Build the layer from the plain one, whose parameters it takes over.

        Args:
            layer: The plain layer: ``nn.Linear`` or torch-geometric's ``Linear``, ``nn.Conv1d``, ``nn.Conv2d``.
            n_fix: Number of fixed entries (of the flattened fan-in) or filters of each row.
            kappa: Standard deviation of the constants; 0 gives fixed zeros (Theorem 3).
            layout: ``"entries"`` or ``"filters"``, which are the same for a linear layer.
            seed: Seed of mask and constants.
            name: Name of the layer in its network; constants are drawn for each name apart.

        Raises:
            ValueError: If rows cannot be made distinct with at least one trainable entry each, or kappa < 0.
        """
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self._adopt(layer, n_fix, kappa, layout, seed, name)
        return self

    @abstractmethod
    def _take_settings(self, layer: nn.Module) -> None:
        """Take over what else a plain layer knows: sizes, stride, padding."""

    @abstractmethod
    def _empty(self, **factory: Any) -> nn.Module:
        """Return a plain layer of the same settings whose parameters are to be overwritten."""

    def _adopt(
        self,
        layer: nn.Module,
        n_fix: int,
        kappa: float,
        layout: Layout,
        seed: int,
        name: str,
    ) -> None:
        """Take over the parameters of a plain layer and draw mask and constants."""
        self.check(layer, n_fix, kappa, layout, name)
        self._take_settings(layer)
        weight: nn.Parameter = layer.weight
        rows, units = rows_and_units(weight, layout)
        groups = getattr(layer, "groups", 1)
        self.n_fix, self.kappa, self.layout = n_fix, float(kappa), layout
        self.weight, self.bias = weight, layer.bias
        generator = layer_generator(seed, name)
        drawn = [distinct_subsets(rows // groups, units, n_fix, generator) for _ in range(groups)]
        subsets = torch.cat(drawn)
        mask = torch.ones(rows, units, dtype=torch.bool, device="cpu").scatter_(1, subsets, False)
        # The mask is drawn before the constants and their draw does not depend on kappa: the same seed gives
        # the same mask, and constants in proportion, for every kappa.
        fixed = kappa * draw_constants(rows, n_fix * (weight[0].numel() // units), generator)
        self.register_buffer("mask", mask.to(weight.device))
        self.register_buffer("fixed", fixed.to(weight.device, weight.dtype))
        self._number_entries(subsets.to(weight.device))
        self.restore_constants()
        self.train(layer.training)

    def _number_entries(self, subsets: Tensor) -> None:
        """Note where the constants stand, given the fixed inputs of each row.

        The positions are no buffer: the mask says them, DDP would send them in each step, and a moving average of
        buffers would round them.
        """
        index = subsets
        size = self.weight[0].numel() // self.mask.shape[1]
        if size > 1:
            within = torch.arange(size, device=index.device)
            index = (index.unsqueeze(-1) * size + within).flatten(1)
        self._index = index
        self._derive()

    def _apply(self, fn: Any, recurse: bool = True) -> AsymmetricLayer:
        super()._apply(fn, recurse)
        self._index = fn(self._index)
        self._derive()
        return self

    def _derive(self) -> None:
        """Note what the fast path needs: whose parameters these are, and the entries' numbers in the whole weight."""
        rows = torch.arange(len(self._index), device=self._index.device).unsqueeze(1)
        flat = self._index + rows * self.weight[0].numel()
        self._places = flat, self._index, self.fixed, torch.zeros_like(self.fixed)
        self._own = self.weight, self.mask, self.fixed

    def restore_constants(self) -> None:
        """Write the constants into ``weight``, where weight decay may have moved them.

        Autograd does not see this: between two calls only an optimizer step can have changed these entries.
        """
        write_constants(self.weight.data, *self._places[:3])

    def _may_write(self, input: Tensor) -> bool:
        """Whether constants may be written into the weight, for an input in plain eager reverse mode.

        What was handed in by ``functional_call`` or stacked by ``vmap`` is the caller's and is never written to.
        """
        weight, mask, fixed = self._own
        parameters, buffers = self._parameters, self._buffers
        return (
            parameters["weight"] is weight
            and buffers["mask"] is mask
            and buffers["fixed"] is fixed
            and in_plain_eager_mode(input, weight)
        )

    def canonical_weight(self) -> Tensor:
        """Return ``W'``, differentiable in ``weight`` and constant at the fixed entries."""
        if self.mask is self._own[1]:
            return with_constants(self.weight, self._index, self.fixed)
        return with_mask(self.weight, self.mask, self.fixed)

    @torch.no_grad()
    def to_layer(self) -> nn.Module:
        """Return the plain layer with the canonical weight: same dtype, device, mode and ``requires_grad``."""
        layer = self._empty(device=self.weight.device, dtype=self.weight.dtype)
        layer.weight.copy_(self.canonical_weight())
        layer.weight.requires_grad_(self.weight.requires_grad)
        if self.bias is not None:
            layer.bias.copy_(self.bias)
            layer.bias.requires_grad_(self.bias.requires_grad)
        return layer.train(self.training)

    def constants(self) -> dict[str, Tensor]:
        """Return the mask and the constants."""
        return {"mask": self.mask, "fixed": self.fixed}

    def trainable_entries(self) -> Tensor:
        """Return the mask in the shape of the weight, true where trainable."""
        size = self.weight[0].numel() // self.mask.shape[1]
        return self.mask.repeat_interleave(size, dim=1).view_as(self.weight)

    @property
    def num_fixed(self) -> int:
        """Number of fixed entries of the weight."""
        return self.fixed.numel()

    @property
    def num_trainable(self) -> int:
        """Number of trainable entries of weight and bias."""
        bias = 0 if self.bias is None else self.bias.numel()
        return self.weight.numel() - self.num_fixed + bias

    @property
    def fixed_fraction(self) -> float:
        """Share of the weight's entries that are fixed."""
        return self.num_fixed / self.weight.numel()

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        self.restore_constants()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        if not self.mask.is_meta:
            self._number_entries(self.mask.logical_not().nonzero()[:, 1].view(len(self.mask), -1))
            if self._index.shape == self.fixed.shape:  # else the loader has already recorded the mismatch
                self.restore_constants()

    def _describe(self) -> str:
        return f"bias={self.bias is not None}, n_fix={self.n_fix}, kappa={self.kappa:g}, layout={self.layout!r}"


def rows_and_units(weight: Tensor, layout: Layout) -> tuple[int, int]:
    """Return the number of rows and the number of inputs of a row, of which some are fixed."""
    return weight.shape[0], weight.shape[1] if layout == "filters" else weight[0].numel()
