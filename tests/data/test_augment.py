"""Batched augmentation against an explicit loop over images."""

from __future__ import annotations

import pickle

import pytest
import torch
from torchvision.transforms import functional

from lightning_symmetry.data import RandomCrop, RandomHorizontalFlip
from lightning_symmetry.data.augment import center_crop


@pytest.fixture(params=[torch.uint8, torch.float32], ids=str)
def images(request):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (300, 3, 7, 9), generator=generator).to(request.param)


@pytest.mark.parametrize("padding", [0, 1, 4])
def test_crop_is_one_window_per_image(images, padding):
    torch.manual_seed(1)
    cropped = RandomCrop(padding)(images)

    torch.manual_seed(1)
    ys, xs = torch.randint(2 * padding + 1, (2, len(images)))
    expected = [
        functional.crop(functional.pad(image, [padding] * 4), int(y), int(x), 7, 9)
        for image, y, x in zip(images, ys, xs, strict=True)
    ]
    assert cropped.dtype == images.dtype
    assert torch.equal(cropped, torch.stack(expected))


def test_crop_draws_every_offset_for_single_images():
    # One white pixel in the middle shows the offset of its image.
    images = torch.zeros(2000, 1, 9, 9)
    images[:, :, 4, 4] = 1
    positions = RandomCrop(2)(images).nonzero()[:, 2:]
    offsets, counts = positions.unique(dim=0, return_counts=True)
    assert len(positions) == 2000
    assert offsets.tolist() == [[y, x] for y in range(2, 7) for x in range(2, 7)]
    # 2,000 draws of 25 offsets: 80 ± 9 each.
    assert counts.min() > 40
    assert counts.max() < 125


@pytest.mark.parametrize(("padding", "size"), [(0, 4), (2, 4), (1, 9), (0, 7)])
def test_crop_to_a_size_is_one_window_per_image(images, padding, size):
    torch.manual_seed(1)
    cropped = RandomCrop(padding, size)(images)

    torch.manual_seed(1)
    ys = torch.randint(7 + 2 * padding - size + 1, (len(images),))
    xs = torch.randint(9 + 2 * padding - size + 1, (len(images),))
    expected = [
        functional.crop(functional.pad(image, [padding] * 4), int(y), int(x), size, size)
        for image, y, x in zip(images, ys, xs, strict=True)
    ]
    assert cropped.dtype == images.dtype
    assert torch.equal(cropped, torch.stack(expected))


@pytest.mark.parametrize("size", [1, 4, 5, 7])
def test_center_crop_is_torchvisions(images, size):
    cropped = center_crop(images, size)
    assert torch.equal(cropped, functional.center_crop(images, [size]))
    assert cropped.untyped_storage().data_ptr() == images.untyped_storage().data_ptr()


def test_flip_is_one_decision_per_image(images):
    torch.manual_seed(2)
    flipped = RandomHorizontalFlip(0.3)(images)

    torch.manual_seed(2)
    decisions = torch.rand(len(images)) < 0.3
    expected = [functional.hflip(i) if flip else i for i, flip in zip(images, decisions, strict=True)]
    assert 50 < decisions.sum() < 130
    assert flipped.dtype == images.dtype
    assert torch.equal(flipped, torch.stack(expected))


@pytest.mark.parametrize("augment", [RandomCrop(3), RandomCrop(0, 5), RandomHorizontalFlip(0.7)], ids=repr)
def test_augmentation_leaves_its_input_and_pickles(images, augment):
    before = images.clone()
    torch.manual_seed(3)
    once = augment(images)
    torch.manual_seed(3)
    again = pickle.loads(pickle.dumps(augment))(images)
    assert torch.equal(images, before)
    assert torch.equal(once, again)


def test_flip_probability_zero_and_one(images):
    assert torch.equal(RandomHorizontalFlip(0.0)(images), images)
    assert torch.equal(RandomHorizontalFlip(1.0)(images), images.flip(-1))


def test_bad_arguments():
    with pytest.raises(ValueError, match="`padding` to be an integer of at least 0, but got -1"):
        RandomCrop(-1)
    with pytest.raises(ValueError, match="`size` to be an integer of at least 1, but got 0"):
        RandomCrop(size=0)
    for crop in (RandomCrop(1, 11), lambda images: center_crop(images, 8)):
        with pytest.raises(ValueError, match=r"images of at least (11 x 11|8 x 8) pixels.* but got (9|7) x"):
            crop(torch.zeros(2, 3, 7, 9))
    with pytest.raises(ValueError, match=r"`p` to be a probability in \[0, 1\], but got 1.5"):
        RandomHorizontalFlip(1.5)
    with pytest.raises(ValueError, match=r"shape \(N, C, H, W\), but got shape \(3, 8, 8\)"):
        RandomCrop()(torch.zeros(3, 8, 8))
