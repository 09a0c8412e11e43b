"""MNIST, Fashion-MNIST, CIFAR and any tree of class folders."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import Subset

from lightning_symmetry.data._checks import check_at_least, check_choice, check_fraction
from lightning_symmetry.data.augment import RandomCrop, RandomHorizontalFlip, center_crop
from lightning_symmetry.data.decode import (
    channel_statistics,
    decode,
    pixel_batches,
    resize_to,
    with_transform,
)
from lightning_symmetry.data.image_dataset import TensorImages
from lightning_symmetry.data.image_folder import class_names, common_size, first_size, is_tree, open_tree
from lightning_symmetry.data.image_module import ImageDataModule, ImageSplits
from lightning_symmetry.data.named_images import NAMED_IMAGES
from lightning_symmetry.data.splits import stratified_split

CROP_PADDING = 4
STATISTICS_SAMPLE = 2048
"""Images that give the statistics of a set too large for memory: a full pass would take hours on ImageNet."""


class VisionData(ImageDataModule):
    """MNIST, Fashion-MNIST, CIFAR-10, CIFAR-100, or any tree of class folders.

    Images are held in memory as bytes and augmented by the batch, per image, as far as they fit into
    `max_memory_gb`; a larger set is read from disk image by image. Named sets are normalised by their usual
    constants, an `imagefolder` by the mean and standard deviation of its training pixels (of 2,048 evenly
    spaced images if it does not fit into memory).

    Where the data is looked for:

    - the named sets: torchvision's files below `data_dir`, for instance `data_dir/MNIST/raw`;
    - CIFAR-10 and CIFAR-100 also: class folders `data_dir/train/CLASS/*` with `data_dir/test/CLASS/*`, or the
      same below `data_dir/cifar10` or `data_dir/cifar100`;
    - `imagefolder`: `data_dir/train/CLASS/*` with test/, or val/, or both. Images are read as RGB.

    There is no validation split unless `val_fraction` is positive or a tree has both val/ and test/: without
    one, `val_dataloader` returns the **test** images, so do not choose a checkpoint by it and then report the
    test result.
    """

    def __init__(
        self,
        name: Literal["mnist", "fashion_mnist", "cifar10", "cifar100", "imagefolder"] = "mnist",
        data_dir: str = "data",
        batch_size: int = 128,
        augment: bool | None = None,
        val_fraction: float = 0.0,
        split_seed: int = 0,
        num_workers: int = 0,
        download: bool = True,
        image_size: int | None = None,
        eval_batch_size: int = 512,
        max_memory_gb: float = 4.0,
        normalize: bool = True,
        crop: int | None = None,
    ) -> None:
        """Choose the data; nothing is read yet.

        Args:
            name: Which data set.
            data_dir: Folder of the data, see above.
            batch_size: Images in a training batch of one process.
            augment: Crop training images at random, after padding by 4 zeros where `crop` is None, and flip them
                left to right with probability 1/2. None does so for CIFAR-10 and CIFAR-100 and wherever there is
                a `crop`.
            val_fraction: Fraction of the training images that is held out for validation; 0 validates on the
                test images, or on val/ where a tree has that beside test/.
            split_seed: Seed of the stratified split into training and validation images.
            num_workers: Worker processes of each loader. 0 is fast for images in memory.
            download: Let `prepare_data` download a named set that is not there.
            image_size: Resize the shorter side to so many pixels and cut out the central square. None keeps
                the size, which all images must share then.
            eval_batch_size: Images in a batch of the validation, test and evaluation loaders.
            max_memory_gb: Most memory that decoded images may take, in GiB; beyond it they stay on disk.
            normalize: Normalise inputs; otherwise they are intensities from 0 to 1, as autoencoders want them.
            crop: Side in pixels of a square that is cut out of each image after resizing: at random for
                augmentation, from the centre everywhere else. None keeps images whole.

        Raises:
            ValueError: If an argument is out of range or the name unknown.
        """
        super().__init__(batch_size, eval_batch_size, num_workers)
        data_dir = str(data_dir)
        self.name = check_choice("name", name, (*NAMED_IMAGES, "imagefolder"))
        self.data_dir = Path(data_dir)
        self.named = NAMED_IMAGES.get(name)
        self.crop = None if crop is None else check_at_least("crop", crop, 1)
        usual = crop is not None or (self.named is not None and self.named.crop_and_flip)
        self.augment = usual if augment is None else augment
        self.val_fraction = check_fraction("val_fraction", val_fraction, zero=True)
        self.split_seed = split_seed
        self.download = download
        self.image_size = None if image_size is None else check_at_least("image_size", image_size, 1)
        if max_memory_gb < 0:
            raise ValueError(f"Expected argument `max_memory_gb` to be at least 0, but got {max_memory_gb}.")
        self.max_memory_gb = max_memory_gb
        self.normalize = normalize
        self.save_hyperparameters(logger=False)

    @property
    def num_classes(self) -> int:
        """Number of classes: the data set's, or the number of class folders."""
        tree = self._tree()
        return self.named.num_classes if tree is None else len(class_names(tree))

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of one input."""
        channels, *size = self._image_shape()
        return (channels, *size) if self.crop is None else (channels, self.crop, self.crop)

    def _image_shape(self) -> tuple[int, int, int]:
        """Return the shape of an image before it is cropped."""
        tree = self._tree()
        channels, *size = self.named.shape if tree is None else (3, None, None)
        if self.image_size is not None:
            size = (self.image_size, self.image_size)
        elif tree is not None:
            size = first_size(tree)
        return (channels, *size)

    def prepare_data(self) -> None:
        """Download a named set that is not there, unless `download` is off.

        Raises:
            FileNotFoundError: If the data is missing and not to be downloaded.
            RuntimeError: If downloading fails.
        """
        if (
            self.download
            and self.named is not None
            and self._tree() is None
            and not self.named.is_complete(self.data_dir)
        ):
            self.named.download(self.data_dir)
        self._require_data()

    def _tree(self) -> Path | None:
        """Return the folder with train/ that the data comes from; None for torchvision's own files."""
        if self.named is None:
            self._require_data()
            return self.data_dir
        if self.named.is_complete(self.data_dir):
            return None
        return next((folder for folder in self._tree_candidates() if is_tree(folder)), None)

    def _tree_candidates(self) -> list[Path]:
        if self.name in ("cifar10", "cifar100"):
            return [self.data_dir, self.data_dir / self.name]
        return [self.data_dir] if self.named is None else []

    def _require_data(self) -> None:
        if self.named is not None and self.named.is_complete(self.data_dir):
            return
        candidates = self._tree_candidates()
        if any(is_tree(folder) for folder in candidates):
            return
        looked_for = [
            f"class folders {folder}/train/CLASS with {folder}/test/CLASS or val/CLASS" for folder in candidates
        ]
        if self.named is None:
            hint = "Point `data_dir` to a folder that has them."
        else:
            missing = next(file for file in self.named.files(self.data_dir) if not file.is_file())
            looked_for.insert(0, f"torchvision's files (missing: {missing})")
            hint = (
                "Pass `download=True` and call `prepare_data()`, as a Trainer does, to download it, "
                "or point `data_dir` to a folder that has it."
            )
        raise FileNotFoundError(f"Found no {self.name} data: looked for {' and for '.join(looked_for)}. {hint}")

    def _load(self) -> ImageSplits:
        self._require_data()
        tree = self._tree()
        sources = self.named.open(self.data_dir) if tree is None else open_tree(tree)
        shape = self._image_shape()
        if tree is not None and self.image_size is None:
            shape = (3, *common_size(sources.values()))
        if self.crop is not None and self.crop > min(shape[1:]):
            raise ValueError(f"Expected argument `crop` to be at most {min(shape[1:])}, but got {self.crop}.")
        parts = {name: (source, None) for name, source in sources.items()}
        if self.val_fraction > 0:
            train, val = stratified_split(_labels(sources["train"]), self.val_fraction, self.split_seed)
            parts["train"], parts["val"] = (sources["train"], train), (sources["train"], val)
        size_gb = sum(len(source) for source in sources.values()) * torch.Size(shape).numel() / 2**30
        if size_gb <= self.max_memory_gb:
            splits = self._in_memory(parts, shape)
        else:
            rank_zero_info(
                f"The images of {self.data_dir} would take {size_gb:.2f} GiB of memory, more than "
                f"max_memory_gb={self.max_memory_gb}: they are decoded anew whenever they are needed."
            )
            splits = self._on_disk(parts, shape)
        splits.plain.setdefault("val", splits.plain["test"])
        return splits

    def _in_memory(self, parts: dict[str, tuple[Any, Tensor | None]], shape: tuple[int, int, int]) -> ImageSplits:
        decoded: dict[int, Tensor] = {}
        tensors = {}
        for name, (source, index) in parts.items():
            if id(source) not in decoded:
                decoded[id(source)] = decode(source, shape, resize_to(self.image_size))
            images, labels = decoded[id(source)], _labels(source)
            tensors[name] = (images, labels) if index is None else (images[index], labels[index])
        mean, std = self._statistics(tensors["train"][0].split(4096))
        plain = {name: TensorImages(self._center(x), labels, mean, std) for name, (x, labels) in tensors.items()}
        if not self.augment:
            return ImageSplits(augmented=plain["train"], plain=plain)
        vary = crop_and_flip if self.crop is None else partial(crop_and_flip, padding=0, size=self.crop)
        return ImageSplits(augmented=TensorImages(*tensors["train"], mean, std, augment=vary), plain=plain)

    def _center(self, images: Tensor) -> Tensor:
        return images if self.crop is None else center_crop(images, self.crop)  # a view: no memory

    def _on_disk(self, parts: dict[str, tuple[Any, Tensor | None]], shape: tuple[int, int, int]) -> ImageSplits:
        from torchvision import transforms

        resize = resize_to(self.image_size)
        source, index = parts["train"]
        index = torch.arange(len(source)) if index is None else index
        sample = index[:: -(-len(index) // STATISTICS_SAMPLE)].tolist()
        normalize = transforms.Normalize(*self._statistics(pixel_batches(source, sample, resize)))
        to_input = [transforms.ToTensor(), normalize]
        before = [] if resize is None else [resize]
        center = [] if self.crop is None else [transforms.CenterCrop(self.crop)]
        plain_transform = transforms.Compose([*before, *center, *to_input])
        plain = {name: _subset(with_transform(part[0], plain_transform), part[1]) for name, part in parts.items()}
        if not self.augment:
            return ImageSplits(augmented=plain["train"], plain=plain)
        window = {"size": shape[1:], "padding": CROP_PADDING} if self.crop is None else {"size": self.crop}
        vary = [transforms.RandomCrop(**window), transforms.RandomHorizontalFlip()]
        varied = with_transform(source, transforms.Compose([*before, *vary, *to_input]))
        return ImageSplits(augmented=_subset(varied, index), plain=plain)

    def _statistics(self, batches: Any) -> tuple[Any, Any]:
        if not self.normalize:
            return [0.0] * self.input_shape[0], [1.0] * self.input_shape[0]
        return channel_statistics(batches) if self.named is None else (self.named.mean, self.named.std)


def crop_and_flip(images: Tensor, padding: int = CROP_PADDING, size: int | None = None) -> Tensor:
    """Crop at random, and flip at random: the usual augmentation for CIFAR.

    Args:
        images: Batch of shape (N, C, H, W).
        padding: Zeros added on every side before.
        size: Height and width h of the window; None for those of the images.

    Returns:
        A new batch of shape (N, C, h, h).
    """
    return RandomHorizontalFlip()(RandomCrop(padding, size)(images))


def _labels(source: Any) -> Tensor:
    return torch.as_tensor(source.targets, dtype=torch.int64)


def _subset(dataset: Any, index: Tensor | None) -> Any:
    return dataset if index is None else Subset(dataset, index.tolist())
