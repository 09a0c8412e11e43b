"""Fisher matrices against loops over samples and outcomes, closed forms, and their sampled estimates."""

from __future__ import annotations

import copy

import pytest
import torch
from fisher_reference import CASES, autoencoder, case, cnn, fisher_by_loop, mlp, scores
from torch import Tensor, nn
from torch_geometric.data import Data
from tqdm.auto import tqdm

from lightning_symmetry import GNN, asymmetrize
from lightning_symmetry.landscape import graph_step
from lightning_symmetry.surgery import plain_copy
from lightning_symmetry.whitening.fisher import fisher_blocks, fisher_matrix
from lightning_symmetry.whitening.fisher_operator import fisher_model

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def fisher(net: nn.Module, batch, layers=None, **settings) -> Tensor:
    return fisher_matrix(net, batch, layers, progress=False, **settings)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_loop_over_samples_and_outcomes(name):
    net, inputs, likelihood = case(name)
    expected = fisher_by_loop(net, inputs, likelihood)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(fisher(net, inputs, likelihood=likelihood, columns=7), expected, **EXACT)


@pytest.mark.parametrize("name", ["mlp", "layer norm", "cnn", "autoencoder"])
def test_blocks_are_the_diagonal_of_the_whole(name):
    net, inputs, likelihood = case(name)
    whole = fisher(net, inputs, likelihood=likelihood)
    blocks = fisher_blocks(net, inputs, likelihood=likelihood, progress=False)
    owners = [name for name, module in net.named_modules() if list(module.parameters(recurse=False))]
    assert list(blocks) == owners
    start = 0
    for block in blocks.values():
        part = slice(start, start + len(block))
        torch.testing.assert_close(block, whole[part, part], **EXACT)
        start = part.stop
    assert start == len(whole)


def test_layers_are_chosen_by_pattern_in_the_order_of_the_network():
    net, inputs, _ = case("layer norm")
    names = ["linears.0.weight", "linears.0.bias", "linears.2.weight", "linears.2.bias"]
    expected = fisher_by_loop(net, inputs, "categorical", names)
    for layers in (["linears.2", "linears.0"], ["linears.[02]"]):
        torch.testing.assert_close(fisher(net, inputs, layers), expected, **EXACT)
    assert list(fisher_blocks(net, inputs, "norms.*", progress=False)) == ["norms.0", "norms.1"]


def with_one(inputs: Tensor) -> Tensor:
    return torch.cat([inputs, torch.ones_like(inputs[:, :1])], 1)


def bias_last(matrix: Tensor, rows: int, inputs: int) -> Tensor:
    """Bring a matrix over the rows of (W | b) into the order vec(W), b."""
    places = torch.arange(rows * (inputs + 1)).reshape(rows, inputs + 1)
    order = torch.cat([places[:, :-1].flatten(), places[:, -1]])
    return matrix[order][:, order]


def test_softmax_regression_in_closed_form():
    torch.manual_seed(1)
    net, inputs = nn.Linear(4, 3).double(), torch.randn(6, 4, dtype=torch.float64)
    p = net(inputs).softmax(1).detach()
    middle = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    expected = torch.einsum("noq,ni,nj->oiqj", middle, with_one(inputs), with_one(inputs)).reshape(15, 15) / 6
    torch.testing.assert_close(fisher(net, inputs), bias_last(expected, 3, 4), **EXACT)


@pytest.mark.parametrize("likelihood", ["mse", "bernoulli_logits"])
def test_linear_and_logistic_regression_in_closed_form(likelihood):
    torch.manual_seed(1)
    net, inputs = nn.Linear(4, 1).double(), torch.randn(6, 4, dtype=torch.float64)
    p = net(inputs).sigmoid().detach()
    weights = p * (1 - p) if likelihood == "bernoulli_logits" else torch.ones_like(p)
    expected = with_one(inputs).mT @ (weights * with_one(inputs)) / 6
    torch.testing.assert_close(fisher(net, inputs, likelihood=likelihood), expected, **EXACT)


def test_labels_of_the_data_are_not_read():
    net, inputs, _ = case("mlp")
    expected = fisher(net, inputs)
    for target in (torch.zeros(len(inputs), dtype=torch.long), torch.full((len(inputs),), 2), None):
        assert torch.equal(fisher(net, (inputs, target)), expected)


