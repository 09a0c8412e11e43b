"""Scores of the Bayesian recipe: images out of distribution are permuted as said, and ranked rightly."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from lightning_symmetry.variational import Predictive

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))  # recipes are scripts and import each other by name

from bayesian_scores import out_of_distribution, permute_pixels


def test_score_of_known_cases():
    def predictions(*samples):
        return Predictive.of(torch.tensor(samples).log(), "logits")

    sure = predictions([[0.98, 0.02], [0.9, 0.1], [0.6, 0.4]], [[0.98, 0.02], [0.9, 0.1], [0.6, 0.4]])
    torn = predictions([[0.99, 0.01], [0.95, 0.05]], [[0.01, 0.99], [0.95, 0.05]])
    found = out_of_distribution(sure, torn, samples=True)
    # entropies rise from 0.98 through 0.95, 0.9 and 0.6 to 0.5; of six pairs the unknown image is higher in 3 and 1
    assert found["entropy"] == pytest.approx(4 / 6)
    assert found["mutual_information"] == pytest.approx((3 + 3 / 2) / 6)  # ties, where samples agree, count half
    assert out_of_distribution(torn, sure, samples=False) == {
        "entropy": pytest.approx(2 / 6),
        "mutual_information": None,
    }


def test_pixels_are_permuted_for_each_image_and_with_all_channels():
    images = torch.arange(3 * 2 * 16.0).view(3, 2, 4, 4)
    found = permute_pixels(images, torch.Generator().manual_seed(0))
    assert torch.equal(found.flatten(2).sort(2).values, images.flatten(2))
    orders = found.flatten(2) - images.flatten(2)[:, :, :1]
    assert torch.equal(orders[:, 0], orders[:, 1])
    assert not torch.equal(orders[0], orders[1])
    assert torch.equal(found, permute_pixels(images, torch.Generator().manual_seed(0)))
