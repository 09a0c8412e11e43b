"""Embed a standard MLP, exactly, in a W-asymmetric one."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init

from lightning_symmetry.asymmetry.embed_compact import compact_map
from lightning_symmetry.asymmetry.embed_mlp import read_mlp
from lightning_symmetry.asymmetry.embed_paper import NEURONS, paper_map
from lightning_symmetry.asymmetry.linear import AsymmetricLinear
from lightning_symmetry.asymmetry.masks import check_counts, layer_generator

Construction = Literal["compact", "paper"]

_GROWTHS = 24  # of the width by an eighth, where it is not given: up to about 15 times
_PRECISION, _SAMPLES = 1e-9, 64  # of the check at the end: relative to the largest output, and inputs


class EmbeddedMLP(nn.Module):
    r"""The W-asymmetric network that :func:`embed` returns, called like the MLP: it pads the input with zeros itself.

    .. math:: x \mapsto A'_L\, \eta(B'_L\, \eta(\cdots A'_1\, \eta(B'_1 [x; 0] + p_1) + b_1 \cdots) + p_L) + b_L

    Args:
        linears: The asymmetric layers :math:`B'_1, A'_1, \ldots, B'_L, A'_L`, with their biases.
        activation: :math:`\eta`, of which each place gets a copy.
        in_features: Number of inputs, before padding.
        flatten: Whether inputs are flattened to ``(N, in_features)``; otherwise the last axis is mapped.

    Attributes:
        linears: The asymmetric layers, two for each linear layer of the MLP.
        activations: The activations between them.
        in_features: Number of inputs, before padding.
        flatten: Whether inputs are flattened.

    Raises:
        ValueError: If an input has another number of features.

    Source: The Empirical Impact of Neural Parameter Symmetries, or Lack Thereof (2024), Theorem 4.
    """

    def __init__(
        self, linears: Sequence[AsymmetricLinear], activation: nn.Module, in_features: int, flatten: bool
    ) -> None:
        super().__init__()
        self.linears = nn.ModuleList(linears)
        self.activations = nn.ModuleList(copy.deepcopy(activation) for _ in linears[1:])
        self.in_features = in_features
        self.flatten = flatten

    @property
    def widths(self) -> tuple[int, ...]:
        """Sizes of the padded input, of each hidden layer and of the output: ``(n, H, n, H, ..., num_outputs)``."""
        return (self.linears[0].in_features, *(linear.out_features for linear in self.linears))

    @property
    def example_input_array(self) -> Tensor:
        """An input of the right shape."""
        return torch.zeros(2, self.in_features)

    def forward(self, input: Tensor) -> Tensor:
        """Map ``(..., in_features)``, or ``(N, ...)`` where inputs are flattened, to ``(..., num_outputs)``."""
        hidden = input.flatten(1) if self.flatten else input
        if hidden.shape[-1] != self.in_features:
            raise ValueError(f"Expected {self.in_features} features but got an input of shape {tuple(input.shape)}.")
        hidden = F.pad(hidden, (0, self.widths[0] - self.in_features))
        for linear, activation in zip(self.linears, self.activations, strict=False):
            hidden = activation(linear(hidden))
        return self.linears[-1](hidden)


def embed(
    mlp: nn.Module,
    *,
    n_fix: int = 2,
    kappa: float = 1.0,
    seed: int = 0,
    construction: Construction = "compact",
    width: int | None = None,
    hidden: int | None = None,
) -> EmbeddedMLP:
    r"""Build a W-asymmetric MLP that computes the same function as a standard one, its constants being what they are.

    Each linear layer :math:`x \mapsto W x + b` becomes two asymmetric ones,

    .. math:: W x + b = A' \eta(B' [x; 0] + p) + b, \qquad \eta(z) - \eta(-z) = z,

    with B' of shape (H, n) and A' of shape (n, H), the last one (num_outputs, H). Masks and constants are those that
    ``asymmetrize(net, n_fix=n_fix, kappa=kappa, seed=seed)`` draws in a standard MLP of the same widths; only free
    entries are chosen. The identity of the activation holds for ReLU, GELU (exact and tanh), SiLU and Hardswish, and is
    checked. All is computed in float64 and then rounded to the type of the MLP: embed ``mlp.double()`` for a function
    that is the same to 1e-8 and better.

    ``construction="paper"`` is that of the proof: blocks of 24 neurons, in triples of equal ones. Only which neurons
    form a block is chosen more freely, without which n would have to be tens of thousands; see
    :mod:`lightning_symmetry.asymmetry.embed_paper`. H = 24 n.

    ``construction="compact"`` pairs neurons with opposite weights and solves linear equations for the coefficients,
    which is exact with probability one where a matching of the neurons exists; see
    :mod:`lightning_symmetry.asymmetry.embed_compact`. H = 4 n.

    With n_fix = 1 there are n distinct masks for the H rows of B', and H for the n rows of A', so H = n. For the
    paper's construction n is then a multiple of 24, and at least 24 times the most outputs of a linear layer.

    Args:
        mlp: A :class:`~lightning_symmetry.MLP` without norm, or an ``nn.Sequential`` of ``nn.Linear`` with one kind of
            activation between them, perhaps after ``nn.Flatten()``. It is not changed. A single linear layer is
            embedded with ReLU.
        n_fix: Fixed entries of each row of each layer.
        kappa: Standard deviation of the constants.
        seed: Seed of masks and constants.
        construction: ``"compact"`` or ``"paper"``.
        width: n, at least the MLP's widest input of a linear layer. Default: grown until the masks admit it.
        hidden: H. Default as above; for the compact construction, at most the number of distinct masks.

    Returns:
        The network, on the device and of the type of the MLP, all of it trainable; ``widths`` says how wide it is.

    Raises:
        TypeError: If the MLP has other modules than linear layers and activations, or is no MLP.
        ValueError: If the activation lacks the identity, layers are normalised or do not follow one another; if the
            masks of this width and seed do not admit the construction, where the text names the block or row and says
            why; or if the constants are so large that rounding would show.

    Source: The Empirical Impact of Neural Parameter Symmetries, or Lack Thereof (2024), Theorem 4, App. B.3.3, B.3.4.
    """
    linears, activation, flatten = read_mlp(mlp)
    _check_settings(linears, n_fix, kappa, construction, width, hidden)
    like = linears[0].weight
    plain = [copy.deepcopy(linear).to("cpu", torch.float64) for linear in linears]
    for n in _widths(plain, n_fix, construction) if width is None else [width]:
        h = hidden or _default_hidden(n, n_fix, construction)
        try:
            layers = _embedded(plain, activation, n, h, (n_fix, kappa, seed), construction)
            break
        except ValueError as error:
            inadmissible = error
    else:
        raise ValueError(
            f"{str(inadmissible).rstrip()} With width={n}, hidden={h}, n_fix={n_fix} and seed={seed} the masks do not "
            f"admit the {construction} construction: take a larger width, a smaller n_fix or another seed."
        ) from inadmissible
    net = EmbeddedMLP(layers, activation, plain[0].in_features, flatten)
    _check_function(net, plain)
    return net.to(like.device, like.dtype).train(mlp.training)


def _embedded(
    linears: Sequence[nn.Linear],
    activation: nn.Module,
    width: int,
    hidden: int,
    settings: tuple[int, float, int],
    construction: Construction,
) -> list[AsymmetricLinear]:
    """Draw all layers of the network, ``settings`` being n_fix, kappa and seed, and set their free entries."""
    n_fix, kappa, seed = settings
    sizes = [width, *[hidden, width] * (len(linears) - 1), hidden, linears[-1].out_features]
    layers = []
    for k, (n, m) in enumerate(pairwise(sizes)):
        check_counts(m, n, n_fix, f"Layer linears.{k}", "")
        plain = skip_init(nn.Linear, n, m, dtype=torch.float64)
        layers.append(AsymmetricLinear.from_layer(plain, n_fix, kappa, seed=seed, name=f"linears.{k}"))
    at_zero = float(activation(torch.zeros(1, dtype=torch.float64)))
    for k, linear in enumerate(linears):
        b, a = layers[2 * k : 2 * k + 2]
        weight = linear.weight.detach()
        bias_b, bias_a = torch.zeros(hidden, dtype=torch.float64), torch.zeros(a.out_features, dtype=torch.float64)
        if linear.bias is not None:
            bias_a[: len(weight)] = linear.bias.detach()
        title = f"Map {k} (layers linears.{2 * k} and linears.{2 * k + 1})"
        if construction == "paper":
            weight_b, weight_a = paper_map(weight, b, a, title)
        else:
            generator = layer_generator(seed, f"map {k}")
            weight_b, weight_a, bias_b = compact_map(weight, b, a, at_zero if k else 0.0, generator, title)
        _fill(b, weight_b, bias_b)
        _fill(a, weight_a, bias_a)
    return layers


@torch.no_grad()
def _fill(layer: AsymmetricLinear, weight: Tensor, bias: Tensor) -> None:
    """Set the free entries of a layer."""
    layer.weight.copy_(weight)
    layer.bias.copy_(bias)
    layer.restore_constants()


def _widths(linears: Sequence[nn.Linear], n_fix: int, construction: Construction) -> Iterator[int]:
    """Yield the widths to try, from one at which there are neurons enough."""
    width = max(n_fix + 1, *(linear.in_features for linear in linears))
    if construction == "paper":
        width = max(width, n_fix**2)
        if n_fix == 1:
            width = NEURONS * max(math.ceil(width / NEURONS), *(linear.out_features for linear in linears))
    elif n_fix == 1:
        width = 4 * width + 4  # so that there are twice as many pairs as inputs
    else:
        while math.comb(width, n_fix) < 4 * width:
            width += 1
    for _ in range(_GROWTHS):
        yield width
        width += max(1, width // 8)


def _default_hidden(width: int, n_fix: int, construction: Construction) -> int:
    """Return the default H: 24 n or 4 n, or as many as have distinct masks."""
    if construction == "paper":
        return NEURONS * (width if n_fix > 1 else width // NEURONS)
    return max(2, min(4 * width, math.comb(width, n_fix) // 2 * 2))


def _check_settings(
    linears: Sequence[nn.Linear],
    n_fix: int,
    kappa: float,
    construction: Construction,
    width: int | None,
    hidden: int | None,
) -> None:
    """Refuse settings that no masks make good."""
    if isinstance(n_fix, bool) or not isinstance(n_fix, int) or n_fix < 1:
        raise ValueError(f"Expected n_fix to be a positive integer but got {n_fix!r}.")
    if not 0 <= kappa < math.inf:
        raise ValueError(f"Expected kappa to be positive (or 0, fixed zeros) but got {kappa}.")
    if construction not in ("compact", "paper"):
        raise ValueError(f"Expected `construction` to be 'compact' or 'paper' but got {construction!r}.")
    least = max(linear.in_features for linear in linears)
    if width is not None and width < least:
        raise ValueError(f"Expected width to be at least {least}, the most inputs of a linear layer, but got {width}.")
    if hidden is not None and hidden < 2:
        raise ValueError(f"Expected hidden to be at least 2 but got {hidden}.")
    blocks = max(linear.out_features for linear in linears)
    if construction == "paper" and hidden is not None and (hidden % NEURONS or hidden < NEURONS * blocks):
        raise ValueError(
            f"Expected hidden to be a multiple of {NEURONS} and at least {NEURONS} * {blocks}, a block for each output "
            f"of a linear layer, but got {hidden}."
        )


@torch.no_grad()
def _check_function(net: EmbeddedMLP, linears: Sequence[nn.Linear]) -> None:
    """Compare with the MLP in float64: constants may be so large that their differences round off what is wanted."""
    generator = layer_generator(0, "inputs")
    x = torch.randn(_SAMPLES, net.in_features, generator=generator, dtype=torch.float64)
    expected = linears[0](x)
    for linear, activation in zip(linears[1:], net.activations, strict=False):
        expected = linear(activation(expected))
    miss, size = float((net(x) - expected).abs().max()), float(expected.abs().max())
    if not miss <= _PRECISION * (size or 1.0):
        raise ValueError(
            f"The embedding misses the MLP by {miss:.1e} of {size:.1e} through rounding: its "
            f"constants of kappa={net.linears[0].kappa:g} are too large, or its equations too nearly singular; take a "
            "smaller kappa, a larger width or another seed."
        )
