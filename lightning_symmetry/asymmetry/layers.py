"""Linear and convolutional layers with fixed entries: ``W' = M * W + (1 - M) * F``."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init

from lightning_symmetry.asymmetry.fixed_linear import (
    FixedLinear,
    fast_path_applies,
    with_constants,
    with_mask,
)
from lightning_symmetry.asymmetry.graph_linear import graph_linear
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
        self._own = self.weight, self.mask, self.fixed

    def _apply(self, fn: Any, recurse: bool = True) -> AsymmetricLayer:
        super()._apply(fn, recurse)
        self._index = fn(self._index)
        self._own = self.weight, self.mask, self.fixed
        return self

    def _holds_its_own(self) -> bool:
        """Whether weight and constants are the module's, not handed in by ``functional_call`` or stacked by ``vmap``.

        What was handed in is the caller's and is never written to.
        """
        weight, mask, fixed = self._own
        return self.weight is weight and self.mask is mask and self.fixed is fixed

    @torch.no_grad()
    def restore_constants(self) -> None:
        """Write the constants into ``weight``, where weight decay may have moved them.

        Autograd does not see this: between two calls only an optimizer step can have changed these entries.
        """
        weight = self.weight.data
        if weight.ndim == 2:
            weight.scatter_(1, self._index, self.fixed)
        else:
            weight.copy_(with_constants(weight, self._index, self.fixed))

    def canonical_weight(self) -> Tensor:
        """Return ``W'``, differentiable in ``weight`` and constant at the fixed entries."""
        if self.mask is self._own[1]:
            return with_constants(self.weight, self._index, self.fixed)
        return with_mask(self.weight, self.mask, self.fixed)

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

    def _fill(self, layer: nn.Module) -> nn.Module:
        """Give a new plain layer the canonical parameters, the mode and ``requires_grad``."""
        with torch.no_grad():
            layer.weight.copy_(self.canonical_weight())
            if self.bias is not None:
                layer.bias.copy_(self.bias)
                layer.bias.requires_grad_(self.bias.requires_grad)
        layer.weight.requires_grad_(self.weight.requires_grad)
        return layer.train(self.training)

    def _describe(self) -> str:
        return f"bias={self.bias is not None}, n_fix={self.n_fix}, kappa={self.kappa:g}, layout={self.layout!r}"


def rows_and_units(weight: Tensor, layout: Layout) -> tuple[int, int]:
    """Return the number of rows and the number of inputs of a row, of which some are fixed."""
    return weight.shape[0], weight.shape[1] if layout == "filters" else weight[0].numel()


