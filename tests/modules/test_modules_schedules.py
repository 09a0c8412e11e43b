"""The warm-up against its closed form."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

from lightning_symmetry import warmup


def rates(steps, peak=0.01, count=30, **arguments):
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=peak)
    schedule = warmup(optimizer, steps, **arguments)
    found = []
    for _ in range(count):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_exponential_warmup_of_the_residual_networks():
    # App. E.1.1: from 1e-4 to 1e-2 over 20 epochs, a factor of 1.259 an epoch.
    found = rates(20, start=0.01, shape="exponential")
    for epoch, rate in enumerate(found):
        assert rate == pytest.approx(min(1e-2, 1e-4 * 100 ** (epoch / 20)), rel=1e-12)
        assert rate == pytest.approx(min(1e-2, 1e-4 * 1.259**epoch), rel=2e-3)
    assert found[0] == pytest.approx(1e-4)
    assert found[20:] == pytest.approx([1e-2] * 10)


def test_linear_warmup_of_the_graph_network():
    # App. E.1.2: linear over 25 epochs to 1e-3, then constant.
    found = rates(25, peak=1e-3)
    assert found == pytest.approx([1e-3 * min(1, epoch / 25) for epoch in range(30)])
    assert rates(4, start=0.5, count=6) == pytest.approx([0.005, 0.00625, 0.0075, 0.00875, 0.01, 0.01])


def test_it_pickles_and_resumes():
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.01)
    schedule = warmup(optimizer, 10, 0.1, "exponential")
    optimizer.step()
    schedule.step()
    state = pickle.loads(pickle.dumps(schedule.state_dict()))
    assert pickle.loads(pickle.dumps(schedule)).get_last_lr() == schedule.get_last_lr()
    other = warmup(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.01), 10, 0.1, "exponential")
    other.load_state_dict(state)
    assert other.get_last_lr() == schedule.get_last_lr()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "`steps` to be at least 1 but got 0"),
        ({"steps": 5, "shape": "cosine"}, "`shape` to be 'linear' or 'exponential' but got 'cosine'"),
        ({"steps": 5, "start": 1.5}, "`start` to lie between 0 and 1 .* but got 1.5"),
        ({"steps": 5, "shape": "exponential"}, r"`start` to lie between 0 and 1 \(exponential: above 0\) but got 0"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        rates(**arguments)
