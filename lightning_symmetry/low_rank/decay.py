"""Weight decay of factorised layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from lightning_symmetry.low_rank.layer import LowRankMap


def low_rank_maps(net: nn.Module) -> dict[str, LowRankMap]:
    """Return the factorised maps of a network by name, each pair of factors once, also where layers are tied.

    Those of attention are its projections.
    """
    found: dict[int, tuple[str, LowRankMap]] = {}
    for name, module in net.named_modules():
        if isinstance(module, LowRankMap):
            found.setdefault(id(module.left), (name, module))
    return dict(found.values())


def frobenius_decay(net: nn.Module, weight: float) -> Tensor:
    r"""Return the penalty on the products, to add to a loss.

    .. math:: \frac{\lambda}{2} \sum_l \|U_l V_l^\top\|_F^2
        = \frac{\lambda}{2} \sum_l \operatorname{tr}\left((U_l^\top U_l)(V_l^\top V_l)\right)

    Products are not formed: r (r + 1) (N + M) multiply-adds a layer. Layers without factors have no part in it.

    Args:
        net: The network.
        weight: :math:`\lambda`.

    Raises:
        ValueError: If the network has no factorised layers.

    Source: Exploring Low Rank Training of Deep Neural Networks (2022), section 3.3.
    """
    return weight / 2 * _total(net, _squared_norm)


def l2_decay(net: nn.Module, weight: float) -> Tensor:
    r"""Return the penalty on the factors, :math:`\frac{\lambda}{2} \sum_l (\|U_l\|_F^2 + \|V_l\|_F^2)`.

    It is what an optimizer's ``weight_decay`` does to them, and its minimum over all factors of a product is
    :math:`\lambda \|U V^\top\|_*`: it lowers the effective rank.

    Args:
        net: The network.
        weight: :math:`\lambda`.

    Raises:
        ValueError: If the network has no factorised layers.

    Source: Exploring Low Rank Training of Deep Neural Networks (2022), section 3.3.
    """
    return weight / 2 * _total(net, lambda layer: layer.left.square().sum() + layer.right.square().sum())


@torch.no_grad()
def add_frobenius_decay_(net: nn.Module, weight: float) -> None:
    r"""Add the gradients of :func:`frobenius_decay` to ``grad``, before an optimizer's step.

    .. math:: G_U \mathrel{+}= \lambda U (V^\top V), \qquad G_V \mathrel{+}= \lambda V (U^\top U)

    This is coupled decay, as the ``weight_decay`` of ``torch.optim.SGD``: momentum and Adam's moments see it. Factors
    without a gradient are left alone, as optimizers leave them.

    Args:
        net: The network, after ``backward``.
        weight: :math:`\lambda`.

    Raises:
        ValueError: If the network has no factorised layers.
    """
    for parameter, direction in _directions(net):
        if parameter.grad is not None:
            parameter.grad.add_(direction.to(parameter.grad), alpha=weight)


@torch.no_grad()
def decay_factors_(net: nn.Module, amount: float) -> None:
    r"""Decay the factors themselves, as AdamW decays weights.

    .. math:: U \leftarrow U - \eta\lambda\, U (V^\top V), \qquad V \leftarrow V - \eta\lambda\, V (U^\top U)

    Both sides take the values before. No moment of an optimizer sees it. Frozen factors are left alone.

    Args:
        net: The network.
        amount: :math:`\eta\lambda`, the learning rate times the weight.

    Raises:
        ValueError: If the network has no factorised layers.
    """
    for parameter, direction in _directions(net):
        if parameter.requires_grad:
            parameter.sub_(direction, alpha=amount)


def _total(net: nn.Module, norm: Callable[[LowRankMap], Tensor]) -> Tensor:
    """Return the sum over the layers, on the device of the first one."""
    layers = _layers(net)
    return torch.stack([norm(layer).to(layers[0].left.device) for layer in layers]).sum()


def _squared_norm(layer: LowRankMap) -> Tensor:
    with torch.autocast(layer.left.device.type, enabled=False):
        left, right = layer.factors()
        return ((left.mT @ left) * (right.mT @ right)).sum()


def _directions(net: nn.Module) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield each factor with U (V^T V) or V (U^T U), laid out as the factor is."""
    for layer in _layers(net):
        left, right = layer.factors()
        packed = layer.pack(left @ (right.mT @ right), right @ (left.mT @ left))
        yield from zip((layer.left, layer.right), packed, strict=True)


def _layers(net: nn.Module) -> list[LowRankMap]:
    layers = list(low_rank_maps(net).values())
    if not layers:
        raise ValueError(f"{type(net).__name__} has no factorised layers to decay: call factorize(net) first.")
    return layers
