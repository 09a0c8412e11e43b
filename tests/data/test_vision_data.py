"""Image folders and named sets against torchvision's own data sets and transforms."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torch.utils.data import Subset
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.transforms.functional import pil_to_tensor

from lightning_symmetry.data import TensorImages, VisionData
from lightning_symmetry.data.decode import channel_statistics, decode
from lightning_symmetry.data.named_images import NAMED_IMAGES
from lightning_symmetry.data.vision import crop_and_flip


def gather(loader):
    return tuple(torch.cat(parts) for parts in zip(*loader, strict=True))


def folder_pixels(folder, *before):
    """Decode by torchvision: float64 images in [0, 1], and labels."""
    items = ImageFolder(str(folder), transforms.Compose([*before, transforms.ToTensor()]))
    images, labels = zip(*items, strict=True)
    return torch.stack(images).double(), torch.tensor(labels)


def normalised(images, train):
    mean = train.mean((0, 2, 3), keepdim=True)
    std = train.std((0, 2, 3), correction=0, keepdim=True)
    return (images - mean) / std


MEMORY = pytest.mark.parametrize("max_memory_gb", [4.0, 0.0], ids=["in_memory", "on_disk"])


@MEMORY
def test_image_folder_equals_torchvision(make_tree, max_memory_gb):
    tree = make_tree()
    data = VisionData("imagefolder", str(tree), max_memory_gb=max_memory_gb, batch_size=4)
    data.prepare_data()
    data.setup("fit")
    train, _ = folder_pixels(tree / "train")
    for split in ("train", "test"):
        images, labels = gather(data.eval_dataloader(split))
        expected, expected_labels = folder_pixels(tree / split)
        # Float32 rounding of values up to about 2, three operations.
        torch.testing.assert_close(images.double(), normalised(expected, train), rtol=1e-5, atol=1e-6)
        assert images.dtype == torch.float32
        assert torch.equal(labels, expected_labels)
    assert data.input_shape == (3, 12, 12)
    assert data.num_classes == 3
    assert isinstance(data.eval_dataloader("train").dataset, TensorImages) == (max_memory_gb > 0)


@MEMORY
def test_resizing_crops_the_central_square(make_tree, max_memory_gb):
    tree = make_tree(size=(10, 16))
    Image.new("RGB", (9, 5)).save(tree / "train" / "cat" / "0.png")
    data = VisionData("imagefolder", str(tree), image_size=8, max_memory_gb=max_memory_gb)
    images, _ = gather(data.test_dataloader())
    resize = (transforms.Resize((8, 12)), transforms.CenterCrop(8))
    expected, _ = folder_pixels(tree / "test", *resize)
    train, _ = folder_pixels(tree / "train", transforms.Resize(8), transforms.CenterCrop(8))
    torch.testing.assert_close(images.double(), normalised(expected, train), rtol=1e-5, atol=1e-6)
    assert data.input_shape == (3, 8, 8)


@MEMORY
@pytest.mark.parametrize(("image_size", "size"), [(None, (10, 10)), (10, (12, 15))])
def test_crop_is_at_random_in_training_and_central_elsewhere(make_tree, max_memory_gb, image_size, size):
    tree = make_tree(size=size)
    data = VisionData("imagefolder", str(tree), max_memory_gb=max_memory_gb, image_size=image_size, crop=6)
    assert data.input_shape == (3, 6, 6)
    whole = [transforms.Resize(10), transforms.CenterCrop(10)] if image_size else []
    train, _ = folder_pixels(tree / "train", *whole)
    for split in ("train", "test"):
        images, _ = gather(data.eval_dataloader(split))
        expected, _ = folder_pixels(tree / split, *whole, transforms.CenterCrop(6))
        torch.testing.assert_close(images.double(), normalised(expected, train), rtol=1e-5, atol=1e-6)
    train = normalised(train, train).float()
    windows = train.unfold(2, 6, 1).unfold(3, 6, 1).permute(0, 2, 3, 1, 4, 5).reshape(-1, 3, 6, 6)
    known = torch.cat([windows, windows.flip(-1)]).flatten(1)
    seen = torch.cat([gather(data.train_dataloader())[0] for _ in range(8)]).flatten(1)
    distance, found = torch.cdist(seen, known).min(1)
    assert distance.max() < 0.01
    assert 80 < len(found.unique()) < 120  # 120 draws of 15 images with 5 x 5 places, flipped or not
    still = VisionData("imagefolder", str(tree), image_size=image_size, crop=6, augment=False)
    assert still.train_dataloader().dataset is still.eval_dataloader("train").dataset
    with pytest.raises(ValueError, match="`crop` to be at most 10, but got 11"):
        VisionData("imagefolder", str(tree), image_size=image_size, crop=11).setup()


@MEMORY
@pytest.mark.parametrize("name", ["imagefolder", "cifar10"])
def test_validation_is_taken_from_training_images(make_tree, max_memory_gb, name):
    tree = make_tree()
    options = {"val_fraction": 0.2, "max_memory_gb": max_memory_gb}
    data = VisionData(name, str(tree), **options)
    state = torch.get_rng_state()
    data.setup("fit")
    assert torch.equal(torch.get_rng_state(), state)
    train, val = (gather(data.eval_dataloader(split)) for split in ("train", "val"))
    assert (len(train[1]), len(val[1])) == (12, 3)
    assert val[1].tolist() == [0, 1, 2]
    assert gather(data.train_dataloader())[0].shape == (12, 3, 12, 12)

    whole, _ = gather(VisionData(name, str(tree), max_memory_gb=max_memory_gb).eval_dataloader("train"))
    if name == "cifar10":
        both = torch.cat([train[0], val[0]]).flatten(1)
        assert torch.equal(both.unique(dim=0), whole.flatten(1).unique(dim=0))
    else:  # Validation images have no part in the statistics.
        assert train[0].mean((0, 2, 3)).abs().max() < 1e-5
    other = gather(VisionData(name, str(tree), split_seed=1, **options).eval_dataloader("val"))
    assert not torch.equal(val[0], other[0])


@pytest.mark.parametrize(("augment", "varies"), [(None, True), (False, False), (True, True)])
@MEMORY
def test_augmentation_of_training_images_only(make_tree, max_memory_gb, augment, varies):
    tree = make_tree()
    data = VisionData("cifar10", str(tree), augment=augment, max_memory_gb=max_memory_gb)
    plain, _ = gather(data.eval_dataloader("train"))
    rows = {tuple(row) for row in plain.flatten(1).tolist()}
    seen = [tuple(row) for row in gather(data.train_dataloader())[0].flatten(1).tolist()]
    assert (set(seen) != rows) == varies
    for split in ("train", "val", "test"):
        once, again = (gather(data.eval_dataloader(split))[0] for _ in range(2))
        assert torch.equal(once, again)


def test_augmented_batches_are_crop_and_flip_of_the_bytes(make_tree):
    data = VisionData("imagefolder", str(make_tree()), augment=True)
    dataset = data.train_dataloader().dataset
    torch.manual_seed(0)
    images, _ = dataset.__getitems__(range(15))
    torch.manual_seed(0)
    expected = TensorImages(
        crop_and_flip(dataset.images),
        dataset.labels,
        dataset.mean.flatten().tolist(),
        dataset.std.flatten().tolist(),
    )
    assert torch.equal(images, expected.__getitems__(range(15))[0])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mnist", False),
        ("fashion_mnist", False),
        ("cifar10", True),
        ("cifar100", True),
        ("imagefolder", False),
    ],
)
def test_augmentation_by_default(name, expected):
    assert VisionData(name).augment is expected
    assert VisionData(name, crop=8).augment is True


def test_val_folder_stands_in_for_test_or_serves_beside_it(make_tree):
    classes = {"cat": 1, "dog": 1}
    tree = make_tree({"train": {"cat": 3, "dog": 3}, "val": {"cat": 2, "dog": 1}})
    data = VisionData("imagefolder", str(tree))
    assert len(data.test_dataloader().dataset) == len(data.val_dataloader().dataset) == 3
    make_tree({"test": classes})
    data = VisionData("imagefolder", str(tree))
    assert len(data.test_dataloader().dataset) == 2
    assert len(data.val_dataloader().dataset) == 3


def test_cifar_is_found_in_a_folder_of_its_name(make_tree, tmp_path):
    tree = make_tree()
    (tmp_path / "cifar100").mkdir()
    for split in ("train", "test"):
        shutil.move(tree / split, tmp_path / "cifar100" / split)
    data = VisionData("cifar100", str(tmp_path), download=False)
    data.prepare_data()
    assert data.num_classes == 3
    images, _ = gather(data.test_dataloader())
    pixels, _ = folder_pixels(tmp_path / "cifar100" / "test")
    spec = NAMED_IMAGES["cifar100"]
    mean, std = (torch.tensor(v, dtype=torch.float64).view(3, 1, 1) for v in (spec.mean, spec.std))
    torch.testing.assert_close(images.double(), (pixels - mean) / std, rtol=1e-5, atol=1e-6)


def test_worker_loads_images_from_disk(make_tree):
    tree = make_tree()
    loaders = [
        VisionData("imagefolder", str(tree), num_workers=n, max_memory_gb=0, val_fraction=0.2).val_dataloader()
        for n in (0, 1)
    ]
    assert isinstance(loaders[0].dataset, Subset)
    assert torch.equal(gather(loaders[0])[0], gather(loaders[1])[0])


def test_bytes_that_torchvision_holds_are_taken_as_they_are():
    rows = torch.arange(2 * 3 * 4 * 5, dtype=torch.uint8)
    cifar = SimpleNamespace(data=rows.view(2, 4, 5, 3).numpy())
    mnist = SimpleNamespace(data=rows.view(6, 4, 5))
    expected = torch.stack([pil_to_tensor(Image.fromarray(image)) for image in cifar.data])
    assert torch.equal(decode(cifar, (3, 4, 5), None), expected)
    assert torch.equal(decode(mnist, (1, 4, 5), None), mnist.data[:, None])


def test_channel_statistics_are_exact():
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (40, 3, 9, 5), generator=generator, dtype=torch.uint8)
    images[:, 2] = 7
    mean, std = channel_statistics(images.split(7))
    pixels = images.double() / 255
    assert mean == pytest.approx(pixels.mean((0, 2, 3)).tolist(), rel=1e-12)
    expected = pixels.std((0, 2, 3), correction=0)
    assert std == pytest.approx([*expected[:2].tolist(), 1.0], rel=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "imagenet"}, "`name` to be one of .*'cifar10'.*'imagefolder'.* but got 'imagenet'"),
        ({"val_fraction": -0.1}, r"`val_fraction` to be a fraction in \[0, 1\), but got -0.1"),
        ({"crop": 0}, "`crop` to be an integer of at least 1, but got 0"),
        ({"image_size": 0}, "`image_size` to be an integer of at least 1, but got 0"),
        ({"max_memory_gb": -1.0}, "`max_memory_gb` to be at least 0, but got -1.0"),
        ({"eval_batch_size": 0}, "`eval_batch_size` to be an integer of at least 1, but got 0"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        VisionData(**arguments)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "imagefolder",
            r"Found no imagefolder data: looked for class folders .*/train/CLASS with .*val/CLASS",
        ),
        ("mnist", r"Found no mnist data: .*MNIST/raw/train-images-idx3-ubyte\)\. Pass `download=True`"),
        ("fashion_mnist", r"missing: .*FashionMNIST/raw/"),
        ("cifar10", r"missing: .*cifar-10-batches-py/.* and for class folders .*/cifar10/train/CLASS"),
        ("cifar100", r"missing: .*cifar-100-python/train"),
    ],
)
def test_missing_data_says_what_was_looked_for(tmp_path, name, message):
    data = VisionData(name, str(tmp_path), download=False)
    for load in (data.prepare_data, data.setup):
        with pytest.raises(FileNotFoundError, match=message):
            load()


def test_failed_download_says_which_files_to_copy(tmp_path, monkeypatch):
    def offline(*args, **kwargs):
        raise OSError("no route to host")

    monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", offline)
    with pytest.raises(RuntimeError, match=r"Could not download CIFAR10 .*no route to host.*data_batch_1"):
        VisionData("cifar10", str(tmp_path)).prepare_data()


def test_differing_class_folders(make_tree):
    tree = make_tree({"train": {"cat": 2, "dog": 2}, "test": {"cat": 1, "dgo": 1}})
    with pytest.raises(ValueError, match=r"lacks \['dog'\] and has \['dgo'\]"):
        VisionData("imagefolder", str(tree)).setup()


@pytest.mark.parametrize("split", ["train", "test"])
def test_empty_class_folder(make_tree, split):
    tree = make_tree()
    for file in (tree / split / "dog").iterdir():
        file.unlink()
    with pytest.raises(ValueError, match=rf"no images in the class folders \['dog'\] of .*{split}"):
        VisionData("imagefolder", str(tree)).setup()


def test_no_class_folders(tmp_path):
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
    with pytest.raises(ValueError, match=r"no class folders in .*train; expected train/CLASS/IMAGE"):
        VisionData("imagefolder", str(tmp_path)).setup()


@MEMORY
def test_sizes_differ(make_tree, max_memory_gb):
    tree = make_tree()
    Image.new("RGB", (12, 14)).save(tree / "test" / "emu" / "1.png")
    message = r"one size, but got \(height, width\) = \(12, 12\) in .*\(14, 12\) in .*emu/1.png; pass `image_size`"
    with pytest.raises(ValueError, match=message):
        VisionData("imagefolder", str(tree), max_memory_gb=max_memory_gb).setup()


def test_class_too_small_to_split(make_tree):
    tree = make_tree({"train": {"cat": 5, "dog": 1}, "test": {"cat": 1, "dog": 1}})
    with pytest.raises(ValueError, match=r"Cannot hold out a stratified 0.5 of 6 items"):
        VisionData("imagefolder", str(tree), val_fraction=0.5).setup()
