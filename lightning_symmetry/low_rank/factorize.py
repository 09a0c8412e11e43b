"""Factorise any network: the room's one verb."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn
from torch.nn.parameter import UninitializedParameter

from lightning_symmetry.low_rank.candidates import LAYERS, is_asymmetric, plain
from lightning_symmetry.low_rank.conv import Scheme
from lightning_symmetry.low_rank.convert import LeftAlone, NewLayer, NotWorthwhile, convert, settings_of, what_became
from lightning_symmetry.low_rank.cost import batch_size, dense_multiply_adds, factored_multiply_adds, one_position
from lightning_symmetry.low_rank.initialisation import Init
from lightning_symmetry.low_rank.plan import Plan, make_plan
from lightning_symmetry.low_rank.rank import Rank
from lightning_symmetry.low_rank.report import FactorizationReport
from lightning_symmetry.surgery import module_names, replace_modules

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
            ``"random"``, with the mean square of the weight's entries in the product, see
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
    plan = make_plan(net, defaults, skip, overrides, example_input)
    new, unsaved = _convert_all(plan, seed)
    reasons = {**plan.reasons, **{n: str(why) for n, why in unsaved.items()}, **dict.fromkeys(plan.skipped, "skipped")}
    report = _report(net, plan, new, reasons, batch_size(example_input))
    if not report.changed:
        raise ValueError(f"factorize found nothing to convert in {type(net).__name__}.\n{report}")
    not_worthwhile = {name for name, why in unsaved.items() if isinstance(why, NotWorthwhile)}
    report.warn_left_alone(expected=plan.skipped | not_worthwhile)
    before, names = _num_parameters(net), module_names(net)
    replace_modules(net, {place: new[name] for name in new for place in names[plan.layers[name]]})
    report.parameters = before, _num_parameters(net)
    net.factorization_report = report
    return net


def _report(
    net: nn.Module, plan: Plan, new: Mapping[str, NewLayer], reasons: Mapping[str, str], size: int
) -> FactorizationReport:
    """Write down what becomes of each layer; ``size`` is the number of samples of the calls."""
    names, calls, ties = module_names(net), plan.calls, plan.ties
    report = FactorizationReport("factorize", unit="position" if calls is None else "sample")
    for name, module in plan.layers.items():
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


def _convert_all(plan: Plan, seed: int) -> tuple[dict[str, NewLayer], dict[str, LeftAlone]]:
    """Return the new layers by name, and why others stay as they are."""
    new: dict[str, NewLayer] = {}
    unsaved: dict[str, LeftAlone] = {}
    for name, module in plan.candidates().items():
        first = plan.ties.get(name, [name])[0]
        if first in unsaved:
            unsaved[name] = unsaved[first]
            continue
        layer, settings = plain(module), plan.settings[name]
        if first != name:
            leader = new[first]
            new[name] = LAYERS[type(layer)].from_factors(layer, *leader.factors(), **settings_of(layer, settings))
            new[name].left, new[name].right = leader.left, leader.right
            continue
        try:
            new[name] = convert(layer, name, seed, settings)
        except NotWorthwhile as reason:
            plan.check_asked_for(name, reason)
            unsaved[name] = reason
        except LeftAlone as reason:
            unsaved[name] = reason
        else:
            if is_asymmetric(module):
                new[name].register_parameter("bias", module.bias)  # the same object, not the plain layer's copy
    return new, unsaved


def _num_parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters() if not isinstance(p, UninitializedParameter))