@pytest.mark.parametrize("name", ["mlp", "logits", "autoencoder"])
def test_samples_have_the_exact_mean_and_variance(name):
    """Over draws, E |F_k - F|^2 is known from the scores; 60 draws estimate it to about 20 %."""
    net, inputs, likelihood = case(name)
    names = [name for name, _ in net.named_parameters()]
    exact, count, draws = fisher(net, inputs, likelihood=likelihood), 8, 60
    variance = 0.0
    for sample in scores(net, inputs, likelihood, names):
        second = sum(weight * torch.outer(g, g) for weight, g in sample)
        fourth = sum(weight * g.square().sum() ** 2 for weight, g in sample)
        variance += (fourth - second.square().sum()).item() / (count * len(inputs) ** 2)
    generator = torch.Generator().manual_seed(0)
    settings = {"likelihood": likelihood, "samples": count, "generator": generator}
    estimates = torch.stack([fisher(net, inputs, **settings) for _ in range(draws)])
    errors = (estimates - exact).square().sum((1, 2))
    assert 0.5 < errors.mean() / variance < 2
    assert (estimates.mean(0) - exact).square().sum() < 4 * variance / draws  # expected: 1


def test_gaussian_samples_converge():
    net, inputs, likelihood = case("regression")
    exact = fisher(net, inputs, likelihood=likelihood)
    estimate = fisher(net, inputs, likelihood=likelihood, samples=100_000)
    assert (estimate - exact).norm() / exact.norm() < 0.02  # of order 1 / sqrt(100,000 / 16)


def test_sampling_repeats_with_the_generator_and_agrees_between_blocks_and_whole():
    net, inputs, _ = case("mlp")
    draws = [fisher(net, inputs, samples=2, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.allclose(draws[0], draws[2])
    generator = torch.Generator().manual_seed(1)
    blocks = fisher_blocks(net, inputs, samples=2, generator=generator, progress=False)
    torch.testing.assert_close(blocks["0"], draws[0][:25, :25], **EXACT)


def test_float32_networks_are_computed_in_float64_by_default():
    torch.manual_seed(0)
    net, inputs = mlp(), torch.randn(5, 4)
    matrix = fisher(net, inputs)
    assert matrix.dtype == torch.float64
    assert torch.equal(matrix, fisher(copy.deepcopy(net).double(), inputs.double()))
    single = fisher(net, inputs, dtype=torch.float32)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), matrix, rtol=1e-4, atol=1e-5)


def test_the_network_is_left_as_it_is():
    torch.manual_seed(0)
    net, inputs = cnn(), torch.randn(5, 2, 4, 4)
    net.train()
    net[0].eval()
    net[-1].weight.requires_grad_(False)
    net(inputs).sum().backward()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()}
    modes, state = [module.training for module in net.modules()], torch.get_rng_state()
    fast = torch.backends.mha.get_fastpath_enabled()
    in_training = fisher(net, inputs)
    fisher(net, inputs, samples=3)
    assert torch.equal(state, torch.get_rng_state())
    assert modes == [module.training for module in net.modules()]
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    for name, parameter in net.named_parameters():
        same = parameter.grad is gradients[name] or torch.equal(parameter.grad, gradients[name])
        assert same and parameter.dtype == torch.float32, name
    assert not net[-1].weight.requires_grad
    assert torch.backends.mha.get_fastpath_enabled() == fast
    assert torch.equal(in_training, fisher(net.eval(), inputs))


def test_in_inference_mode():
    net, inputs, _ = case("mlp")
    with torch.inference_mode():
        matrix = fisher(net, inputs * 1)
    assert torch.equal(matrix, fisher(net, inputs))


def test_layers_in_other_coordinates_enter_as_plain_ones():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    net, inputs = asymmetrize(net, n_fix=2, kappa=1.0, seed=0), torch.randn(5, 4)
    plain = plain_copy(net)
    assert type(net[0]) is not type(plain[0])
    torch.testing.assert_close(
        fisher(net, inputs), fisher_by_loop(plain.double(), inputs.double(), "categorical"), **EXACT
    )


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight

    def forward(self, input: Tensor) -> Tensor:
        return self.b(self.a(input).tanh())


def test_a_tied_parameter_counts_once():
    torch.manual_seed(0)
    net, inputs = Tied().double(), torch.randn(5, 3, dtype=torch.float64)
    expected = fisher_by_loop(net, inputs, "categorical")  # a.weight, a.bias, b.bias
    assert len(expected) == 15
    torch.testing.assert_close(fisher(net, inputs), expected, **EXACT)
    names = ["a.weight", "b.bias"]
    torch.testing.assert_close(fisher(net, inputs, "b"), fisher_by_loop(net, inputs, "categorical", names), **EXACT)


