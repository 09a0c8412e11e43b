"""Find and replace the layers of a network."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from lightning_symmetry.surgery.contract import ReparametrizedLayer


def module_names(net: nn.Module) -> dict[nn.Module, list[str]]:
    """Return every module of ``net`` with all dotted names under which it is reached (several if shared)."""
    names: dict[nn.Module, list[str]] = defaultdict(list)
    for name, module in net.named_modules(remove_duplicate=False):
        names[module].append(name)
    return dict(names)


def uncompiled(name: str) -> str:
    """Return a dotted name without the prefix that ``torch.compile`` writes into it."""
    return name.replace("_orig_mod.", "")


def replace_modules(net: nn.Module, replacements: Mapping[str, nn.Module]) -> None:
    """Put each module in the place of the one called by its dotted name.

    Raises:
        ValueError: If a name is empty: the network itself cannot be replaced in place.
    """
    for name, module in replacements.items():
        if not name:
            raise ValueError("The network itself is the layer to replace; wrap it in nn.Sequential first.")
        parent, _, child = name.rpartition(".")
        owner = net.get_submodule(parent)
        setattr(owner, child, module)  # not _modules: a function of that name would stay in front of it
        _leave_fast_path(net, parent)


def _leave_fast_path(net: nn.Module, parent: str) -> None:
    """Make a transformer layer call its layers: its evaluation fast path reads their weights directly."""
    owner = net.get_submodule(parent)
    if isinstance(owner, nn.TransformerEncoderLayer):
        owner.activation_relu_or_gelu = 0
    names = parent.split(".")
    for depth in range(len(names) + 1):
        ancestor = net.get_submodule(".".join(names[:depth]))
        if isinstance(ancestor, nn.TransformerEncoder):
            ancestor.use_nested_tensor = False
            ancestor.enable_nested_tensor = False


def tied_parameters(net: nn.Module) -> dict[str, list[str]]:
    """Return, for each module that holds a tied parameter, the other modules that hold it too."""
    holders: dict[int, list[str]] = defaultdict(list)
    for name, module in net.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders[id(parameter)].append(name)
    tied: dict[str, list[str]] = {}
    for names in holders.values():
        if len(set(names)) > 1:
            for name in names:
                tied[name] = sorted(set(names) - {name})
    return tied


def why_not_callable(net: nn.Module) -> dict[str, str]:
    """Return the layers whose weight the parent reads without calling them, each with the reason.

    Replacing such a layer would change nothing, or half of what was meant.
    """
    reasons: dict[str, str] = {}
    for name, module in net.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, nn.MultiheadAttention):
            reasons[f"{prefix}out_proj"] = "nn.MultiheadAttention reads its weight without calling it"
        if type(module).__name__.startswith("ShiftedWindowAttention"):
            for child in ("qkv", "proj"):
                reasons[f"{prefix}{child}"] = "torchvision's window attention reads its weight without calling it"
    return reasons


def match_patterns(names: Iterable[str], patterns: Iterable[str], argument: str) -> dict[str, list[str]]:
    """Match shell patterns (``*``, ``?``, ``[...]``) with layer names; return the patterns of each name.

    Raises:
        ValueError: If a pattern matches no name.
    """
    names = list(names)
    matched: dict[str, list[str]] = {name: [] for name in names}
    for pattern in patterns:
        hits = [name for name in names if fnmatchcase(name, pattern)]
        if not hits:
            close = get_close_matches(pattern, names, n=3, cutoff=0.0)
            raise ValueError(
                f"`{argument}` has the pattern {pattern!r}, which matches no layer. "
                f"The network has {len(names)}; the closest names are {', '.join(map(repr, close)) or 'none'}."
            )
        for name in hits:
            matched[name].append(pattern)
    return matched


def settings_for(
    names: Iterable[str], defaults: Mapping[str, Any], overrides: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each name with its settings: the defaults, then every matching override in the order given.

    Raises:
        ValueError: If an override's pattern matches no name or sets what does not exist.
    """
    names = list(names)
    for pattern, values in overrides.items():
        if unknown := sorted(set(values) - set(defaults)):
            raise ValueError(f"`overrides[{pattern!r}]` sets {unknown}, but a layer only has {sorted(defaults)}.")
    matched = match_patterns(names, overrides, "overrides")
    for name in names:
        settings = dict(defaults)
        for pattern in matched[name]:
            settings.update(overrides[pattern])
        yield name, settings


def plain_copy(net: nn.Module, keep_affine: bool = False) -> nn.Module:
    """Return a deep copy of ``net`` in which each reparametrised layer is the plain layer it stands for.

    Layers that share all parameters which describe their weight share the weight.

    Args:
        net: Any network; it is left as it is.
        keep_affine: Leave layers whose canonical weight is affine in their parameters as they are.
    """
    net = copy.deepcopy(net)
    if isinstance(net, ReparametrizedLayer) and not (keep_affine and net.affine):
        return net.to_layer()
    weights: dict[tuple[int, ...], nn.Parameter] = {}
    for module, names in module_names(net).items():
        if isinstance(module, ReparametrizedLayer) and not (keep_affine and module.affine):
            plain = module.to_layer()
            _keep_ties(plain, module, weights)
            replace_modules(net, dict.fromkeys(names, plain))
    return net


def _keep_ties(plain: nn.Module, module: nn.Module, weights: dict[tuple[int, ...], nn.Parameter]) -> None:
    """Give a plain layer the weight of one that was built from the same parameters, and the bias of its layer."""
    bias = module._parameters.get("bias")
    if bias is not None and torch.equal(plain.bias, bias):  # in other coordinates it need not be
        plain.bias = bias
    described = tuple(id(p) for name, p in module._parameters.items() if name != "bias" and p is not None)
    if described and "weight" in plain._parameters:
        plain.weight = weights.setdefault(described, plain.weight)
