"""Many segments at once against one at a time, and against loops over state dicts with whole-set forward passes."""

from __future__ import annotations

import copy
import math
from functools import partial

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, nn
from torch.func import stack_module_state
from torch.utils.data import DataLoader, TensorDataset
from torch_geometric.data import Data

from lightning_symmetry import GNN, MLP, asymmetrize, evaluate_path
from lightning_symmetry.landscape import batches as loading
from lightning_symmetry.landscape import evaluate_paths, graph_step
from lightning_symmetry.metanets.classifiers import zoo_classifier
from lightning_symmetry.networks import ConvNet, ResNet
from lightning_symmetry.surgery import ReparametrizedLayer

SMOOTHING = torch.tensor([0.0, 0.1, 0.3])
FEATURES, CLASSES = 5, 3


def mlp() -> MLP:
    return MLP(FEATURES, (8, 8), CLASSES)


def bn_net() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, CLASSES))


def population(build, count: int, seed: int, shape: tuple[int, ...] = (FEATURES,)) -> list[nn.Module]:
    """Networks of different weights; those with running statistics have seen different numbers of batches."""
    nets = []
    for k in range(count):
        torch.manual_seed(seed + k)
        net = build().train()
        dtype = next(net.parameters()).dtype
        with torch.no_grad():
            for _ in range(1 + (seed + k) % 3):
                net(2 * torch.randn(16, *shape, dtype=dtype) + 0.1 * k)
        nets.append(net)
    return nets


