"""Statistics of weights, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_symmetry import ResNet
from lightning_symmetry.metanets import StatNN, WeightLayout, stat_nn, weight_statistics


def reference(row: np.ndarray) -> list[float]:
    return [row.mean(), row.var(), *np.quantile(row, [0, 0.25, 0.5, 0.75, 1])]


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4), seed=st.integers(0, 999), chunk=st.integers(1, 99))
def test_they_are_numpys(sizes, seed, chunk):
    layout = WeightLayout({f"t{k}": (size,) for k, size in enumerate(sizes)})
    rows = torch.randn(4, sum(sizes), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stat_nn, "_CHUNK", chunk)
        found = weight_statistics(rows, layout)
    for row, own in zip(rows.numpy(), found.numpy(), strict=True):
        expected = [value for part in np.split(row, np.cumsum(sizes)[:-1]) for value in reference(part)]
        np.testing.assert_allclose(own, expected, rtol=1e-12, atol=1e-14)


def test_a_large_tensor_in_single_precision():
    rows = torch.randn(2, 30_001, generator=torch.Generator().manual_seed(0))
    found = weight_statistics(rows, {"a": (30_001,)})
    np.testing.assert_allclose(found.numpy(), [reference(row) for row in rows.double().numpy()], rtol=1e-5, atol=1e-6)


def test_order_within_tensors_does_not_change_a_bit():
    rows = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(1))
    assert torch.equal(weight_statistics(rows, {"a": (1000,)}), weight_statistics(rows[:, order], {"a": (1000,)}))


def test_gradients():
    rows = torch.randn(2, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    layout = {"a": (2, 2), "b": (5,)}
    assert torch.autograd.gradcheck(lambda x: weight_statistics(x, layout), (rows,))
    torch.testing.assert_close(weight_statistics(rows, layout), weight_statistics(rows.detach(), layout))


def test_fixed_entries_are_left_out():
    fixed = torch.tensor([False, True, False, True, True])
    layout = WeightLayout({"a": (3,), "b": (2,)}, fixed)
    found = weight_statistics(torch.tensor([[1.0, 9.0, 3.0, 9.0, 9.0]]), layout)
    torch.testing.assert_close(found, torch.tensor([[2.0, 1.0, 1.0, 1.5, 2.0, 2.5, 3.0]]))


def test_no_network_has_no_statistics():
    assert weight_statistics(torch.zeros(0, 5), {"a": (5,)}).shape == (0, 7)


def test_number_of_parameters_of_the_paper():
    """Its ResNet has 78,042 weights in 29 tensors, of 7 statistics each."""
    layout = WeightLayout.of(ResNet(blocks=1, norm="layer"))
    assert (layout.num_features, len(layout.names)) == (78_042, 29)
    metanet = StatNN(layout)
    assert sum(parameter.numel() for parameter in metanet.parameters()) == 119_297
