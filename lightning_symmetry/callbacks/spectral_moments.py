"""Which parameters of a factorised network stand for which of the dense one, and what becomes of their moments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from lightning_symmetry.low_rank.attention import LowRankMultiheadAttention
from lightning_symmetry.low_rank.candidates import is_factorized
from lightning_symmetry.low_rank.layer import LowRankMap
from lightning_symmetry.low_rank.projections import DenseProjection
from lightning_symmetry.surgery.factor_moments import factor_direction, factor_gradient, factor_squares
from lightning_symmetry.surgery.handover import Replacement, Substitution
from lightning_symmetry.surgery.optimizer_states import MomentMap


def replacements_between(before: dict[str, nn.Module], net: nn.Module) -> list[Replacement]:
    """Return which factorised layers of a network took the place of which dense ones.

    Factors of weights that were tied are counted at the first layer.

    Args:
        before: All modules by name, as they were.
        net: The network, in which some are factorised.
    """
    result, seen = [], set()
    for name, new in net.named_modules():
        old = before.get(name)
        if old is None or old is new or not is_factorized(new):
            continue
        substitutions = tuple(one for one in _substitutions(old, new) if id(one.new[0]) not in seen)
        seen.update(id(one.new[0]) for one in substitutions)
        result.append(Replacement(old, new, substitutions))
    return result


def _substitutions(old: nn.Module, new: nn.Module) -> list[Substitution]:
    if not isinstance(new, LowRankMultiheadAttention):
        groups = getattr(new, "groups", 1)

        def matrices(moment: Tensor) -> Tensor:
            return type(new).matrices_of(SimpleNamespace(weight=moment, groups=groups), **new.settings)

        return [Substitution(old.weight, (new.left, new.right), _OfFactors(new, matrices))]
    parts = new.projections()
    out = parts.pop("out_proj")
    pairs: list[tuple[nn.Parameter, list[nn.Module]]] = [(old.out_proj.weight, [out])]
    if old.in_proj_weight is not None:
        pairs.insert(0, (old.in_proj_weight, list(parts.values())))
    else:
        pairs[:0] = [(getattr(old, f"{key}_weight"), [part]) for key, part in parts.items()]
    return [
        Substitution(weight, tuple(p for part in those for p in part.parameters()), _OfProjections(those))
        for weight, those in pairs
    ]


class _OfFactors:
    """Moments of a weight as those of its factors.

    Args:
        layer: The layer with the factors.
        matrices: How a tensor of the weight's shape is a matrix for each group.
    """

    def __init__(self, layer: LowRankMap, matrices: Callable[[Tensor], Tensor]) -> None:
        self._layer, self._matrices = layer, matrices
        self._factors = tuple(factor.detach().to("cpu", torch.float64) for factor in layer.factors())

    def direction(self, direction: Tensor) -> Sequence[Tensor]:
        return self._layer.pack(*factor_direction(self._matrices(direction), *self._factors))

    def gradient(self, gradient: Tensor) -> Sequence[Tensor]:
        return self._layer.pack(*factor_gradient(self._matrices(gradient), *self._factors))

    def squares(self, squares: Tensor, mean: Tensor | None) -> Sequence[Tensor]:
        mean = None if mean is None else self._matrices(mean)
        means, noise = factor_squares(self._matrices(squares), mean, *self._factors)
        return [a + b for a, b in zip(self._layer.pack(*means), self._layer.pack(*noise), strict=True)]


class _AsItIs:
    """Moments of a weight that is a parameter of a module of its own now."""

    def direction(self, direction: Tensor) -> Sequence[Tensor]:
        return [direction.clone()]

    def gradient(self, gradient: Tensor) -> Sequence[Tensor]:
        return [gradient.clone()]

    def squares(self, squares: Tensor, mean: Tensor | None) -> Sequence[Tensor]:
        return [squares.clone()]


class _OfProjections:
    """Moments of a fused weight as those of the projections that were its rows, one after the other."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._sizes = [len(part.canonical_weight()) for part in parts]
        self._maps: list[MomentMap] = [
            _AsItIs() if isinstance(part, DenseProjection) else _OfFactors(part, lambda moment: moment.unsqueeze(0))
            for part in parts
        ]

    def direction(self, direction: Tensor) -> Sequence[Tensor]:
        rows = direction.split(self._sizes)
        return [made for one, part in zip(self._maps, rows, strict=True) for made in one.direction(part)]

    def gradient(self, gradient: Tensor) -> Sequence[Tensor]:
        rows = gradient.split(self._sizes)
        return [made for one, part in zip(self._maps, rows, strict=True) for made in one.gradient(part)]

    def squares(self, squares: Tensor, mean: Tensor | None) -> Sequence[Tensor]:
        rows = squares.split(self._sizes)
        means = [None] * len(rows) if mean is None else mean.split(self._sizes)
        found = zip(self._maps, rows, means, strict=True)
        return [made for one, part, average in found for made in one.squares(part, average)]
