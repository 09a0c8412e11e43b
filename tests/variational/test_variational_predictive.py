"""Predictive distributions are those of the formulas in float64, written down over all samples at once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_symmetry.variational import Predictive, predictive, to_variational


def draws(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return (4 * torch.randn(7, *shape, generator=generator, dtype=torch.float64)).to(dtype)


def entropy_of(p: Tensor, dim: int) -> Tensor:
    return -(p * p.log()).sum(dim)


MANY = {"last": ((5, 4), -1), "images": ((2, 4, 3, 3), 1), "tokens": ((2, 6, 4), 2)}


@pytest.mark.parametrize("outputs", ["logits", "probabilities"])
@pytest.mark.parametrize("kind", MANY)
def test_classes(kind, outputs):
    shape, dim = MANY[kind]
    logits = draws(*shape)
    axis = dim + 1 if dim >= 0 else dim
    p = logits.exp() / logits.exp().sum(axis, keepdim=True)
    found = Predictive.of(logits if outputs == "logits" else p, outputs, dim)
    mean = p.mean(0)
    torch.testing.assert_close(found.probabilities, mean)
    torch.testing.assert_close(found.log_probabilities, mean.log())
    torch.testing.assert_close(found.entropy, entropy_of(mean, dim))
    torch.testing.assert_close(found.mutual_information, entropy_of(mean, dim) - entropy_of(p, axis).mean(0))
    assert found.entropy.shape == mean.select(dim, 0).shape
    assert (found.mutual_information >= 0).all() and (found.entropy <= math.log(4) + 1e-12).all()
    output = found.output.softmax(dim) if outputs == "logits" else found.output
    torch.testing.assert_close(output, mean)
    assert found.mean is None and found.variance is None


SINGLE = {"column": ((6, 1), -1), "vector": ((6,), -1), "labels": ((6, 3), None), "channel": ((2, 1, 3, 3), 1)}


@pytest.mark.parametrize("outputs", ["logits", "probabilities"])
@pytest.mark.parametrize("kind", SINGLE)
def test_one_of_two_classes(kind, outputs):
    shape, dim = SINGLE[kind]
    logits = draws(*shape)
    p = 1 / (1 + (-logits).exp())
    found = Predictive.of(logits if outputs == "logits" else p, outputs, dim)
    mean = p.mean(0)
    torch.testing.assert_close(found.probabilities, mean)
    torch.testing.assert_close(found.log_probabilities, mean.log())
    torch.testing.assert_close(found.output, (mean / (1 - mean)).log() if outputs == "logits" else mean)
    whole, parts = (entropy_of(torch.stack([q, 1 - q]), 0) for q in (mean, p))
    expected = whole - parts.mean(0)
    if kind in ("column", "channel"):
        whole, expected = whole.squeeze(dim), expected.squeeze(dim)
    torch.testing.assert_close(found.entropy, whole)
    torch.testing.assert_close(found.mutual_information, expected)


def test_values():
    values = draws(5, 2)
    found = Predictive.of(values, "values")
    torch.testing.assert_close(found.mean, values.mean(0))
    torch.testing.assert_close(found.output, found.mean)
    torch.testing.assert_close(found.variance, values.var(0))
    assert found.probabilities is None and found.entropy is None and found.mutual_information is None
    assert torch.equal(Predictive.of(values[:1], "values").variance, torch.zeros(5, 2))
    far = Predictive.of((values + 1e6).float(), "values").variance  # no difference of squares
    torch.testing.assert_close(far.double(), values.var(0), rtol=0.05, atol=0)


def test_equal_samples_say_nothing_about_the_weights():
    found = Predictive.of(draws(5, 4, dtype=torch.float32)[:1].expand(25, 5, 4))
    assert float(found.mutual_information.abs().max()) < 1e-6
    one = Predictive.of(draws(5, 4)[:1])
    assert torch.equal(one.mutual_information, torch.zeros(5, dtype=torch.float64))
    torch.testing.assert_close(one.output, draws(5, 4)[0].log_softmax(-1))


@pytest.mark.parametrize("shape", [(5, 4), (5, 1), (5,)])
def test_certain_outputs_stay_finite(shape):
    logits = 1e4 * draws(*shape, dtype=torch.float32)
    found = Predictive.of(logits)
    assert found.output.isfinite().all() and found.entropy.isfinite().all()
    assert found.mutual_information.isfinite().all() and (found.mutual_information >= 0).all()
    certain = Predictive.of(torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]]), "probabilities")
    assert torch.equal(certain.entropy, torch.zeros(1)) and torch.equal(certain.mutual_information, torch.zeros(1))


@pytest.mark.parametrize("outputs", ["logits", "values"])
def test_half_precision_is_summed_in_single(outputs):
    samples = draws(5, 4, dtype=torch.bfloat16)
    found, expected = Predictive.of(samples, outputs), Predictive.of(samples.double(), outputs)
    assert found.output.dtype == torch.float32
    torch.testing.assert_close(found.output.double(), expected.output, rtol=1e-5, atol=1e-5)


def bayesian() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
    return to_variational(net, 2, variance=0.1, scale=2.0)


def test_of_a_network():
    net, x = bayesian(), torch.randn(6, 3)
    torch.manual_seed(5)
    found = predictive(net, x, num_samples=9)
    torch.manual_seed(5)
    p = torch.stack([net(x).double().softmax(1) for _ in range(9)]).detach()
    torch.testing.assert_close(found.probabilities.double(), p.mean(0), rtol=1e-5, atol=1e-6)
    information = entropy_of(p.mean(0), 1) - entropy_of(p, 2).mean(0)
    torch.testing.assert_close(found.mutual_information.double(), information, rtol=1e-4, atol=1e-6)
    assert float(found.mutual_information.min()) > 1e-3
    assert not found.probabilities.requires_grad and net.training


@pytest.mark.parametrize("count", [0, -1, 2.0, True])
def test_bad_counts(count):
    with pytest.raises(ValueError, match="Expected `num_samples` to be an int of at least 1 but got"):
        predictive(bayesian(), torch.randn(2, 3), num_samples=count)


def test_bad_outputs():
    with pytest.raises(ValueError, match="Expected `outputs` to be 'logits', 'probabilities' or 'values' but got 'p'"):
        predictive(bayesian(), torch.randn(2, 3), outputs="p")
    with pytest.raises(ValueError, match=r"Expected `class_dim` to be an axis or None but got 0\.5"):
        Predictive.of(draws(2), class_dim=0.5)
    with pytest.raises(TypeError, match="to return a tensor of real numbers but got a tuple"):
        Predictive.of([(torch.zeros(2),)])
    with pytest.raises(TypeError, match=r"but got a tensor of torch\.int64"):
        Predictive.of([torch.zeros(2, dtype=torch.long)])
    with pytest.raises(ValueError, match="at least one output"):
        Predictive.of([])


class Counted(nn.Sequential):
    """A network before whose last layer nothing is random, which counts how often that is computed."""

    def __init__(self, choose: bool = False) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(25, 30), nn.Tanh(), nn.Linear(30, 3))
        self.calls, self.choose = 0, choose
        to_variational(self, 2, variance=0.04, skip=["0"])

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        output = self[2](self[1](self[0](input)))
        return output if not self.choose or bool(output.sum() < 1e9) else -output


@pytest.mark.parametrize("mode", ["local", "shared", "weight"])
def test_what_depends_on_no_noise_is_computed_once(mode):
    """Samples have the mean and variance that the last layer's posterior gives them, and are independent."""
    net, x, count = Counted(), torch.randn(4, 25), 4000
    layer = net[2]
    layer.mode = mode
    found = predictive(net, x, num_samples=count, outputs="values")
    assert net.calls == 1
    with torch.no_grad():
        h = net[1](net[0](x)).double()
        factors = torch.einsum("koi,ni->kno", layer.weight_factors.double(), h) + layer.bias_factors[:, None]
        variance = 0.04 * (h.square().sum(1, keepdim=True) + 1) + factors.square().mean(0)
        mean = h @ layer.weight.double().T + layer.bias
    assert ((found.mean - mean) / (variance / count).sqrt()).abs().max() < 4.5
    assert ((found.variance / variance - 1) / math.sqrt(2 / count)).abs().max() < 4.5


def test_what_cannot_be_mapped_over_is_sampled_one_by_one():
    net = Counted(choose=True)
    found = predictive(net, torch.randn(4, 25), num_samples=6, outputs="values")
    assert net.calls == 7 and (found.variance > 0).all()
    whole = to_variational(nn.Sequential(nn.Linear(5, 3)), 2)
    assert (predictive(whole, torch.randn(4, 5), num_samples=6, outputs="values").variance > 0).all()


@pytest.mark.parametrize("wrap", [lambda y: (y,), lambda y: [y, y], lambda y: {"logits": y}, lambda y: (y, 3)])
@pytest.mark.parametrize("skip", [["0"], []])
def test_outputs_that_are_no_tensor_are_refused_whether_mapped_over_or_not(wrap, skip):
    class Wrapped(nn.Sequential):
        def forward(self, input: Tensor) -> Any:
            return wrap(super().forward(input))

    net = to_variational(Wrapped(nn.Linear(25, 30), nn.Linear(30, 3)), 2, skip=skip)
    with pytest.raises(TypeError, match=r"to return a tensor of real numbers but got a (tuple|list|dict)"):
        predictive(net, torch.randn(4, 25))
