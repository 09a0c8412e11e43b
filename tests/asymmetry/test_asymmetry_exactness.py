"""Fixed entries stay exact to the bit, and the state dict true, whatever trains, copies or calls the network."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from asymmetry_reference import (
    MaskedPlain,
    assert_truthful,
    asymmetric,
    batch,
    constants_of,
    dense_weight,
    spoil,
)
from torch import nn
from torch.func import functional_call, grad, jacrev, stack_module_state, vmap
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from lightning_symmetry import MLP, AsymmetricLinear, asymmetrize
from lightning_symmetry.asymmetry import AsymmetricLayer

every_net = pytest.mark.parametrize("kind", ["mlp", "images", "sequences"])


class SignDescent(torch.optim.Optimizer):
    """Writes through ``.data``, with weight decay and moves of entries whose gradient is zero."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data * 0.99 - 1e-2 * (p.grad + 1e-3).sign()


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1),
    "AdamW fused": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1, foreach=True),
    "SGD": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 1e-2, weight_decay=0.1),
    "LBFGS": lambda p: torch.optim.LBFGS(p, 1e-2, max_iter=3),
    "through data": SignDescent,
}


def train(net, optimizer, x, target, steps=4, clip=None):
    norms = []

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x).float(), target)
        loss.backward()
        if clip is not None:
            norms.append(nn.utils.clip_grad_norm_(net.parameters(), clip))
        return loss

    for _ in range(steps):
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return norms


@every_net
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training(kind, optimizer):
    net, (x, target) = asymmetric(kind), batch(kind)
    constants, before = constants_of(net), copy.deepcopy(net.state_dict())
    optim = OPTIMIZERS[optimizer](net.parameters())
    train(net, optim, x, target)
    assert_truthful(kind, net, constants, x)
    for name, (mask, _) in constants.items():
        trainable = mask.reshape(len(mask), -1)
        moved = (net.state_dict()[f"{name}.weight"] != before[f"{name}.weight"]).reshape(*trainable.shape, -1).any(2)
        assert moved[trainable].float().mean() > 0.5  # a step may be below the rounding of an entry
    # The function is that of eq. 2 also right after the step, before anything has been restored.
    optim = OPTIMIZERS[optimizer](net.parameters())
    train(net, optim, x, target, steps=1)
    expected = MaskedPlain(kind, net)(x)
    torch.testing.assert_close(net(x), expected)


@every_net
@pytest.mark.parametrize("optimizer", ["AdamW", "AdamW fused", "SGD", "Adagrad"])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_training_is_that_of_the_dense_form(kind, optimizer, clip):
    net, (x, target) = asymmetric(kind).double(), batch(kind, dtype=torch.float64)
    reference = MaskedPlain(kind, net)
    norms = train(net, OPTIMIZERS[optimizer](net.parameters()), x, target, 6, clip)
    expected = train(reference, OPTIMIZERS[optimizer](reference.parameters()), x, target, 6, clip)
    torch.testing.assert_close(norms, expected)
    state = net.state_dict()
    for name, wanted in reference.weights().items():
        torch.testing.assert_close(state[name], wanted, rtol=1e-9, atol=1e-9)


@every_net
def test_clipping_norm_is_that_of_the_trainable_entries(kind):
    net, (x, target) = asymmetric(kind), batch(kind)
    spoil(next(m for m in net.modules() if isinstance(m, AsymmetricLayer)))
    F.cross_entropy(net(x), target).backward()
    total = 0.0
    for module in net.modules():
        for name, p in module.named_parameters(recurse=False):
            entries = p.grad
            if isinstance(module, AsymmetricLayer) and name == "weight":
                assert (p.grad[~module.trainable_entries()] == 0).all()
                entries = p.grad[module.trainable_entries()]
            total += entries.double().square().sum()
    assert nn.utils.clip_grad_norm_(net.parameters(), 1e9).item() == pytest.approx(total.sqrt().item(), rel=1e-6)


def file_round_trip(net):
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def state_round_trip(net):
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    other = asymmetric(net.kind, seed=77)
    other.load_state_dict(torch.load(file, weights_only=True))
    return other


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda net: pickle.loads(pickle.dumps(net)),
    "save": file_round_trip,
    "state dict": state_round_trip,
    "twice": lambda net: copy.deepcopy(pickle.loads(pickle.dumps(net))),
    "to and back": lambda net: copy.deepcopy(net).to("meta").to_empty(device="cpu"),
}


