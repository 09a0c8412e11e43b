"""Train many networks of one architecture at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from lightning_symmetry.metanets.population_evaluation import (
    evaluate_population,
    smoothed_cross_entropy,
    stacked_layers,
)
from lightning_symmetry.metanets.population_optimizer import stacked_optimizer
from lightning_symmetry.metanets.population_settings import (
    PopulationSettings,
    checked_hyperparameters,
    learning_rate_factor,
)
from lightning_symmetry.metanets.population_stack import PopulationStack, check_networks

__all__ = ["PopulationResult", "PopulationSettings", "evaluate_population", "suggested_chunk", "train_population"]

_SAMPLES_AT_ONCE = 1024  # of all networks: from here on larger stacks are not faster
_BYTES_AT_ONCE = 2**29  # of tensors kept for the backward pass


@dataclass
class PopulationResult:
    """What came of a population of K networks.

    Attributes:
        initial: Their states before the training, by name as in a ``state_dict``, each ``(K, *shape)``.
        final: Their states after it. That of a network that diverged is the one at which its loss was first not
            finite, before the update that this loss would have given; it may be finite or not.
        diverged: Whether a loss, or a final number that is not the initial one, was not finite, shape ``(K,)``.
        epochs_done: Number of whole epochs, shape ``(K,)``.
        train_loss: Mean loss over the last epoch as it was minimised (augmented, with label smoothing, while the
            weights changed), float64 of shape ``(K,)``; NaN where a network diverged.
        train_accuracy: Share of right answers in the same passes.
        history_loss: The same for each epoch, shape ``(K, max_epochs)``; NaN from the end of a network's training.
        history_accuracy: The same.
    """

    initial: dict[str, Tensor]
    final: dict[str, Tensor]
    diverged: Tensor
    epochs_done: Tensor
    train_loss: Tensor
    train_accuracy: Tensor
    history_loss: Tensor
    history_accuracy: Tensor


def train_population(
    networks: Sequence[nn.Module],
    inputs: Tensor,
    targets: Tensor,
    hyperparameters: Mapping[str, Any],
    settings: PopulationSettings | None = None,
    *,
    on_epoch: Callable[[int], None] | None = None,
    networks_at_once: int | None = None,
) -> PopulationResult:
    """Train K networks at once; each goes the way that it would go alone, to rounding.

    Network k minimises the mean cross-entropy with its own label smoothing, by the optimizer of the settings with its
    own peak rate and weight decay, for its own number of epochs. ``torch.Generator().manual_seed(seed[k])`` draws one
    ``torch.randperm(N)`` an epoch for the order of its samples, and between these what its augmentation draws. What a
    network computes does not depend on its company but for rounding; the same call gives the same bits.

    A network whose loss is not finite leaves the population at once, one that is done at the end of its last epoch.
    Constants of asymmetric layers stay as they are. Networks of like numbers of epochs are stacked, some at a time; how
    many does not change what a network computes but for rounding.

    Args:
        networks: K untrained networks of one architecture and with the same constants; they are left as they are.
        inputs: Training data, shape ``(N, *sample)``, of the dtype and on the device of the networks.
        targets: Classes, int64 of shape ``(N,)``.
        hyperparameters: ``learning_rate``, ``weight_decay``, ``label_smoothing``, ``epochs`` and ``seed``, each of
            shape ``(K,)``; other keys are left out.
        settings: What all networks share.
        on_epoch: Called with the number of network-epochs just done, or given up where a network diverged; they add up
            to the sum of ``epochs``.
        networks_at_once: Networks in a stack, at most; by default :func:`suggested_chunk`.

    Returns:
        The trained networks.

    Raises:
        ValueError: If architectures or constants differ, a network draws random numbers in training, or the data or a
            hyper-parameter is not as described.
    """
    settings = PopulationSettings() if settings is None else settings
    values = checked_hyperparameters(hyperparameters, len(networks))
    check_networks(networks)
    _check_data(inputs, targets, networks[0], settings)
    _keep_freed_memory()
    size = suggested_chunk(networks[0], inputs, settings.batch_size) if networks_at_once is None else networks_at_once
    if size < 1:
        raise ValueError(f"Expected `networks_at_once` to be at least 1 but got {size}.")
    order = np.argsort(values["epochs"], kind="stable")
    results = []
    for rows in np.array_split(order, -(-len(order) // size)):
        stack = PopulationStack([networks[row] for row in rows])
        own = {name: value[rows] for name, value in values.items()}
        results.append(_Training(stack, inputs, targets, own, settings, on_epoch or (lambda count: None)).run())
    return _merged(results, order)


def suggested_chunk(network: nn.Module, inputs: Tensor, batch_size: int) -> int:
    """Return how many networks to train at once: fast, and within half a gigabyte of activations.

    Args:
        network: One of the networks.
        inputs: Training data, of which two samples are used.
        batch_size: Samples of each network in a step.

    Returns:
        Number of networks, from 1 to 64; a function of the arguments' shapes alone.
    """
    stack, sizes = PopulationStack([network]), []

    def keep(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    stack.network.train()
    with torch.random.fork_rng(devices=[]), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        stack.network(inputs[:1].repeat_interleave(2, 0))
    most = int(_BYTES_AT_ONCE / max(1.0, sum(sizes) / 2 * batch_size))
    return max(1, min(64, most, -(-_SAMPLES_AT_ONCE // batch_size)))


def _keep_freed_memory() -> None:
    """Let the C library keep what a step frees for the next one.

    The GNU library gives large blocks back to the system, and each step would fault its pages in anew, which took an
    eighth of the time. It raises its limits to the largest mapped block that was ever freed, up to 32 MiB.
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8)