class AsymmetricLinear(AsymmetricLayer):
    """Linear layer with fixed entries, see :class:`AsymmetricLayer`.

    Args:
        in_features: Size of the last axis of the input.
        out_features: Size of the last axis of the output.
        n_fix: Number of fixed inputs of each output.
        kappa: Standard deviation of the constants; 0 gives fixed zeros (Theorem 3).
        bias: Whether to add a bias.
        layout: A linear layer's entries are its filters: both layouts are the same.
        seed: Seed of mask and constants.
        device: Device of the parameters.
        dtype: Type of the parameters.

    Raises:
        ValueError: If rows cannot be made distinct with at least one trainable entry each, or kappa < 0.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        n_fix: int,
        kappa: float,
        bias: bool = True,
        layout: Layout = "entries",
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        layer = nn.Linear(in_features, out_features, bias, device, dtype)
        self._from(layer, n_fix, kappa, layout, seed, "")

    def _from(self, layer: nn.Module, n_fix: int, kappa: float, layout: Layout, seed: int, name: str) -> None:
        self.of_graph_network = isinstance(layer, graph_linear())
        if self.of_graph_network:
            self.in_features, self.out_features = layer.in_channels, layer.out_channels
            self._initializers = layer.weight_initializer, layer.bias_initializer
        else:
            self.in_features, self.out_features = layer.in_features, layer.out_features
        self._adopt(layer, n_fix, kappa, layout, seed, name)

    @classmethod
    def from_layer(
        cls,
        layer: nn.Module,
        n_fix: int,
        kappa: float,
        layout: Layout = "entries",
        seed: int = 0,
        name: str = "",
    ) -> AsymmetricLinear:
        """Build the layer from a plain one, whose parameters it takes over.

        Args:
            layer: ``nn.Linear`` or torch-geometric's ``Linear``.
            n_fix: Number of fixed inputs of each output.
            kappa: Standard deviation of the constants.
            layout: Both layouts are the same here.
            seed: Seed of mask and constants.
            name: Name of the layer in its network; seeds are drawn for each name apart.
        """
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self._from(layer, n_fix, kappa, layout, seed, name)
        return self

    def to_layer(self) -> nn.Module:
        """Return the plain ``nn.Linear``, or torch-geometric's, with the canonical weight."""
        factory = {"device": self.weight.device, "dtype": self.weight.dtype}
        if self.of_graph_network:
            from torch_geometric.nn import Linear as GraphLinear  # takes seconds to import

            weight_init, bias_init = self._initializers
            with torch.random.fork_rng(devices=[]):  # it cannot be built without drawing parameters
                layer = GraphLinear(
                    self.in_features,
                    self.out_features,
                    bias=self.bias is not None,
                    weight_initializer=weight_init,
                    bias_initializer=bias_init,
                ).to(**factory)
        else:
            layer = skip_init(nn.Linear, self.in_features, self.out_features, bias=self.bias is not None, **factory)
        return self._fill(layer)

    def forward(self, input: Tensor) -> Tensor:
        """Map ``(..., in_features)`` to ``(..., out_features)``."""
        if self._holds_its_own() and fast_path_applies(self.weight, input):
            self.restore_constants()
            return FixedLinear.apply(input, self.weight, self.bias, self._index, self.fixed)
        return F.linear(input, self.canonical_weight(), self.bias)

    def extra_repr(self) -> str:
        """Describe sizes and constants."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self._describe()}"


class _AsymmetricConv(AsymmetricLayer):
    """What the convolutions share; subclasses name the plain class and the function."""

    _plain: type[nn.Conv1d] | type[nn.Conv2d]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        n_fix: int,
        kappa: float,
        stride: int | tuple[int, ...] = 1,
        padding: str | int | tuple[int, ...] = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
        layout: Layout = "entries",
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        layer = self._plain(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            padding_mode,
            device,
            dtype,
        )
        self._from(layer, n_fix, kappa, layout, seed, "")

    def _from(self, layer: Any, n_fix: int, kappa: float, layout: Layout, seed: int, name: str) -> None:
        for attribute in _CONV_ATTRIBUTES:
            setattr(self, attribute, getattr(layer, attribute))
        if self.padding_mode != "zeros":
            self._pad = list(layer._reversed_padding_repeated_twice)
        self._adopt(layer, n_fix, kappa, layout, seed, name)

    @classmethod
    def from_layer(
        cls,
        layer: Any,
        n_fix: int,
        kappa: float,
        layout: Layout = "entries",
        seed: int = 0,
        name: str = "",
    ) -> Any:
        """Build the layer from a plain convolution, whose parameters it takes over.

        Args:
            layer: The plain convolution.
            n_fix: Number of fixed entries (of the flattened fan-in) or filters of each output channel.
            kappa: Standard deviation of the constants.
            layout: ``"entries"`` or ``"filters"``.
            seed: Seed of mask and constants.
            name: Name of the layer in its network; seeds are drawn for each name apart.
        """
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self._from(layer, n_fix, kappa, layout, seed, name)
        return self

    def to_layer(self) -> nn.Module:
        """Return the plain convolution with the canonical weight."""
        arguments = {attribute: getattr(self, attribute) for attribute in _CONV_ATTRIBUTES}
        layer = skip_init(
            self._plain,
            **arguments,
            bias=self.bias is not None,
            device=self.weight.device,
            dtype=self.weight.dtype,
        )
        return self._fill(layer)

    def extra_repr(self) -> str:
        """Describe sizes and constants."""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, groups={self.groups}, {self._describe()}"
        )


_CONV_ATTRIBUTES = (
    "in_channels",
    "out_channels",
    "kernel_size",
    "stride",
    "padding",
    "dilation",
    "groups",
    "padding_mode",
)


class AsymmetricConv1d(_AsymmetricConv):
    """One-dimensional convolution with fixed entries, see :class:`AsymmetricLayer`.

    Arguments are those of ``nn.Conv1d``, and those of :class:`AsymmetricLinear` for the constants: ``n_fix`` counts
    entries of the flattened fan-in (layout ``"entries"``) or input filters (``"filters"``) of each output channel. In
    a grouped convolution a row covers the ``in_channels / groups`` channels that it reads.
    """

    _plain = nn.Conv1d

    def forward(self, input: Tensor) -> Tensor:
        """Convolve ``(N, C, L)``."""
        return _convolve(F.conv1d, self, input)


class AsymmetricConv2d(_AsymmetricConv):
    """Two-dimensional convolution with fixed entries, see :class:`AsymmetricLayer`.

    Arguments are those of ``nn.Conv2d``, and those of :class:`AsymmetricLinear` for the constants: ``n_fix`` counts
    entries of the flattened fan-in (layout ``"entries"``) or input filters (``"filters"``) of each output channel. In
    a grouped convolution a row covers the ``in_channels / groups`` channels that it reads.
    """

    _plain = nn.Conv2d

    def forward(self, input: Tensor) -> Tensor:
        """Convolve ``(N, C, H, W)``."""
        return _convolve(F.conv2d, self, input)


def _convolve(convolution: Any, layer: Any, input: Tensor) -> Tensor:
    """Convolve with the canonical weight, as ``nn.Conv1d`` and ``nn.Conv2d`` do."""
    padding = layer.padding
    if layer.padding_mode != "zeros":
        input = F.pad(input, layer._pad, mode=layer.padding_mode)
        padding = 0
    weight = layer.canonical_weight()
    return convolution(input, weight, layer.bias, layer.stride, padding, layer.dilation, layer.groups)
