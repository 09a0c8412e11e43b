"""Tracing leaves the network, its inputs and the process as they were; also where it fails."""

from __future__ import annotations

import copy
import dataclasses
from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from lightning import LightningModule
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from trace_reference import ROUNDING, Net, assert_symmetric, normal, parameter, randomise, sizes

from lightning_symmetry.permutation.spec import trace_permutations

rows = normal(5, 3)


def network():
    net = nn.Sequential(
        nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.GRU(6, 4), First(), nn.Linear(4, 2)
    ).double()
    net[0].weight.requires_grad_(False)
    net[1].eval()
    net[5].weight.grad = torch.ones_like(net[5].weight)
    net[0].register_forward_hook(lambda *_: None)
    return net


class First(nn.Module):
    def forward(self, pair):
        return pair[0]


def everything(net):
    return {
        "modes": [module.training for module in net.modules()],
        "state": {key: (id(t), t._version, t.clone()) for key, t in net.state_dict(keep_vars=True).items()},
        "buffers": {key: (id(t), t.clone()) for key, t in net.named_buffers()},
        "gradients": {key: (p.requires_grad, p.grad is None, id(p.grad)) for key, p in net.named_parameters()},
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in net.modules()],
        "random": torch.get_rng_state(),
        "process": [
            torch.is_grad_enabled(),
            torch.backends.mha.get_fastpath_enabled(),
            torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled(),
            torch.backends.cudnn.enabled,
            _get_current_dispatch_mode(),
            torch.overrides._get_current_function_mode(),
        ],
    }


