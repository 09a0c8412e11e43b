"""Put whitened layers into a user's module for the time of a fit, and its own layers back afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from lightning_symmetry.surgery import ConversionReport, replace_modules
from lightning_symmetry.whitening.coefficients import Mode
from lightning_symmetry.whitening.collect import whitened_layers
from lightning_symmetry.whitening.layer import HasWhitening
from lightning_symmetry.whitening.whiten import unwhiten, whiten

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
)
_FAST_PATH = ("activation_relu_or_gelu", "enable_nested_tensor", "use_nested_tensor")


class WhitenedFor:
    """Whitened layers in the place of a module's own, until they are put back.

    The layers that come back are the same objects, with the same Parameter objects and with the hooks that were
    registered in the meantime.

    Args:
        module: The module, changed in place.
        mode: See :func:`~lightning_symmetry.whitening.whiten.whiten`, also for what follows.
        explicit: Whether parameters become V and d.
        skip: Patterns of layers to leave alone.
        overrides: Settings of single layers by pattern.

    Attributes:
        report: What was changed, what not and why.
        layers: The whitened layers by name.

    Raises:
        ValueError: If there is nothing to whiten.
    """

    def __init__(
        self,
        module: nn.Module,
        mode: Mode,
        explicit: bool,
        skip: Sequence[str],
        overrides: Mapping[str, Mapping[str, Any]] | None,
    ) -> None:
        own = dict(module.named_modules(remove_duplicate=False))
        fast_path = {part: {k: vars(part)[k] for k in _FAST_PATH if k in vars(part)} for part in own.values()}
        whiten(module, mode, explicit=explicit, skip=skip, overrides=overrides)
        self.module = module
        self.report: ConversionReport = module.whitening_report
        self.layers: dict[str, HasWhitening] = whitened_layers(module)
        present = dict(module.named_modules(remove_duplicate=False))
        self._own = {name: part for name, part in own.items() if isinstance(present[name], HasWhitening)}
        self._fast_path = {part: flags for part, flags in fast_path.items() if flags}
        for name, part in self._own.items():
            for hooks in _HOOKS:
                vars(present[name])[hooks] = vars(part)[hooks]

    def put_back(self) -> None:
        """Put the module's own layers back, with the parameters, buffers and modes of the whitened ones."""
        present = dict(self.module.named_modules(remove_duplicate=False))
        own = {name: part for name, part in self._own.items() if isinstance(present.get(name), HasWhitening)}
        unwhiten(self.module)
        for name, part in own.items():
            plain = self.module.get_submodule(name)
            part._parameters.update(plain._parameters)
            part._buffers.update(plain._buffers)
            part.training = plain.training
        replace_modules(self.module, own)
        for part, flags in self._fast_path.items():
            vars(part).update(flags)