@every_net
@pytest.mark.parametrize("how", COPIES)
def test_copies(kind, how):
    net, (x, target) = asymmetric(kind), batch(kind)
    net.kind = kind
    constants = constants_of(net)
    train(net, OPTIMIZERS["AdamW"](net.parameters()), x, target, 2)  # its entries are spoilt at this moment
    for module in net.modules():
        if isinstance(module, AsymmetricLayer):
            spoil(module)
    clone = COPIES[how](net)
    if how == "to and back":
        clone.load_state_dict(net.state_dict())
    assert torch.equal(clone(x), net(x))
    assert_truthful(kind, clone, constants, x)
    before = copy.deepcopy(net.state_dict())
    train(clone, OPTIMIZERS["SGD"](clone.parameters()), x, target, 3)
    assert_truthful(kind, clone, constants, x)
    for name, value in net.state_dict().items():  # the copy shares nothing
        assert torch.equal(value, before[name])
    last = [m for m in clone.modules() if isinstance(m, AsymmetricLinear)][-1]  # copies stay on the fast path
    assert type(last(torch.randn(2, last.in_features)).grad_fn).__name__ == "FixedLinearBackward"


@every_net
@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_of_another_seed_brings_its_masks_and_constants(kind, assign):
    a, b = asymmetric(kind, seed=1), asymmetric(kind, seed=2)
    x, target = batch(kind)
    wanted = constants_of(b)
    assert not all(torch.equal(constants_of(a)[n][0], m) for n, (m, _) in wanted.items())
    a.load_state_dict(copy.deepcopy(b.state_dict()), assign=assign)
    assert torch.equal(a(x), b(x))
    # The derived positions are the new ones: training keeps b's entries and gradients vanish there.
    train(a, OPTIMIZERS["AdamW"](a.parameters()), x, target)
    assert_truthful(kind, a, wanted, x)
    for module in a.modules():
        if isinstance(module, AsymmetricLayer):
            assert (module.weight.grad[~module.trainable_entries()] == 0).all()


@every_net
def test_a_plain_checkpoint_keeps_the_constants(kind):
    net, (x, _) = asymmetric(kind), batch(kind)
    constants = constants_of(net)
    plain = MaskedPlain(kind, net).plain
    for p in plain.parameters():
        nn.init.normal_(p)
    missing = net.load_state_dict(plain.state_dict(), strict=False)
    assert not missing.unexpected_keys
    assert_truthful(kind, net, constants, x)
    layer = next(m for m in net.modules() if isinstance(m, AsymmetricLayer))
    weight = next(p for n, p in plain.named_parameters() if n.endswith("weight"))
    trainable = layer.trainable_entries()
    assert torch.equal(layer.weight[trainable], weight[trainable])


def test_state_dict_with_another_number_of_fixed_entries_is_refused():
    a, b = (asymmetrize(MLP(12, (16,), 4), n_fix=n) for n in (2, 3))
    with pytest.raises(RuntimeError, match=r"size mismatch for linears.0.fixed"):
        a.load_state_dict(b.state_dict())


@every_net
@pytest.mark.parametrize("foreign", ["tensors", "parameters"])
def test_functional_call_never_writes_to_what_it_is_given(kind, foreign):
    net, (x, _) = asymmetric(kind), batch(kind)
    given = {
        name: (nn.Parameter if foreign == "parameters" else torch.clone)(torch.full_like(p, 0.3))
        for name, p in net.named_parameters()
    }
    own = copy.deepcopy(net.state_dict())
    out = functional_call(net, given, (x,))
    for value in given.values():
        assert (value == 0.3).all()
    for name, value in net.state_dict().items():
        assert torch.equal(value, own[name])
    net.load_state_dict({n: v.detach() for n, v in given.items()}, strict=False)
    torch.testing.assert_close(out, net(x))
    if foreign == "parameters":
        out.sum().backward()
        for name, module in net.named_modules():
            if isinstance(module, AsymmetricLayer):
                assert (given[f"{name}.weight"].grad[~module.trainable_entries()] == 0).all()


@every_net
def test_functional_call_with_the_state_of_another_seed(kind):
    a, b = asymmetric(kind, seed=1), asymmetric(kind, seed=2)
    x, _ = batch(kind)
    before = copy.deepcopy(a.state_dict())
    torch.testing.assert_close(functional_call(a, b.state_dict(), (x,)), b(x))
    constants = {k: v for k, v in b.state_dict().items() if k.endswith(("mask", "fixed"))}
    expected = MaskedPlain(kind, b)
    expected.plain.load_state_dict({n: p.detach() for n, p in a.named_parameters()})
    torch.testing.assert_close(functional_call(a, constants, (x,)), expected(x))
    for name, value in a.state_dict().items():
        assert torch.equal(value, before[name])


