"""torch-geometric's own linear layer, without importing torch-geometric, which takes seconds."""

from __future__ import annotations

import sys

from torch import nn


def graph_linear() -> tuple[type[nn.Module], ...]:
    """Return torch-geometric's ``Linear`` class, or nothing as long as nobody has imported it and built one."""
    module = sys.modules.get("torch_geometric.nn")
    return (module.Linear,) if module is not None else ()
