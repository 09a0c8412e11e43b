"""Give the layers of any network a posterior: the room's one verb, and the way back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from lightning_symmetry.surgery import (
    ConversionReport,
    match_patterns,
    module_names,
    replace_modules,
    settings_for,
    uncompiled,
)
from lightning_symmetry.surgery.transaction import all_or_nothing
from lightning_symmetry.variational.candidates import (
    LAYERS,
    base_of,
    find_layers,
    loses_coordinates,
    plain_kind,
    why_left_alone,
)
from lightning_symmetry.variational.layer import VariationalLayer
from lightning_symmetry.variational.posterior import put_back
from lightning_symmetry.variational.settings import VARIANCE, Diagonal, Mode, Posterior, Prior

NetT = TypeVar("NetT", bound=nn.Module)


def to_variational(
    net: NetT,
    rank: int = 4,
    *,
    diagonal: Diagonal = "constant",
    variance: float = VARIANCE,
    prior: Prior = "fan_in",
    mode: Mode = "local",
    scale: float | None = None,
    skip: Sequence[str] = (),
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    seed: int = 0,
) -> NetT:
    r"""Give the weights and biases of a network a Gaussian posterior, in place.

    .. math:: q = \prod_{\text{layers}} N\Big(\mu, \operatorname{diag}(d) + \frac1K \sum_{k=1}^K v_k v_k^\top\Big)

    Converted are ``nn.Linear``, ``nn.Conv1d``, ``nn.Conv2d`` and ``nn.Embedding``, and layers with fixed entries, which
    stay fixed. A factorised layer becomes one with a posterior over its canonical weight, and its factors are gone.
    Layers whose parameters require no gradients are converted too, though their covariance is not trained either: name
    in ``skip`` what is to have no noise. Parameters of norms stay deterministic. The means are the same Parameter
    objects under the same names; those of the covariance are ``weight_factors`` and ``bias_factors`` and, for a learned
    diagonal, ``weight_log_variance`` and ``bias_log_variance``, which a new optimizer must be told of. The report of
    what was changed, what not and why is left as ``net.variational_report``. If anything fails the network is as it
    was.

    Other conversions leave variational layers alone: make a network asymmetric or factorise it before. Where networks
    are interpolated or measured it is their means that count; to align them call :func:`to_mean` first.

    The defaults are the paper's but for the prior, which is that of its ResNets; its multi-layer perceptrons have
    ``prior="fan_in:100"``, and its ResNets ``variance=math.exp(-12)``.

    Args:
        net: The network, changed in place.
        rank: K; 0 is mean-field.
        diagonal: ``"constant"``, one d for each layer that is not trained, or ``"learned"``, one for each entry.
        variance: d at the beginning.
        prior: Variance of the prior: a number, ``"fan_in"`` (1/n with n inputs), ``"fan_in:100"`` (100/n) or
            ``"optimal"``, that with the least divergence at any time.
        mode: How outputs are sampled: ``"local"``, ``"shared"``, ``"weight"`` or ``"mean"``, see
            :class:`~lightning_symmetry.variational.layer.VariationalLayer`.
        scale: Standard deviation of the first entries of v, as a multiple of that of the weight over :math:`\sqrt K`;
            None: 0.5, and 0.1 for convolutions.
        skip: Shell patterns of layers to leave alone.
        overrides: Shell pattern -> settings (``rank``, ``diagonal``, ``variance``, ``prior``, ``mode``, ``scale``) of
            single layers; where several match, the later one counts.
        seed: Seed of the first factors, which depend on it and on the layer's name within ``net`` only.

    Returns:
        The same network.

    Raises:
        ValueError: If there is nothing to convert, a pattern matches nothing, a setting is none, or the network is
            variational already.

    Source: The Empirical Impact of Neural Parameter Symmetries, or Lack Thereof (2024), section 5.2, App. E.2;
    Tomczak, Swaroop, Turner, Efficient Low Rank Gaussian Variational Inference for Neural Networks (2020).
    """
    names, layers = module_names(net), find_layers(net)
    skipped = {name for name, patterns in match_patterns(layers, skip, "skip").items() if patterns}
    defaults = {"rank": rank, "diagonal": diagonal, "variance": variance}
    defaults |= {"prior": prior, "mode": mode, "scale": scale}
    Posterior(**defaults)
    chosen = {name: Posterior(**values) for name, values in settings_for(layers, defaults, overrides or {})}
    reasons = {**why_left_alone(net, layers), **dict.fromkeys(skipped, "skipped")}
    report = ConversionReport("to_variational")
    replacements: dict[str, nn.Module] = {}
    for name, module in layers.items():
        if name in reasons:
            report.add(name, type(module).__name__, False, reasons[name])
            continue
        kind = LAYERS[plain_kind(module)]
        new = kind.from_layer(base_of(module), chosen[name], seed=seed, name=uncompiled(name))
        replacements.update(dict.fromkeys(names[module], new))
        report.add(name, type(module).__name__, True, _detail(module, new, len(names[module])))
    if not report.changed:
        raise ValueError(f"to_variational found nothing to convert in {type(net).__name__}.\n{report}")
    report.warn_left_alone(expected=skipped)
    with all_or_nothing(net):
        replace_modules(net, replacements)
        net.variational_report = report
    return net


def to_mean(net: NetT) -> NetT:
    """Put the layers back that :func:`to_variational` replaced, in place, with the means as their parameters.

    Parameters are the same objects; layers with fixed entries have them again. A network without variational layers is
    returned as it is.

    Args:
        net: The network, changed in place.

    Returns:
        The same network.

    Raises:
        ValueError: If the network is itself a variational layer, whose ``release()`` is what is wanted.
    """
    return put_back(net, VariationalLayer.release)


def _detail(old: nn.Module, new: VariationalLayer, places: int) -> str:
    """Describe what became of a layer."""
    entries = new.gaussian().size
    prior = "optimal" if new.prior_variance is None else f"variance {new.prior_variance:.3g}"
    fixed = new.weight.numel() - new._size
    text = f"rank {new.posterior.rank}, {new.posterior.diagonal} diagonal {new.posterior.variance:.3g}, prior {prior}, "
    text += f"{entries} entries" + (f" and {fixed} fixed" if fixed else "")
    text += ", its other coordinates are gone" if loses_coordinates(old) else ""
    text += ", frozen" if not any(p.requires_grad for p in new.parameters()) else ""
    return text + (f", shared at {places} places" if places > 1 else "")