@every_net
@pytest.mark.parametrize("seeds", [(0, 0, 0), (1, 2, 3)], ids=["same masks", "other masks"])
def test_vmap_over_stacked_networks_is_a_loop(kind, seeds):
    nets = [asymmetric(kind, seed=seed) for seed in seeds]
    x, target = batch(kind)
    for i, net in enumerate(nets):
        with torch.no_grad():
            for p in net.parameters():
                p.add_(0.1 * i)
    parameters, buffers = stack_module_state(nets)
    stacked = {n: p.clone() for n, p in parameters.items()}
    base = copy.deepcopy(nets[0]).to("meta")

    def loss(parameters, buffers, x):
        return F.cross_entropy(functional_call(base, (parameters, buffers), (x,)), target)

    values = vmap(loss, in_dims=(0, 0, None))(parameters, buffers, x)
    gradients = vmap(grad(loss), in_dims=(0, 0, None))(parameters, buffers, x)
    for i, net in enumerate(nets):
        expected = F.cross_entropy(net(x), target)
        torch.testing.assert_close(values[i], expected.detach())
        for (name, p), wanted in zip(
            net.named_parameters(), torch.autograd.grad(expected, list(net.parameters())), strict=True
        ):
            torch.testing.assert_close(gradients[name][i], wanted, msg=name)
            assert p.shape == wanted.shape
    for name, value in parameters.items():
        assert torch.equal(value, stacked[name])


def test_vmap_over_parameters_with_the_constants_of_the_module():
    nets = [asymmetric("mlp") for _ in range(3)]
    x, _ = batch("mlp")
    for i, net in enumerate(nets):
        with torch.no_grad():
            net.linears[0].weight.mul_(1 + i)
    parameters, _ = stack_module_state(nets)
    out = vmap(lambda p: functional_call(nets[0], p, (x,)))(parameters)
    torch.testing.assert_close(out, torch.stack([net(x) for net in nets]))


@every_net
def test_transforms_with_the_module_captured(kind):
    net, (x, _) = asymmetric(kind).double(), batch(kind, 2, torch.float64)
    reference = MaskedPlain(kind, net)
    for module in net.modules():
        if isinstance(module, AsymmetricLayer):
            spoil(module)
    torch.testing.assert_close(grad(lambda x: net(x).square().sum())(x), grad(lambda x: reference(x).square().sum())(x))
    torch.testing.assert_close(jacrev(net)(x), jacrev(reference)(x))
    torch.testing.assert_close(torch.func.jacfwd(net)(x), jacrev(reference)(x))
    torch.testing.assert_close(vmap(net)(x[:, None]), reference(x)[:, None])
    jacobian = torch.autograd.functional.jacobian
    torch.testing.assert_close(jacobian(net, x, vectorize=True), jacobian(reference, x))
    forward = jacobian(net, x, vectorize=True, strategy="forward-mode")
    torch.testing.assert_close(forward, jacobian(reference, x))


def test_forward_mode_and_batched_gradients_of_the_weight():
    net, (x, _) = asymmetric("mlp").double(), batch("mlp", 2, torch.float64)
    layer = net.linears[0]
    layer.zero_grad()
    tangent = torch.randn_like(x)
    with torch.autograd.forward_ad.dual_level():
        dual = layer(torch.autograd.forward_ad.make_dual(x, tangent))
        found = torch.autograd.forward_ad.unpack_dual(dual).tangent
    torch.testing.assert_close(found, tangent @ torch.from_numpy(dense_weight(layer)).T)
    y = layer(x[0])
    batched = torch.autograd.grad(y, layer.weight, torch.eye(16, dtype=torch.float64), is_grads_batched=True)[0]
    for row in range(16):
        expected = torch.zeros_like(layer.weight)
        expected[row] = x[0] * layer.mask[row]
        torch.testing.assert_close(batched[row], expected)


@every_net
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_compiled(kind):
    torch._dynamo.reset()
    net, (x, target) = asymmetric(kind), batch(kind)
    constants = constants_of(net)
    reference = copy.deepcopy(net)
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    train(compiled, OPTIMIZERS["AdamW"](net.parameters()), x, target)
    train(reference, OPTIMIZERS["AdamW"](reference.parameters()), x, target)
    assert_truthful(kind, net, constants, x)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], value, rtol=1e-4, atol=1e-6)
    assert set(compiled.state_dict()) == {f"_orig_mod.{name}" for name in net.state_dict()}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_compiled_functional_call_with_constants_of_another_seed():
    torch._dynamo.reset()
    a, b = asymmetric("mlp", seed=1), asymmetric("mlp", seed=2)
    x, _ = batch("mlp")
    state = {name: value.clone() for name, value in b.state_dict().items()}
    compiled = torch.compile(lambda state, x: functional_call(a, state, (x,)), backend="eager")
    torch.testing.assert_close(compiled(state, x), b(x))


