"""Whiten any network: the room's one verb, and the way back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from lightning_symmetry.surgery import (
    OTHER_MAPS,
    ConversionReport,
    ReparametrizedLayer,
    match_patterns,
    module_names,
    replace_modules,
    settings_for,
    why_not_convertible,
)
from lightning_symmetry.whitening.borrowed import BorrowedLayer, can_borrow
from lightning_symmetry.whitening.coefficients import Mode, check_mode
from lightning_symmetry.whitening.collect import whitened_layers
from lightning_symmetry.whitening.conv import WhitenedConv1d, WhitenedConv2d
from lightning_symmetry.whitening.explicit import ExplicitWhitenedConv1d, ExplicitWhitenedConv2d, ExplicitWhitenedLinear
from lightning_symmetry.whitening.layer import HasWhitening
from lightning_symmetry.whitening.linear import WhitenedLinear

NetT = TypeVar("NetT", bound=nn.Module)

_CANONICAL = {nn.Linear: WhitenedLinear, nn.Conv1d: WhitenedConv1d, nn.Conv2d: WhitenedConv2d}
_EXPLICIT = {
    nn.Linear: ExplicitWhitenedLinear,
    nn.Conv1d: ExplicitWhitenedConv1d,
    nn.Conv2d: ExplicitWhitenedConv2d,
}


def whiten(
    net: NetT,
    mode: Mode = "full",
    *,
    explicit: bool = False,
    skip: Sequence[str] = (),
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> NetT:
    r"""Bring the linear layers and convolutions of a network into whitened coordinates, in place.

    A whitened layer is :math:`h \mapsto V U (h - c) + d` (eq. 7). It begins with U = I and c = 0, where nothing is
    changed yet; :func:`~lightning_symmetry.whitening.reparametrize.reparametrize` sets the coefficients. Functions
    never change.

    Parameters stay the same objects under the same names. By default they are the canonical W and b, whose gradients
    become those of SGD on (V, d): for SGD with momentum, Nesterov's or none
    (:class:`~lightning_symmetry.whitening.layer.WhitenedLayer`). ``explicit`` makes them V and d, for optimizers that
    act on each entry by itself, such as Adam
    (:class:`~lightning_symmetry.whitening.explicit.ExplicitWhitenedLayer`).

    Converted are ``nn.Linear``, ``nn.Conv1d`` and ``nn.Conv2d``, and in the canonical form layers with fixed entries
    and torch-geometric's ``Linear``. The report of what was changed, what not and why is left as
    ``net.whitening_report``.

    Args:
        net: The network, changed in place.
        mode: ``"full"`` whitens, ``"diagonal"`` divides by standard deviations, ``"center"`` subtracts the mean only.
        explicit: Whether parameters become V and d.
        skip: Shell patterns of layers to leave alone.
        overrides: Shell pattern -> settings (``mode``, ``explicit``) of single layers; where several match, the later
            one counts.

    Returns:
        The same network.

    Raises:
        ValueError: If there is nothing to convert, a pattern matches nothing, a setting does not exist, or the network
            is whitened already.

    Source: Natural Neural Networks (2015), section 3.
    """
    check_mode(mode)
    if twice := list(whitened_layers(net)):
        raise ValueError(f"The network is whitened already: {', '.join(twice[:3])} ({len(twice)} layers).")
    names = module_names(net)
    layers = {found[0]: module for module, found in names.items() if _is_map(module)}
    if "" in layers and not isinstance(net, OTHER_MAPS):
        raise ValueError(f"The network is itself a {type(net).__name__}: wrap it in nn.Sequential first.")
    skipped = {name for name, patterns in match_patterns(layers, skip, "skip").items() if patterns}
    overrides = overrides or {}
    chosen = dict(settings_for(layers, {"mode": mode, "explicit": explicit}, overrides))
    for values in chosen.values():
        check_mode(values["mode"])
    reasons = _why_left_alone(net, layers, chosen)
    report = ConversionReport("whiten")
    replacements: dict[str, nn.Module] = {}
    for name, module in layers.items():
        kind = type(module).__name__
        if name in skipped or name in reasons:
            report.add(name, kind, False, "skipped" if name in skipped else reasons[name])
            continue
        new = _convert(module, **chosen[name])
        replacements.update(dict.fromkeys(names[module], new))
        shared = f", shared at {len(names[module])} places" if len(names[module]) > 1 else ""
        form = "explicit" if chosen[name]["explicit"] else "canonical"
        groups = f", {new.groups} groups" if new.groups > 1 else ""
        report.add(name, kind, True, f"{form}, mode {new.mode}, {new.weight.shape[1]} inputs{groups}{shared}")
    if not report.changed:
        raise ValueError(f"whiten found nothing to convert in {type(net).__name__}.\n{report}")
    report.warn_left_alone(expected=skipped)
    replace_modules(net, replacements)
    net.whitening_report = report
    return net


def unwhiten(net: NetT) -> NetT:
    r"""Put the layers back that :func:`whiten` replaced, in place and with the same Parameter objects.

    Those of explicit layers take the canonical values, :math:`W = V U, b = d - W c`; the function stays what it is, to
    rounding. A network without whitened layers is returned as it is.

    Args:
        net: The network, changed in place.

    Returns:
        The same network.

    Source: Natural Neural Networks (2015), eq. 7.
    """
    layers = {module: names for module, names in module_names(net).items() if isinstance(module, HasWhitening)}
    for module, names in layers.items():
        replace_modules(net, dict.fromkeys(names, module.release()))
    if "whitening_report" in net.__dict__:
        del net.whitening_report
    return net


def _is_map(module: nn.Module) -> bool:
    return isinstance(module, (*_CANONICAL, *OTHER_MAPS, ReparametrizedLayer)) or can_borrow(module)


def _convert(module: nn.Module, mode: Mode, explicit: bool) -> HasWhitening:
    if can_borrow(module):
        return BorrowedLayer.of(module, mode=mode)
    return (_EXPLICIT if explicit else _CANONICAL)[type(module)].from_layer(module, mode=mode)


def _why_left_alone(
    net: nn.Module, layers: Mapping[str, nn.Module], chosen: Mapping[str, Mapping[str, Any]]
) -> dict[str, str]:
    """Return the reason for each layer that cannot be converted."""
    reasons = why_not_convertible(net, layers, _CANONICAL, lambda m: type(m) in _CANONICAL or can_borrow(m))
    for name, module in layers.items():
        if chosen[name]["explicit"] and can_borrow(module):
            reasons.setdefault(name, "it has no explicit form: its entries are those of the canonical weight")
    return reasons
