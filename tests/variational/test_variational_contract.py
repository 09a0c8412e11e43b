"""Variational networks as modules: copies, transforms, compilation, precision, checkpoints."""

from __future__ import annotations

import copy

import pytest
import torch
from layer_contract import COPIES
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap
from variational_cases import images, small_network

from lightning_symmetry import asymmetrize
from lightning_symmetry.surgery import ReparametrizedLayer, plain_copy
from lightning_symmetry.variational import kl_divergence, sample_network, sampling_mode, to_mean, to_variational

KINDS = {
    "plain": lambda net: net,
    "asymmetric": lambda net: asymmetrize(net, n_fix=2, kappa=0.5),
}
WHOLE = pytest.mark.parametrize("kind", KINDS)
MODES = pytest.mark.parametrize("mode", ["local", "shared", "weight", "mean"])


def network(kind="plain", dtype=torch.float32, **settings):
    net = KINDS[kind](small_network(dtype))
    return to_variational(net, 2, variance=0.01, **settings).eval()


def seeded_loss(net, x):
    torch.manual_seed(7)
    return net(x).square().sum() + kl_divergence(net).to(x.dtype)


def seeded(net, x):
    net.zero_grad()
    loss = seeded_loss(net, x)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def assert_same(a, b, **tolerances):
    torch.testing.assert_close(a[0], b[0], **tolerances)
    assert a[1].keys() == b[1].keys()
    for name, value in a[1].items():
        torch.testing.assert_close(value, b[1][name], **tolerances)


