"""Break parameter symmetries: layers with fixed entries, the FiGLU nonlinearity, and ``asymmetrize``."""

from lightning_symmetry.asymmetry.asymmetrize import asymmetrize, fixed_fraction, num_trainable
from lightning_symmetry.asymmetry.conv import AsymmetricConv1d, AsymmetricConv2d
from lightning_symmetry.asymmetry.embed import EmbeddedMLP, embed
from lightning_symmetry.asymmetry.figlu import FiGLU
from lightning_symmetry.asymmetry.layer import AsymmetricLayer
from lightning_symmetry.asymmetry.linear import AsymmetricLinear
from lightning_symmetry.asymmetry.presets import PRESETS

__all__ = [
    "PRESETS",
    "AsymmetricConv1d",
    "AsymmetricConv2d",
    "AsymmetricLayer",
    "AsymmetricLinear",
    "EmbeddedMLP",
    "FiGLU",
    "asymmetrize",
    "embed",
    "fixed_fraction",
    "num_trainable",
]