def samples(count: int = 23, shape: tuple[int, ...] = (FEATURES,), classes: int = CLASSES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(count, *shape, generator=generator), torch.randint(classes, (count,), generator=generator)


def batched(x: Tensor, y: Tensor, size: int = 10) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


def merged(nets: list[nn.Module]) -> dict[str, Tensor]:
    parameters, buffers = stack_module_state(nets)
    return {**parameters, **buffers}


def without_constants(nets: list[nn.Module]) -> dict[str, Tensor]:
    return {name: t for name, t in merged(nets).items() if name.rpartition(".")[2] not in ("mask", "fixed")}


def smoothed(share: float):
    return partial(F.cross_entropy, reduction="none", label_smoothing=share)


def one_by_one(starts, ends, batches, alphas, shares) -> Tensor:
    pairs = zip(starts, ends, shares, strict=True)
    return torch.stack(
        [evaluate_path(a, b, batches, alphas, loss=smoothed(s), progress=False).loss for a, b, s in pairs]
    )


def losses(results) -> Tensor:
    return torch.stack([result.loss for result in results])


def brute_force(a: nn.Module, b: nn.Module, alphas: list[float], x: Tensor, y: Tensor, share: float) -> Tensor:
    """A fresh network with the interpolated state dict, on all samples, in float64."""
    ours, theirs = a.state_dict(), b.state_dict()
    curve = []
    for alpha in alphas:
        state = {}
        for name, here in ours.items():
            there = theirs[name]
            nearer = here if alpha < 0.5 else there
            state[name] = (1 - alpha) * here + alpha * there if here.is_floating_point() else nearer
        net = copy.deepcopy(a).eval()
        net.load_state_dict(state)
        with torch.no_grad():
            curve.append(F.cross_entropy(net(x), y, label_smoothing=share))
    return torch.stack(curve)


FORMS = {
    "networks": lambda nets: nets,
    "two dictionaries": stack_module_state,
    "one dictionary": merged,
    "without constants": without_constants,
}


@pytest.mark.parametrize("chunk_size", [None, 1, 4], ids=["by the rule", "one after another", "vmap"])
@pytest.mark.parametrize("norm", ["layer", "batch"])
@pytest.mark.parametrize("kind", ["standard", "sigma", "w"])
def test_same_as_one_pair_at_a_time_in_float64(kind, norm, chunk_size):
    shape, alphas = (1, 8, 8), [0.0, 0.2, 0.5, 0.9, 1.0]
    nets = population(lambda: zoo_classifier(kind, "digits", norm).double(), 6, 0, shape)
    x, y = samples(20, shape, 10)
    x = x.double()
    batches = batched(x, y, 8)
    results = evaluate_paths(
        nets[0], nets[:3], nets[3:], batches, alphas, label_smoothing=SMOOTHING, chunk_size=chunk_size, progress=False
    )
    found = losses(results)
    expected = one_by_one(nets[:3], nets[3:], batches, alphas, SMOOTHING.tolist())
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    for curve, a, b, share in zip(found, nets[:3], nets[3:], SMOOTHING.double().tolist(), strict=True):
        torch.testing.assert_close(curve, brute_force(a, b, alphas, x, y, share), rtol=1e-8, atol=0)
    assert [result.num_samples for result in results] == [20] * 3
    assert all(result.alphas.tolist() == alphas for result in results)


@pytest.mark.parametrize("chunk_size", [1, 7])
@pytest.mark.parametrize("norm", ["layer", "batch"])
@pytest.mark.parametrize("kind", ["standard", "sigma", "w"])
def test_same_as_one_pair_at_a_time_in_float32(kind, norm, chunk_size):
    """To 1e-6 relative, 8 roundings: the order of sums in a convolution depends on how many are done at once."""
    shape = (1, 8, 8)
    nets = population(lambda: zoo_classifier(kind, "digits", norm), 6, 0, shape)
    batches = batched(*samples(20, shape, 10), 8)
    results = evaluate_paths(
        nets[0], nets[:3], nets[3:], batches, 5, label_smoothing=SMOOTHING, chunk_size=chunk_size, progress=False
    )
    expected = one_by_one(nets[:3], nets[3:], batches, 5, SMOOTHING.tolist())
    torch.testing.assert_close(losses(results), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["standard", "w"])
def test_same_as_one_pair_at_a_time_for_the_papers_network(kind):
    nets = population(lambda: zoo_classifier(kind, "cifar10").double(), 4, 0, (3, 8, 8))
    x, y = samples(6, (3, 8, 8), 10)
    batches = batched(x.double(), y, 4)
    results = evaluate_paths(nets[0], nets[:2], nets[2:], batches, 3, chunk_size=3, progress=False)
    expected = one_by_one(nets[:2], nets[2:], batches, 3, [0.0, 0.0])
    torch.testing.assert_close(losses(results), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("build", [mlp, bn_net, lambda: asymmetrize(mlp(), n_fix=2, kappa=1.0, seed=5)])
@pytest.mark.parametrize(("starts", "ends"), [*zip(FORMS, FORMS, strict=True), ("networks", "one dictionary")])
def test_forms_of_the_ends_agree(build, starts, ends):
    nets = population(build, 4, 0)
    batches = batched(*samples())
    expected = one_by_one(nets[:2], nets[2:], batches, 4, [0.0, 0.0])
    results = evaluate_paths(nets[3], FORMS[starts](nets[:2]), FORMS[ends](nets[2:]), batches, 4, progress=False)
    torch.testing.assert_close(losses(results), expected, rtol=1e-6, atol=0)


@given(st.integers(1, 12), st.integers(1, 3), st.integers(2, 5))
@settings(deadline=None, max_examples=25)
def test_chunks_do_not_matter(chunk_size, count, points):
    nets = population(lambda: bn_net().double(), 2 * count, 3)
    x, y = samples()
    batches = batched(x.double(), y)
    call = partial(evaluate_paths, nets[0], nets[:count], nets[count:], batches, points, progress=False)
    torch.testing.assert_close(losses(call(chunk_size=chunk_size)), losses(call(chunk_size=1)), rtol=1e-13, atol=0)


class Counted:
    def __init__(self, batches) -> None:
        self.batches = batches
        self.loaded = [0] * len(batches)

    def __iter__(self):
        for i, batch in enumerate(self.batches):
            self.loaded[i] += 1
            yield batch


@pytest.mark.parametrize("limit", [2**28, 250, 0], ids=["one group", "groups of two", "groups of one"])
def test_each_batch_is_loaded_once_for_all_pairs(monkeypatch, limit):
    nets = population(mlp, 6, 0)
    batches = Counted(batched(*samples()))
    expected = one_by_one(nets[:3], nets[3:], batches.batches, 5, [0.0] * 3)
    monkeypatch.setattr(loading, "HELD_BYTES", limit)
    results = evaluate_paths(nets[0], nets[:3], nets[3:], batches, 5, progress=False)
    assert batches.loaded == [1, 1, 1]
    torch.testing.assert_close(losses(results), expected, rtol=1e-6, atol=0)
    assert results[0].num_samples == 23


RULE = {  # network, batch, points at once of the 50 there are
    "small batch": (ConvNet, (8, 1, 8, 8), 32),
    "middling batch": (ConvNet, (32, 1, 8, 8), 15),
    "large batch": (ConvNet, (64, 1, 8, 8), 1),
    "large network": (partial(ResNet, blocks=1), (1, 3, 8, 8), 1),
}


@pytest.mark.parametrize("case", RULE)
def test_points_are_evaluated_at_once_where_that_is_faster(case):
    build, shape, at_once = RULE[case]
    calls = []

    def step(net: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return net(batch[0]), batch[1]

    nets = [build() for _ in range(4)]
    x, y = samples(shape[0], shape[1:], 10)
    evaluate_paths(nets[0], nets[:2], nets[2:], [(x, y)] * 2, 25, step=step, progress=False)
    assert len(calls) == 2 * math.ceil(50 / at_once)


class Branching(nn.Module):
    """Which branch is taken depends on the weights, so that vmap cannot run it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if self.linear.bias.sum() > 0 else -self.linear(x)


def test_networks_that_cannot_be_vmapped_are_evaluated_one_after_another():
    nets = population(Branching, 6, 0)
    batches = batched(*samples())
    expected = one_by_one(nets[:3], nets[3:], batches, 5, [0.0] * 3)
    results = evaluate_paths(nets[0], nets[:3], nets[3:], batches, 5, progress=False)
    torch.testing.assert_close(losses(results), expected, rtol=1e-6, atol=0)
    with pytest.raises(RuntimeError, match="data-dependent control flow"):
        evaluate_paths(nets[0], nets[:3], nets[3:], batches, 5, chunk_size=4, progress=False)


def test_errors_of_the_network_itself_come_through():
    nets = population(lambda: nn.Sequential(nn.Linear(FEATURES, CLASSES)), 2, 0)
    x, y = samples(shape=(FEATURES + 1,))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        evaluate_paths(nets[0], nets[:1], nets[1:], [(x, y)], 5, progress=False)


def poison(net: nn.Module, name: str, value: float) -> nn.Module:
    net = copy.deepcopy(net)
    with torch.no_grad():
        net.get_parameter(name).flatten()[0] = value
    return net


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunk_size", [1, 6])
def test_a_network_that_diverged_does_not_spoil_the_others(value, form, chunk_size):
    nets = population(bn_net, 8, 0)
    starts, ends = nets[:4], nets[4:]
    starts[1] = poison(starts[1], "4.bias", value)
    ends[3] = poison(ends[3], "0.weight", value)
    batches = batched(*samples())
    results = evaluate_paths(
        nets[0], FORMS[form](starts), FORMS[form](ends), batches, 5, chunk_size=chunk_size, progress=False
    )
    for k in (1, 3):
        assert results[k].loss.shape == (5,) and results[k].loss.isnan().all()
        assert results[k].num_samples == 0 and not results[k].is_monotonic
    healthy = [0, 2]
    expected = one_by_one([starts[k] for k in healthy], [ends[k] for k in healthy], batches, 5, [0.0] * 2)
    torch.testing.assert_close(losses([results[k] for k in healthy]), expected, rtol=1e-6, atol=0)


def test_running_statistics_may_diverge_too():
    nets = population(bn_net, 4, 0)
    nets[2][1].running_var.fill_(math.inf)
    results = evaluate_paths(nets[0], nets[:2], nets[2:], batched(*samples()), 3, progress=False)
    assert results[0].loss.isnan().all() and results[1].loss.isfinite().all()


def test_where_all_diverged_nothing_is_loaded():
    nets = population(mlp, 4, 0)
    ends = [poison(net, "linears.0.weight", math.nan) for net in nets[2:]]
    batches = Counted(batched(*samples()))
    results = evaluate_paths(nets[0], nets[:2], ends, batches, 5, progress=False)
    assert losses(results).isnan().all() and losses(results).shape == (2, 5)
    assert batches.loaded == [0, 0, 0]


def test_loss_may_overflow_between_finite_ends():
    nets = population(mlp, 2, 0)
    with torch.no_grad():
        nets[0].linears[-1].weight.fill_(2e38), nets[1].linears[-1].weight.fill_(-2e38)
    batches = batched(*samples())
    (result,) = evaluate_paths(nets[0], nets[:1], nets[1:], batches, 3, progress=False)
    expected = evaluate_path(nets[0], nets[1], batches, 3, progress=False).loss
    assert not expected.isfinite().all()
    torch.testing.assert_close(result.loss, expected, equal_nan=True)


class Masked(nn.Module):
    """Scores of -inf, in a buffer on which all networks agree, take one class out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES + 1)
        self.register_buffer("out", torch.tensor([0.0] * CLASSES + [-math.inf]))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.out


def test_infinities_on_which_the_ends_agree_are_no_divergence():
    nets = population(Masked, 4, 0)
    batches = batched(*samples())
    expected = one_by_one(nets[:2], nets[2:], batches, 4, [0.0, 0.0])
    assert expected.isfinite().all()
    results = evaluate_paths(nets[0], nets[:2], merged(nets[2:]), batches, 4, progress=False)
    torch.testing.assert_close(losses(results), expected, rtol=1e-6, atol=0)
    # With smoothing, the class that is out costs infinitely much, but only where there is smoothing.
    some = torch.tensor([0.0, 0.1])
    found = losses(evaluate_paths(nets[0], nets[:2], nets[2:], batches, 4, label_smoothing=some, progress=False))
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0)
    assert found[1].isinf().all()


@pytest.mark.parametrize("share", [0.2, torch.tensor(0.2), torch.tensor([0.2, 0.2])])
def test_one_label_smoothing_for_all(share):
    nets = population(mlp, 4, 0)
    batches = batched(*samples())
    results = evaluate_paths(nets[0], nets[:2], nets[2:], batches, 4, label_smoothing=share, progress=False)
    expected = one_by_one(nets[:2], nets[2:], batches, 4, [0.2, 0.2])
    torch.testing.assert_close(losses(results), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("chunk_size", [1, 5])
def test_losses_and_steps_are_those_of_evaluate_path(chunk_size):
    def mean_step(net: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        return F.mse_loss(net(batch[0])[:, 0], batch[1].float()), len(batch[1])

    def squares(output: Tensor, target: Tensor) -> Tensor:
        return (output[:, 0] - target).square()

    nets = population(mlp, 4, 0)
    batches = batched(*samples())
    for arguments in ({"loss": squares}, {"loss": None, "step": mean_step}, {"loss": F.cross_entropy}):
        results = evaluate_paths(
            nets[0], nets[:2], nets[2:], batches, 4, **arguments, chunk_size=chunk_size, progress=False
        )
        for a, b, result in zip(nets[:2], nets[2:], results, strict=True):
            expected = evaluate_path(a, b, batches, 4, **arguments, progress=False)
            torch.testing.assert_close(result.loss, expected.loss, rtol=1e-6, atol=0)
            assert result.num_samples == expected.num_samples


def test_graph_networks():
    torch.manual_seed(0)
    nets = [GNN(FEATURES, CLASSES, hidden=8) for _ in range(4)]
    edges = torch.randint(12, (2, 40))
    graph = Data(x=torch.randn(12, FEATURES), edge_index=edges, y=torch.randint(CLASSES, (12,)))
    graph.train_mask = torch.arange(12) < 7
    step = graph_step("train_mask")
    results = evaluate_paths(nets[0], nets[:2], nets[2:], [graph], 3, step=step, progress=False)
    for a, b, result in zip(nets[:2], nets[2:], results, strict=True):
        expected = evaluate_path(a, b, [graph], 3, step=step, progress=False)
        torch.testing.assert_close(result.loss, expected.loss, rtol=1e-6, atol=0)
        assert result.num_samples == 7


class Factorised(ReparametrizedLayer):
    """A linear map ``U V``, whose canonical weight is not affine in the parameters."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(rows, 2)), nn.Parameter(torch.randn(2, columns))

    def canonical_weight(self) -> Tensor:
        return self.left @ self.right

    def to_layer(self) -> nn.Linear:
        layer = nn.Linear(self.right.shape[1], self.left.shape[0], bias=False)
        layer.weight = nn.Parameter(self.canonical_weight().detach())
        return layer

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.canonical_weight())


@pytest.mark.parametrize("form", ["networks", "one dictionary"])
def test_layers_in_other_coordinates_enter_by_their_canonical_weight(form):
    nets = population(lambda: nn.Sequential(Factorised(6, FEATURES), nn.ReLU(), nn.Linear(6, CLASSES)), 4, 0)
    batches = batched(*samples())
    expected = one_by_one(nets[:2], nets[2:], batches, 5, [0.0, 0.0])
    results = evaluate_paths(nets[0], FORMS[form](nets[:2]), FORMS[form](nets[2:]), batches, 5, progress=False)
    torch.testing.assert_close(losses(results), expected, rtol=1e-6, atol=0)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES), None
        self.second.weight = self.first.weight
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x).relu()))


def test_tied_parameters_stay_tied():
    nets = population(Tied, 4, 0)
    batches = batched(*samples())
    expected = one_by_one(nets[:2], nets[2:], batches, 5, [0.0, 0.0])
    results = evaluate_paths(nets[0], nets[:2], merged(nets[2:]), batches, 5, progress=False)
    torch.testing.assert_close(losses(results), expected, rtol=1e-6, atol=0)


def test_stacked_states_of_half_precision_are_evaluated_in_the_type_of_the_network():
    nets = population(mlp, 4, 0)
    rounded = [copy.deepcopy(net).half().float() for net in nets]
    halves = {name: tensor.half() for name, tensor in merged(nets).items()}
    batches = batched(*samples())
    starts, ends = ({name: t[half] for name, t in halves.items()} for half in (slice(2), slice(2, 4)))
    results = evaluate_paths(nets[0], starts, ends, batches, 4, progress=False)
    expected = one_by_one(rounded[:2], rounded[2:], batches, 4, [0.0, 0.0])
    torch.testing.assert_close(losses(results), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", ["networks", "one dictionary"])
@pytest.mark.parametrize("chunk_size", [1, 4])
def test_nothing_is_changed(form, chunk_size):
    nets = population(lambda: asymmetrize(bn_net(), n_fix=2, kappa=1.0, seed=5), 4, 0)
    nets[0].eval(), nets[1].eval(), nets[2][3].eval()
    modes = [[module.training for module in net.modules()] for net in nets]
    stacks = [FORMS[form](nets[:2]), FORMS[form](nets[2:])]
    tensors = [copy.deepcopy(dict(net.named_parameters()) | dict(net.named_buffers())) for net in nets]
    stacked = [copy.deepcopy(stack) for stack in stacks] if form != "networks" else []
    state = torch.get_rng_state()
    loader = DataLoader(TensorDataset(*samples()), batch_size=10, shuffle=True)
    evaluate_paths(nets[0], *stacks, loader, 5, chunk_size=chunk_size, progress=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert [[module.training for module in net.modules()] for net in nets] == modes
    for net, before in zip(nets, tensors, strict=True):
        for name, tensor in (dict(net.named_parameters()) | dict(net.named_buffers())).items():
            assert torch.equal(tensor, before[name]) and tensor.requires_grad == before[name].requires_grad
    for stack, before in zip(stacks, stacked, strict=False):
        assert all(torch.equal(tensor, before[name]) for name, tensor in stack.items())


def test_progress_bar(capsys):
    nets = population(mlp, 2, 0)
    call = partial(evaluate_paths, nets[0], nets[:1], nets[1:], batched(*samples()), 3)
    call(progress=False)
    assert "paths" not in capsys.readouterr().err
    call()
    assert "paths" in capsys.readouterr().err


def w_mlp(seed: int = 3) -> nn.Module:
    return asymmetrize(mlp(), n_fix=2, kappa=1.5, seed=seed)


def wide() -> nn.Module:
    return MLP(FEATURES, (8, 9), CLASSES)


REFUSED = {
    "no pairs": (mlp, [], [], "as many `starts` as `ends`, at least one, but got 0 and 0"),
    "numbers": (mlp, [mlp] * 3, [mlp] * 2, "as many `starts` as `ends`, at least one, but got 3 and 2"),
    "width": (mlp, [mlp, wide], [mlp] * 2, r"starts\[1\] \(b\) is not .* `network` \(a\).*\(8, 8\) in a and \(9, 8\)"),
    "depth": (mlp, [mlp], [lambda: MLP(FEATURES, (8,), CLASSES)], r"ends\[0\] \(b\).* a has linears\.2\.weight"),
    "constants": (w_mlp, [w_mlp], [partial(w_mlp, 4)], r"different masks: .* of `network` and .* of ends\[0\]"),
    "plain": (w_mlp, [mlp], [w_mlp], r"`network` has linears\.0\.mask .*, starts\[0\] does not"),
    "asymmetric": (mlp, [mlp], [w_mlp], r"ends\[0\] has linears\.0\.mask .*, `network` does not"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_networks_that_do_not_belong_together(case):
    build, starts, ends, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        evaluate_paths(build(), [net() for net in starts], [net() for net in ends], batched(*samples()), progress=False)


def test_stacked_states_that_do_not_fit():
    nets = population(mlp, 2, 0)
    good = merged(nets)
    short = {name: tensor for name, tensor in good.items() if name != "linears.1.weight"}
    long = {**good, "linears.9.weight": torch.zeros(2, 3)}
    uneven = {**good, "linears.1.bias": torch.zeros(3, 8)}
    for states, message in (
        (short, r"`network` has linears\.1\.weight, the stacked `ends` does not"),
        (long, r"the stacked `ends` has linears\.9\.weight, `network` does not"),
        (merged([wide(), wide()]), r"linears\.1\.weight .* \(2, 8, 8\), but got \(2, 9, 8\)"),
        (uneven, r"linears\.1\.bias of the stacked `ends` .* \(2, 8\), but got \(3, 8\)"),
        (nets[0].state_dict(), r"of the stacked `ends` to have the shape"),
        ({}, r"`network` has linears\.0\.weight"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate_paths(nets[0], nets, states, batched(*samples()), progress=False)
    others = [w_mlp(3), w_mlp(4)]
    with pytest.raises(ValueError, match=r"different masks: .* of `network` and .* of `starts` 1"):
        evaluate_paths(others[0], merged(others), [w_mlp(3)] * 2, batched(*samples()), progress=False)


def test_ends_of_the_wrong_type():
    net = mlp()
    with pytest.raises(TypeError, match=r"starts\[0\] is of type OrderedDict"):
        evaluate_paths(net, [net.state_dict()], [net], batched(*samples()), progress=False)
    with pytest.raises(TypeError, match=r"`ends` but got linears\.0\.weight of another type"):
        evaluate_paths(net, [net], {"linears.0.weight": [1.0]}, batched(*samples()), progress=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"label_smoothing": torch.zeros(3)}, r"one number or of shape \(2,\), one a pair, but got shape \(3,\)"),
        ({"label_smoothing": 1.5}, "within 0 and 1 but got 1.5"),
        ({"label_smoothing": math.nan}, "within 0 and 1 but got nan"),
        ({"label_smoothing": 0.1, "loss": F.cross_entropy}, "another `loss` was given"),
        ({"chunk_size": 0}, "at least 1 but got 0"),
        ({"alphas": 1}, "at least 2 points but got 1"),
        ({"dataloader": []}, "no samples"),
    ],
)
def test_arguments_out_of_range(arguments, message):
    nets = population(mlp, 4, 0)
    with pytest.raises(ValueError, match=message):
        evaluate_paths(
            nets[0], nets[:2], nets[2:], **{"dataloader": batched(*samples()), **arguments, "progress": False}
        )
