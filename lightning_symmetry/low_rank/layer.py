"""The bases of the factorised layers."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from lightning_symmetry.low_rank.decomposition import Decomposition
from lightning_symmetry.low_rank.initialisation import (
    Init,
    initial_factors,
    kept_variance,
    layer_generator,
    usual_variance,
)
from lightning_symmetry.low_rank.rank import Rank, choose_rank
from lightning_symmetry.surgery import ReparametrizedLayer


class LowRankMap(nn.Module):
    r"""A module with a weight that is a product of two factors, :math:`W = U V^\top`.

    Attributes:
        left: U, laid out as the layer uses it.
        right: V, laid out as the layer uses it.
        rank: The number r of columns of both, in each group.
    """

    left: nn.Parameter
    right: nn.Parameter
    rank: int

    @abstractmethod
    def factors(self) -> tuple[Tensor, Tensor]:
        """Return U and V as matrices, of shape ``(G, N, r)`` and ``(G, M, r)``, differentiable in the parameters."""

    @abstractmethod
    def canonical_weight(self) -> Tensor:
        """Return the weight that the plain layer would have, the product, differentiable in the factors."""

    @property
    def weight(self) -> Tensor:
        """The canonical weight, for code that reads it: ``F.linear(hidden, embedding.weight)``, ``weight.dtype``.

        Each time a new tensor, the product being formed, and no parameter: what is written into it is lost.
        """
        return self.canonical_weight()

    @abstractmethod
    def pack(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Return matrices U and V, as :meth:`factors` gives them, in the shapes of the parameters."""

    @torch.no_grad()
    def set_factors(self, left: Tensor, right: Tensor, like: nn.Parameter) -> None:
        """Take new parameters of the type, device and ``requires_grad`` of another one."""
        self.rank = left.shape[-1]
        for name, value in zip(("left", "right"), self.pack(left, right), strict=True):
            value = value.to(like.device, like.dtype, copy=True, memory_format=torch.contiguous_format)
            setattr(self, name, nn.Parameter(value, requires_grad=like.requires_grad))


class MatrixMap(LowRankMap):
    """A map with a weight that is one matrix: ``left`` is U, ``(N, r)``; ``right`` is V, ``(M, r)``."""

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return U and V, of shape ``(1, N, r)`` and ``(1, M, r)``."""
        return self.left.unsqueeze(0), self.right.unsqueeze(0)

    def pack(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Return U and V without the axis of groups."""
        return left.squeeze(0), right.squeeze(0)

    def canonical_weight(self) -> Tensor:
        r"""Return :math:`U V^\top`."""
        return self.left @ self.right.mT


