"""LightningDataModules: data that needs no download, and the usual image, graph and text data sets."""

from lightning_symmetry.data.augment import RandomCrop, RandomHorizontalFlip
from lightning_symmetry.data.digits import DigitsData
from lightning_symmetry.data.graphs import ArxivData, DigitsGraph, PlanetoidData
from lightning_symmetry.data.image_dataset import TensorImages
from lightning_symmetry.data.text import TextData
from lightning_symmetry.data.text_windows import TokenWindows
from lightning_symmetry.data.vision import VisionData
from lightning_symmetry.data.zoo import ZooData

__all__ = [
    "ArxivData",
    "DigitsData",
    "DigitsGraph",
    "PlanetoidData",
    "RandomCrop",
    "RandomHorizontalFlip",
    "TensorImages",
    "TextData",
    "TokenWindows",
    "VisionData",
    "ZooData",
]