def _merged(results: list[PopulationResult], order: np.ndarray) -> PopulationResult:
    """Return results of parts as one; ``order`` says which network each row of all parts is."""
    back = torch.as_tensor(np.argsort(order))
    longest = max(result.history_loss.shape[1] for result in results)

    def joined(name: str) -> Any:
        parts = [getattr(result, name) for result in results]
        if isinstance(parts[0], dict):
            return {key: torch.cat([part[key] for part in parts])[back] for key in parts[0]}
        if name.startswith("history"):
            parts = [F.pad(part, (0, longest - part.shape[1]), value=torch.nan) for part in parts]
        return torch.cat(parts)[back]

    return PopulationResult(**{field.name: joined(field.name) for field in fields(PopulationResult)})


class _Training:
    """The training of one population; networks that are left stand in the stack, in the order of ``active``."""

    def __init__(
        self,
        stack: PopulationStack,
        inputs: Tensor,
        targets: Tensor,
        values: dict[str, np.ndarray],
        settings: PopulationSettings,
        on_epoch: Callable[[int], None],
    ) -> None:
        self._stack, self._inputs, self._targets, self._settings = stack, inputs, targets, settings
        self._values, self._on_epoch, self._augment = values, on_epoch, settings.augmentation()
        stack.network.train()
        count, longest = len(stack), int(values["epochs"].max())
        self._initial = stack.state()
        self._final = {name: value.clone() for name, value in self._initial.items()}
        self._optimizer = stacked_optimizer(settings, stack.weights)
        self._generators = [torch.Generator().manual_seed(int(seed)) for seed in values["seed"]]
        self._steps = values["epochs"] * -(-len(inputs) // settings.batch_size)
        self._step = 0
        self._active = np.arange(count)
        self._diverged = torch.zeros(count, dtype=torch.bool)
        self._epochs_done = torch.zeros(count, dtype=torch.int64)
        self._history = torch.full((2, count, longest), torch.nan, dtype=torch.float64)

    def run(self) -> PopulationResult:
        """Train until no network is left."""
        epoch = 0
        while len(self._active) > 0:
            sums = self._run_epoch(epoch)
            self._history[:, self._active, epoch] = sums[:, self._active] / len(self._inputs)
            self._epochs_done[self._active] += 1
            epoch += 1
            if len(self._active) > 0:
                self._on_epoch(len(self._active))
                self._leave(self._values["epochs"][self._active] == epoch)
        for name, value in self._final.items():
            if value.is_floating_point():  # an infinity may stand there from the start, as in an attention mask
                self._diverged |= ~(value.isfinite() | (value == self._initial[name])).flatten(1).all(1).cpu()
        last = (self._epochs_done - 1).clamp_min(0).unsqueeze(1)
        loss, accuracy = (h.gather(1, last)[:, 0].masked_fill(self._diverged, torch.nan) for h in self._history)
        return PopulationResult(
            self._initial, self._final, self._diverged, self._epochs_done, loss, accuracy, *self._history
        )

    def _run_epoch(self, epoch: int) -> Tensor:
        """Do the steps of an epoch, and return sums of losses and right answers, shape ``(2, K)``."""
        samples, size = len(self._inputs), self._settings.batch_size
        orders = {k: torch.randperm(samples, generator=self._generators[k]) for k in self._active.tolist()}
        sums = torch.zeros(2, len(self._generators), dtype=torch.float64)
        for start in range(0, samples, size):
            index = torch.stack([orders[k][start : start + size] for k in self._active.tolist()])
            losses, right, grad = self._gradients(index.to(self._inputs.device))
            finite = losses.isfinite().cpu()
            sums[0, self._active] += losses.cpu().double() * index.shape[1]
            sums[1, self._active] += right.cpu().double()
            if not finite.all():
                gone = self._active[~finite.numpy()]
                self._diverged[gone] = True
                grad = grad[finite.to(grad.device)]
                self._leave(~finite.numpy())
                self._on_epoch(int((self._values["epochs"][gone] - epoch).sum()))
                if len(self._active) == 0:
                    break
            factor = learning_rate_factor(self._step, self._steps[self._active], self._settings.warmup)
            rate = self._column(self._values["learning_rate"][self._active] * factor)
            self._optimizer.step(self._stack.weights, grad, rate, self._of_active("weight_decay").unsqueeze(1))
            self._step += 1
        return sums

    def _gradients(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return losses and right answers of each network, and gradients ``(K, P)``, for samples ``(K, B)``."""
        x, y = self._augmented(self._inputs[index]), self._targets[index]
        parameters = {name: value.detach().requires_grad_() for name, value in self._stack.parameters.items()}
        with stacked_layers(x.device):
            logits = vmap(self._stack.call)(parameters, self._stack.buffers, x)
        losses = smoothed_cross_entropy(logits, y, self._of_active("label_smoothing")).mean(1)
        # Each network's loss depends on its own parameters alone, and a NaN of one does not reach the others.
        grads = torch.autograd.grad(losses.sum(), list(parameters.values()), allow_unused=True)
        rows = [
            (torch.zeros_like(value) if grad is None else grad).flatten(1)
            for grad, value in zip(grads, parameters.values(), strict=True)
        ]
        return losses.detach(), (logits.detach().argmax(-1) == y).sum(1), torch.cat(rows, 1)

    def _augmented(self, images: Tensor) -> Tensor:
        """Change the images ``(K, B, *sample)`` of each network with its own random numbers."""
        generators = [self._generators[k] for k in self._active.tolist()]
        if self._augment is None:
            return images
        if hasattr(self._augment, "draw"):
            draws = torch.cat([self._augment.draw(images.shape[1], generator) for generator in generators])
            return self._augment.apply(images.flatten(0, 1), draws).unflatten(0, images.shape[:2])
        return torch.stack([self._augment(own, g) for own, g in zip(images, generators, strict=True)])

    def _leave(self, gone: np.ndarray) -> None:
        """Take networks out of the stack and keep their states; ``gone`` is true for them, shape ``(active,)``."""
        if not gone.any():
            return
        state, rows = self._stack.state(), torch.as_tensor(np.flatnonzero(gone))
        for name, value in self._final.items():
            value[self._active[gone]] = state[name][rows]
        left = torch.as_tensor(np.flatnonzero(~gone))
        self._stack.keep(left)
        self._optimizer.keep(left)
        self._active = self._active[~gone]

    def _of_active(self, name: str) -> Tensor:
        return self._column(self._values[name][self._active]).squeeze(1)

    def _column(self, values: np.ndarray) -> Tensor:
        weights = self._stack.weights
        return torch.as_tensor(values, dtype=weights.dtype, device=weights.device).unsqueeze(1)


def _check_data(inputs: Tensor, targets: Tensor, network: nn.Module, settings: PopulationSettings) -> None:
    if len(inputs) == 0 or targets.shape != inputs.shape[:1]:
        raise ValueError(
            "Expected `inputs` and `targets` to have one entry a sample but got shapes "
            f"{tuple(inputs.shape)} and {tuple(targets.shape)}."
        )
    if targets.dtype != torch.int64:
        raise ValueError(f"Expected `targets` to be classes (int64) but got {targets.dtype}.")
    weights = next(network.parameters())
    if settings.augment is None and inputs.is_floating_point() and inputs.dtype != weights.dtype:
        raise ValueError(f"Expected `inputs` to be {weights.dtype} as the networks are but got {inputs.dtype}.")
    if inputs.device != weights.device:
        raise ValueError(f"Expected `inputs` on {weights.device}, where the networks are, but got {inputs.device}.")
