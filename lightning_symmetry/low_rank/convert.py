"""Convert one layer, or say why it is not worth it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_symmetry.low_rank.attention import LowRankMultiheadAttention
from lightning_symmetry.low_rank.candidates import LAYERS
from lightning_symmetry.low_rank.decomposition import Decomposition, DecompositionError
from lightning_symmetry.low_rank.layer import LowRankLayer
from lightning_symmetry.low_rank.projections import LowRankProjection, projection_rank, projections_of
from lightning_symmetry.low_rank.rank import Rank, break_even, choose_rank, is_worthwhile, saving
from lightning_symmetry.low_rank.report import FactorizedLayer

NewLayer = LowRankLayer | LowRankMultiheadAttention


class LeftAlone(Exception):
    """A layer that stays as it is, with the reason."""


class NotWorthwhile(LeftAlone):
    """A layer whose rank is too high to save what is asked for."""


def convert(layer: nn.Module, name: str, seed: int, settings: dict[str, Any]) -> NewLayer:
    """Return the factorised layer of a plain one.

    Args:
        layer: The plain layer.
        name: Its name in the network.
        seed: Seed of random factors.
        settings: ``rank``, ``init``, ``scheme`` and ``min_saving``.

    Raises:
        LeftAlone: If it has no spectral factors.
        NotWorthwhile: If the factors would not save enough.
    """
    try:
        if isinstance(layer, nn.MultiheadAttention):
            return _convert_attention(layer, name, seed, settings)
        return _convert_layer(layer, name, seed, settings)
    except DecompositionError as error:
        raise LeftAlone(str(error)) from error


def settings_of(layer: nn.Module, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that what becomes of a plain layer is built with beside its factors."""
    return {name: settings[name] for name in LAYERS[type(layer)].settings_names}


@torch.no_grad()
def what_became(layer: nn.Module, new: NewLayer, multiply_adds: tuple[float, float]) -> FactorizedLayer:
    """Return what became of a layer.

    Args:
        layer: The plain layer.
        new: The factorised one.
        multiply_adds: Those before and after.
    """
    if isinstance(new, LowRankMultiheadAttention):
        wanted = {key: weight.unsqueeze(0) for key, (weight, _, _) in projections_of(layer).items()}
        parts = {key: part for key, part in new.projections().items() if isinstance(part, LowRankProjection)}
        sizes = sum(w.numel() for w in wanted.values()), sum(p.numel() for m in new.children() for p in m.parameters())
    else:
        wanted, parts = {"": type(new).matrices_of(layer, **new.settings)}, {"": new}
        sizes = new.dense_size, new.left.numel() + new.right.numel()
    lost = sum(_squared_error(wanted[key], *part.factors()) for key, part in parts.items())
    whole = sum(float(weight.double().square().sum()) for weight in wanted.values())
    ranks = {key: (part.rank, min(wanted[key].shape[1:])) for key, part in parts.items()}
    return FactorizedLayer(ranks, sizes, multiply_adds, (lost / whole) ** 0.5 if whole else float(lost > 0))


def _squared_error(matrices: Tensor, left: Tensor, right: Tensor) -> float:
    return float((matrices.double() - left.double() @ right.double().mT).square().sum())


def check_saving_by_shape(layer: nn.Module, settings: dict[str, Any]) -> None:
    """Check that the factors of a plain layer would save enough, unless their rank depends on singular values.

    Args:
        layer: The layer.
        settings: As for :func:`convert`.

    Raises:
        NotWorthwhile: If they would not.
    """
    rank, min_saving = settings["rank"], settings["min_saving"]
    if isinstance(rank, str):
        return
    if not isinstance(layer, nn.MultiheadAttention):
        matrices = LAYERS[type(layer)].matrices_of(layer, **settings_of(layer, settings))
        _worthwhile_rank(Decomposition(matrices), rank, min_saving)
        return
    weights = [weight.unsqueeze(0) for weight, _, _ in projections_of(layer).values()]
    try:
        ranks = [projection_rank(Decomposition(weight), rank, min_saving) for weight in weights]
    except ValueError as error:  # beyond the full rank
        raise NotWorthwhile(str(error)) from error
    if not any(ranks):
        raise _saves_too_little(layer, rank)


def _convert_layer(layer: nn.Module, name: str, seed: int, settings: dict[str, Any]) -> LowRankLayer:
    kind, own = LAYERS[type(layer)], settings_of(layer, settings)
    decomposition = Decomposition(kind.matrices_of(layer, **own))
    _check_not_zero(settings["init"], layer.weight)
    rank = _worthwhile_rank(decomposition, settings["rank"], settings["min_saving"])
    return kind.from_decomposition(layer, decomposition, rank, settings["init"], seed, name, **own)


def _convert_attention(
    layer: nn.MultiheadAttention, name: str, seed: int, settings: dict[str, Any]
) -> LowRankMultiheadAttention:
    _check_not_zero(settings["init"], *(weight for weight, _, _ in projections_of(layer).values()))
    check_saving_by_shape(layer, settings)
    rank, min_saving = settings["rank"], settings["min_saving"]
    new = LowRankMultiheadAttention.from_layer(
        layer, rank, settings["init"], seed=seed, name=name, min_saving=min_saving
    )
    if not any(isinstance(part, LowRankProjection) for part in new.children()):
        raise _saves_too_little(layer, rank)
    return new


def _saves_too_little(layer: nn.MultiheadAttention, rank: Rank) -> NotWorthwhile:
    lowest = min(break_even(*weight.shape) for weight, _, _ in projections_of(layer).values())
    return NotWorthwhile(f"rank {rank} saves too little in all of its projections, with break-even at {lowest:g}")


def _worthwhile_rank(decomposition: Decomposition, rank: Rank, min_saving: float) -> int:
    sizes = decomposition.rows, decomposition.columns
    limit = f"break-even of {sizes[0]} x {sizes[1]} is at rank {break_even(*sizes):.4g}"
    if isinstance(rank, int) and rank > decomposition.full_rank:
        raise NotWorthwhile(f"rank {rank} is beyond its full rank {decomposition.full_rank}: {limit}")
    number = choose_rank(rank, decomposition)
    if not is_worthwhile(number, *sizes, min_saving):
        share = saving(number, *sizes)
        verdict = f"saves {share:.1%} of its parameters" if share > 0 else "saves no parameters"
        wanted = f", less than the {min_saving:.1%} asked for" if min_saving > 0 else ""
        raise NotWorthwhile(f"rank {number} {verdict}{wanted}: {limit}")
    return number


def _check_not_zero(init: str, *weights: Tensor) -> None:
    if init != "random" and not all(bool(weight.any()) for weight in weights):
        raise LeftAlone("its weight is zero: it has no singular vectors")
