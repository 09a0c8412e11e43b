"""PRONG+: rows that are watched, lower precision, copies, compiled networks, and what is refused."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from units_reference import EPS, Mixture, random, scaled, shown, train
from whitening_reference import zca

from lightning_symmetry.whitening import load_whitening_state, rescale_units, whiten, whitening_state
from lightning_symmetry.whitening.units import spread_rows


@pytest.mark.parametrize("shape", [(50, 3), (5, 10, 3), (50, 3, 8, 8), (3, 8, 8), (6, 3, 17)])
@pytest.mark.parametrize("count", [7, 24, 10_000])
def test_rows_are_spread_over_samples_and_pixels(shape, count):
    spatial = len(shape) - 2 if shape[-1] != 3 else 0
    spatial = 2 if shape == (3, 8, 8) else spatial
    lead = shape[:-1] if not spatial else (*shape[: -spatial - 1], *shape[-spatial:])
    total = torch.Size(lead).numel()
    numbers = torch.arange(total).view(lead).unsqueeze(-1).expand(*lead, 3).movedim(-1, -spatial - 1)
    rows = spread_rows(numbers, spatial, count)
    assert rows.shape == (min(count, total), 3)
    assert (rows == rows[:, :1]).all()
    chosen = rows[:, 0]
    assert len(chosen.unique()) == len(chosen)
    if count < total:
        starts = torch.arange(count + 1) * total // count
        assert ((starts[:-1] <= chosen) & (chosen < starts[1:])).all()
    if count == 24 and spatial == 2 and len(lead) == 3:
        assert len((chosen % 64).unique()) > 12  # at all places of the image, of 24 rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_lower_precision_has_variances_in_float32(dtype, autocast):
    inputs = [input.to(dtype) for input in shown(12)]
    net = whiten(nn.Sequential(nn.Linear(12, 10).to(dtype)))
    with torch.autocast("cpu", enabled=autocast and dtype == torch.float32):
        train(net, inputs)
    mixture = Mixture(inputs[0].double())
    U = zca(mixture.covariance(), EPS)
    for input in inputs[1:]:
        mixture.add(input.double())
    assert net[0].units.variance.dtype == torch.float32
    torch.testing.assert_close(net[0].units.variance[0].double(), scaled(U, mixture)[0], rtol=2e-4, atol=0)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "state"])
def test_a_copy_goes_on_to_the_bit(how):
    net = whiten(nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 3)))
    inputs = [input.float() for input in shown(12)]
    train(net, inputs)
    if how == "state":
        again = whiten(nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 3)))
        again.load_state_dict(net.state_dict())
        load_whitening_state(again, copy.deepcopy(whitening_state(net)))
    else:
        again = copy.deepcopy(net) if how == "deepcopy" else pickle.loads(pickle.dumps(net))
    optimizer, result = [torch.optim.SGD(each.parameters(), 0.01) for each in (net, again)], []
    for each, steps in zip((net, again), optimizer, strict=True):
        for input in inputs:
            steps.zero_grad()
            each(input).square().mean().backward()
            steps.step()
            rescale_units(each)
        result.append([*each.state_dict().values(), each[0].units.variance, each[2].units.mean])
    assert all(map(torch.equal, *result))


def test_a_compiled_step_is_one_graph_and_compiles_once():
    runs = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        net = whiten(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(36, 3)).double())
        frames = CompileCounterWithBackend("aot_eager")
        call = torch.compile(net, backend=frames, fullgraph=True) if compiled else net
        optimizer = torch.optim.SGD(net.parameters(), 0.05)
        for step in range(6):
            if step == 0:
                train(net, [random(9, 3, 5, 5)], num_rows=20)
            optimizer.zero_grad()
            call(random(9, 3, 5, 5, seed=step) + step).square().mean().backward()
            optimizer.step()
            rescale_units(net)
        assert frames.frame_count == compiled
        runs.append([*net.state_dict().values(), net[0].units.variance])
    torch.testing.assert_close(*runs, rtol=1e-10, atol=1e-10)


def test_explicit_parameters_and_centring():
    net = whiten(nn.Sequential(nn.Linear(12, 10).double()), explicit=True)
    with pytest.raises(ValueError, match="explicit parameters cannot be rescaled: use the canonical form"):
        train(net, shown(12))
    net = whiten(nn.Sequential(nn.Linear(12, 10).double()), "center")
    train(net, shown(12))
    assert net[0].units is None
    assert net[0].form == "centred"