@WHOLE
@MODES
@pytest.mark.parametrize("case", COPIES)
def test_copies_have_the_samples_and_the_gradients(case, mode, kind):
    net = network(kind, mode=mode, diagonal="learned")
    again = COPIES[case](net)
    assert {id(p) for p in again.parameters()}.isdisjoint(id(p) for p in net.parameters())
    if case != "moved" or mode in ("weight", "mean"):  # elsewhere noise is drawn in the order of the output's memory
        assert_same(seeded(again, images()), seeded(net, images()), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        for p in again.parameters():
            p.mul_(0.5)
    again.load_state_dict(net.state_dict())
    torch.testing.assert_close(kl_divergence(again), kl_divergence(net))
    twin = to_mean(copy.deepcopy(again))
    with sampling_mode(net, "mean"):
        torch.testing.assert_close(twin(images()), net(images()), rtol=1e-4, atol=1e-4)


@WHOLE
@MODES
def test_functional_transforms(mode, kind):
    net, x = network(kind, torch.float64, mode=mode), images(dtype=torch.float64)
    value, expected = seeded(net, x)
    parameters, buffers = {n: p.detach() for n, p in net.named_parameters()}, dict(net.named_buffers())
    torch.manual_seed(7)
    torch.testing.assert_close(functional_call(net, parameters, (x,)).square().sum() + kl_divergence(net), value)

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return seeded_loss(self.net, x)

    def loss(parameters, buffers=buffers):
        values = {f"net.{name}": value for name, value in (parameters | buffers).items()}
        return functional_call(Loss(), values, (x,))

    for name, value in grad(loss)(parameters).items():
        torch.testing.assert_close(value, expected.get(name, torch.zeros_like(value)))
    nets = [net, copy.deepcopy(net)]
    with torch.no_grad():
        for p in nets[1].parameters():
            p.mul_(1.1)
    stacked, stacked_buffers = stack_module_state(nets)
    values = vmap(grad(loss), randomness="same")({n: p.detach() for n, p in stacked.items()}, stacked_buffers)
    for index, one in enumerate(nets):
        expected = seeded(one, x)[1]
        for name, value in values.items():
            torch.testing.assert_close(value[index], expected.get(name, torch.zeros_like(value[index])))


@MODES
def test_traced_whole_by_the_compiler(mode):
    net = network("asymmetric", mode=mode, diagonal="learned")
    expected = seeded(net, images())
    torch.compiler.reset()
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    net.zero_grad()
    torch.manual_seed(7)
    loss = (
        compiled(images()).square().sum() + torch.compile(kl_divergence, backend="eager", fullgraph=True)(net).float()
    )
    loss.backward()
    found = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    assert_same((loss.detach(), found), expected, rtol=1e-4, atol=1e-4)


@WHOLE
@MODES
@pytest.mark.parametrize("diagonal", ["constant", "learned"])
def test_autocast(diagonal, mode, kind):
    net = network(kind, mode=mode, diagonal=diagonal)
    torch.manual_seed(7)
    expected = net(images())
    torch.manual_seed(7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = net(images())
    assert output.dtype == torch.bfloat16
    assert output.shape == expected.shape
    output.float().square().sum().backward()
    if mode in ("weight", "mean"):  # elsewhere noise is drawn in the output's type
        torch.testing.assert_close(output.float(), expected, rtol=0.1, atol=0.1)
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@MODES
def test_other_types(dtype, mode):
    net = network("asymmetric", mode=mode, diagonal="learned").to(dtype)
    output = net(images(dtype=dtype))
    assert output.dtype == dtype
    assert output.isfinite().all()
    assert kl_divergence(net).dtype == torch.float64


@WHOLE
@MODES
@pytest.mark.parametrize("diagonal", ["constant", "learned"])
@pytest.mark.parametrize("autocast", [True, False])
def test_variances_do_not_overflow_float16(autocast, diagonal, mode, kind):
    net = network(kind, mode=mode, diagonal=diagonal)
    images_, features = 300 * images(), torch.full((4, 128), 300.0)
    if not autocast:
        net, images_, features = net.half(), images_.half(), features.half()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16, enabled=autocast):
        outputs = net[0](images_), net[5](features)
    assert all(output.dtype == torch.float16 and output.isfinite().all() for output in outputs)


@WHOLE
def test_a_deterministic_checkpoint_loads(kind):
    source = KINDS[kind](small_network()).eval()
    with torch.no_grad():
        for p in source.parameters():
            p.add_(0.1)
    net = network(kind, diagonal="learned")
    factors = net[5].weight_factors.clone()
    net.load_state_dict(source.state_dict())
    assert torch.equal(net[5].weight_factors, factors)
    with sampling_mode(net, "mean"):
        torch.testing.assert_close(net(images()), source(images()), rtol=1e-6, atol=1e-6)
    state = net.state_dict()
    del state["5.weight_factors"]
    with pytest.raises(RuntimeError, match=r"Missing key.*5\.weight_factors"):
        net.load_state_dict(state)
    state = source.state_dict()
    del state["5.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*5\.weight"):
        net.load_state_dict(state)


def test_constants_come_with_the_checkpoint():
    net = to_variational(asymmetrize(small_network(), n_fix=2, kappa=0.5, seed=1), 2).eval()
    other = to_variational(asymmetrize(small_network(), n_fix=2, kappa=0.5, seed=2), 2).eval()
    with torch.no_grad():
        net[5].weight.mul_(0.9)  # as weight decay does, fixed entries too
    other.load_state_dict(net.state_dict())
    for name, value in net[5].named_buffers():
        assert torch.equal(value, dict(other[5].named_buffers())[name])
    assert torch.equal(other[5].canonical_weight(), net[5].canonical_weight())
    assert torch.equal(net.state_dict()["5.weight"], net[5].canonical_weight())
    assert torch.equal(kl_divergence(other), kl_divergence(net))
    assert torch.equal(to_mean(other)(images()), to_mean(net)(images()))


@pytest.mark.parametrize("source", ["variational", "deterministic"])
def test_a_checkpoint_with_other_numbers_of_constants_is_refused(source):
    other = asymmetrize(small_network(), n_fix=3, kappa=0.5)
    if source == "variational":
        to_variational(other, 2)
    with pytest.raises(RuntimeError, match=r"size mismatch for 5.fixed: .*torch.Size\(\[24, 3\]\) from checkpoint"):
        network("asymmetric").load_state_dict(other.state_dict())


def with_padding():
    return to_variational(nn.Sequential(nn.Embedding(5, 4, padding_idx=1), nn.Linear(4, 2)), 2)


@pytest.mark.parametrize("case", ["plain", "asymmetric", "padding"])
@pytest.mark.parametrize("assign", [True, False])
def test_a_checkpoint_fills_a_network_from_the_meta_device(assign, case):
    net = with_padding() if case == "padding" else network(case)
    empty = copy.deepcopy(net).to("meta")
    if not assign:
        empty.to_empty(device="cpu")
        for buffer in empty.buffers():
            buffer.zero_()
    empty.load_state_dict(net.state_dict(), assign=assign)
    x = torch.tensor([[0, 1, 4]]) if case == "padding" else images()
    with sampling_mode(net, "mean"), sampling_mode(empty, "mean"):
        torch.testing.assert_close(empty(x), net(x))
    assert torch.equal(kl_divergence(empty), kl_divergence(net))
    torch.testing.assert_close(to_mean(empty)(x), to_mean(net)(x))


@WHOLE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_round_trips(kind, dtype):
    plain = KINDS[kind](small_network(dtype)).eval()
    kinds = [type(m) for m in plain.modules()]
    plain[0].train()
    plain[5].weight.requires_grad_(False)
    expected, state = plain(images(dtype=dtype)), copy.deepcopy(plain.state_dict())
    parameters = dict(plain.named_parameters())
    net = to_variational(plain, 2)
    assert dict(net.named_parameters()).items() >= parameters.items()
    for name in ("weight", "weight_factors"):
        assert not getattr(net[5], name).requires_grad
    assert net[5].bias_factors.requires_grad
    canonical = plain_copy(net)
    assert [type(m) for m in canonical.modules()] == [type(m) for m in small_network().modules()]
    torch.testing.assert_close(canonical(images(dtype=dtype)), expected, rtol=0, atol=0)
    assert to_mean(net) is net
    assert [type(m) for m in net.modules()] == kinds
    assert dict(net.named_parameters()).items() == parameters.items()
    assert torch.equal(net(images(dtype=dtype)), expected)
    assert list(net.state_dict()) == list(state)
    for name, value in net.state_dict().items():
        assert torch.equal(value, state[name])
    assert (net[0].training, net[5].training, net[5].weight.requires_grad) == (True, False, False)
    assert not hasattr(net, "variational_report")
    assert to_mean(net) is net


@WHOLE
def test_moved_and_back(kind):
    net = to_mean(network(kind).double())
    assert all(p.dtype == torch.float64 for p in net.parameters())
    assert net(images(dtype=torch.float64)).dtype == torch.float64


@WHOLE
def test_sampled_networks_are_deterministic(kind):
    net = network(kind, diagonal="learned")
    before = copy.deepcopy(net.state_dict())
    random = torch.get_rng_state()
    one, same = (sample_network(net, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), random)
    other = sample_network(net)
    assert torch.equal(one(images()), one(images()))
    assert torch.equal(one(images()), same(images()))
    assert not torch.equal(one(images()), other(images()))
    reference = KINDS[kind](small_network())
    assert list(one.state_dict()) == list(reference.state_dict())
    assert [type(m) for m in one.modules()] == [type(m) for m in reference.modules()]
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])
    if kind == "asymmetric":
        fixed = ~reference[5].mask
        assert torch.equal(one[5].weight[fixed], reference[5].weight[fixed])
    single = sample_network(net[5])
    assert not isinstance(single, ReparametrizedLayer) or kind == "asymmetric"


