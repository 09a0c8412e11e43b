"""The way back from a factorised network."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from lightning_symmetry.low_rank.attention import LowRankMultiheadAttention
from lightning_symmetry.low_rank.candidates import is_factorized
from lightning_symmetry.low_rank.layer import LowRankLayer
from lightning_symmetry.surgery import module_names, replace_modules

NetT = TypeVar("NetT", bound=nn.Module)


def recompose(net: NetT) -> NetT:
    r"""Put plain layers with the product :math:`U V^\top` as their weight in the place of factorised ones, in place.

    Names are those of the plain network again, biases stay the same objects, and tied layers are tied. A network
    without factorised layers is returned as it is.

    Args:
        net: The network, changed in place.

    Returns:
        The same network.

    Raises:
        ValueError: If the network is itself a factorised layer, whose ``to_layer()`` is what is wanted.
    """
    replacements: dict[str, nn.Module] = {}
    weights: dict[int, nn.Parameter] = {}
    for module, names in module_names(net).items():
        if is_factorized(module):
            replacements.update(dict.fromkeys(names, _plain(module, weights)))
    replace_modules(net, replacements)
    if "factorization_report" in net.__dict__:
        del net.factorization_report
    return net


def _plain(module: LowRankLayer | LowRankMultiheadAttention, weights: dict[int, nn.Parameter]) -> nn.Module:
    """Return the plain layer with the same biases, and the same weight as another one with these factors."""
    layer = module.to_layer()
    if isinstance(module, LowRankMultiheadAttention):
        layer.in_proj_bias, layer.out_proj.bias = module.in_proj_bias, module.out_proj_bias
        layer.bias_k, layer.bias_v = module.bias_k, module.bias_v
        return layer
    if module.bias is not None:
        layer.bias = module.bias
    layer.weight = weights.setdefault(id(module.left), layer.weight)
    return layer
