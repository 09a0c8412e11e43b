"""The image classifiers that the paper's zoos are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import nn

from lightning_symmetry.asymmetry import asymmetrize
from lightning_symmetry.networks import ConvNet, ResNet
from lightning_symmetry.networks.norm import Norm

Kind = Literal["standard", "sigma", "w"]

_W: dict[str, dict[str, Any]] = {
    "digits": {"convs.0": {"layout": "entries", "n_fix": 4}, "head": {"layout": "entries", "n_fix": 8}},
    "cifar10": {"stem": {"layout": "entries", "n_fix": 12}, "head": {"layout": "entries", "n_fix": 8}},
}


def zoo_classifier(
    kind: Kind = "standard",
    data: Literal["digits", "cifar10"] = "digits",
    norm: Norm = "layer",
    constants_seed: int = 0,
    settings: Mapping[str, Any] | None = None,
) -> nn.Module:
    r"""Build an untrained classifier of a zoo; its weights come from torch's random state.

    ``"digits"`` gives a :class:`~lightning_symmetry.networks.ConvNet` of 3 convolutions and 7,514 weights,
    ``"cifar10"`` the paper's residual network of one block a stage and 78,042 weights.

    ``"w"`` fixes 8 filters of each output channel, and 8 entries of each row of the head, at constants of standard
    deviation 2. Of the first convolution, which has no 8 filters to fix, it fixes 4 of 9 entries (digits) or 12 of 27
    (CIFAR). That leaves 3,914 of the 7,514 and 60,874 of the 78,042 weights trainable. The paper's 60,634 are what is
    left if all 27 entries are fixed; its stem would then learn nothing, and its rows have no distinct masks, which
    Theorem 1 asks for.

    ``"sigma"`` has FiGLU of standard deviation :math:`1 / \sqrt{d}` for activations.

    Args:
        kind: ``"standard"``, ``"sigma"`` or ``"w"``.
        data: Which of the two architectures.
        norm: ``"layer"``, as the paper has, or ``"batch"``.
        constants_seed: Seed of masks and constants, which all networks of a zoo share.
        settings: Arguments of :func:`~lightning_symmetry.asymmetrize` that go before those above.

    Returns:
        The network.

    Raises:
        ValueError: If an argument is unknown.

    Source: The Empirical Impact of Neural Parameter Symmetries (2024), App. E.3.1 and E.4.
    """
    if data not in _W:
        raise ValueError(f"Expected `data` to be one of {sorted(_W)} but got {data!r}.")
    network = ConvNet(norm=norm) if data == "digits" else ResNet(blocks=1, norm=norm)
    if kind == "standard":
        if settings:
            raise ValueError(f"A standard network has no `settings` but got {dict(settings)}.")
        return network
    if kind == "sigma":
        arguments: dict[str, Any] = {"method": "sigma", "scale": 1.0}
    elif kind == "w":
        arguments = {"method": "w", "layout": "filters", "n_fix": 8, "kappa": 2.0, "overrides": _W[data]}
    else:
        raise ValueError(f"Expected `kind` to be 'standard', 'sigma' or 'w' but got {kind!r}.")
    return asymmetrize(network, seed=constants_seed, **{**arguments, **(settings or {})})