@WHOLE
@MODES
def test_weight_decay_of_fixed_entries_never_shows(kind, mode):
    net = network(kind, mode=mode)
    if kind == "asymmetric":
        expected = seeded(net, images())
        with torch.no_grad():
            net[5].weight[~net[5].mask] = 3.0
            net[5].weight_factors[:, ~net[5].mask] = 3.0
        assert_same(seeded(net, images()), expected)
        assert torch.equal(to_mean(net)[5].weight, net[5].canonical_weight())


def test_the_same_factors_on_every_machine():
    first, second = network(seed=3), network(seed=3)
    torch.manual_seed(99)
    third, other = network(seed=3), network(seed=4)
    for net in (second, third):
        assert torch.equal(first[5].weight_factors, net[5].weight_factors)
    assert not torch.equal(first[5].weight_factors, other[5].weight_factors)
    expected = 0.5 * first[5].weight.std() / 2**0.5
    assert float((first[5].weight_factors.std() / expected).detach()) == pytest.approx(1, abs=0.05)
    expected = 0.1 * first[3].weight.std() / 2**0.5  # zero would be a saddle
    assert float((first[3].weight_factors.std() / expected).detach()) == pytest.approx(1, abs=0.1)
    assert torch.equal(network(scale=0.5, seed=3)[5].weight_factors, first[5].weight_factors)
    again = network(scale=0.5, seed=3)[3].weight_factors
    torch.testing.assert_close(again, 5 * first[3].weight_factors)
