"""Give a network the layers that a checkpoint was written with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from lightning_symmetry.surgery.replace import module_names, replace_modules
from lightning_symmetry.surgery.transaction import all_or_nothing

Layout = dict[str, dict[str, Any]]
"""What each layer in other coordinates needs to be built: its settings, in plain types, by the layer's name."""

NetT = TypeVar("NetT", bound=nn.Module)


def restructure(
    net: NetT,
    layout: Mapping[str, Mapping[str, Any]],
    restore: Callable[[NetT], Any],
    build: Callable[[str, nn.Module, Mapping[str, Any]], nn.Module],
) -> NetT:
    """Give a network the layers of a layout and plain ones elsewhere, in place.

    Values are to be loaded afterwards. A module that is shared at several places stays shared. New parameters are no
    inference tensors, wherever it is called. If anything fails the network is as it was.

    Args:
        net: The network.
        layout: Settings of layers by name.
        restore: Puts plain layers in the place of all others.
        build: Makes a layer from its name, the plain one and its settings.

    Returns:
        The same network.

    Raises:
        ValueError: If the network has no layer of a name.
    """
    with all_or_nothing(net), torch.inference_mode(False), torch.no_grad():
        restore(net)
        modules, names = dict(net.named_modules()), module_names(net)
        if missing := [name for name in layout if name not in modules]:
            raise ValueError(
                f"The checkpoint has factors or a posterior for {missing[0]!r} ({len(missing)} in all), but "
                f"{type(net).__name__} has no layer of that name."
            )
        for name, settings in layout.items():
            new = build(name, modules[name], settings)
            replace_modules(net, dict.fromkeys(names[modules[name]], new))
    return net
