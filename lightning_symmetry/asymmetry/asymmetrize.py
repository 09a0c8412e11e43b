"""Make any network asymmetric: the room's one verb."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from torch import nn

from lightning_symmetry.asymmetry.layer import Layout
from lightning_symmetry.asymmetry.presets import PRESETS
from lightning_symmetry.asymmetry.sigma import sigma_replacements
from lightning_symmetry.asymmetry.w import w_replacements
from lightning_symmetry.surgery import ConversionReport, HasConstants, replace_modules

NetT = TypeVar("NetT", bound=nn.Module)
Overrides = Mapping[str, Mapping[str, Any]]


def asymmetrize(
    net: NetT,
    method: Literal["w", "sigma"] | None = None,
    *,
    preset: str | None = None,
    n_fix: int | float | None = None,
    kappa: float | None = None,
    layout: Layout | None = None,
    scale: float | None = None,
    seed: int = 0,
    skip: Sequence[str] = (),
    overrides: Overrides | None = None,
    example_input: Any = None,
) -> NetT:
    r"""Break the parameter symmetries of a network in place.

    ``method="w"`` replaces linear maps by asymmetric ones, :math:`W' = M \odot W + (1 - M) \odot F` with
    :math:`F_{ij} \sim N(0, \kappa^2)` (eq. 2): ``nn.Linear``, ``nn.Conv1d``, ``nn.Conv2d`` and torch-geometric's
    ``Linear``. Trainable entries keep the values of the layers that are replaced. Biases and norms are as before.

    ``method="sigma"`` replaces elementwise nonlinearities by :class:`FiGLU`,
    :math:`\sigma(x) = \eta(F x) \odot x` (eq. 4). It needs one forward pass to see how many channels each has.

    The report of what was changed, what not and why is left as ``net.asymmetry_report`` (print it).

    Constants are buffers, which an average of weights must leave alone: give Lightning's ``WeightAveraging`` and
    ``EMAWeightAveraging`` ``use_buffers=False``. Their default averages buffers too: the former fails on the boolean
    mask, which PyTorch cannot subtract, and the latter rounds the constants, so that the network can no longer be
    compared with others of its seed.

    Args:
        net: The network, changed in place.
        method: ``"w"`` (the default) or ``"sigma"``.
        preset: Name in :data:`PRESETS` of one of the paper's settings. Arguments given here go before it.
        n_fix: Fixed entries (layout ``"entries"``) or filters (``"filters"``) in each row: a number, or a
            fraction of the row's inputs. Default 1/8.
        kappa: Standard deviation of the constants; well above that of the initialisation, or nothing is gained.
            0 is allowed: fixed zeros, as in Theorem 3. Default 1.
        layout: ``"entries"`` fixes single entries of the flattened fan-in, ``"filters"`` whole connections
            between channels. Default ``"entries"``.
        scale: Standard deviation of FiGLU's F times the root of the number of channels. Default 1.
        seed: Seed of masks and constants, which depend on it and on the layer's name within ``net`` only. Networks can
            only be interpolated when they share it; every rank of a distributed run must.
        skip: Shell patterns of layers to leave alone.
        overrides: Shell pattern -> settings (``n_fix``, ``kappa``, ``layout``; ``scale`` for sigma) of single
            layers; where several match, the later one counts.
        example_input: For sigma: a tensor, or a tuple or dictionary of arguments of ``net``. Default
            ``net.example_input_array``. For w it is optional: layers that are not called with it are left alone.

    Returns:
        The same network.

    Raises:
        ValueError: If there is nothing to convert, a pattern matches nothing, the network is asymmetric already,
            n_fix or kappa do not fit a layer, or an activation is functional and so cannot be replaced.

    Source: The Empirical Impact of Neural Parameter Symmetries, or Lack Thereof (2024), section 4.
    """
    given = {"method": method, "n_fix": n_fix, "kappa": kappa, "layout": layout, "scale": scale}
    settings, overrides = _settings(preset, given, overrides or {})
    method = settings.pop("method")
    if example_input is None and method == "sigma":
        example_input = getattr(net, "example_input_array", None)
    report = ConversionReport("asymmetrize")
    if method == "w":
        replacements = w_replacements(net, settings, overrides, skip, seed, example_input, report)
    else:
        replacements = sigma_replacements(net, settings, overrides, skip, seed, example_input, report)
    if not report.changed:
        raise ValueError(f"asymmetrize(method={method!r}) found nothing to convert in {type(net).__name__}.\n{report}")
    replace_modules(net, replacements)
    net.asymmetry_report = report
    return net


def _settings(
    preset: str | None, given: dict[str, Any], overrides: Overrides
) -> tuple[dict[str, Any], dict[str, Mapping[str, Any]]]:
    """Merge the preset with the arguments and check which of them belong to the method."""
    base: dict[str, Any] = {}
    if preset is not None:
        if preset not in PRESETS:
            raise ValueError(f"Expected `preset` to be one of {sorted(PRESETS)} but got {preset!r}.")
        base = copy.deepcopy(PRESETS[preset])
    merged: dict[str, Mapping[str, Any]] = base.pop("overrides", {})
    for pattern, values in overrides.items():
        merged[pattern] = {**merged.pop(pattern, {}), **values}
    base.update({name: value for name, value in given.items() if value is not None})
    method = base.setdefault("method", "w")
    defaults = {"w": {"n_fix": 0.125, "kappa": 1.0, "layout": "entries"}, "sigma": {"scale": 1.0}}
    if method not in defaults:
        raise ValueError(f"Expected `method` to be 'w' or 'sigma' but got {method!r}.")
    if foreign := sorted(set(base) - set(defaults[method]) - {"method"}):
        raise ValueError(f"method={method!r} has no {', '.join(foreign)}; it has {sorted(defaults[method])}.")
    return {**defaults[method], **base}, merged


def fixed_fraction(net: nn.Module) -> float:
    """Return the share of fixed entries among all entries of the network's parameters, 0 where nothing is fixed.

    Args:
        net: The network. FiGLU has no fixed entries: its constants are no parameters.
    """
    fixed = sum(m.num_fixed_parameters for m in net.modules() if isinstance(m, HasConstants))
    return fixed / max(1, sum(p.numel() for p in net.parameters()))


def num_trainable(net: nn.Module) -> int:
    """Return the number of trainable entries: those of parameters that require gradients, less the fixed ones.

    Args:
        net: The network. Parameters that are shared count once; those of a posterior count as others do.
    """
    total = sum(p.numel() for p in net.parameters() if p.requires_grad)
    layers = [m for m in net.modules() if isinstance(m, HasConstants) and m.num_fixed and m.weight.requires_grad]
    return total - sum(layer.num_fixed_parameters for layer in layers)
