"""What stands where in flat weights."""

from __future__ import annotations

import pytest
import torch
from metanet_cases import asymmetric, setting
from torch import nn

from lightning_symmetry.metanets import FlatMLP, WeightLayout, ZooLayout


def test_places_names_and_tensors():
    layout = WeightLayout({"a": (2, 3), "b": (), "c": (4,)})
    assert (layout.num_features, layout.offsets, layout.names) == (11, {"a": 0, "b": 6, "c": 7}, ["a", "b", "c"])
    assert layout.tensor_of.tolist() == [0] * 6 + [1] + [2] * 4
    assert layout.free.tolist() == list(range(11))


def test_rows_are_those_of_a_zoo():
    net, _, layout = setting("cnn with batch norm")
    rows = layout.flatten(net.state_dict())
    zoo = ZooLayout.of(net)
    assert list(layout.shapes) == [entry.name for entry in zoo.in_rows]
    for name, tensor in zoo.unflatten(rows).items():
        torch.testing.assert_close(tensor, net.state_dict()[name])
    assert WeightLayout.of_rows(zoo, layout.fixed).shapes == layout.shapes
    with pytest.raises(TypeError, match="does not say which weights are constants"):
        FlatMLP(zoo)


def test_flatten_takes_stacked_tensors():
    layout = WeightLayout({"weight": (2, 3), "bias": (2,)})
    states = [nn.Linear(3, 2).state_dict() for _ in range(4)]
    stacked = {name: torch.stack([state[name] for state in states]) for name in layout.shapes}
    torch.testing.assert_close(layout.flatten(stacked), torch.stack([layout.flatten(state) for state in states]))


def test_fixed_entries_of_an_asymmetric_network_are_not_read():
    net, _ = asymmetric()
    layout = WeightLayout.of(net)
    fixed = sum(module.num_fixed for module in net.modules() if hasattr(module, "num_fixed"))
    assert int(layout.fixed.sum()) == fixed > 0
    metanet = FlatMLP(layout, (4,))
    rows = torch.randn(3, layout.num_features)
    other = torch.where(layout.fixed, torch.randn(3, layout.num_features), rows)
    assert metanet.net[0].in_features == layout.num_features - fixed
    assert torch.equal(metanet(rows), metanet(other))


def test_a_tensor_that_is_fixed_as_a_whole_counts_for_nothing():
    layout = WeightLayout({"a": (2,), "b": (3,)}, torch.tensor([True, True, False, True, False]))
    assert layout.free_counts == {"b": 2}
    assert layout.free.tolist() == [2, 4]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WeightLayout({}), "Expected a layout of tensors"),
        (lambda: WeightLayout({"a": (0, 3)}), "Expected a layout of tensors"),
        (lambda: WeightLayout({"a": (2,)}, torch.zeros(3)), r"Expected `fixed` to have shape \(2,\)"),
        (lambda: WeightLayout({"a": (2,)}, torch.ones(2)), "All weights are fixed"),
        (lambda: WeightLayout({"a": (2,)}).flatten({}), "Expected a to have shape .* but got nothing"),
        (lambda: WeightLayout({"a": (2,)}).flatten({"a": torch.zeros(3)}), r"but got \(3,\)"),
        (lambda: FlatMLP({"a": (2,)})(torch.zeros(1, 3)), "Expected rows of 2 weights"),
        (lambda: FlatMLP({"a": (2,)})(torch.zeros(2)), "Expected rows of 2 weights"),
        (lambda: FlatMLP({"a": (2,)}, outputs=0), "Expected `outputs`"),
        (lambda: FlatMLP({"a": (2,)}, (0,)), "Expected all widths"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()
