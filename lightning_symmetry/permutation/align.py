"""Align a network with another: match, permute, and prove that the function is the same."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_symmetry.landscape.batches import to_device
from lightning_symmetry.permutation.activations import Inputs, first_of_batch, match_activations
from lightning_symmetry.permutation.equivalence import check_equivalence
from lightning_symmetry.permutation.spec import PermutationSpec, check_shapes, trace_permutations
from lightning_symmetry.permutation.weights import match_weights
from lightning_symmetry.surgery import check_constants, constants_of, device_of, example_of

Method = Literal["weights", "activations"]


@dataclass(frozen=True)
class Alignment:
    """A network permuted to be close to another.

    Attributes:
        network: The permuted copy. It computes the same function as the network that was given.
        permutations: The permutation of each group.
        method: How they were found.
        before: Objective before: inner product of the weights, or summed correlation of the units.
        after: Objective after.
        sweeps: Sweeps over all groups.
        seconds: Time it took.
        deviation: Largest relative deviation of the permuted network's output from the original's: rounding.
        spec: The symmetries that were used.
    """

    network: nn.Module
    permutations: dict[str, Tensor]
    method: str
    before: float
    after: float
    sweeps: int
    seconds: float
    deviation: float
    spec: PermutationSpec = field(repr=False)

    @property
    def num_moved(self) -> int:
        """Number of units that are no longer at their old place."""
        return sum(int((p != torch.arange(len(p))).sum()) for p in self.permutations.values())

    def __str__(self) -> str:
        units = sum(len(p) for p in self.permutations.values())
        return (
            f"aligned by {self.method}: objective {self.before:.5g} -> {self.after:.5g} in {self.sweeps} sweep(s), "
            f"{self.num_moved} of {units} units of {len(self.permutations)} groups moved, {self.seconds:.2f} s, "
            f"function kept to {self.deviation:.1e}"
        )


def align(
    b: nn.Module,
    to: nn.Module,
    method: Method = "weights",
    *,
    example_input: Any = None,
    dataloader: Iterable[Any] | None = None,
    inputs: Inputs = first_of_batch,
    num_batches: int | None = None,
    restarts: int | None = None,
    generator: torch.Generator | None = None,
    spec: PermutationSpec | None = None,
    progress: bool = False,
) -> Alignment:
    """Permute the hidden units of ``b`` so that it comes close to another network, without changing its function.

    Args:
        b: The network to permute; it is left as it is.
        to: The network to come close to, of the same architecture.
        method: ``"weights"`` (:func:`match_weights`) or ``"activations"`` (:func:`match_activations`).
        example_input: A tensor, or a tuple or dictionary of arguments, to trace and compare with. Default: the first
            batch of ``dataloader``, if given, else ``b.example_input_array``.
        dataloader: Batches, which activations are matched on.
        inputs: What the network is called with for a batch.
        num_batches: Most batches to match activations on; default all.
        restarts: Descents of weight matching, the best of which counts; see :func:`match_weights`.
        generator: Source of their random orders.
        spec: The symmetries, if they are known already.
        progress: Whether to show a progress bar.

    Returns:
        The permuted copy and how it came about.

    Raises:
        ValueError: If the architectures or the constants differ, or nothing can be permuted (all layers have fixed
            entries), or ``"activations"`` has no ``dataloader``.
        NotEquivalentError: If the permuted copy does not compute the same function.
    """
    start = time.perf_counter()
    if method not in ("weights", "activations"):
        raise ValueError(f"Expected `method` to be 'weights' or 'activations' but got {method!r}.")
    if method == "activations" and dataloader is None:
        raise ValueError("align(method='activations') needs `dataloader`, the batches to match activations on.")
    check_shapes(_shapes(to), _shapes(b), "the network to align to")
    check_constants(constants_of(to), constants_of(b), "to", "b")
    if example_input is None and dataloader is not None:
        first, dataloader = _peek(dataloader, keep=method == "activations")
        example_input = inputs(first)
    example_input = to_device(example_of(b, example_input), device_of(b))
    spec = spec or trace_permutations(b, example_input)
    if method == "weights":
        match = match_weights(to, b, spec, restarts=restarts, generator=generator, progress=progress)
    else:
        match = match_activations(to, b, spec, dataloader, inputs=inputs, num_batches=num_batches, progress=progress)
    network = copy.deepcopy(b)
    network.load_state_dict(spec.apply(b.state_dict(), match.permutations))
    deviation = check_equivalence(b, network, example_input)
    seconds = time.perf_counter() - start
    return Alignment(
        network, match.permutations, method, match.before, match.after, match.sweeps, seconds, deviation, spec
    )


def _peek(dataloader: Iterable[Any], keep: bool) -> tuple[Any, Iterable[Any]]:
    """Return the first batch, and all batches again: an iterator gives each only once."""
    batches = iter(dataloader)
    for first in batches:
        return first, chain([first], batches) if keep else ()
    raise ValueError("The dataloader gave no batches to align with.")


def _shapes(net: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in net.state_dict().items() if isinstance(tensor, Tensor)}
