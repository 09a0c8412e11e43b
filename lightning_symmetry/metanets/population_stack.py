"""Networks of one architecture as one network with stacked parameters."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_symmetry.metanets.zoo_layout import ZooLayout
from lightning_symmetry.surgery import HasConstants, check_constants, constants_of


class PopulationStack:
    """The states of K networks, stacked, and one network to run them all with.

    Parameters that are trained stand in one matrix, a row a network, of which :attr:`parameters` are views.
    Floating-point buffers are stacked too. Constants of asymmetric layers, and integer and boolean buffers that agree
    (``num_batches_tracked`` of networks that step together), are held once.

    Args:
        networks: Networks of one architecture and with the same constants; they are left as they are.
        states: The states, stacked; by default those of the networks. What is missing is taken from the first network.

    Attributes:
        network: A copy of the first network, whose own tensors are only read where they are held once.
        weights: Trained parameters, shape ``(K, P)``.
        parameters: Views of them by name, ``(K, *shape)``.
        buffers: What else is stacked: buffers, and parameters that need no gradient.
        shared: What is held once, unstacked.

    Raises:
        ValueError: If there are no networks, their architectures or constants differ, or one without given
            ``states`` draws random numbers in training.
    """

    def __init__(self, networks: Sequence[nn.Module], states: Mapping[str, Tensor] | None = None) -> None:
        check_networks(networks)
        self.network = copy.deepcopy(networks[0])
        if states is None:
            refuse_random_modules(self.network)
        first = _state(self.network)
        stacked = {name: torch.stack([state[name] for state in map(_state, networks)]) for name in first}
        constants = constants_of(self.network)
        if states is not None:
            stacked = _given(states, first, constants)
        trained = {name for name, p in self.network.named_parameters() if p.requires_grad}
        self._slices: dict[str, tuple[slice, torch.Size]] = {}
        self.buffers: dict[str, Tensor] = {}
        self.shared: dict[str, Tensor] = {}
        rows, offset = [], 0
        for name, value in first.items():
            if name in trained:
                self._slices[name] = slice(offset, offset + value.numel()), value.shape
                offset += value.numel()
                rows.append(stacked[name].flatten(1))
            elif name in constants or (
                not value.is_floating_point() and bool((stacked[name] == stacked[name][:1]).all())
            ):
                self.shared[name] = stacked[name][0].clone()
            else:
                self.buffers[name] = stacked[name].clone()
        if not rows:
            raise ValueError(f"{type(self.network).__name__} has no parameters to train.")
        if len({row.dtype for row in rows}) > 1:
            raise ValueError(f"Expected parameters of one dtype but got {sorted({str(row.dtype) for row in rows})}.")
        self.weights = torch.cat(rows, 1)
        # Names of the state_dict, and which tensor of the stack each stands for: of tied ones, the first.
        self._persistent = {name: _owner(self.network, name) for name in self.network.state_dict()}
        self._fixed = torch.zeros(offset, dtype=torch.bool, device=self.weights.device)
        self._constants = self.weights[0].clone()
        for name, module in self.network.named_modules():
            place = self._slices.get(f"{name}.weight".lstrip("."))
            if isinstance(module, HasConstants) and hasattr(module, "trainable_entries") and place is not None:
                self._fixed[place[0]] = ~module.trainable_entries().flatten()

    def __len__(self) -> int:
        return len(self.weights)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Views of :attr:`weights` by name."""
        return {name: self.weights[:, place].view(-1, *shape) for name, (place, shape) in self._slices.items()}

    def keep(self, rows: Tensor) -> None:
        """Keep only some networks.

        Args:
            rows: Their numbers, shape ``(k,)``.
        """
        self.weights = self.weights[rows]
        self.buffers = {name: value[rows] for name, value in self.buffers.items()}

    def state(self) -> dict[str, Tensor]:
        """Return a copy of what the ``state_dict`` of each network would be, stacked; what is held once, expanded."""
        # What weight decay does to the constants in a weight never shows.
        self.weights = torch.where(self._fixed, self._constants, self.weights)
        found = {**self.parameters, **self.buffers}
        state = {}
        for name, owner in self._persistent.items():
            if owner in found:
                state[name] = found[owner].clone()
            else:
                state[name] = self.shared[owner].clone().expand(len(self), *self.shared[owner].shape)
        return state

    def call(self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], input: Tensor) -> Tensor:
        """Run one network; to be called under ``vmap``.

        Args:
            parameters: Its parameters.
            buffers: Its stacked buffers, which it may change in place.
            input: Its batch.

        Returns:
            Its output.

        Raises:
            ValueError: If it draws random numbers.
        """
        try:
            return functional_call(self.network, {**self.shared, **buffers, **parameters}, (input,))
        except RuntimeError as error:
            if "randomness" not in str(error):
                raise
            raise ValueError(
                f"The forward pass of {type(self.network).__name__} draws random numbers. A population has no random "
                f"numbers of each network's own: take networks without. ({error})"
            ) from error


