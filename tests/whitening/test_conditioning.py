"""Condition numbers of known matrices, before and after whitening, and extreme eigenvalues without the matrix."""

from __future__ import annotations

import math

import pytest
import torch
from fisher_reference import cnn
from torch import Tensor, nn

from lightning_symmetry.whitening.conditioning import condition_number, extreme_eigenvalues
from lightning_symmetry.whitening.fisher import fisher_blocks, fisher_matrix


def with_spectrum(values: list[float], dtype: torch.dtype = torch.float64) -> Tensor:
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(len(values), len(values), dtype=torch.float64)).Q
    return (basis * torch.tensor(values, dtype=torch.float64) @ basis.mT).to(dtype)


def test_condition_number_of_a_known_spectrum():
    assert condition_number(with_spectrum([4.0, 2.0, 0.5])) == pytest.approx(8, rel=1e-12)
    assert condition_number(with_spectrum([4.0, 2.0, 0.5]), damping=0.5) == pytest.approx(4.5, rel=1e-12)
    assert condition_number(torch.eye(3)) == 1


def test_singular_matrices_count_on_their_range_or_with_damping():
    matrix = with_spectrum([4.0, 2.0, 0.0, 0.0])
    assert condition_number(matrix) == pytest.approx(2, rel=1e-12)
    assert condition_number(matrix, damping=0.01) == pytest.approx(401, rel=1e-9)
    assert condition_number(torch.zeros(3, 3), damping=0.1) == 1
    assert condition_number(with_spectrum([4.0, 2.0, 0.0, 0.0], torch.float32)) == pytest.approx(2, rel=1e-5)


def test_rank_tolerance_says_what_counts():
    matrix = with_spectrum([1.0, 0.1, 1e-4])
    assert condition_number(matrix, rank_tolerance=1e-5) == pytest.approx(1e4, rel=1e-9)
    assert condition_number(matrix, rank_tolerance=1e-3) == pytest.approx(10, rel=1e-12)


@pytest.mark.parametrize(
    ("matrix", "settings", "message"),
    [
        (torch.zeros(3, 3), {}, "matrix is 0"),
        (torch.eye(3)[:2], {}, r"square matrix but got shape \(2, 3\)"),
        (torch.full((2, 2), math.nan), {}, "not finite"),
        (torch.tensor([[1.0, 0.5], [0.0, 1.0]]), {}, "not symmetric"),
        (torch.diag(torch.tensor([1.0, -0.1])), {"damping": 1.0}, "not positive semi-definite"),
        (torch.eye(2), {"damping": -1.0}, "`damping` to be finite and not negative"),
        (torch.eye(2), {"rank_tolerance": 1.0}, r"`rank_tolerance` to be in \[0, 1\)"),
    ],
)
def test_errors(matrix, settings, message):
    with pytest.raises(ValueError, match=message):
        condition_number(matrix, **settings)


def inputs_with(scales: list[float], mean: list[float], count: int = 40) -> Tensor:
    """Inputs of exactly this mean, and this standard deviation along exactly orthogonal directions."""
    torch.manual_seed(0)
    noise = torch.randn(count, len(scales), dtype=torch.float64)
    white = torch.linalg.qr(noise - noise.mean(0)).Q * count**0.5
    turn = torch.linalg.qr(torch.randn(len(scales), len(scales), dtype=torch.float64)).Q
    scales, mean = (torch.tensor(values, dtype=torch.float64) for values in (scales, mean))
    return white * scales @ turn.mT + mean


def zca(inputs: Tensor) -> tuple[Tensor, Tensor]:
    mean = inputs.mean(0)
    values, vectors = torch.linalg.eigh((inputs - mean).mT @ (inputs - mean) / len(inputs))
    return vectors * values.rsqrt() @ vectors.mT, mean


def test_linear_regression_is_conditioned_by_its_inputs_and_perfectly_when_they_are_whitened():
    """F is I (x) E[(x, 1)(x, 1)^T]: eigenvalues 100^2, 1, 0.1^2 and 1 for the bias, 10^6 in all."""
    net = nn.Linear(3, 2).double()
    settings = {"likelihood": "mse", "progress": False}
    centred = inputs_with([100.0, 1.0, 0.1], [0.0, 0.0, 0.0])
    assert condition_number(fisher_matrix(net, centred, **settings)) == pytest.approx(1e6, rel=1e-8)
    shifted = inputs_with([100.0, 1.0, 0.1], [3.0, -2.0, 30.0])
    assert condition_number(fisher_matrix(net, shifted, **settings)) > 1e6
    U, c = zca(shifted)
    after = fisher_matrix(net, shifted, whitening={"": (U, c)}, **settings)
    torch.testing.assert_close(after, torch.eye(8, dtype=torch.float64), rtol=1e-8, atol=1e-8)
    only_scaled = fisher_matrix(net, shifted, whitening={"": (U, None)}, **settings)
    assert condition_number(only_scaled) > 10  # without the centre it is not done


