"""Weight decay of factorised layers, and of others by the norm that these have."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_symmetry.low_rank.attention import LowRankMultiheadAttention
from lightning_symmetry.low_rank.layer import LowRankMap
from lightning_symmetry.low_rank.projections import DenseProjection
from lightning_symmetry.surgery import ReparametrizedLayer


def low_rank_maps(net: nn.Module) -> dict[str, LowRankMap]:
    """Return the factorised maps of a network by name, each pair of factors once, also where layers are tied.

    Those of attention are its projections.
    """
    found: dict[int, tuple[str, LowRankMap]] = {}
    for name, module in net.named_modules():
        if isinstance(module, LowRankMap):
            found.setdefault(id(module.left), (name, module))
    return dict(found.values())


Part = LowRankMap | ReparametrizedLayer | nn.Parameter
"""What has one penalty: a factorised map, a layer in other coordinates, or the weight of a plain layer."""

_PLAIN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Embedding, nn.MultiheadAttention, DenseProjection)
_WEIGHTS = ("weight", "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


def decayed_parts(net: nn.Module, dense: bool = False) -> dict[str, Part]:
    """Return what Frobenius decay acts on by name, each once, also where layers are tied.

    Those are the factorised maps. With ``dense`` the weights of ``nn.Linear``, ``nn.Conv1d``, ``nn.Conv2d``,
    ``nn.Embedding`` and the projections of ``nn.MultiheadAttention`` come with them, and layers in other coordinates,
    such as those with fixed entries: what is penalised there is their canonical weight, and its gradient reaches what
    is trained. A weight that is parametrised by ``torch.nn.utils.parametrize``, and those of layers of other kinds,
    have no part in it.

    Args:
        net: The network.
        dense: Whether weights without factors are decayed too.
    """
    parts: dict[str, Part] = dict(low_rank_maps(net))
    return {**parts, **_dense_parts(net)} if dense else parts


def _dense_parts(net: nn.Module) -> dict[str, Part]:
    found: dict[int, tuple[str, Part]] = {}
    for name, module in net.named_modules():
        if isinstance(module, LowRankMap | LowRankMultiheadAttention):
            continue
        if isinstance(module, ReparametrizedLayer):
            found.setdefault(id(module._parameters.get("weight", module)), (name, module))
        elif isinstance(module, _PLAIN):
            for key in _WEIGHTS:
                if (parameter := module._parameters.get(key)) is not None:
                    found.setdefault(id(parameter), (f"{name}.{key}".lstrip("."), parameter))
    return dict(found.values())


def frobenius_decay(net: nn.Module, weight: float, dense: bool = False) -> Tensor:
    r"""Return the penalty on the products, to add to a loss.

    .. math:: \frac{\lambda}{2} \sum_l \|U_l V_l^\top\|_F^2
        = \frac{\lambda}{2} \sum_l \operatorname{tr}\left((U_l^\top U_l)(V_l^\top V_l)\right)

    Products are not formed: r (r + 1) (N + M) multiply-adds a layer. With ``dense`` layers without factors have the
    same penalty, :math:`\frac{\lambda}{2} \|W\|_F^2`, see :func:`decayed_parts`.

    Args:
        net: The network.
        weight: :math:`\lambda`.
        dense: Whether weights without factors are penalised too.

    Raises:
        ValueError: If the network has nothing to penalise.

    Source: Exploring Low Rank Training of Deep Neural Networks (2022), section 3.3.
    """
    return weight / 2 * _sum([_squared_norm(part) for part in _parts(net, dense)])


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
    return weight / 2 * _sum([part.left.square().sum() + part.right.square().sum() for part in _parts(net)])


@torch.no_grad()
def add_frobenius_decay_(net: nn.Module, weight: float, dense: bool = False) -> None:
    r"""Add the gradients of :func:`frobenius_decay` to ``grad``, before an optimizer's step.

    .. math:: G_U \mathrel{+}= \lambda U (V^\top V), \qquad G_V \mathrel{+}= \lambda V (U^\top U), \qquad
        G_W \mathrel{+}= \lambda W

    This is coupled decay, as the ``weight_decay`` of ``torch.optim.SGD``: momentum and Adam's moments see it.
    Parameters without a gradient are left alone, as optimizers leave them.

    Args:
        net: The network, after ``backward``.
        weight: :math:`\lambda`.
        dense: Whether weights without factors are decayed too.

    Raises:
        ValueError: If the network has nothing to decay, or a gradient is sparse.
    """
    for part in _parts(net, dense):
        for parameter, direction in directions(part):
            add_to_gradient_(parameter, direction, weight)


@torch.no_grad()
def decay_factors_(net: nn.Module, amount: float, dense: bool = False) -> None:
    r"""Decay the factors themselves, as AdamW decays weights.

    .. math:: U \leftarrow U - \eta\lambda\, U (V^\top V), \qquad V \leftarrow V - \eta\lambda\, V (U^\top U),
        \qquad W \leftarrow W - \eta\lambda\, W

    Both sides take the values before. No moment of an optimizer sees it. Frozen parameters are left alone.

    Args:
        net: The network.
        amount: :math:`\eta\lambda`, the learning rate times the weight.
        dense: Whether weights without factors are decayed too.

    Raises:
        ValueError: If the network has nothing to decay.
    """
    for part in _parts(net, dense):
        for parameter, direction in directions(part):
            decay_(parameter, direction, amount)


def directions(part: Part) -> list[tuple[nn.Parameter, Tensor]]:
    """Return the parameters of a part, each with the gradient of half the squared norm of the matrix.

    Args:
        part: One of :func:`decayed_parts`.
    """
    if isinstance(part, nn.Parameter):
        return [(part, part.detach())]
    if isinstance(part, LowRankMap):
        with torch.autocast(part.left.device.type, enabled=False):  # manual optimization steps within it
            left, right = (factor.detach() for factor in part.factors())
            packed = part.pack(left @ (right.mT @ right), right @ (left.mT @ left))
        return list(zip((part.left, part.right), packed, strict=True))
    parameters = [parameter for parameter in part.parameters(recurse=False) if parameter.requires_grad]
    if not parameters:
        return []
    with torch.enable_grad():
        gradients = torch.autograd.grad(_squared_norm(part) / 2, parameters, allow_unused=True)
    return [(p, gradient) for p, gradient in zip(parameters, gradients, strict=True) if gradient is not None]


@torch.no_grad()
def add_to_gradient_(parameter: nn.Parameter, direction: Tensor, weight: float) -> None:
    """Add a multiple of a direction to a parameter's gradient, if it has one.

    Raises:
        ValueError: If the gradient is sparse.
    """
    if parameter.grad is None:
        return
    if parameter.grad.is_sparse:
        raise ValueError("A sparse gradient takes no coupled decay, which is dense: decay the parameters themselves.")
    parameter.grad.add_(direction.to(parameter.grad), alpha=weight)


@torch.no_grad()
def decay_(parameter: nn.Parameter, direction: Tensor, amount: float) -> None:
    """Subtract a multiple of a direction from a parameter that is trained."""
    if parameter.requires_grad:
        parameter.sub_(direction, alpha=amount)


def _sum(terms: list[Tensor]) -> Tensor:
    """Return the sum, on the device of the first term."""
    return torch.stack([term.to(terms[0].device) for term in terms]).sum()


def _squared_norm(part: Part) -> Tensor:
    device = part.device if isinstance(part, nn.Parameter) else next(part.parameters()).device
    with torch.autocast(device.type, enabled=False):
        if isinstance(part, LowRankMap):
            left, right = part.factors()
            return ((left.mT @ left) * (right.mT @ right)).sum()
        return (part if isinstance(part, nn.Parameter) else part.canonical_weight()).square().sum()


def _parts(net: nn.Module, dense: bool = False) -> list[Part]:
    parts = list(decayed_parts(net, dense).values())
    if not parts:
        what = "weights to decay" if dense else "factorised layers to decay: call factorize(net) first"
        raise ValueError(f"{type(net).__name__} has no {what}.")
    return parts
