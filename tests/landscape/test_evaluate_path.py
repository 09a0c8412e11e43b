"""The loss along a segment against loops of load_state_dict and whole-set forward passes in float64."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch_geometric.data import Data
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from lightning_symmetry import GNN, MLP, asymmetrize, evaluate_path
from lightning_symmetry.landscape import batches as loading
from lightning_symmetry.landscape import graph_step
from lightning_symmetry.landscape.path import path_values, supervised_step
from lightning_symmetry.landscape.result import as_positions

FEATURES, CLASSES, SAMPLES = 5, 3, 23


def mlp() -> MLP:
    return MLP(FEATURES, (8, 8), CLASSES)


def bn_net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 6), nn.BatchNorm1d(6),
        nn.ReLU(), nn.Linear(6, CLASSES),
    )  # fmt: skip


def w_mlp() -> MLP:
    return asymmetrize(mlp(), n_fix=2, kappa=1.0, seed=5)


def pair(build) -> tuple[nn.Module, nn.Module]:
    """Two networks; those with running statistics have seen batches of data."""
    nets = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        net = build().train()
        for _ in range(3):
            net(2 * torch.randn(16, FEATURES) + seed)
        nets.append(net)
    return nets[0], nets[1]


def samples(count: int = SAMPLES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(count, FEATURES, generator=generator), torch.randint(CLASSES, (count,), generator=generator)


def loader(batch_size: int = 10) -> DataLoader:
    """Batches of uneven size: 10, 10, 3."""
    return DataLoader(TensorDataset(*samples()), batch_size=batch_size)


class Counted:
    """An iterable that counts how often each batch is loaded."""

    def __init__(self, batches) -> None:
        self.batches = list(batches)
        self.loaded = [0] * len(self.batches)

    def __iter__(self):
        for i, batch in enumerate(self.batches):
            self.loaded[i] += 1
            yield batch


def outputs(a: nn.Module, b: nn.Module, alpha: float, x: Tensor) -> Tensor:
    """Brute force: a fresh network in float64 with the interpolated state dict."""
    net = copy.deepcopy(a).double().eval()
    ours, theirs = a.state_dict(), b.state_dict()
    state = {}
    for name, tensor in ours.items():
        end = theirs[name]
        state[name] = (1 - alpha) * tensor.double() + alpha * end.double() if tensor.is_floating_point() else tensor
    net.load_state_dict(state)
    with torch.no_grad():
        return net(x.double())


@pytest.mark.parametrize("build", [mlp, bn_net, w_mlp], ids=["mlp", "batch norm", "w"])
@pytest.mark.parametrize("alphas", [7, [0.0, 0.2, 0.21, 1.0], [-0.25, 0.5, 1.25]], ids=["uniform", "own", "beyond"])
def test_matches_brute_force(build, alphas):
    a, b = pair(build)
    x, y = samples()
    result = evaluate_path(
        a, b, loader(), alphas, metrics={"accuracy": MulticlassAccuracy(CLASSES, average="micro")}, progress=False
    )
    logits = [outputs(a, b, alpha, x) for alpha in as_positions(alphas).tolist()]
    expected = torch.stack([F.cross_entropy(z, y) for z in logits])
    torch.testing.assert_close(result.loss, expected, rtol=2e-6, atol=2e-6)
    accuracy = torch.stack([(z.argmax(1) == y).double().mean() for z in logits])
    torch.testing.assert_close(result.metrics["accuracy"], accuracy, rtol=1e-6, atol=1e-6)
    assert result.alphas.tolist() == as_positions(alphas).tolist()
    assert result.num_samples == SAMPLES


def test_batches_weigh_by_their_samples():
    a, b = pair(mlp)
    batches = list(loader())
    result = evaluate_path(a, b, batches, 3, progress=False)
    means = torch.tensor([F.cross_entropy(outputs(a, b, 0.5, x), y).item() for x, y in batches], dtype=torch.float64)
    sizes = torch.tensor([10, 10, 3], dtype=torch.float64)
    assert result.loss[1].item() == pytest.approx((means @ sizes).item() / 23, abs=1e-6)
    assert abs(result.loss[1].item() - means.mean().item()) > 1e-4  # the mean of means is another number


LOSSES = {
    "per sample": lambda output, target: F.cross_entropy(output, target, reduction="none"),
    "scalar": F.cross_entropy,
    "column": lambda output, target: F.cross_entropy(output, target, reduction="none").unsqueeze(1),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_forms_of_the_loss_agree(loss):
    a, b = pair(mlp)
    expected = evaluate_path(a, b, loader(), 5, progress=False).loss
    torch.testing.assert_close(evaluate_path(a, b, loader(), 5, loss=loss, progress=False).loss, expected)


def test_step_may_return_the_mean_loss_itself():
    def step(net: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        return F.cross_entropy(net(batch[0]), batch[1]), len(batch[1])

    a, b = pair(mlp)
    result = evaluate_path(a, b, loader(), 5, loss=None, step=step, progress=False)
    torch.testing.assert_close(result.loss, evaluate_path(a, b, loader(), 5, progress=False).loss)
    assert result.num_samples == SAMPLES


@pytest.mark.parametrize("flat", [False, True])
def test_losses_of_tokens_are_averaged_whatever_their_shape(flat):
    torch.manual_seed(0)
    a, b = nn.Linear(4, 6), nn.Linear(4, 6)
    x, y = torch.randn(5, 7, 4), torch.randint(6, (5, 7))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        losses = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none")
        return losses if flat else losses.view_as(target)

    result = evaluate_path(a, b, [(x[:3], y[:3]), (x[3:], y[3:])], 2, loss=loss, progress=False)
    assert result.loss[0].item() == pytest.approx(F.cross_entropy(a(x).flatten(0, 1), y.flatten()).item(), abs=1e-6)


def test_batches_without_samples_do_not_count():
    a, b = pair(mlp)
    x, y = samples()
    for loss in LOSSES.values():
        result = evaluate_path(a, b, [(x[:0], y[:0]), (x, y), (x[:0], y[:0])], 2, loss=loss, progress=False)
        torch.testing.assert_close(result.loss, evaluate_path(a, b, loader(), 2, progress=False).loss)


@pytest.mark.parametrize("limit", [2**28, 250, 0], ids=["one group", "groups of two", "groups of one"])
@pytest.mark.parametrize("batch_norm", ["keep", "recompute"])
def test_each_batch_is_loaded_once(monkeypatch, limit, batch_norm):
    a, b = pair(bn_net)
    train = list(loader(6))[:3]
    expected = evaluate_path(a, b, loader(), 5, batch_norm=batch_norm, train_loader=train, progress=False)
    monkeypatch.setattr(loading, "HELD_BYTES", limit)
    tests, trains = Counted(loader()), Counted(train)
    result = evaluate_path(a, b, tests, 5, batch_norm=batch_norm, train_loader=trains, progress=False)
    assert tests.loaded == [1, 1, 1]
    assert trains.loaded == ([1, 1, 1] if batch_norm == "recompute" else [0, 0, 0])
    torch.testing.assert_close(result.loss, expected.loss, rtol=1e-12, atol=0)


def test_batches_are_gathered_up_to_the_limit_of_memory(monkeypatch):
    """Batches of 8 bytes in any container, and a limit that two of them exceed."""
    pairs = {
        "tensor": torch.zeros(2),
        "array": torch.zeros(2).numpy(),
        "mapping": {"x": torch.zeros(1), "more": [torch.zeros(1), "text"]},
        "graph": Data(x=torch.zeros(2)),
        "dataclass": Columns(torch.zeros(1), torch.zeros(1)),
    }
    monkeypatch.setattr(loading, "HELD_BYTES", 8)
    for name, batch in pairs.items():
        groups = list(loading.BatchGroups([batch] * 5, lambda item: item))
        assert [len(group) for group in groups] == [2, 2, 1], name


@dataclass
class Columns:
    x: Tensor
    y: Tensor


class Named(NamedTuple):
    x: Tensor
    y: Tensor


BATCHES = {
    "list": (lambda x, y: [x, y], supervised_step),
    "named tuple": (Named, supervised_step),
    "mapping": (lambda x, y: {"in": {"x": x}, "y": y}, lambda net, batch: (net(batch["in"]["x"]), batch["y"])),
    "dataclass": (Columns, lambda net, batch: (net(batch.x), batch.y)),
    "nested": (lambda x, y: ((x, "name"), {"y": [y]}), lambda net, batch: (net(batch[0][0]), batch[1]["y"][0])),
}


@pytest.mark.parametrize("form", BATCHES.values(), ids=BATCHES)
def test_forms_of_batches(form):
    build, step = form
    a, b = pair(mlp)
    batches = [build(x, y) for x, y in loader()]
    result = evaluate_path(a, b, batches, 3, step=step, progress=False)
    assert torch.equal(result.loss, evaluate_path(a, b, loader(), 3, progress=False).loss)


def test_transfer_is_applied_once_to_each_batch():
    calls = []

    def transfer(batch: list[Tensor]) -> list[Tensor]:
        calls.append(len(batch[0]))
        return [2 * batch[0], batch[1]]

    a, b = pair(mlp)
    x, y = samples()
    result = evaluate_path(a, b, loader(), 3, transfer=transfer, progress=False)
    assert calls == [10, 10, 3]
    assert result.loss[0].item() == pytest.approx(F.cross_entropy(outputs(a, b, 0, 2 * x), y).item(), abs=1e-6)


def test_graph_step_selects_the_nodes_of_a_split():
    torch.manual_seed(0)
    graph = Data(
        x=torch.randn(9, 4),
        y=torch.randint(3, (9,)),
        edge_index=torch.randint(9, (2, 20)),
        test_mask=torch.arange(9) < 4,
        val_mask=torch.arange(9) >= 7,
    )
    a, b = GNN(4, 3, hidden=6), GNN(4, 3, hidden=6)
    for mask, count in (("test_mask", 4), ("val_mask", 2)):
        result = evaluate_path(a, b, [graph], 3, step=graph_step(mask), progress=False)
        for end, net in ((0, a), (-1, b)):
            with torch.no_grad():
                logits = copy.deepcopy(net).eval()(graph.x, graph.edge_index)[graph[mask]]
            assert result.loss[end].item() == pytest.approx(F.cross_entropy(logits, graph.y[graph[mask]]).item())
        assert result.num_samples == count


def test_kept_batch_norm_statistics_are_exact_at_the_ends():
    a, b = pair(bn_net)
    result = evaluate_path(a, b, loader(SAMPLES), 3, progress=False)
    x, y = samples()
    for end, net in ((0, a), (-1, b)):
        with torch.no_grad():
            losses = F.cross_entropy(copy.deepcopy(net).eval()(x), y, reduction="none")
        assert result.loss[end].item() == losses.double().mean().item()


def test_recomputed_batch_norm_statistics_match_a_loop():
    a, b = pair(bn_net)
    train = [(3 * x - 1, y) for x, y in loader(7)]
    result = evaluate_path(a, b, loader(), 5, batch_norm="recompute", train_loader=train, progress=False)
    x, y = samples()
    expected = []
    for alpha in result.alphas.tolist():
        net = copy.deepcopy(a).double()
        state = {
            name: (1 - alpha) * value.double() + alpha * b.state_dict()[name].double()
            for name, value in a.state_dict().items()
        }
        net.load_state_dict(state)
        net.eval()
        for layer in net.modules():
            if isinstance(layer, nn.BatchNorm1d):
                layer.reset_running_stats()
                layer.momentum = None
                layer.train()
        with torch.no_grad():
            for batch, _ in train:
                net(batch.double())
            expected.append(F.cross_entropy(net.eval()(x.double()), y))
    torch.testing.assert_close(result.loss, torch.stack(expected), rtol=1e-5, atol=1e-5)
    kept = evaluate_path(a, b, loader(), 5, progress=False)
    assert (result.loss - kept.loss).abs().max() > 1e-2


@pytest.mark.parametrize("batch_norm", ["keep", "recompute"])
@pytest.mark.parametrize("fails", [False, True])
def test_networks_metrics_and_random_state_are_left_as_they_are(batch_norm, fails):
    a, b = pair(bn_net)
    a.train(), b.eval()
    a[1].eval()
    for net in (a, b):
        net(torch.randn(4, FEATURES)).sum().backward()
    accuracy = MulticlassAccuracy(CLASSES)
    accuracy.update(torch.tensor([0, 1]), torch.tensor([0, 2]))
    shuffled = DataLoader(TensorDataset(*samples()), batch_size=10, shuffle=True)

    def step(net: nn.Module, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        torch.rand(3)
        if fails:
            raise KeyboardInterrupt
        return supervised_step(net, batch)

    def snapshot() -> list[Tensor]:
        tensors = [value.clone() for net in (a, b) for value in net.state_dict().values()]
        tensors += [p.grad.clone() for net in (a, b) for p in net.parameters()]
        return [*tensors, torch.get_rng_state(), accuracy.compute().clone(), torch.tensor(torch.is_grad_enabled())]

    modes = [(m.training, getattr(m, "momentum", None)) for net in (a, b) for m in net.modules()]
    before = snapshot()
    arguments = {"batch_norm": batch_norm, "train_loader": shuffled, "step": step, "progress": False}
    if fails:
        with pytest.raises(KeyboardInterrupt):
            evaluate_path(a, b, shuffled, 3, metrics={"accuracy": accuracy}, **arguments)
    else:
        result = evaluate_path(a, b, shuffled, 3, metrics={"accuracy": accuracy}, **arguments)
        ordered = evaluate_path(a, b, loader(), 3, progress=False)
        if batch_norm == "keep":  # dropout is off and the order of samples does not matter
            torch.testing.assert_close(result.loss, ordered.loss, rtol=1e-6, atol=1e-6)
    assert all(torch.equal(x, y) for x, y in zip(snapshot(), before, strict=True))
    assert modes == [(m.training, getattr(m, "momentum", None)) for net in (a, b) for m in net.modules()]


def test_any_iterable_will_do_even_a_generator():
    a, b = pair(mlp)
    result = evaluate_path(a, b, (batch for batch in loader()), 3, progress=False)
    assert torch.equal(result.loss, evaluate_path(a, b, loader(), 3, progress=False).loss)


def test_losses_that_are_not_finite_stay_so():
    a, b = pair(mlp)
    with torch.no_grad():
        b.linears[-1].bias[0] = torch.inf
    result = evaluate_path(a, b, loader(), 3, progress=False)
    assert torch.isfinite(result.loss[0])
    assert torch.isnan(result.loss[1:]).all()
    assert not result.is_monotonic


@pytest.mark.parametrize("count", [0, 1, 2])
def test_one_process_may_have_few_positions_or_none(count):
    a, b = pair(mlp)
    metrics = {"accuracy": MulticlassAccuracy(CLASSES)}
    whole = evaluate_path(a, b, loader(), 3, metrics=metrics, progress=False)
    values, curves, samples_seen = path_values(
        a, b, loader(), whole.alphas[:count], loss=F.cross_entropy, metrics=metrics, batch_norm="keep",
        train_loader=None, step=supervised_step, transfer=None, progress=False,
    )  # fmt: skip
    torch.testing.assert_close(values, whole.loss[:count])
    torch.testing.assert_close(curves["accuracy"], whole.metrics["accuracy"][:count])
    assert samples_seen == (SAMPLES if count else 0)


def test_no_data():
    a, b = pair(mlp)
    for empty in ([], [(torch.zeros(0, FEATURES), torch.zeros(0, dtype=torch.long))]):
        with pytest.raises(ValueError, match="gave no samples"):
            evaluate_path(a, b, empty, 3, progress=False)


def test_recompute_needs_data_and_batch_norm():
    a, b = pair(bn_net)
    with pytest.raises(ValueError, match="needs `train_loader`"):
        evaluate_path(a, b, loader(), 3, batch_norm="recompute", progress=False)
    with pytest.raises(ValueError, match="`train_loader` gave no batches"):
        evaluate_path(a, b, loader(), 3, batch_norm="recompute", train_loader=[], progress=False)
    with pytest.raises(ValueError, match="no batch normalisation with running statistics"):
        evaluate_path(*pair(mlp), loader(), 3, batch_norm="recompute", train_loader=loader(), progress=False)


def test_other_errors():
    a, b = pair(mlp)
    with pytest.raises(ValueError, match="'keep', 'recompute' or 'repair' but got 'reset'"):
        evaluate_path(a, b, loader(), 3, batch_norm="reset", progress=False)
    with pytest.raises(ValueError, match="at least 2 points but got 1"):
        evaluate_path(a, b, loader(), 1, progress=False)
    with pytest.raises(ValueError, match="metrics cannot be updated"):
        evaluate_path(a, b, loader(), 3, loss=None, metrics={"accuracy": MulticlassAccuracy(CLASSES)}, progress=False)
    with pytest.raises(TypeError, match=r"\(input, target\) but got Tensor; say with `step`"):
        evaluate_path(a, b, [torch.zeros(2, FEATURES)], 3, progress=False)
    with pytest.raises(ValueError, match="metric 'confusion' to compute one number"):
        metrics = {"confusion": MulticlassConfusionMatrix(CLASSES)}
        evaluate_path(a, b, loader(), 3, metrics=metrics, progress=False)
    with pytest.raises(ValueError, match="differ in architecture"):
        evaluate_path(a, MLP(FEATURES, (8, 9), CLASSES), loader(), 3, progress=False)


@pytest.mark.parametrize("progress", [True, False])
def test_progress_is_shown_only_if_asked_for(capsys, progress):
    a, b = pair(mlp)
    evaluate_path(a, b, loader(), 3, progress=progress)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert ("path" in captured.err) is progress