def test_step_says_how_the_network_is_called():
    net, inputs, _ = case("mlp")
    batch = {"features": inputs.float(), "kept": torch.tensor([0, 2])}
    matrix = fisher(net, batch, step=lambda net, batch: (net(batch["features"])[batch["kept"]], None))
    expected = fisher(net, inputs.float()[[0, 2]])
    torch.testing.assert_close(matrix, expected, **EXACT)


def test_graphs():
    torch.manual_seed(0)
    edges = torch.tensor([[0, 1, 2, 3, 4, 0], [1, 2, 3, 4, 0, 2]])
    graph = Data(torch.randn(5, 4), edges, y=torch.zeros(5).long(), train_mask=torch.tensor([1, 0, 1, 1, 0]).bool())
    net = GNN(4, 3, hidden=3, num_layers=2)
    matrix = fisher(net, graph, step=graph_step("train_mask"))
    assert graph.x.dtype == torch.float32
    nodes = Selected(copy.deepcopy(net).double(), graph.x.double(), edges)
    expected = fisher_by_loop(nodes, torch.tensor([0, 2, 3]), "categorical")
    torch.testing.assert_close(matrix, expected, **EXACT)


class Selected(nn.Module):
    """The outputs of some nodes of a graph, as if they were the input."""

    def __init__(self, net: nn.Module, features: Tensor, edges: Tensor) -> None:
        super().__init__()
        self.net, self.features, self.edges = net, features, edges

    def forward(self, nodes: Tensor) -> Tensor:
        return self.net(self.features, self.edges)[nodes]


@pytest.mark.parametrize("samples", [None, 1, 2])
@pytest.mark.parametrize("name", CASES)
def test_the_bound_of_the_rank_holds(name, samples):
    net, inputs, likelihood = case(name)
    settings = {"likelihood": likelihood, "samples": samples, "generator": None, "whitening": None, "step": None}
    with fisher_model(net, inputs[:2], None, torch.float64, **settings) as model:
        operator = model.operator(model.parameters)
        matrix = operator.dense(64, tqdm(disable=True))
    rank = torch.linalg.matrix_rank(matrix, hermitian=True, rtol=1e-10)
    assert 0 < rank <= operator.rank_bound < operator.size


def test_certain_probabilities_give_nothing():
    torch.manual_seed(0)
    net, inputs = autoencoder().double(), torch.randn(5, 4, dtype=torch.float64)
    with torch.no_grad():
        net[2].bias.copy_(torch.tensor([50.0, 0.0, -800.0, 0.0]))  # 1 and 0 in float64
    matrix = fisher(net, inputs, ["2"], likelihood="bernoulli")
    diagonal = matrix.diagonal()[-4:]
    assert diagonal[0] == 0 and diagonal[2] == 0 and (diagonal[[1, 3]] > 0.1).all()


class Noisy(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + torch.randn(self.out_features)


def broken() -> nn.Module:
    net = mlp()
    with torch.no_grad():
        net[0].weight[0, 0] = float("nan")
    return net


class Root(nn.Module):
    """Finite, with an infinite derivative at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 2))

    def forward(self, input: Tensor) -> Tensor:
        return (input.abs() @ self.weight).sqrt()


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (mlp, {"layers": ["fc*"]}, "`layers` has the pattern 'fc\\*', which matches no layer"),
        (mlp, {"layers": []}, "`layers` is empty"),
        (nn.ReLU, {}, "ReLU has no parameters"),
        (mlp, {"likelihood": "poisson"}, "Expected `likelihood` to be one of .*'poisson'"),
        (mlp, {"likelihood": "bernoulli"}, "takes probabilities, .* but the network returns values from"),
        (lambda: nn.Linear(4, 1), {}, "takes logits .* for a single logit take 'bernoulli_logits'"),
        (lambda: nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), {}, "takes logits .* but the network returns \\(5,\\)"),
        (lambda: nn.LSTM(4, 3), {}, "Expected the network to return real values, samples first, but got tuple"),
        (broken, {}, "outputs on the batch are not finite"),
        (Root, {}, "Fisher matrix is not finite"),
        (lambda: Noisy(4, 3), {}, "other outputs each time"),
        (mlp, {"samples": 0}, "Expected `samples` to be at least 1 but got 0"),
    ],
)
def test_errors(make, settings, message):
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=message):
        fisher(make(), torch.cat([torch.randn(4, 4), torch.zeros(1, 4)]), **settings)