def check_networks(networks: Sequence[nn.Module]) -> None:
    """Check that networks can be stacked.

    Args:
        networks: The networks.

    Raises:
        ValueError: If there are none, or their architectures or constants differ; the message names both sides.
    """
    if len(networks) == 0:
        raise ValueError("Expected `networks` to have at least one network but got none.")
    first, layout, text = networks[0], ZooLayout.of(networks[0]), repr(networks[0])
    frozen = [name for name, p in first.named_parameters() if not p.requires_grad]
    for number, network in enumerate(networks[1:], 1):
        left, right = "network 0", f"network {number}"
        if type(network) is not type(first):
            raise ValueError(
                f"The networks differ in their architecture: {left} is a {type(first).__name__}, "
                f"{right} a {type(network).__name__}."
            )
        difference = layout.difference(ZooLayout.of(network), left, right)
        if difference is None and repr(network) != text:
            ours, theirs = text.splitlines(), repr(network).splitlines()
            pairs = [(a, b) for a, b in zip(ours, theirs, strict=False) if a != b] or [(ours[-1], theirs[-1])]
            difference = f"{left} has {pairs[0][0].strip()}, {right} has {pairs[0][1].strip()}"
        if difference is None and [name for name, p in network.named_parameters() if not p.requires_grad] != frozen:
            difference = f"{left} and {right} train other parameters"
        if difference is not None:
            raise ValueError(f"The networks differ in their architecture: {difference}.")
        check_constants(constants_of(first), constants_of(network), left, right)


def _state(network: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers, detached, each under its first name; writes the constants into the weights."""
    network.state_dict()
    return {name: value.detach() for name, value in [*network.named_parameters(), *network.named_buffers()]}


def _given(
    states: Mapping[str, Tensor], first: Mapping[str, Tensor], constants: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return stacked states by the first name of each tensor."""
    if not states:
        raise ValueError("Expected `states` to hold stacked tensors but got none.")
    count = len(next(iter(states.values())))
    stacked = {}
    for name, value in first.items():
        given = states.get(name)
        if given is None:
            stacked[name] = value.expand(count, *value.shape)
            continue
        if given.shape != (count, *value.shape):
            raise ValueError(
                f"Expected {name} of `states` to have shape {(count, *value.shape)} but got {tuple(given.shape)}."
            )
        if name in constants and not bool((given == value).all()):
            raise ValueError(f"Expected the constants {name} of `states` to be those of `network`, but they differ.")
        stacked[name] = given
    return stacked


def _owner(network: nn.Module, name: str) -> str:
    """Return the first name of a tensor that may stand at several places."""
    tensors: dict[str, Any] = dict(network.named_parameters(remove_duplicate=False))
    tensors.update(network.named_buffers(remove_duplicate=False))
    return next(other for other, tensor in tensors.items() if tensor is tensors[name])


def refuse_random_modules(network: nn.Module) -> None:
    """Refuse networks whose forward pass draws random numbers in training.

    Args:
        network: The network.

    Raises:
        ValueError: If it has dropout or the like; the message names the layer.
    """
    for name, module in network.named_modules():
        rate = getattr(module, "dropout", 0.0) if isinstance(module, nn.RNNBase | nn.MultiheadAttention) else 0.0
        if isinstance(module, nn.modules.dropout._DropoutNd):
            rate = module.p
        if rate > 0 or isinstance(module, nn.RReLU):
            raise ValueError(
                f"{name or 'The network'} ({type(module).__name__}) draws random numbers in training. A population has "
                "no random numbers of each network's own: take networks without it, or with its probability at 0."
            )
