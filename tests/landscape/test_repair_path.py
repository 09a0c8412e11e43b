"""Repair along a path; what it loads, runs, leaves as it was and refuses."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from repair_networks import (
    CLASSES,
    SAMPLES,
    SHAPES,
    bn_cnn,
    cnn,
    data,
    layer_norm,
    mixed,
    mlp,
    pair,
    samples,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_symmetry import evaluate_path, interpolate
from lightning_symmetry.landscape import batches as loading
from lightning_symmetry.landscape import repair
from lightning_symmetry.landscape.path import path_values
from lightning_symmetry.landscape.steps import supervised_step


@pytest.mark.parametrize("build", [mlp, cnn, layer_norm, bn_cnn, mixed])
def test_a_path_repairs_each_position(build):
    a, b = pair(build)
    train, test = data(SHAPES[build], 12), data(SHAPES[build])
    alphas = [-0.2, 0.0, 0.3, 0.5, 1.0]
    result = evaluate_path(a, b, test, alphas, batch_norm="repair", train_loader=train, progress=False)
    x, y = samples(SHAPES[build])
    for alpha, loss in zip(alphas, result.loss.tolist(), strict=True):
        net = interpolate(a, b, alpha)
        if alpha not in (0, 1):
            repair(net, train, (a, b), alpha, progress=False)
        assert loss == pytest.approx(F.cross_entropy(net.eval()(x), y).item(), rel=1e-11)
    kept = evaluate_path(a, b, test, alphas, progress=False)
    assert result.loss[[1, 4]].tolist() == kept.loss[[1, 4]].tolist()
    assert (result.loss - kept.loss)[[0, 2, 3]].abs().min() > 1e-4


def test_a_path_with_batch_norm_is_the_recomputed_one():
    a, b = pair(bn_cnn)
    paths = [
        evaluate_path(
            a, b, data(SHAPES[bn_cnn]), 5, batch_norm=kind, train_loader=data(SHAPES[bn_cnn], 12), progress=False
        ).loss
        for kind in ("repair", "recompute")
    ]
    assert torch.equal(paths[0][1:-1], paths[1][1:-1])
    assert not torch.equal(paths[0], paths[1])  # its ends keep their own statistics


def test_one_process_may_have_few_positions_or_none():
    a, b = pair(mlp)
    whole = evaluate_path(a, b, data((6,)), 4, batch_norm="repair", train_loader=data((6,)), progress=False)
    for part in ([], [0], [0, 3], [1], [2, 3]):
        values, _, _ = path_values(
            a, b, data((6,)), whole.alphas[part], loss=F.cross_entropy, metrics=None, batch_norm="repair",
            train_loader=data((6,)), step=supervised_step, transfer=None, progress=False,
        )  # fmt: skip
        torch.testing.assert_close(values, whole.loss[part], rtol=1e-12, atol=0)


class Counted:
    """An iterable that counts how often each batch is loaded."""

    def __init__(self, batches) -> None:
        self.batches = list(batches)
        self.loaded = [0] * len(self.batches)

    def __iter__(self):
        for i, batch in enumerate(self.batches):
            self.loaded[i] += 1
            yield batch


def test_data_that_fits_into_memory_is_loaded_once(monkeypatch):
    a, b = pair(mlp)
    train = Counted(data((6,)))
    once = evaluate_path(a, b, data((6,)), 5, batch_norm="repair", train_loader=train, progress=False)
    assert train.loaded == [1, 1, 1]
    generator = (batch for batch in data((6,)))
    again = evaluate_path(a, b, data((6,)), 5, batch_norm="repair", train_loader=generator, progress=False)
    assert torch.equal(again.loss, once.loss)
    monkeypatch.setattr(loading, "HELD_BYTES", 0)
    train = Counted(data((6,)))
    again = evaluate_path(a, b, data((6,)), 5, batch_norm="repair", train_loader=train, progress=False)
    assert train.loaded == [5, 4, 4]  # the first batch to find the layers, then two ends and two layers
    torch.testing.assert_close(again.loss, once.loss, rtol=1e-12, atol=0)
    generator = (batch for batch in data((6,)))
    with pytest.raises(ValueError, match="`train_loader` gave 2 batches in the first pass and 0 in a later one"):
        evaluate_path(a, b, data((6,)), 5, batch_norm="repair", train_loader=generator, progress=False)


def test_transfer_is_applied_once_to_each_batch():
    a, b = pair(mlp)
    expected = repair(interpolate(a, b, 0.5), [(3 * x, y) for x, y in data((6,))], (a, b), progress=False)
    net = interpolate(a, b, 0.5)
    repair(net, data((6,)), (a, b), transfer=lambda batch: [3 * batch[0], batch[1]], progress=False)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), expected.parameters(), strict=True))


@pytest.mark.parametrize("build", [mlp, mixed])
@pytest.mark.parametrize("failure", [None, 2, 7, 12], ids=["ends well", "at once", "at the ends", "in the middle"])
def test_nothing_else_is_changed(build, failure):
    a, b = pair(build)
    net = interpolate(a, b, 0.5).train()
    net[0].eval(), b[1].eval()
    net[2].weight.requires_grad_(False) if build is mlp else net[3].weight.requires_grad_(False)
    parts = (net, a, b)
    for part in parts:
        part(samples((6,))[0]).sum().backward()
    seen = [0]

    def step(part: nn.Module, batch):
        torch.rand(2)
        seen[0] += 1
        if seen[0] == failure:
            raise KeyboardInterrupt
        return supervised_step(part, batch)

    def notes() -> list:
        modules = [m for part in parts for m in part.modules()]
        return [
            [(m.training, getattr(m, "momentum", None)) for m in modules],
            [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules],
            [id(p) for part in parts for p in part.parameters()],
            [p.requires_grad for part in parts for p in part.parameters()],
            torch.is_grad_enabled(),
        ]

    def tensors() -> list[Tensor]:
        gradients = [p.grad.clone() for part in parts for p in part.parameters() if p.grad is not None]
        return [torch.get_rng_state(), *gradients, *(v.clone() for end in (a, b) for v in end.state_dict().values())]

    before, kept, state = notes(), tensors(), copy.deepcopy(net.state_dict())
    shuffled = DataLoader(TensorDataset(*samples((6,))), batch_size=10, shuffle=True)
    if failure is None:
        repair(net, shuffled, (a, b), step=step, progress=False)
        assert seen[0] > 12
    else:
        with pytest.raises(KeyboardInterrupt):
            repair(net, shuffled, (a, b), step=step, progress=False)
    assert notes() == before
    assert all(torch.equal(x, y) for x, y in zip(tensors(), kept, strict=True))
    same = [torch.equal(value, state[name]) for name, value in net.state_dict().items()]
    assert all(same) is (failure is not None)


def test_a_pass_ends_at_the_layer_that_it_measures():
    """One trial run, three batches at each end, and three for each hidden layer as far as that layer."""
    calls = dict.fromkeys("0123456", 0)
    a, b = pair(lambda: nn.Sequential(*mlp(), nn.Identity(), nn.Identity()))
    net = interpolate(a, b, 0.5)
    for name, layer in net.named_children():
        layer.register_forward_pre_hook(lambda module, args, name=name: calls.update({name: calls[name] + 1}))
    repair(net, data((6,)), (a, b), progress=False)
    assert calls == {"0": 7, "1": 4, "2": 4, "3": 1, "4": 1, "5": 1, "6": 1}


@pytest.mark.parametrize(
    "compiled", [lambda net: torch.compile(net, backend="eager"), lambda net: net], ids=["by call", "in place"]
)
def test_compiled_networks(compiled):
    """They were compiled for batches of the same size before there are hooks."""
    a, b = pair(mlp)
    whole = data((6,), SAMPLES)
    expected = repair(interpolate(a, b, 0.5), whole, (a, b), progress=False)
    loss = evaluate_path(a, b, whole, 3, batch_norm="repair", train_loader=whole, progress=False).loss
    net = interpolate(a, b, 0.5)
    a, b, net = compiled(a), compiled(b), compiled(net)
    x, _ = samples((6,))
    for part in (a, b, net):
        part.compile(backend="eager")
        with torch.no_grad():
            part.eval()(x)
    repair(net, whole, (a, b), progress=False)
    torch.testing.assert_close(net(x), expected(x), rtol=1e-12, atol=1e-12)
    path = evaluate_path(a, b, whole, 3, batch_norm="repair", train_loader=whole, progress=False)
    torch.testing.assert_close(path.loss, loss, rtol=1e-12, atol=0)


def test_errors():
    a, b = pair(mlp)
    net = interpolate(a, b, 0.5)
    with pytest.raises(ValueError, match="`dataloader` gave no batches"):
        repair(net, [], (a, b), progress=False)
    with pytest.raises(ValueError, match="gave no samples at 0"):
        repair(net, [(x[:0], y[:0]) for x, y in data((6,))], (a, b), progress=False)
    with pytest.raises(ValueError, match=r"no batch normalisation.*give `ends`"):
        repair(net, data((6,)), progress=False)
    with pytest.raises(ValueError, match="`alpha` to be finite but got nan"):
        repair(net, data((6,)), (a, b), float("nan"), progress=False)
    wide = mlp(9).double()
    with pytest.raises(ValueError, match=r"0 has a weight of shape \(8, 6\) in `net` and has .* \(9, 6\) in ends\[1\]"):
        repair(net, data((6,)), (a, wide), progress=False)
    with pytest.raises(ValueError, match=r"2 has a weight of shape \(8, 8\) in `net` and is missing in ends\[0\]"):
        repair(net, data((6,)), (a[:2], b), progress=False)
    linear = nn.Sequential(nn.Linear(6, CLASSES)).double()
    with pytest.raises(ValueError, match="no hidden linear or convolutional layer to rescale and no batch norm"):
        repair(linear, data((6,)), (copy.deepcopy(linear), linear), progress=False)
    with pytest.raises(ValueError, match="batch_norm='repair' needs `train_loader`"):
        evaluate_path(a, b, data((6,)), 3, batch_norm="repair", progress=False)
    with pytest.raises(ValueError, match="`train_loader` gave no batches"):
        evaluate_path(a, b, data((6,)), 3, batch_norm="repair", train_loader=[], progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a network without such layers gives no warning
        repair(net, data((6,)), (a, b), progress=False)
    assert all(torch.isfinite(p).all() for p in net.parameters())
