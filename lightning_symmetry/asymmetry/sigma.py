"""Which nonlinearities become FiGLU, and which are left alone and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_symmetry.asymmetry.activations import ACTIVATIONS, watch
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
    names = module_names(net)
    sizes: dict[str, list[tuple[int, int]]] = {}
    kinds: dict[str, str] = {}
    places: dict[str, list[str]] = {}
    for module, found in names.items():
        name = found[0]
        if isinstance(module, ACTIVATIONS):
            sizes[name] = sorted(seen.sizes[name], reverse=True)  # images before features, as FiGLUs needs it
            kinds[name], places[name] = type(module).__name__, found
        elif isinstance(module, _TRANSFORMER_LAYERS) and not isinstance(module.activation, nn.Module):
            child = f"{name}.activation" if name else "activation"
            sizes[child], kinds[child] = [(-1, module.linear1.out_features)], module.activation.__name__
            places[child] = [f"{place}.activation" if place else "activation" for place in found]
        elif isinstance(module, nn.Sigmoid | nn.Hardsigmoid | nn.GLU):
            report.add(name, type(module).__name__, False, "a gate or an output, not a hidden nonlinearity")
    skipped = match_patterns(sizes, skip, "skip")
    _refuse_functional(seen.functional, net)
    replacements: dict[str, nn.Module] = {}
    for name, values in settings_for(sizes, settings, overrides):
        if skipped[name]:
            report.add(name, kinds[name], False, "skipped")
            continue
        if not sizes[name]:
            report.add(name, kinds[name], False, "it is not called with the example input")
            continue
        title = uncompiled(name)
        figlus = {
            f"{'last' if axis == -1 else axis}_{dim}": FiGLU(dim, values["scale"], axis, seed, f"{title}/{axis}/{dim}")
            for axis, dim in sizes[name]
        }
        new = next(iter(figlus.values())) if len(figlus) == 1 else FiGLUs(figlus)
        reference = next(net.parameters(), None)
        if reference is not None:
            new.to(reference.device, reference.dtype)
        new.train(net.training)
        replacements.update(dict.fromkeys(places[name], new))
        dims = ", ".join(str(dim) for _, dim in sizes[name])
        report.add(name, kinds[name], True, f"FiGLU of {dims} channels, scale {values['scale']:g}")
    return replacements


def _refuse_functional(functional: list[tuple[str, str]], net: nn.Module) -> None:
    found = sorted({f"{function} in {where or type(net).__name__}" for function, where in functional})
    if found:
        raise ValueError(
            f"asymmetrize(method='sigma') cannot replace functional activations: {'; '.join(found)}. Use modules "
            "(nn.ReLU() instead of F.relu) there, or build FiGLU into the network yourself."
        )