def test_whitening_the_badly_scaled_inputs_of_a_hidden_layer_improves_it_by_more_than_95_percent():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Sigmoid(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    with torch.no_grad():
        net[0].weight *= torch.tensor([[3.0], [1.0], [0.3], [0.1], [0.03]])
    inputs = torch.randn(200, 6, dtype=torch.float64)
    coefficients = zca(net[:2](inputs).detach())
    before = fisher_blocks(net, inputs, ["2"], progress=False)["2"]
    after = fisher_blocks(net, inputs, ["2"], whitening={"2": coefficients}, progress=False)["2"]
    # Three classes have two logits: rank 2 for each of 200 samples, so that blocks of size 24 are regular.
    assert condition_number(after) < 0.05 * condition_number(before)


def wide() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    return net, torch.randn(100, 8, dtype=torch.float64)


@pytest.mark.parametrize("layers", [["0"], ["2"], ["0", "2"], None])
@pytest.mark.parametrize("settings", [{}, {"samples": 2}, {"likelihood": "mse"}])
def test_extreme_eigenvalues_are_those_of_the_matrix(layers, settings):
    net, inputs = wide()
    values = torch.linalg.eigvalsh(fisher_matrix(net, inputs, layers, progress=False, **settings))
    smallest, largest = extreme_eigenvalues(net, inputs, layers, damping=0.125, **settings)
    assert largest == pytest.approx(values[-1].item() + 0.125, rel=1e-4)
    assert smallest == pytest.approx(max(values[0].item(), 0) + 0.125, abs=1e-4 * values[-1].item())


def test_extreme_eigenvalues_give_the_damped_condition_number_of_whitened_layers():
    net, inputs = wide()
    whitening = {"0": zca(inputs), "2": zca(net[:2](inputs).detach())}
    matrix = fisher_matrix(net, inputs, whitening=whitening, progress=False)
    smallest, largest = extreme_eigenvalues(net, inputs, damping=1e-2, whitening=whitening)
    assert largest / smallest == pytest.approx(condition_number(matrix, damping=1e-2), rel=1e-3)
    plain = fisher_matrix(net, inputs, progress=False)
    assert abs(condition_number(plain, damping=1e-2) * smallest / largest - 1) > 0.01  # and they differ


def test_too_few_predictions_leave_the_damping_as_the_smallest_eigenvalue():
    net, inputs = wide()
    values = torch.linalg.eigvalsh(fisher_matrix(net, inputs[:20], ["0"], progress=False))
    assert len(values) == 81 > 20 * 3
    assert values[80 - 60].abs() < 1e-12 < values[81 - 60]
    smallest, largest = extreme_eigenvalues(net, inputs[:20], ["0"], damping=1e-3, max_products=1000)
    assert smallest == 1e-3
    assert largest == pytest.approx(values[-1].item() + 1e-3, rel=1e-6)


def test_extreme_eigenvalues_of_nothing():
    net, inputs = wide()
    with torch.no_grad():
        net[4].weight.zero_()  # no gradient reaches the layers before
    assert extreme_eigenvalues(net, inputs, ["0"], damping=0.5) == (0.5, 0.5)


def test_extreme_eigenvalues_leave_the_network_and_random_numbers_alone():
    torch.manual_seed(0)
    net, inputs = cnn().train(), torch.randn(5, 2, 4, 4)
    before, state = {name: value.clone() for name, value in net.state_dict().items()}, torch.get_rng_state()
    first = extreme_eigenvalues(net, inputs)
    assert torch.equal(state, torch.get_rng_state()) and all(module.training for module in net.modules())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    assert extreme_eigenvalues(net, inputs) == first


def test_no_convergence_is_an_error_and_so_is_a_negative_damping():
    net, inputs = wide()
    with pytest.raises(RuntimeError, match="did not converge in 1 products"):
        extreme_eigenvalues(net, inputs, tolerance=1e-14, max_products=1)
    with pytest.raises(ValueError, match="`damping` to be finite and not negative"):
        extreme_eigenvalues(net, inputs, damping=-1e-3)
