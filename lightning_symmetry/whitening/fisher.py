"""The Fisher information matrix of a network's predictive distribution."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from lightning_symmetry.landscape.steps import Step
from lightning_symmetry.whitening.fisher_operator import Coefficients, fisher_model
from lightning_symmetry.whitening.likelihoods import LikelihoodName


def fisher_matrix(
    net: nn.Module,
    batch: Any,
    layers: Iterable[str] | None = None,
    *,
    likelihood: LikelihoodName = "categorical",
    samples: int | None = None,
    generator: torch.Generator | None = None,
    whitening: Mapping[str, Coefficients] | None = None,
    step: Step | None = None,
    dtype: torch.dtype = torch.float64,
    columns: int = 64,
    progress: bool = True,
) -> Tensor:
    r"""Return the Fisher information matrix over all parameters of the chosen layers.

    .. math::
        F = \frac1N \sum_{n=1}^N E_{y \sim p(y \mid x_n, \theta)}
        \left[\nabla_\theta \log p(y \mid x_n)\, \nabla_\theta \log p(y \mid x_n)^\top\right]

    The labels are the model's own: exactly in expectation by default, else sampled. Those of the data are never read
    (with them it would be the empirical Fisher, another matrix).

    It is computed as the generalised Gauss-Newton matrix :math:`\frac1N \sum_n J_n^\top H_n J_n`, with H the Hessian of
    the negative log-likelihood in the outputs' natural parameters, which is the same matrix for these likelihoods
    (curvlinops' ``GGNLinearOperator``; with ``samples``, ``FisherMCLinearOperator``). The network is copied and runs in
    evaluation mode. Layers in other coordinates (asymmetric, whitened, factorised) enter as the plain layers that they
    stand for: for the matrix in whitened coordinates give ``whitening``.

    Layout: the layers stand in the order of the network, in each its parameters in the order of definition, in each
    the entries row by row. A linear layer is :math:`(\mathrm{vec}(W), b)` with W's entry (o, i) at ``o * N + i``. A
    parameter that layers share stands in the first of them. Frozen parameters count.

    Args:
        net: The network. It is left as it is.
        batch: An input tensor, an ``(input, target)`` pair whose target is not used, or what ``step`` takes.
        layers: Names or shell patterns of the layers. Default: all that hold parameters.
        likelihood: What the outputs mean. ``"categorical"``: logits with the classes on axis 1; ``"mse"``: means of
            Gaussians of variance 1; ``"bernoulli"``: probabilities, as a sigmoid gives (those within a rounding error
            of 0 or 1 count as certain); ``"bernoulli_logits"``: their logits. Outputs along further axes are
            independent; their log-likelihoods add up.
        samples: Sample this many labels for each prediction instead of the exact expectation. With several positions a
            sample, the cross terms between positions, whose expectation is 0, are left out.
        generator: Where the seed of the samples comes from. Default: seed 0.
        whitening: U and c (None: 0) by layer name: those layers are seen in the coordinates (V, d) of
            :math:`W = V U, b = d - V U c`; see :func:`~lightning_symmetry.whitening.coordinates.transform_fisher`.
        step: ``step(net, batch) -> (output, anything)``, for networks that are called otherwise.
        dtype: Type to compute in.
        columns: How many columns are computed at a time. Memory is about this many times that of a forward pass.
        progress: Whether to show a progress bar.

    Returns:
        The symmetric matrix, of shape ``(D, D)`` for D parameters, on the network's device.

    Raises:
        ValueError: If a pattern matches no layer, the network has no parameters, its outputs are not what the
            likelihood takes, or change from call to call, or something is not finite.

    Source: Natural Neural Networks (2015), eq. 3 and figure 2.
    """
    with fisher_model(
        net,
        batch,
        layers,
        dtype,
        likelihood=likelihood,
        samples=samples,
        generator=generator,
        whitening=whitening,
        step=step,
    ) as model:
        operator = model.operator(model.parameters)
        with tqdm(total=operator.size, desc="Fisher", disable=not progress, leave=False) as bar:
            return operator.dense(columns, bar)


def fisher_blocks(
    net: nn.Module,
    batch: Any,
    layers: Iterable[str] | None = None,
    *,
    likelihood: LikelihoodName = "categorical",
    samples: int | None = None,
    generator: torch.Generator | None = None,
    whitening: Mapping[str, Coefficients] | None = None,
    step: Step | None = None,
    dtype: torch.dtype = torch.float64,
    columns: int = 64,
    progress: bool = True,
) -> dict[str, Tensor]:
    r"""Return the diagonal blocks of the Fisher information matrix, one a layer.

    .. math::
        F_{\ell\ell} = \frac1N \sum_{n=1}^N E_{y \sim p(y \mid x_n, \theta)}
        \left[\nabla_{\theta_\ell} \log p(y \mid x_n)\, \nabla_{\theta_\ell} \log p(y \mid x_n)^\top\right]

    A block holds the weight and the bias of a layer together. What is between layers is never computed. Arguments,
    layout and errors are those of :func:`fisher_matrix`, whose diagonal blocks these are.

    Returns:
        By the layer's name, a symmetric matrix of shape ``(D, D)`` for the layer's D parameters.

    Source: Natural Neural Networks (2015), eq. 3 and figure 2.
    """
    with fisher_model(
        net,
        batch,
        layers,
        dtype,
        likelihood=likelihood,
        samples=samples,
        generator=generator,
        whitening=whitening,
        step=step,
    ) as model:
        operators = {name: model.operator([name]) for name in model.parameters}
        total = sum(operator.size for operator in operators.values())
        with tqdm(total=total, desc="Fisher", disable=not progress, leave=False) as bar:
            return {name: operator.dense(columns, bar) for name, operator in operators.items()}
