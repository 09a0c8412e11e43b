"""Initial factors of a matrix: spectral, spectral ones, and random."""

from __future__ import annotations

import hashlib
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from lightning_symmetry.low_rank.decomposition import Decomposition

Init = Literal["spectral", "spectral_ones", "random"]


def check_init(init: str) -> None:
    """Check the name of an initialisation.

    Raises:
        ValueError: If there is none of that name.
    """
    if init not in get_args(Init):
        raise ValueError(f"Expected `init` to be 'spectral', 'spectral_ones' or 'random' but got {init!r}.")


def initial_factors(
    decomposition: Decomposition,
    rank: int,
    init: Init = "spectral",
    variance: float = 1.0,
    generator: torch.Generator | None = None,
    precision: float = torch.finfo(torch.float32).eps,
) -> tuple[Tensor, Tensor]:
    r"""Return factors U and V of shape ``(G, N, r)`` and ``(G, M, r)``, in float64 or, if random, float32.

    ``"spectral"`` is the truncated decomposition, the nearest matrix of that rank (Eckart-Young),

    .. math:: U = \tilde U_r S_r^{1/2}, \qquad V = \tilde V_r S_r^{1/2}. \qquad (3)

    Where a singular value is zero to rounding, eq. 3 gives two zero columns, which no gradient ever moves. There V
    keeps its zero column and U gets the scale of the smallest singular value that is not: the product is the same, and
    the direction is trained.

    ``"spectral_ones"`` is eq. 3 with :math:`S_r = I`: the directions alone, at another scale.

    ``"random"`` draws Gaussian entries such that those of the product have a given variance,
    :math:`r \sigma_U^2 \sigma_V^2 = \sigma^2`, and both factors the same expected Frobenius norm, as those of eq. 3
    have: :math:`N \sigma_U^2 = M \sigma_V^2`.

    Args:
        decomposition: That of the matrix.
        rank: The number of columns r.
        init: Which of the three.
        variance: Variance of the product's entries, for ``"random"``.
        generator: What ``"random"`` draws from, on the CPU; None: the global random state.
        precision: Singular values below this share of the largest one are zero to rounding.

    Raises:
        DecompositionError: If the matrix has no decomposition.
        ValueError: If there is no such initialisation.

    Source: Exploring Low Rank Training of Deep Neural Networks (2022), section 3.2, eq. 3, and section 4.1.
    """
    check_init(init)
    groups, rows, columns = decomposition.groups, decomposition.rows, decomposition.columns
    if init == "random":
        scale = (variance / rank) ** 0.25
        left = torch.randn(groups, rows, rank, generator=generator, device="cpu")
        right = torch.randn(groups, columns, rank, generator=generator, device="cpu")
        return left * scale * (columns / rows) ** 0.25, right * scale * (rows / columns) ** 0.25
    left, values, right = decomposition.truncate(rank)
    if init == "spectral_ones":
        return left, right
    largest = values.amax(-1, keepdim=True)
    null = values <= precision * largest
    smallest = torch.where(null, torch.inf, values).amin(-1, keepdim=True)
    smallest = torch.where(largest > 0, smallest, 1)
    roots = values.sqrt().unsqueeze(-2)
    null, smallest = null.unsqueeze(-2), smallest.unsqueeze(-2)
    return left * torch.where(null, smallest.sqrt(), roots), right * torch.where(null, 0, roots)


def usual_variance(layer: nn.Module) -> float:
    """Return the variance of a weight's entries as PyTorch initialises the layer.

    That is ``1 / (3 fan_in)`` for linear layers and convolutions (Kaiming's uniform distribution with ``a = sqrt(5)``)
    and 1 for embeddings.
    """
    return 1.0 if isinstance(layer, nn.Embedding) else 1 / (3 * layer.weight[0].numel())


def kept_variance(weight: Tensor, usual: float) -> float:
    """Return the mean square of a weight's entries, which random factors in its place are to have in their product.

    Args:
        weight: The weight.
        usual: What to return where it is zero, which no random factors should be.
    """
    return float(weight.detach().double().square().mean()) or usual


def layer_generator(seed: int, name: str) -> torch.Generator:
    """Return a CPU generator that depends on the seed and the layer's name only."""
    digest = hashlib.sha256(f"low rank/{seed}/{name}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
