"""Optimizers go on with the parameters of new layers, wherever those were and in what order."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_symmetry.callbacks.spectral_moments import replacements_between
from lightning_symmetry.low_rank import factorize
from lightning_symmetry.surgery.handover import Replacement, Substitution, hand_over
from lightning_symmetry.surgery.learning_rates import scale_learning_rates
from lightning_symmetry.surgery.optimizer_states import UnknownStateError
from lightning_symmetry.surgery.transaction import all_or_nothing


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.encode, self.decode = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        self.decode.weight = self.encode.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.last(self.frozen(self.decode(self.encode(self.norm(x)).tanh())))


def trained(net: Net) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.requires_grad]


def by_decay(net: Net) -> list[dict[str, Any]]:
    """Weights decay, biases and norms do not, as usual."""
    ours = trained(net)
    decays = [p for p in ours if p.ndim > 1]
    return [{"params": decays, "weight_decay": 0.1}, {"params": [p for p in ours if p.ndim < 2], "weight_decay": 0.0}]


def backwards(net: Net) -> list[dict[str, Any]]:
    parts = [net.last, net.encode, net.norm, net.attention, net.first]
    return [{"params": [*part.parameters()], "lr": 1e-3 * (i + 1)} for i, part in enumerate(parts)]


GROUPS: dict[str, Callable[[Net], Any]] = {"one": trained, "decay": by_decay, "backwards": backwards}
OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True),
    "fused": lambda groups: torch.optim.Adam(groups, lr=0.01, fused=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.01, initial_accumulator_value=0.5),
    "tensor lr": lambda groups: torch.optim.Adam(groups, lr=torch.tensor(0.01), foreach=False),
}


def steps(net: nn.Module, optimizer: torch.optim.Optimizer, count: int = 3) -> None:
    for seed in range(count):
        x = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()


def switch(net: nn.Module, *optimizers: torch.optim.Optimizer, moments: str = "project", **kwargs: Any) -> None:
    before = dict(net.named_modules())
    factorize(net, **{"rank": 0.5, "min_saving": -1, **kwargs})
    hand_over(optimizers, replacements_between(before, net), moments)


@pytest.mark.parametrize("moments", ["project", "reset"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("groups", GROUPS)
def test_a_new_optimizer_has_the_same_order(groups, optimizer, moments):
    """Its ``load_state_dict`` maps by position: what it loads goes on as what it was saved from."""
    net = Net()
    ours = OPTIMIZERS[optimizer](GROUPS[groups](net))
    steps(net, ours)
    held = [id(group) for group in ours.param_groups]
    switch(net, ours, moments=moments)
    assert [id(group) for group in ours.param_groups] == held
    clone = copy.deepcopy(net)
    other = OPTIMIZERS[optimizer](GROUPS[groups](clone))
    names = {id(p): name for n in (net, clone) for name, p in n.named_parameters()}
    for a, b in zip(ours.param_groups, other.param_groups, strict=True):
        assert [names[id(p)] for p in a["params"]] == [names[id(p)] for p in b["params"]]
    other.load_state_dict(copy.deepcopy(ours.state_dict()))
    for one, its in ((net, ours), (clone, other)):
        steps(one, its)
    for a, b in zip(net.parameters(), clone.parameters(), strict=True):
        assert torch.equal(a, b)


def test_named_parameters_keep_names():
    net = Net()
    optimizer = torch.optim.AdamW([(name, p) for name, p in net.named_parameters() if p.requires_grad])
    steps(net, optimizer)
    switch(net, optimizer, skip=["last"])
    assert optimizer.param_groups[0]["param_names"] == [name for name, p in net.named_parameters() if p.requires_grad]


def test_what_no_optimizer_has_stays_out():
    net = Net()
    optimizer = torch.optim.SGD(net.first.parameters(), lr=0.1, momentum=0.9)
    steps(net, optimizer)
    switch(net, optimizer)
    assert list(map(id, optimizer.param_groups[0]["params"])) == list(map(id, net.first.parameters()))
    assert not net.frozen.left.requires_grad


def test_an_order_of_ones_own_is_kept():
    net = nn.Sequential(nn.Linear(6, 4))
    optimizer = torch.optim.SGD([net[0].bias, net[0].weight], lr=0.1)
    switch(net, optimizer)
    layer = net[0]
    expected = [layer.bias, layer.left, layer.right]
    assert list(map(id, optimizer.param_groups[0]["params"])) == list(map(id, expected))


@pytest.mark.parametrize("moments", ["project", "reset"])
def test_states_of_other_parameters_stay_the_same_objects(moments):
    net = Net()
    optimizer = OPTIMIZERS["adamw"](trained(net))
    steps(net, optimizer)
    kept = {p: optimizer.state[p] for p in (net.norm.weight, net.first.bias, net.last.weight)}
    switch(net, optimizer, moments=moments, skip=["last"])
    assert all(optimizer.state[p] is state for p, state in kept.items())
    new = optimizer.state.get(net.first.left)
    assert (new is None) == (moments == "reset")
    if new is not None:
        assert float(new["step"]) == 3
        assert new["step"] is not optimizer.state[net.first.right]["step"]
        # No step of Adam is longer than its learning rate, right after the switch too.
        mean, square = new["exp_avg"] / (1 - 0.9**3), new["exp_avg_sq"] / (1 - 0.999**3)
        assert bool((mean.abs() <= square.sqrt() * (1 + 1e-3) + 1e-12).all())


def test_attention_takes_its_rows():
    net = Net()
    optimizer = torch.optim.SGD(trained(net), lr=0.01, momentum=0.9)
    steps(net, optimizer)
    momentum = optimizer.state[net.attention.in_proj_weight]["momentum_buffer"].clone()
    switch(net, optimizer, rank=1.0)
    for part, rows in zip(("q_proj", "k_proj", "v_proj"), momentum.chunk(3), strict=True):
        layer = getattr(net.attention, part)
        states = [optimizer.state[p]["momentum_buffer"] for p in (layer.left, layer.right)]
        moved = states[0] @ layer.right.T + layer.left @ states[1].T
        small = torch.linalg.svdvals(layer.canonical_weight())
        if small[-1] > 2e-3 * small[0]:  # no bound was at work
            torch.testing.assert_close(moved.detach(), rows, rtol=1e-3, atol=1e-6)


def snapshot(net: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return (
        {name: id(part) for name, part in net.named_modules()},
        {name: (id(p), p.detach().clone()) for name, p in net.named_parameters()},
        [sorted(vars(part)) for part in net.modules()],
        [
            {k: list(map(id, v)) if k == "params" else copy.deepcopy(v) for k, v in g.items()}
            for g in optimizer.param_groups
        ],
        {id(p): {k: copy.deepcopy(v) for k, v in state.items()} for p, state in optimizer.state.items()},
    )


def assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        a, b = list(a.values()), list(b.values())
    if isinstance(a, list | tuple):
        for left, right in zip(a, b, strict=True):
            assert_same(left, right)
    else:
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


@pytest.mark.parametrize("kind", [torch.optim.Adadelta, torch.optim.Rprop])
def test_states_without_a_rule_leave_all_as_it_was(kind):
    net = Net()
    optimizer = kind(trained(net), lr=0.01)
    steps(net, optimizer)
    before = snapshot(net, optimizer)
    with (
        pytest.raises(UnknownStateError, match=f"{kind.__name__} keeps .* use moments='reset'"),
        all_or_nothing(net, [optimizer]),
    ):
        switch(net, optimizer)
    assert_same(snapshot(net, optimizer), before)
    steps(net, optimizer)
    switch(net, optimizer, moments="reset")
    steps(net, optimizer)


@pytest.mark.parametrize("rate", [0.01, torch.tensor(0.01)], ids=["number", "tensor"])
def test_everything_comes_back_after_a_late_failure(rate):
    net = nn.Sequential(Net(), nn.TransformerEncoder(nn.TransformerEncoderLayer(2, 1, 8, batch_first=True), 1))
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=rate, foreach=False)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)],
        [2],
    )
    steps(net, optimizer)
    before, schedule = snapshot(net, optimizer), copy.deepcopy(scheduler.state_dict())
    schedulers = [scheduler, *scheduler._schedulers]
    with pytest.raises(RuntimeError, match="power cut"), all_or_nothing(net, [optimizer], schedulers):
        switch(net, optimizer)
        scale_learning_rates([optimizer], schedulers, 0.5)
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.01 / 3 / 2)
        raise RuntimeError("power cut")
    assert_same(snapshot(net, optimizer), before)
    assert_same(scheduler.state_dict(), schedule)
    steps(net, optimizer)


def test_refusals():
    net = nn.Sequential(nn.Linear(6, 4))
    with pytest.raises(ValueError, match="LBFGS keeps its history"):
        hand_over([torch.optim.LBFGS(net.parameters())], [], "project")
    with pytest.raises(ValueError, match="`moments` to be 'project' or 'reset' but got 'keep'"):
        hand_over([torch.optim.SGD(net.parameters(), lr=0.1)], [], "keep")


def test_any_layer_can_be_handed_over():
    """The moments map is the caller's: here a weight that becomes twice itself."""

    class Twice:
        def direction(self, direction: Tensor) -> list[Tensor]:
            return [2 * direction]

        gradient = direction

        def squares(self, squares: Tensor, mean: Tensor | None) -> list[Tensor]:
            return [4 * squares]

    old, new = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.SGD(old.parameters(), lr=0.1, momentum=0.9)
    old(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    hand_over([optimizer], [Replacement(old, new, (Substitution(old.weight, (new.weight,), Twice()),))], "project")
    assert torch.equal(optimizer.state[new.weight]["momentum_buffer"], torch.full((2, 3), 2.0))
    assert old.weight not in optimizer.state