@every_net
def test_mixed_precision(kind):
    net, (x, target) = asymmetric(kind), batch(kind)
    constants = constants_of(net)
    optimizer = OPTIMIZERS["AdamW"](net.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = net(x)
            loss = F.cross_entropy(out, target)
        assert out.dtype == torch.bfloat16
        loss.backward()
        for module in net.modules():
            if isinstance(module, AsymmetricLayer):
                assert (module.weight.grad[~module.trainable_entries()] == 0).all()
                assert module.weight.grad.dtype == torch.float32
        optimizer.step()
        with torch.no_grad():  # autocast rounds the exact weights, not the decayed ones
            with torch.autocast("cpu", torch.bfloat16):
                found = net(x)
            with torch.autocast("cpu", torch.bfloat16):
                expected = MaskedPlain(kind, net)(x)
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    assert_truthful(kind, net, constants, x)


@every_net
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_converted_modules(kind, dtype):
    net, (x, target) = asymmetric(kind), batch(kind)
    constants = {name: (mask, fixed.to(dtype)) for name, (mask, fixed) in constants_of(net).items()}
    net.to(dtype)
    train(net, OPTIMIZERS["AdamW"](net.parameters()), x.to(dtype), target)
    assert_truthful(kind, net, constants, x.to(dtype), rtol=0.05, atol=0.05)


@every_net
def test_two_forwards_before_one_backward(kind):
    net, (x, _) = asymmetric(kind).double(), batch(kind, dtype=torch.float64)
    reference = MaskedPlain(kind, net)
    optim, other = (OPTIMIZERS["AdamW"](n.parameters()) for n in (net, reference))
    for _ in range(3):
        for model, optimizer in ((net, optim), (reference, other)):
            optimizer.zero_grad()
            left, right = model(x), model(x.flip(0))
            (left - right).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(net(x), reference(x))


@every_net
def test_gradient_accumulation(kind):
    net, (x, target) = asymmetric(kind).double(), batch(kind, dtype=torch.float64)
    whole = copy.deepcopy(net)
    constants = constants_of(net)
    for model, parts in ((net, 3), (whole, 1)):
        optimizer = OPTIMIZERS["AdamW"](model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            for inputs, labels in zip(x.chunk(parts), target.chunk(parts), strict=True):
                (F.cross_entropy(model(inputs), labels) / parts).backward()
            optimizer.step()
    torch.testing.assert_close(net(x), whole(x))
    assert_truthful(kind, net, constants, x)


@every_net
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(kind, reentrant):
    net, (x, target) = asymmetric(kind), batch(kind)
    F.cross_entropy(net(x), target).backward()
    expected = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    out = checkpoint(net, x.clone().requires_grad_(), use_reentrant=reentrant)
    F.cross_entropy(out, target).backward()
    for p, wanted in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, wanted)


@every_net
def test_inference_mode(kind):
    net, (x, target) = asymmetric(kind), batch(kind)
    constants = constants_of(net)
    train(net, OPTIMIZERS["AdamW"](net.parameters()), x, target, 1)
    with torch.inference_mode():
        net.eval()
        found = net(x).clone()
        net.state_dict()
    torch.testing.assert_close(found, MaskedPlain(kind, net)(x).detach())
    train(net.train(), OPTIMIZERS["AdamW"](net.parameters()), x, target, 1)
    assert_truthful(kind, net, constants, x)
    with torch.inference_mode():
        made_there = asymmetric(kind)
    with torch.no_grad():
        torch.testing.assert_close(made_there(x), asymmetric(kind)(x))


@every_net
@pytest.mark.parametrize("decay", [0.9, 0.999])
def test_moving_averages_of_weights_and_buffers(kind, decay):
    net, (x, target) = asymmetric(kind), batch(kind)
    constants = constants_of(net)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
    optimizer = OPTIMIZERS["AdamW"](net.parameters())
    for _ in range(20):
        train(net, optimizer, x, target, 1)
        average.update_parameters(net)
    assert_truthful(kind, average.module, constants, x)


@every_net
def test_deterministic_algorithms(kind):
    net, (x, target) = asymmetric(kind), batch(kind)
    constants = constants_of(net)
    torch.use_deterministic_algorithms(True)
    try:
        train(net, OPTIMIZERS["AdamW"](net.parameters()), x, target)
        assert_truthful(kind, net, constants, x)
    finally:
        torch.use_deterministic_algorithms(False)


def test_layout_of_filters_trains_exactly():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.Flatten(), nn.Linear(48, 4))
    asymmetrize(net, n_fix=1, layout="filters")
    constants = constants_of(net)
    x = torch.randn(5, 4, 6, 6)
    train(net, OPTIMIZERS["AdamW"](net.parameters()), x, torch.arange(5) % 4)
    for name, (mask, fixed) in constants.items():
        weight = net.state_dict()[f"{name}.weight"].reshape(*mask.shape, -1)
        assert torch.equal(weight[~mask].reshape(len(mask), -1), fixed)
    assert {tuple(m.fixed.shape) for m in net.modules() if isinstance(m, AsymmetricLayer)} == {(4, 9), (3, 9), (4, 1)}
