"""Gradients of the bound, and a conjugate case in which posterior and evidence are known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal
from variational_cases import covariance, joint, randomize

from lightning_symmetry.variational import (
    VariationalLinear,
    kl_divergence,
    kl_warmup,
    negative_elbo,
    sampling_mode,
    to_variational,
)


class Curved(nn.Module):
    """One layer and a smooth nonlinearity: the expected loss is a Gaussian integral over the layer's outputs."""

    def __init__(self, diagonal):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2, dtype=torch.float64)
        to_variational(self, 2, diagonal=diagonal, variance=0.1, prior=0.5)
        randomize(self.layer)

    def forward(self, x):
        return self.layer(x).sin().sum(-1)


def exact_loss(net, x, y):
    r"""Return the expected squared error: of sums of sines of jointly Gaussian outputs, in closed form.

    :math:`E \sin a = e^{-v/2} \sin m` and :math:`\sin a \sin b = (\cos(a - b) - \cos(a + b)) / 2`.
    """
    layer = net.layer
    mean = x @ layer.weight.T + layer.bias
    spread = torch.einsum("koi,ni->nko", layer.weight_factors, x) + layer.bias_factors
    low_rank = torch.einsum("nko,nkp->nop", spread, spread) / 2
    if layer.weight_log_variance is None:
        diagonal = (0.1 * (x.square().sum(1, keepdim=True) + 1)).expand(-1, 2)
    else:
        diagonal = x.square() @ layer.weight_log_variance.exp().T + layer.bias_log_variance.exp()
    cov = low_rank + torch.diag_embed(diagonal)
    variance = cov.diagonal(dim1=1, dim2=2)
    first = (torch.exp(-variance / 2) * mean.sin()).sum(1)
    total = variance.unsqueeze(1) + variance.unsqueeze(2)
    left, right = mean.unsqueeze(1), mean.unsqueeze(2)
    difference = torch.exp(-(total - 2 * cov) / 2) * (left - right).cos()
    addition = torch.exp(-(total + 2 * cov) / 2) * (left + right).cos()
    second = (difference - addition).sum((1, 2)) / 2
    return (second - 2 * y * first + y.square()).mean()


@pytest.mark.parametrize("diagonal", ["constant", "learned"])
@pytest.mark.parametrize("mode", ["local", "shared", "weight"])
def test_gradients_of_the_bound_are_unbiased(mode, diagonal):
    """Every gradient's mean over 6,000 samples is within 4.5 standard errors of the exact one."""
    net = Curved(diagonal)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(4, generator=generator, dtype=torch.float64)
    negative_elbo(exact_loss(net, x, y), kl_divergence(net), 100).backward()
    exact = torch.cat([p.grad.flatten() for p in net.parameters()])
    values = {name: p.detach() for name, p in net.named_parameters()}

    def bound(values, _):
        with_these = torch.func.functional_call(net, values, (x,))
        return (with_these - y).square().mean()

    torch.manual_seed(2)
    per_sample = torch.func.vmap(torch.func.grad(bound), in_dims=(None, 0), randomness="different")
    gradients = per_sample(values, torch.empty(6000))
    of_kl = torch.func.grad(lambda v: torch.func.functional_call(Divergence(net), v, ()))(
        {f"net.{k}": v for k, v in values.items()}
    )
    samples = torch.cat([gradients[k].flatten(1) + of_kl[f"net.{k}"].flatten() / 100 for k in values], 1)
    z = (samples.mean(0) - exact) / (samples.std(0) / math.sqrt(len(samples)))
    assert z.abs().max() < 4.5


class Divergence(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self):
        return kl_divergence(self.net)


