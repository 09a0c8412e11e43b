"""What a trained classifier predicts for images like those of its training and for others, for ``bayesian.py``."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc

from lightning_symmetry.callbacks.calibration_bins import CalibrationBins, score
from lightning_symmetry.variational import Predictive, predictive

NUM_BINS = 15


def permute_pixels(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return images with their pixels in another order, which is drawn for each image, and is that of all channels."""
    pixels = images.flatten(2)
    order = torch.rand(len(images), 1, pixels.shape[2], generator=generator).argsort(2).to(images.device)
    return pixels.gather(2, order.expand_as(pixels)).view_as(images)


def predict(module: Any, loader: Any, count: int, permuted: bool = False) -> Predictive:
    """Return what a network predicts for all images of a loader, with their pixels in another order or not.

    The orders are the same for all networks.

    Args:
        module: The LightningModule that has the network.
        loader: Images and targets.
        count: Number of samples to average.
        permuted: Whether to bring each image's pixels into an order of its own.
    """
    generator, parts, training = torch.Generator().manual_seed(0), [], module.training
    module.eval()
    for images, _ in loader:
        images = permute_pixels(images, generator) if permuted else images
        parts.append(predictive(module.net, images.to(module.device), num_samples=count))
    module.train(training)
    names = ("output", "probabilities", "log_probabilities", "entropy", "mutual_information")
    return Predictive(**{name: torch.cat([getattr(part, name) for part in parts]).cpu() for name in names})


def out_of_distribution(known: Predictive, unknown: Predictive, samples: bool) -> dict[str, float | None]:
    """Return how well uncertainty tells images that are like the training images from others: AUROC, 0.5 is chance.

    Args:
        known: Predictions of test images.
        unknown: Predictions of others.
        samples: Whether there are several samples, which can disagree: else there is no mutual information.
    """
    target = torch.cat([torch.zeros(len(known.entropy)), torch.ones(len(unknown.entropy))]).long()
    found: dict[str, float | None] = {"entropy": None, "mutual_information": None}
    for name in ("entropy", "mutual_information") if samples else ("entropy",):
        # the ranks alone count; scores beyond [0, 1] would be taken for logits, which round off
        scores = torch.cat([getattr(known, name), getattr(unknown, name)]).double()
        found[name] = float(binary_auroc(scores / scores.max().clamp_min(1.0), target))
    return found


def measure(predicted: Predictive, target: Tensor) -> dict[str, Any]:
    """Return calibration, likelihood and accuracy; bins without images have None, as JSON has no NaN."""
    bins = CalibrationBins(NUM_BINS)
    bins.update(score(predicted.log_probabilities, target))
    found = asdict(bins.result())
    for name in ("confidence", "hits"):
        found[name] = [None if math.isnan(value) else value for value in found[name]]
    return found
