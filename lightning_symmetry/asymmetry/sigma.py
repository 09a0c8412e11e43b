"""Which nonlinearities become FiGLU, and which are left alone and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_symmetry.asymmetry.activations import ACTIVATIONS, Sightings, watch
from lightning_symmetry.asymmetry.figlu import FiGLU
from lightning_symmetry.surgery import ConversionReport, match_patterns, module_names, settings_for, uncompiled

_TRANSFORMER_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


class FiGLUs(nn.ModuleDict):
    """FiGLUs in the place of one activation module that is called with several numbers of channels."""

    def forward(self, input: Tensor) -> Tensor:
        """Apply the FiGLU whose number of channels and axis fit the input."""
        for figlu in self.values():
            axis = figlu.channel_dim
            if (axis == -1 or input.ndim > 2) and input.shape[axis] == figlu.dim:
                return figlu(input)
        raise ValueError(
            f"The activation was seen with {[f.dim for f in self.values()]} channels, but the input has shape "
            f"{tuple(input.shape)}."
        )


def sigma_replacements(
    net: nn.Module,
    settings: Mapping[str, Any],
    overrides: Mapping[str, Mapping[str, Any]],
    skip: Sequence[str],
    seed: int,
    example_input: Any,
    report: ConversionReport,
) -> dict[str, nn.Module]:
    """Build the FiGLUs of ``net`` without changing it, and write the report.

    Args:
        net: The network.
        settings: ``scale``.
        overrides: Settings by pattern.
        skip: Patterns to leave alone.
        seed: Seed of the constants.
        example_input: Arguments of ``net``.
        report: The report to fill.

    Returns:
        New modules by name.
    """
    if twice := [name for name, m in net.named_modules() if isinstance(m, FiGLU)]:
        raise ValueError(f"The network is sigma-asymmetric already: {', '.join(twice[:3])} ({len(twice)} FiGLUs).")
    if example_input is None:
        raise ValueError(
            "asymmetrize(method='sigma') runs the network once to see the channels of each activation: give "
            "`example_input` (a tensor, or a tuple or dictionary of arguments), or the network an "
            "`example_input_array`."
        )
    seen = watch(net, example_input)
    activations = _find_activations(net, seen, report)
    skipped = match_patterns(activations, skip, "skip")
    _refuse_functional(seen.functional, net)
    replacements: dict[str, nn.Module] = {}
    for name, values in settings_for(activations, settings, overrides):
        kind, places, sizes = activations[name]
        if skipped[name]:
            report.add(name, kind, False, "skipped")
            continue
        if not sizes:
            report.add(name, kind, False, "it is not called with the example input")
            continue
        new = _figlu(uncompiled(name), sizes, values["scale"], seed)
        reference = next(net.parameters(), None)
        if reference is not None:
            new.to(reference.device, reference.dtype)
        replacements.update(dict.fromkeys(places, new.train(net.training)))
        dims = ", ".join(str(dim) for _, dim in sizes)
        report.add(name, kind, True, f"FiGLU of {dims} channels, scale {values['scale']:g}")
    return replacements


class _Activation(NamedTuple):
    """An activation: its kind, the names by which it is reached, and the (axis, channels) with which it was called."""

    kind: str
    places: list[str]
    sizes: list[tuple[int, int]]


def _find_activations(net: nn.Module, seen: Sightings, report: ConversionReport) -> dict[str, _Activation]:
    """Return the activations by their first name, and report what looks like one but is left alone."""
    activations = {}
    for module, places in module_names(net).items():
        if isinstance(module, ACTIVATIONS):
            sizes = sorted(seen.sizes[places[0]], reverse=True)  # images before features, as FiGLUs needs it
            activations[places[0]] = _Activation(type(module).__name__, places, sizes)
        elif isinstance(module, _TRANSFORMER_LAYERS) and not isinstance(module.activation, nn.Module):
            places = [f"{place}.activation".lstrip(".") for place in places]
            sizes = [(-1, module.linear1.out_features)]
            activations[places[0]] = _Activation(module.activation.__name__, places, sizes)
        elif isinstance(module, nn.Sigmoid | nn.Hardsigmoid | nn.GLU):
            report.add(places[0], type(module).__name__, False, "a gate or an output, not a hidden nonlinearity")
    return activations


def _figlu(title: str, sizes: Sequence[tuple[int, int]], scale: float, seed: int) -> nn.Module:
    """Build the FiGLU for an activation, or several where that was called with several numbers of channels."""
    figlus = {
        f"{'last' if axis == -1 else axis}_{dim}": FiGLU(dim, scale, axis, seed, f"{title}/{axis}/{dim}")
        for axis, dim in sizes
    }
    return next(iter(figlus.values())) if len(figlus) == 1 else FiGLUs(figlus)


def _refuse_functional(functional: list[tuple[str, str]], net: nn.Module) -> None:
    found = sorted({f"{function} in {where or type(net).__name__}" for function, where in functional})
    if found:
        raise ValueError(
            f"asymmetrize(method='sigma') cannot replace functional activations: {'; '.join(found)}. Use modules "
            "(nn.ReLU() instead of F.relu) there, or build FiGLU into the network yourself."
        )
