"""TensorImages against torchvision's transforms, image by image."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import transforms

from lightning_symmetry.data import RandomCrop, RandomHorizontalFlip, TensorImages
from lightning_symmetry.data.loaders import keep_batch

MEAN, STD = (0.49, 0.48, 0.44), (0.25, 0.24, 0.26)


def make(count=50, **options):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (count, 3, 8, 6), generator=generator, dtype=torch.uint8)
    return TensorImages(images, torch.arange(count) % 7, MEAN, STD, **options)


def reference(dataset):
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
    arrays = dataset.images.permute(0, 2, 3, 1).numpy()
    return torch.stack([transform(array) for array in arrays])


def test_batches_equal_torchvision_bit_for_bit():
    dataset = make()
    loader = DataLoader(dataset, batch_size=16, collate_fn=keep_batch)
    images, labels = (torch.cat(parts) for parts in zip(*loader, strict=True))
    assert images.dtype == torch.float32
    assert torch.equal(images, reference(dataset))
    assert torch.equal(labels, dataset.labels)


def test_single_items_equal_batches():
    dataset = make()
    images, labels = dataset.__getitems__([3, 1, -1])
    for i, index in enumerate([3, 1, -1]):
        image, label = dataset[index]
        assert torch.equal(image, images[i])
        assert label == labels[i]


def test_fetching_does_not_change_the_images():
    dataset = make()
    before = dataset.images.clone()
    dataset.__getitems__(range(50))
    assert torch.equal(dataset.images, before)


def test_augment_sees_bytes_before_normalisation():
    augment = transforms.Compose([RandomCrop(2), RandomHorizontalFlip()])
    dataset = make(augment=augment)
    torch.manual_seed(0)
    images, _ = dataset.__getitems__(range(50))
    torch.manual_seed(0)
    plain = TensorImages(augment(dataset.images), dataset.labels, MEAN, STD)
    assert torch.equal(images, reference(plain))


def test_flatten_and_max_value():
    dataset = make(flatten=True, max_value=16)
    images, _ = dataset.__getitems__([4, 5])
    mean, std = torch.tensor(MEAN).view(3, 1, 1).double(), torch.tensor(STD).view(3, 1, 1).double()
    expected = ((dataset.images[[4, 5]].double() / 16 - mean) / std).flatten(1)
    assert images.shape == (2, 3 * 8 * 6)
    torch.testing.assert_close(images.double(), expected, rtol=1e-6, atol=1e-6)


def test_loader_pickles_and_works_with_a_worker():
    loader = DataLoader(make(augment=RandomCrop()), batch_size=20, num_workers=1, collate_fn=keep_batch)
    loader = pickle.loads(pickle.dumps(loader))
    assert [len(labels) for _, labels in loader] == [20, 20, 10]


def test_distributed_samplers_divide_the_images():
    dataset = make()
    seen = []
    for rank in range(2):
        sampler = DistributedSampler(dataset, num_replicas=2, rank=rank, shuffle=True)
        images = [x for x, _ in DataLoader(dataset, batch_size=10, sampler=sampler, collate_fn=keep_batch)]
        seen.append(torch.cat(images))
    order = torch.cat(seen).flatten(1).unique(dim=0)
    assert torch.equal(order, reference(dataset).flatten(1).unique(dim=0))


def test_subset_uses_the_fast_path():
    dataset = make()
    loader = DataLoader(Subset(dataset, [7, 2, 9]), batch_size=3, collate_fn=keep_batch)
    images, labels = next(iter(loader))
    assert torch.equal(images, reference(dataset)[[7, 2, 9]])
    assert labels.tolist() == [0, 2, 2]


BYTES, LABELS = torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((BYTES.float(), LABELS, [0.0], [1.0]), r"`images` to be uint8 .* but got torch.float32"),
        ((BYTES[0], LABELS, [0.0], [1.0]), r"`images` to be uint8 .* of shape \(1, 2, 2\)"),
        ((BYTES, LABELS[:3], [0.0], [1.0]), r"`labels` to be int64 of shape \(4,\), .* of shape \(3,\)"),
        ((BYTES, LABELS.int(), [0.0], [1.0]), r"`labels` to be int64 .* but got torch.int32"),
        ((BYTES, LABELS, [0.0, 0.0], [1.0]), r"`mean` and `std` to hold 1 values"),
        ((BYTES, LABELS, [0.0], [0.0]), r"`std` to be positive, but got \[0.0\] and \[0.0\]"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        TensorImages(*arguments)