def regression():
    """Return inputs, targets, the noise's variance and the prior's, and the exact posterior and log evidence."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) + 0.3
    y = y + 0.5 * torch.randn(20, generator=generator, dtype=torch.float64)
    design = torch.cat([x, torch.ones(20, 1, dtype=torch.float64)], 1)
    noise, prior = 0.25, 2.0
    cov = torch.linalg.inv(design.T @ design / noise + torch.eye(4, dtype=torch.float64) / prior)
    mean = cov @ design.T @ y / noise
    marginal = prior * design @ design.T + noise * torch.eye(20, dtype=torch.float64)
    evidence = MultivariateNormal(torch.zeros(20, dtype=torch.float64), marginal).log_prob(y)
    return x, y, design, noise, prior, mean, cov, evidence


@pytest.mark.parametrize("diagonal", ["constant", "learned"])
def test_bayesian_linear_regression(diagonal):
    """With as many factors as entries the bound's maximum is the posterior, and its value the evidence, to 1 %."""
    _, y, design, noise, prior, exact_mean, exact_covariance, evidence = regression()
    torch.manual_seed(0)
    settings = {"diagonal": diagonal, "variance": 1e-5, "prior": prior}
    layer = VariationalLinear(3, 1, rank=4, dtype=torch.float64, **settings)

    def bound():
        """The expected log-likelihood is exact here; the divergence is the layer's own."""
        mean = torch.cat([layer.weight[0], layer.bias])
        factors = torch.cat([layer.weight_factors[:, 0], layer.bias_factors], 1)
        d = torch.full_like(mean, 1e-5)
        if diagonal == "learned":
            d = torch.cat([layer.weight_log_variance[0], layer.bias_log_variance]).exp()
        cov = torch.diag(d) + factors.T @ factors / 4
        errors = (y - design @ mean).square().sum() + ((design @ cov) * design).sum()
        return -0.5 * errors / noise - 10 * math.log(2 * math.pi * noise) - layer.kl_divergence()

    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=1000, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = -bound()
        loss.backward()
        return loss

    optimizer.step(closure)
    found, _, _ = joint(layer)
    assert float((found - exact_mean).norm() / exact_mean.norm()) < 0.01
    assert float((covariance(layer) - exact_covariance).norm() / exact_covariance.norm()) < 0.01
    assert float(bound()) == pytest.approx(float(evidence), rel=0.01)
    assert float(bound()) < float(evidence)


def test_the_bound_by_samples_is_the_evidence():
    """At the exact posterior the sampled bound, over batches, has the evidence as its mean, within 4 errors."""
    x, y, _, noise, prior, exact_mean, exact_covariance, evidence = regression()
    layer = VariationalLinear(3, 1, rank=4, dtype=torch.float64, variance=1e-9, prior=prior)
    root = 2 * torch.linalg.cholesky(exact_covariance - 1e-9 * torch.eye(4, dtype=torch.float64)).T
    with torch.no_grad():
        layer.weight.copy_(exact_mean[None, :3])
        layer.bias.copy_(exact_mean[3:])
        layer.weight_factors.copy_(root[:, None, :3])
        layer.bias_factors.copy_(root[:, 3:])
    torch.manual_seed(0)
    bounds = []
    with torch.no_grad():
        for start in range(0, 20, 5):  # batches of 5 of N = 20
            inputs = x[start : start + 5].expand(4000, 5, 3).reshape(-1, 3)
            errors = (y[start : start + 5] - layer(inputs).view(4000, 5)).square()
            nll = 0.5 * errors / noise + 0.5 * math.log(2 * math.pi * noise)
            kl = layer.kl_divergence()
            bounds.append(torch.func.vmap(lambda one, kl=kl: negative_elbo(one, kl, 20))(nll.mean(1)))
    found = -20 * torch.stack(bounds).mean(0)
    assert abs(float(found.mean() - evidence)) < 4 * float(found.std()) / math.sqrt(4000)


def test_training_lowers_the_bound():
    torch.manual_seed(0)
    x = torch.randn(200, 6)
    y = (x[:, 0] * x[:, 1] > 0).long()
    net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2))
    to_variational(net, 2, prior="fan_in:100", mode="shared")
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    losses, divergences = [], []
    for _ in range(150):
        optimizer.zero_grad()
        kl = kl_divergence(net)
        loss = negative_elbo(nn.functional.cross_entropy(net(x), y), kl, len(x))
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
        divergences.append(float(kl))
    assert losses[-1] < losses[0]
    assert divergences[-1] < divergences[0]
    with sampling_mode(net, "mean"), torch.no_grad():
        assert (net(x).argmax(1) == y).float().mean() > 0.9


def test_the_divergence_is_divided_by_all_the_data_and_not_by_the_batch():
    nll, kl = torch.tensor(0.5), torch.tensor(60.0, dtype=torch.float64)
    loss = negative_elbo(nll, kl, 1000)
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(0.56)
    assert float(negative_elbo(nll, kl, 1000, kl_weight=0.125)) == pytest.approx(0.5075)


def test_warmup():
    assert [kl_warmup(step, 4) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert kl_warmup(0, 0, 0.5) == 0.5
    with pytest.raises(ValueError, match="at least 0"):
        kl_warmup(-1, 3)


@pytest.mark.parametrize("count", [0, -3, math.inf, math.nan, True])
def test_an_unknown_number_of_samples(count):
    with pytest.raises(ValueError, match="`num_data` to be the number of samples"):
        negative_elbo(torch.tensor(0.0), torch.tensor(0.0), count)


def test_other_errors_of_the_bound():
    with pytest.raises(ValueError, match="`kl_weight`"):
        negative_elbo(torch.tensor(0.0), torch.tensor(0.0), 3, kl_weight=math.nan)
    with pytest.raises(ValueError, match=r"`nll` to be a scalar but got shape \(2,\)"):
        negative_elbo(torch.zeros(2), torch.tensor(0.0), 3)
