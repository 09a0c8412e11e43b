"""Which linear maps become asymmetric, and which are left alone and why."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
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
    if twice := [name for name, m in net.named_modules() if isinstance(m, AsymmetricLayer)]:
        raise ValueError(f"The network is W-asymmetric already: {', '.join(twice[:3])} ({len(twice)} layers).")
    names = module_names(net)
    become = conversions()
    kinds = (*become, *OTHER_MAPS)
    layers = {found[0]: module for module, found in names.items() if isinstance(module, kinds)}
    for name, module in layers.items():
        if isinstance(module, tuple(become)) and not name:
            raise ValueError(
                f"The network is itself a {type(module).__name__}: build {become[type(module)].__name__}"
                ".from_layer(net, ...) or wrap it in nn.Sequential."
            )
    skipped = match_patterns(layers, skip, "skip")
    reasons = _why_left_alone(net, layers, example_input)
    unexpected = {}
    candidates = {}
    for name, module in layers.items():
        if name in reasons and not skipped[name]:
            unexpected[name] = reasons[name]
        elif not skipped[name]:
            candidates[name] = module
    chosen = dict(settings_for(candidates, settings, _present(overrides, layers, candidates)))
    for name, values in chosen.items():
        _, values["units"] = rows_and_units(layers[name].weight, values["layout"])
        values["n_fix"] = _number(name, values["n_fix"], values["units"])
        # All are checked before the first is built, which writes its constants into the parameters of the old one.
        become[type(layers[name])].check(layers[name], values["n_fix"], values["kappa"], values["layout"], name)
    replacements: dict[str, nn.Module] = {}
    for name, module in layers.items():
        kind = type(module).__name__
        if name not in candidates:
            report.add(name, kind, False, "skipped" if skipped[name] else reasons[name])
            continue
        values = chosen[name]
        layout, units, n_fix = values["layout"], values["units"], values["n_fix"]
        new = become[type(module)].from_layer(module, n_fix, values["kappa"], layout, seed, uncompiled(name))
        replacements.update(dict.fromkeys(names[module], new))
        what = "filters" if layout == "filters" else "entries"
        shared = f", shared at {len(names[module])} places" if len(names[module]) > 1 else ""
        report.add(name, kind, True, f"{n_fix} of {units} {what} a row fixed, kappa {new.kappa:g}{shared}")
    if unexpected:
        listed = "; ".join(f"{name} ({reason})" for name, reason in unexpected.items())
        warnings.warn(f"asymmetrize left {len(unexpected)} layer(s) alone: {listed}.", stacklevel=3)
    return replacements


def _present(
    overrides: Mapping[str, Mapping[str, Any]], layers: Mapping[str, Any], candidates: Mapping[str, Any]
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
