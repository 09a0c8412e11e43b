"""Which linear maps become asymmetric, and which are left alone and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from lightning_symmetry.asymmetry.activations import watch
from lightning_symmetry.asymmetry.conv import AsymmetricConv1d, AsymmetricConv2d
from lightning_symmetry.asymmetry.graph_linear import graph_linear
from lightning_symmetry.asymmetry.layer import AsymmetricLayer, rows_and_units
from lightning_symmetry.asymmetry.linear import AsymmetricLinear
from lightning_symmetry.surgery import (
    OTHER_MAPS,
    ConversionReport,
    ReparametrizedLayer,
    match_patterns,
    module_names,
    settings_for,
    uncompiled,
    why_not_convertible,
)


def conversions() -> dict[type[nn.Module], type[AsymmetricLayer]]:
    """Return the plain layers that can be converted, with what they become."""
    linear = dict.fromkeys((nn.Linear, *graph_linear()), AsymmetricLinear)
    return {**linear, nn.Conv1d: AsymmetricConv1d, nn.Conv2d: AsymmetricConv2d}


def w_replacements(
    net: nn.Module,
    settings: Mapping[str, Any],
    overrides: Mapping[str, Mapping[str, Any]],
    skip: Sequence[str],
    seed: int,
    example_input: Any,
    report: ConversionReport,
) -> dict[str, nn.Module]:
    """Build the asymmetric layers of ``net`` without changing it, and write the report.

    Args:
        net: The network.
        settings: ``n_fix``, ``kappa`` and ``layout``.
        overrides: Settings by pattern.
        skip: Patterns to leave alone.
        seed: Seed of masks and constants.
        example_input: Arguments of ``net`` or None; layers that are not called with it are left alone.
        report: The report to fill.

    Returns:
        New layers by name.
    """
    names, become = module_names(net), conversions()
    layers = _find_layers(names, become)
    skipped = {name for name, patterns in match_patterns(layers, skip, "skip").items() if patterns}
    reasons = _why_left_alone(net, layers, example_input)
    candidates = [name for name in layers if name not in skipped and name not in reasons]
    chosen = dict(settings_for(candidates, settings, _present(overrides, layers, candidates)))
    for name, values in chosen.items():
        _, values["units"] = rows_and_units(layers[name].weight, values["layout"])
        values["n_fix"] = _number(name, values["n_fix"], values["units"])
        # All are checked before the first is built, which writes its constants into the parameters of the old one.
        become[type(layers[name])].check(layers[name], values["n_fix"], values["kappa"], values["layout"], name)
    replacements: dict[str, nn.Module] = {}
    for name, module in layers.items():
        kind = type(module).__name__
        if name not in chosen:
            report.add(name, kind, False, "skipped" if name in skipped else reasons[name])
            continue
        values = chosen[name]
        layout, units, n_fix = values["layout"], values["units"], values["n_fix"]
        new = become[type(module)].from_layer(module, n_fix, values["kappa"], layout, seed, uncompiled(name))
        replacements.update(dict.fromkeys(names[module], new))
        what = "filters" if layout == "filters" else "entries"
        shared = f", shared at {len(names[module])} places" if len(names[module]) > 1 else ""
        report.add(name, kind, True, f"{n_fix} of {units} {what} a row fixed, kappa {new.kappa:g}{shared}")
    report.warn_left_alone(expected=skipped, stacklevel=3)
    return replacements


def _find_layers(
    names: Mapping[nn.Module, list[str]], become: Mapping[type[nn.Module], type[AsymmetricLayer]]
) -> dict[str, nn.Module]:
    """Return the layers that hold linear maps by their first name, after a check that they can be replaced at all."""
    if twice := [found[0] for module, found in names.items() if isinstance(module, AsymmetricLayer)]:
        raise ValueError(f"The network is W-asymmetric already: {', '.join(twice[:3])} ({len(twice)} layers).")
    maps = (*become, *OTHER_MAPS, ReparametrizedLayer)
    layers = {found[0]: module for module, found in names.items() if isinstance(module, maps)}
    if (kind := type(layers.get(""))) in become:
        raise ValueError(
            f"The network is itself a {kind.__name__}: build {become[kind].__name__}.from_layer(net, ...) or wrap it "
            "in nn.Sequential."
        )
    return layers


def _present(
    overrides: Mapping[str, Mapping[str, Any]], layers: Mapping[str, Any], candidates: Iterable[str]
) -> dict[str, Mapping[str, Any]]:
    """Return the overrides that still meet a layer to convert, after a check that all meet some layer."""
    matched = match_patterns(layers, overrides, "overrides")
    used = {pattern for name in candidates for pattern in matched[name]}
    return {pattern: values for pattern, values in overrides.items() if pattern in used}


def _number(name: str, n_fix: float, units: int) -> int:
    """Turn a fraction into a number of inputs, at least one."""
    if isinstance(n_fix, bool) or not isinstance(n_fix, int | float):
        raise ValueError(f"Layer {name!r}: expected n_fix to be a number or a fraction but got {n_fix!r}.")
    if isinstance(n_fix, int):
        return n_fix
    if not 0 < n_fix < 1:
        raise ValueError(
            f"Layer {name!r}: a fraction n_fix must lie between 0 and 1, but got {n_fix}. "
            "Give an int for a number of entries."
        )
    return max(1, round(n_fix * units))


def _why_left_alone(net: nn.Module, layers: Mapping[str, nn.Module], example_input: Any) -> dict[str, str]:
    """Return the reason for each layer that cannot be converted."""
    become = conversions()
    reasons = why_not_convertible(net, layers, become, lambda module: type(module) in become)
    if example_input is not None:
        called = watch(net, example_input).called
        for name in layers:
            if name not in called:
                reasons.setdefault(name, "it is not called with the example input")
    return reasons