def assert_alike(a, b):
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_alike(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_alike(one, other)
    else:
        assert torch.equal(a, b) if torch.is_tensor(a) else a == b


def test_nothing_is_left_behind():
    net = network()
    before, inputs = everything(net), rows.clone()
    spec = trace_permutations(net, inputs)
    assert sizes(spec) == [4, 6]
    assert_alike(everything(net), before)
    assert torch.equal(inputs, rows)


@pytest.mark.parametrize("wrong", ["shape", "branch", "exception"])
def test_nothing_is_left_behind_after_an_error(wrong):
    net = network()
    if wrong == "branch":
        net[4].register_forward_hook(lambda module, x, out: out if out.sum() > 0 else -out)
    elif wrong == "exception":
        net[4].register_forward_hook(lambda *_: 1 / 0)
    before = everything(net)
    with pytest.raises(ValueError):
        trace_permutations(net, normal(5, 4) if wrong == "shape" else rows)
    assert_alike(everything(net), before)


class Counting(nn.Module):
    """Writes into its buffers, and its input, whenever it is called."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))
        self.register_buffer("last", torch.zeros(5, 6, dtype=torch.float64), persistent=False)
        self.linear = nn.Linear(3, 6, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(6, dtype=torch.float64)

    def forward(self, x):
        self.calls += 1
        x.mul_(2)
        y = self.linear(x)
        self.mean[1:].add_(y.mean(0)[1:])
        y = F.batch_norm(y, self.norm.running_mean, self.norm.running_var, training=True)
        self.last = y
        return y @ y.T


@pytest.mark.parametrize("fails", [True, False])
def test_networks_that_write_to_themselves_are_as_before(fails):
    net, inputs = Counting(), rows.clone()
    if fails:
        net.register_forward_hook(lambda *_: 1 / 0)
    before = everything(net)
    if fails:
        with pytest.raises(ValueError, match="division by zero"):
            trace_permutations(net, inputs)
    else:
        trace_permutations(net, inputs)
    after = everything(net)
    for part in before:
        if part != "state":
            assert_alike(after[part], before[part])
    for key in before["state"]:
        assert_alike(after["state"][key][0], before["state"][key][0])
        assert_alike(after["state"][key][2], before["state"][key][2])
    assert torch.equal(inputs, rows)


class Plain(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
        self.example_input_array = torch.zeros(2, 3)

    def forward(self, x):
        return self.net(x)


def test_lightning_modules():
    spec = assert_symmetric(Plain().double(), rows)
    assert sizes(spec) == [6]
    assert list(spec.groups) == ["net.0"]
    assert list(trace_permutations(Plain()).groups) == ["net.0"]


def test_compiled_modules():
    net = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)).double()
    spec = assert_symmetric(torch.compile(net, backend="eager"), rows, elements=0)
    assert list(spec.groups) == ["_orig_mod.0"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:")
def test_scripted_modules():
    part = torch.jit.script(nn.Sequential(nn.Linear(3, 6), nn.ReLU()))
    assert sizes(assert_symmetric(nn.Sequential(part, nn.Linear(6, 2)).double(), rows)) == [6]


def test_checkpointed_and_functional_networks():
    from torch.func import functional_call
    from torch.utils.checkpoint import checkpoint

    net = Net(
        lambda net, x: functional_call(
            net.b, dict(net.b.named_parameters()), checkpoint(net.a, x, use_reentrant=False)
        ),
        a=nn.Sequential(nn.Linear(3, 6), nn.ReLU()),
        b=nn.Linear(6, 2),
    )
    assert sizes(assert_symmetric(net.double(), rows)) == [6]


Pair = namedtuple("Pair", "logits hidden")


@dataclasses.dataclass
class Result:
    logits: torch.Tensor
    nested: dict


class Bare:
    def __init__(self, logits):
        self.logits = logits


OUTPUTS = {
    "dictionary": (lambda y, h: {"logits": y}, [6]),
    "dictionary with the hidden layer": (lambda y, h: {"logits": y, "hidden": [h]}, []),
    "dataclass": (lambda y, h: Result(y, {}), [6]),
    "dataclass with the hidden layer": (lambda y, h: Result(y, {"hidden": (h,)}), []),
    "named tuple": (lambda y, h: Pair(y, h.sum()), [6]),
    "named tuple with the hidden layer": (lambda y, h: Pair(y, h), []),
    "object": (lambda y, h: Bare(y), [6]),
    "object with the hidden layer": (lambda y, h: (y, Bare([h])), []),
    "distribution": (lambda y, h: torch.distributions.Normal(y, 1.0, validate_args=False), [6]),
    "distribution of the hidden layer": (lambda y, h: torch.distributions.Normal(h, y.sum().exp(), False), [2]),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_of_all_kinds(name):
    make, expected = OUTPUTS[name]

    def forward(net, x):
        hidden = net.a(x).relu()
        return make(net.b(hidden), hidden)

    assert sizes(assert_symmetric(Net(forward, a=nn.Linear(3, 6), b=nn.Linear(6, 2)).double(), rows)) == expected


def test_inputs_of_all_kinds():
    net = nn.Bilinear(3, 4, 5).double()
    x, y = normal(2, 3), normal(2, 4)
    for inputs in ((x, y), [x, y], {"input1": x, "input2": y}):
        assert not trace_permutations(net, inputs).groups
    batch = Net(lambda net, batch: net.b(net.a(batch["x"][0])), a=nn.Linear(3, 6), b=nn.Linear(6, 2)).double()
    assert sizes(assert_symmetric(batch, ({"x": [rows]},))) == [6]


def test_half_precision():
    net = nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 2))
    spec = assert_symmetric(net.bfloat16(), rows.bfloat16(), tolerance=0.05)
    assert sizes(spec) == [6]
    mixed = Net(
        lambda net, x: net.a(x.half().float()).half().float(), a=nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    )
    assert sizes(assert_symmetric(mixed, rows.float(), tolerance=0.01)) == [4]


def autocast(net, x):
    with torch.autocast("cpu", torch.bfloat16):
        return net.a(x).float()


def test_autocast():
    net = Net(autocast, a=nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    assert sizes(assert_symmetric(net, rows.float(), tolerance=0.05)) == [4]


def hidden_times(name):
    return lambda net, x: net.b(net.a(x) * getattr(net, name))


def test_buffers_and_constants_that_are_not_in_the_state_dict_stay():
    net = Net(hidden_times("g"), a=nn.Linear(3, 6), b=nn.Linear(6, 2)).double()
    net.register_buffer("g", normal(6), persistent=False)
    spec = assert_symmetric(net, rows)
    assert not spec.groups
    assert "not in the state dict" in spec.frozen()["a.weight"]
    net = Net(hidden_times("g"), a=nn.Linear(3, 6), b=nn.Linear(6, 2)).double()
    net.g = normal(6)
    spec = assert_symmetric(net, rows)
    assert not spec.groups
    assert "a constant" in spec.frozen()["a.weight"]


def test_unused_parameters_stay():
    net = Net(lambda net, x: net.b(net.a(x)), a=nn.Linear(3, 6), b=nn.Linear(6, 2), c=nn.Linear(6, 6)).double()
    spec = assert_symmetric(net, rows)
    assert sizes(spec) == [6]
    assert spec.frozen()["c.weight"] == "; ".join(
        f"axis {k}: the network does not use it with this input" for k in range(2)
    )


def test_memory_that_is_shared():
    """The same entries twice are permuted alike; other views of them hold them in their places."""

    def build(view, name, persistent=True):
        net = Net(hidden_times(name), a=nn.Linear(3, 6), b=nn.Linear(6, 2)).double()
        net.register_buffer("g", view(net.a.bias.detach()), persistent=persistent)
        return net

    same = build(lambda bias: bias, "g")
    assert sizes(trace_permutations(same, rows)) == [6]
    assert_symmetric(same, rows)
    for view in (lambda bias: bias.flip(0).as_strided((6,), (1,)), lambda bias: bias[:]):
        assert_symmetric(build(view, "g"), rows)
    part = build(lambda bias: bias[:3].repeat(1), "g")
    part.g = part.a.bias.detach()[1:4]
    part.function = lambda net, x: net.b(torch.cat([net.a(x)[:, :3] * net.g, net.a(x)[:, 3:]], 1))
    spec = trace_permutations(part, rows)
    assert not spec.groups
    assert "shares memory" in spec.frozen()["a.bias"]
    hidden = build(lambda bias: bias, "g", persistent=False)
    assert not trace_permutations(hidden, rows).groups
    first = Net(lambda net, x: net.b(net.a(x)) * net.view[0], a=nn.Linear(3, 6), b=nn.Linear(6, 2)).double()
    first.view = first.a.bias.detach()
    assert "a view that was made unseen" in trace_permutations(first, rows).frozen()["a.bias"]


def test_a_parameter_under_two_names_is_permuted_once():
    net = Net(lambda net, x: net.c(net.b(net.a(x))), a=nn.Linear(3, 3), b=nn.Linear(3, 3), c=nn.Linear(3, 3)).double()
    net.b.weight = net.a.weight
    net.register_buffer("alias", net.c.bias, persistent=False)
    spec = assert_symmetric(net, rows)
    assert not spec.groups  # the weight of `a` reads the input, and so does that of `b`
    net = Net(lambda net, x: net.b(net.a(x) * net.g), a=nn.Linear(3, 6), b=nn.Linear(6, 2), g=parameter(6)).double()
    net.register_buffer("alias", net.g, persistent=False)
    assert sizes(assert_symmetric(net, rows)) == [6]


def test_float32_and_inference_mode():
    net = randomise(nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))).eval()
    with torch.inference_mode():
        assert sizes(trace_permutations(net, rows.float())) == [6]
    assert sizes(assert_symmetric(copy.deepcopy(net), rows.float(), ROUNDING)) == [6]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_sparse_matrices():
    adjacency = torch.eye(5, dtype=torch.float64).roll(1, 0)
    for sparse in (adjacency.to_sparse(), adjacency.to_sparse_csr()):
        net = Net(lambda net, x, a=sparse: net.b(a @ net.a(x).relu()), a=nn.Linear(3, 6), b=nn.Linear(6, 2)).double()
        assert sizes(assert_symmetric(net, rows)) == [6]
        assert sizes(trace_permutations(net, (rows, sparse))) == [6]
