"""What ``factorize`` would do with a network, as far as it can be told without decompositions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_symmetry.low_rank.candidates import find_layers, plain, tied_weights, why_left_alone
from lightning_symmetry.low_rank.conv import check_scheme
from lightning_symmetry.low_rank.convert import NotWorthwhile, check_saving_by_shape
from lightning_symmetry.low_rank.cost import Call, watch_calls
from lightning_symmetry.low_rank.initialisation import check_init
from lightning_symmetry.low_rank.projections import projections_of
from lightning_symmetry.low_rank.rank import Rank, check_rank
from lightning_symmetry.surgery import match_patterns, settings_for


@dataclass(frozen=True)
class Plan:
    """Which layers of a network are to be factorised, and how.

    Attributes:
        layers: The layers that hold matrices, by name.
        settings: ``rank``, ``init``, ``scheme`` and ``min_saving`` of each.
        ties: The names that share a weight, by name.
        reasons: Why a layer is left alone, by name, other than that it is skipped.
        skipped: Names of the layers that are skipped.
        asked_for: Names of the layers that were given a number as their rank by their full name.
        calls: The calls of each layer with an example input; None without one.
    """

    layers: dict[str, nn.Module]
    settings: dict[str, dict[str, Any]]
    ties: dict[str, list[str]]
    reasons: dict[str, str]
    skipped: set[str]
    asked_for: set[str]
    calls: dict[str, list[Call]] | None

    def candidates(self) -> dict[str, nn.Module]:
        """Return the layers that are to be factorised if that is worth it, by name."""
        return {name: m for name, m in self.layers.items() if name not in self.reasons and name not in self.skipped}

    def check_asked_for(self, name: str, reason: NotWorthwhile) -> None:
        """Check that a layer of which the factors do not save enough was not asked for by its name.

        Raises:
            ValueError: If it was.
        """
        if name in self.asked_for:
            raise ValueError(f"Layer {name!r}: {reason}. Give `min_saving=-1` to have it anyway.") from reason

    def unsaved(self) -> dict[str, NotWorthwhile]:
        """Return the candidates whose shapes alone say that factors would not save enough, each with the reason.

        Raises:
            ValueError: If such a layer was asked for by its name.
        """
        found = {}
        for name, module in self.candidates().items():
            try:
                check_saving_by_shape(plain(module), self.settings[name])
            except NotWorthwhile as reason:
                self.check_asked_for(name, reason)
                found[name] = reason
        return found

    def weights(self) -> list[nn.Parameter]:
        """Return the parameters that would become factors, as far as shapes tell, each once."""
        unsaved = self.unsaved()
        found: dict[int, nn.Parameter] = {}
        for name, module in self.candidates().items():
            if name in unsaved:
                continue
            attention = isinstance(module, nn.MultiheadAttention)
            held = [like for _, _, like in projections_of(module).values()] if attention else [module.weight]
            found.update({id(parameter): parameter for parameter in held})
        return list(found.values())


def make_plan(
    net: nn.Module,
    defaults: Mapping[str, Any],
    skip: Sequence[str] = (),
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    example_input: Any = None,
) -> Plan:
    """Return what is to be done with a network, which stays as it is; arguments as in ``factorize``.

    Args:
        net: The network.
        defaults: ``rank``, ``init``, ``scheme`` and ``min_saving``.
        skip: Shell patterns of layers to leave alone.
        overrides: Shell pattern -> settings of single layers.
        example_input: Arguments to call the network with; layers that are not called are left alone.

    Raises:
        ValueError: If a pattern matches nothing, a setting does not exist, tied layers have different settings, or the
            network is factorised or whitened.
    """
    overrides = overrides or {}
    layers = find_layers(net)
    matched = match_patterns(layers, skip, "skip")
    chosen = dict(settings_for(layers, defaults, overrides))
    for settings in (defaults, *chosen.values()):
        _check_settings(**settings)
    ties = tied_weights(net, layers)
    reasons = why_left_alone(net, layers, ties)
    calls = None
    if example_input is not None:
        calls = watch_calls(net, {name: m for name, m in layers.items() if name not in reasons}, example_input)
        for name in layers.keys() - calls.keys():
            reasons.setdefault(name, "it is not called with the example input")
    skipped = {name for name in layers if matched[name]}
    _spread(reasons, skipped, ties)
    asked_for = {name for name in layers if isinstance(overrides.get(name, {}).get("rank"), int)}
    plan = Plan(layers, chosen, ties, reasons, skipped, asked_for, calls)
    for name in plan.candidates():
        first = ties.get(name, [name])[0]
        if chosen[name] != chosen[first]:
            raise ValueError(f"{first} and {name} have the same weight, so that they need the same settings.")
    return plan


def _check_settings(rank: Rank, init: str, scheme: str, min_saving: float) -> None:
    check_rank(rank)
    check_init(init)
    check_scheme(scheme)
    if not min_saving < 1:
        raise ValueError(f"Expected `min_saving` to be a share of the parameters, below 1, but got {min_saving}.")


def _spread(reasons: dict[str, str], skipped: set[str], ties: Mapping[str, list[str]]) -> None:
    """Leave layers alone that are tied to one that is left alone."""
    for name, group in ties.items():
        left_alone = [tied for tied in group if tied in reasons or tied in skipped]
        if left_alone and name not in left_alone:
            reasons[name] = f"its weight is tied to {left_alone[0]}, which is left alone"