class LowRankLayer(LowRankMap, ReparametrizedLayer):
    r"""A layer with a weight that is a product of two factors, :math:`W = U V^\top`.

    Subclasses say which matrix of shape ``(N, M)`` the plain layer's weight is, how the factors are laid out, and how
    they are applied one after the other: V maps M inputs to r, U maps r to N outputs, at ``r (N + M)`` multiply-adds
    in place of ``N M``. Beyond break-even, ``r > N M / (N + M)``, and with inputs enough, it is cheaper to multiply
    the factors first, and that is done.

    Attributes:
        left: U.
        right: V.
        bias: The plain layer's bias, or None.
        rank: The number r of columns of both factors, in each group.

    Source: Exploring Low Rank Training of Deep Neural Networks (2022), section 2.
    """

    settings_names: tuple[str, ...] = ()
    """Names of what a layer is built with beside its factors."""

    bias: nn.Parameter | None
    _dense: int

    @classmethod
    def from_layer(
        cls,
        layer: nn.Module,
        rank: Rank = 0.25,
        init: Init = "spectral",
        *,
        seed: int = 0,
        name: str = "",
        **settings: Any,
    ) -> Self:
        r"""Build the layer from the plain one, whose bias it takes over.

        Args:
            layer: The plain layer; it is not changed.
            rank: A number, a share of the full rank, ``"energy:0.9"`` or ``"stable"``, see
                :func:`~lightning_symmetry.low_rank.rank.choose_rank`. Break-even is no limit here.
            init: ``"spectral"``, ``"spectral_ones"`` or ``"random"``, see
                :func:`~lightning_symmetry.low_rank.initialisation.initial_factors`. Entries of the product of random
                factors have the mean square of the weight's: of a new layer that of its own initialisation.
            seed: Seed of random factors.
            name: Name of the layer in its network; factors are drawn for each name apart.
            **settings: ``scheme``, for convolutions.

        Raises:
            ValueError: If the rank does not fit, the initialisation does not exist, or the weight is not finite.
        """
        decomposition = Decomposition(cls.matrices_of(layer, **settings))
        return cls.from_decomposition(
            layer, decomposition, choose_rank(rank, decomposition), init, seed, name, **settings
        )

    @classmethod
    def from_decomposition(
        cls,
        layer: nn.Module,
        decomposition: Decomposition,
        rank: int,
        init: Init = "spectral",
        seed: int = 0,
        name: str = "",
        **settings: Any,
    ) -> Self:
        """Build the layer from the plain one, whose bias it takes over, and the decomposition of its weight.

        Args:
            layer: The plain layer; it is not changed.
            decomposition: That of its matrices.
            rank: The number of columns of the factors.
            init: Initialisation of the factors, as in :meth:`from_layer`.
            seed: Seed of random factors.
            name: Name of the layer in its network.
            **settings: ``scheme``, for convolutions.
        """
        precision = torch.finfo(layer.weight.dtype).eps
        variance, generator = kept_variance(layer.weight, usual_variance(layer)), layer_generator(seed, name)
        factors = initial_factors(decomposition, rank, init, variance, generator, precision)
        return cls.from_factors(layer, *factors, **settings)

    @classmethod
    def from_factors(cls, layer: nn.Module, left: Tensor, right: Tensor, **settings: Any) -> Self:
        """Build the layer from the plain one, whose bias it takes over, and factors of one's own.

        Args:
            layer: The plain layer; it is not changed.
            left: U, of shape ``(G, N, r)``.
            right: V, of shape ``(G, M, r)``.
            **settings: ``scheme``, for convolutions.
        """
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self._adopt(layer, left, right, **settings)
        return self

    def _adopt(self, layer: nn.Module, left: Tensor, right: Tensor, **settings: Any) -> None:
        self._take_settings(layer, **settings)
        self.set_factors(left, right, like=layer.weight)
        self.register_parameter("bias", getattr(layer, "bias", None))
        self._note_costs()
        self.train(layer.training)

    def _draw(self, layer: nn.Module, rank: int, **settings: Any) -> None:
        """Become a new layer, drawn from the global random state as plain layers are."""
        decomposition = Decomposition(self.matrices_of(layer, **settings))
        number = choose_rank(rank, decomposition)
        self._adopt(layer, *initial_factors(decomposition, number, "random", usual_variance(layer)), **settings)

    @classmethod
    @abstractmethod
    def matrices_of(cls, layer: nn.Module) -> Tensor:
        """Return the weight of a plain layer as matrices, of shape ``(G, N, M)``."""

    @abstractmethod
    def _take_settings(self, layer: nn.Module, **settings: Any) -> None:
        """Take over what else a plain layer knows: sizes, stride, padding."""

    @abstractmethod
    def _note_costs(self) -> None:
        """Note the number of entries of the product, and when it is cheaper to multiply the factors first."""

    @property
    def settings(self) -> dict[str, Any]:
        """What the layer was built with beside its factors, as :meth:`from_factors` takes it."""
        return {name: getattr(self, name) for name in self.settings_names}

    @property
    def dense_size(self) -> int:
        """Number of entries of the canonical weight."""
        return self._dense

    @abstractmethod
    def _empty(self, **factory: Any) -> nn.Module:
        """Return a plain layer of the same settings with parameters that are not initialised."""

    @torch.no_grad()
    def to_layer(self) -> nn.Module:
        """Return the plain layer with the product as its weight: same dtype, device, mode and ``requires_grad``."""
        layer = self._empty(device=self.left.device, dtype=self.left.dtype)
        layer.weight.copy_(self.canonical_weight())
        layer.weight.requires_grad_(self.left.requires_grad)
        if self.bias is not None:
            layer.bias.copy_(self.bias)
            layer.bias.requires_grad_(self.bias.requires_grad)
        return layer.train(self.training)


class MatrixLayer(MatrixMap, LowRankLayer):
    """A factorised layer with a weight that is one matrix: a linear layer or an embedding."""

    @classmethod
    def matrices_of(cls, layer: nn.Module) -> Tensor:
        """Return the weight, of shape ``(1, N, M)``."""
        return layer.weight.unsqueeze(0)
