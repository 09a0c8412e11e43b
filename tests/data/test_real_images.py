"""MNIST and CIFAR-100 themselves, where the machine has them."""

from __future__ import annotations

import pytest
import torch
from torchvision import transforms
from torchvision.datasets import MNIST

from lightning_symmetry.data import VisionData


def test_real_mnist_loads_without_a_download(real_data, monkeypatch):
    def forbidden(self):
        raise AssertionError("tried to download")

    monkeypatch.setattr(MNIST, "download", forbidden)
    data = VisionData("mnist", str(real_data), val_fraction=0.1)
    data.prepare_data()
    data.setup("fit")
    assert [len(data.eval_dataloader(s).dataset) for s in ("train", "val", "test")] == [54000, 6000, 10000]
    images, labels = next(iter(data.test_dataloader()))
    to_input = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    expected = MNIST(str(real_data), train=False, transform=to_input)
    for i in range(len(labels)):
        assert torch.equal(images[i], expected[i][0])
        assert labels[i] == expected[i][1]
    train = data.eval_dataloader("train").dataset
    assert train.images.double().div(255).mean().item() == pytest.approx(0.1307, abs=1e-3)


def test_real_mnist_resized_on_the_fly(real_data):
    data = VisionData("mnist", str(real_data), image_size=14, max_memory_gb=0, eval_batch_size=8)
    images, _ = next(iter(data.test_dataloader()))
    assert images.shape == (8, *data.input_shape) == (8, 1, 14, 14)


def test_real_cifar100_folder(real_data):
    data = VisionData("cifar100", str(real_data))
    data.setup("fit")
    assert data.num_classes == 100
    assert data.input_shape == (3, 32, 32)
    loader = data.eval_dataloader("train")
    images, labels = (torch.cat(parts) for parts in zip(*loader, strict=True))
    assert labels.bincount().unique().tolist() == [40]
    # A subset of 4,000: the usual constants fit it to a few hundredths.
    assert images.mean((0, 2, 3)).abs().max() < 0.05
    assert (images.std((0, 2, 3)) - 1).abs().max() < 0.05
