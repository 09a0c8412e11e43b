"""Factorise any network: the room's one verb."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn
from torch.nn.parameter import UninitializedParameter

from lightning_symmetry.low_rank.candidates import (
    LAYERS,
    find_layers,
    is_asymmetric,
    plain,
    tied_weights,
    why_left_alone,
)
from lightning_symmetry.low_rank.conv import Scheme, check_scheme
from lightning_symmetry.low_rank.convert import LeftAlone, NewLayer, NotWorthwhile, convert, settings_of, what_became
from lightning_symmetry.low_rank.cost import (
    Call,
    batch_size,
    dense_multiply_adds,
    factored_multiply_adds,
    one_position,
    watch_calls,
)
from lightning_symmetry.low_rank.initialisation import Init, check_init
from lightning_symmetry.low_rank.rank import Rank, check_rank
from lightning_symmetry.low_rank.report import FactorizationReport
from lightning_symmetry.surgery import match_patterns, module_names, replace_modules, settings_for

NetT = TypeVar("NetT", bound=nn.Module)


def factorize(
    net: NetT,
    rank: Rank = 0.25,
    *,
    init: Init = "spectral",
    scheme: Scheme = "kxk-1x1",
    min_saving: float = 0.0,
    skip: Sequence[str] = (),
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    seed: int = 0,
    example_input: Any = None,
) -> NetT:
    r"""Factorise the weights of a network in place, :math:`W = U V^\top`.

    Converted are ``nn.Linear``, ``nn.Conv1d``, ``nn.Conv2d``, ``nn.Embedding`` and ``nn.MultiheadAttention`` with its
    four projections; of a layer with fixed entries the canonical weight is factorised, and its constants are gone.
    Weights that are tied, such as those of an embedding and a head, get the same factors, and modules that are shared
    stay shared. Biases stay the same objects. Factors are called ``left`` and ``right`` and come in the order of the
    weight that they replace.

    A layer is left alone where the factors would not save parameters, that is at break-even
    ``r = N M / (N + M)`` and beyond. A share of the full rank of a head with few outputs is very little: ``skip`` it.
    The report of what was changed, what not and why, with parameters, multiply-adds and errors, is left as
    ``net.factorization_report`` (print it). If anything fails the network is as it was.

    Args:
        net: The network, changed in place.
        rank: A number of columns; a share of the full rank ``min(N, M)`` in (0, 1]; ``"energy:0.9"``, the least
            that keeps this share of :math:`\|W\|_F^2`; or ``"stable"``, the stable rank rounded up. See
            :func:`~lightning_symmetry.low_rank.rank.choose_rank`.
        init: ``"spectral"`` (eq. 3), ``"spectral_ones"`` (eq. 3 with :math:`S_r = I`; does not keep the function) or
            ``"random"``, with the variance of PyTorch's own initialisation in the product, see
            :func:`~lightning_symmetry.low_rank.initialisation.initial_factors`.
        scheme: ``"kxk-1x1"`` or ``"1xk-kx1"``: the two convolutions that become of an ``nn.Conv2d``.
        min_saving: Layers that would save a smaller share of their weight's parameters, or nothing, are left alone.
            -1 takes any rank, as the papers do with 0.62 of the full rank, which costs parameters.
        skip: Shell patterns of layers to leave alone. Attention is one layer.
        overrides: Shell pattern -> settings (``rank``, ``init``, ``scheme``, ``min_saving``) of single layers; where
            several match, the later one counts. A number as the rank of a layer called by its full name must save
            parameters.
        seed: Seed of random factors, which depend on it and on the layer's name within ``net`` only.
        example_input: A tensor, or a tuple or dictionary of arguments of ``net``, to count multiply-adds a sample
            with, its first axis being that of samples. Layers that are not called with it are left alone.

    Returns:
        The same network.

    Raises:
        ValueError: If there is nothing to convert, a pattern matches nothing, a setting does not exist or does not fit
            a layer called by its name, tied layers have different settings, or the network is factorised or whitened.

    Source: Exploring Low Rank Training of Deep Neural Networks (2022), sections 2 and 3.
    """
    defaults = {"rank": rank, "init": init, "scheme": scheme, "min_saving": min_saving}
    overrides = overrides or {}
    layers = find_layers(net)
    skipped = match_patterns(layers, skip, "skip")
    chosen = dict(settings_for(layers, defaults, overrides))
    for settings in (defaults, *chosen.values()):
        _check_settings(**settings)
    ties = tied_weights(net, layers)
    reasons = why_left_alone(net, layers, ties)
    calls: dict[str, list[Call]] | None = None
    if example_input is not None:
        calls = watch_calls(net, {name: m for name, m in layers.items() if name not in reasons}, example_input)
        for name in layers.keys() - calls.keys():
            reasons.setdefault(name, "it is not called with the example input")
    excluded = {name for name in layers if skipped[name]}
    _spread(reasons, excluded, ties)
    new, unsaved = _convert_all(layers, chosen, {*reasons, *excluded}, ties, overrides, seed)
    reasons |= {name: str(why) for name, why in unsaved.items()} | dict.fromkeys(excluded, "skipped")
    report = _report(net, layers, new, reasons, ties, calls, batch_size(example_input))
    if not report.changed:
        raise ValueError(f"factorize found nothing to convert in {type(net).__name__}.\n{report}")
    expected = {*excluded, *(name for name, why in unsaved.items() if isinstance(why, NotWorthwhile))}
    if unexpected := {name: why for name, why in reasons.items() if name not in expected}:
        listed = "; ".join(f"{name} ({reason})" for name, reason in unexpected.items())
        warnings.warn(f"factorize left {len(unexpected)} layer(s) alone: {listed}.", stacklevel=2)
    before, names = _num_parameters(net), module_names(net)
    replace_modules(net, {place: new[name] for name in new for place in names[layers[name]]})
    report.parameters = before, _num_parameters(net)
    net.factorization_report = report
    return net


def _report(
    net: nn.Module,
    layers: Mapping[str, nn.Module],
    new: Mapping[str, NewLayer],
    reasons: Mapping[str, str],
    ties: Mapping[str, list[str]],
    calls: Mapping[str, list[Call]] | None,
    size: int,
) -> FactorizationReport:
    """Write down what becomes of each layer; ``size`` is the number of samples of the calls."""
    names = module_names(net)
    report = FactorizationReport("factorize", unit="position" if calls is None else "sample")
    for name, module in layers.items():
        kind = type(module).__name__
        if name not in new:
            report.add(name, kind, False, reasons[name])
            continue
        layer = plain(module)
        seen = [one_position(layer)] if calls is None else calls[name]
        dense = sum(dense_multiply_adds(layer, one) for one in seen) / size
        factored = sum(factored_multiply_adds(new[name], one) for one in seen) / size
        became = what_became(layer, new[name], (dense, factored))
        tied = [other for other in ties.get(name, ()) if other != name]
        if tied and ties[name][0] != name:
            became = replace(became, parameters=(0, 0))  # counted at the first
        report.layers[name] = became
        notes = f", shared at {len(names[module])} places" if len(names[module]) > 1 else ""
        notes += f", tied to {', '.join(tied)}" if tied else ""
        notes += ", its constants are gone" if is_asymmetric(module) else ""
        report.add(name, kind, True, became.describe(report.unit) + notes)
    return report


def _check_settings(rank: Rank, init: str, scheme: str, min_saving: float) -> None:
    check_rank(rank)
    check_init(init)
    check_scheme(scheme)
    if not min_saving < 1:
        raise ValueError(f"Expected `min_saving` to be a share of the parameters, below 1, but got {min_saving}.")


def _spread(reasons: dict[str, str], skipped: set[str], ties: Mapping[str, list[str]]) -> None:
    """Leave layers alone that are tied to one that is left alone."""
    for name, group in ties.items():
        left_alone = [tied for tied in group if tied in reasons or tied in skipped]
        if left_alone and name not in left_alone:
            reasons[name] = f"its weight is tied to {left_alone[0]}, which is left alone"


def _convert_all(
    layers: Mapping[str, nn.Module],
    chosen: Mapping[str, dict[str, Any]],
    excluded: set[str],
    ties: Mapping[str, list[str]],
    overrides: Mapping[str, Mapping[str, Any]],
    seed: int,
) -> tuple[dict[str, NewLayer], dict[str, LeftAlone]]:
    """Return the new layers by name, and why others stay as they are."""
    new: dict[str, NewLayer] = {}
    unsaved: dict[str, LeftAlone] = {}
    for name, module in layers.items():
        if name in excluded:
            continue
        first = ties.get(name, [name])[0]
        if chosen[name] != chosen[first]:
            raise ValueError(f"{first} and {name} have the same weight, so that they need the same settings.")
        if first in unsaved:
            unsaved[name] = unsaved[first]
            continue
        layer = plain(module)
        if first != name:
            leader = new[first]
            new[name] = LAYERS[type(layer)].from_factors(layer, *leader.factors(), **settings_of(layer, chosen[name]))
            new[name].left, new[name].right = leader.left, leader.right
            continue
        try:
            new[name] = convert(layer, name, seed, chosen[name])
        except NotWorthwhile as reason:
            if isinstance(overrides.get(name, {}).get("rank"), int):
                raise ValueError(f"Layer {name!r}: {reason}. Give `min_saving=-1` to have it anyway.") from reason
            unsaved[name] = reason
        except LeftAlone as reason:
            unsaved[name] = reason
        else:
            if is_asymmetric(module):
                new[name].register_parameter("bias", module.bias)  # the same object, not the plain layer's copy
    return new, unsaved


def _num_parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters() if not isinstance(p, UninitializedParameter))
