"""Argument checks that the data modules share; each message names what was expected and what came."""

from __future__ import annotations

from collections.abc import Collection


def check_at_least(name: str, value: int, minimum: int) -> int:
    """Return `value` if it is an integer of at least `minimum`.

    Args:
        name: The argument's name, for the message.
        value: The value to check.
        minimum: The smallest value allowed.

    Returns:
        The value itself.

    Raises:
        ValueError: If the value is no integer or too small.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"Expected argument `{name}` to be an integer of at least {minimum}, but got {value!r}.")
    return value


def check_fraction(name: str, value: float, *, zero: bool) -> float:
    """Return `value` if it is a fraction of a data set.

    Args:
        name: The argument's name, for the message.
        value: The value to check.
        zero: Whether an empty part is allowed.

    Returns:
        The value itself.

    Raises:
        ValueError: If the value is outside [0, 1), or 0 where that is not allowed.
    """
    if not 0 <= value < 1 or (value == 0 and not zero):
        interval = "[0, 1)" if zero else "(0, 1)"
        raise ValueError(f"Expected argument `{name}` to be a fraction in {interval}, but got {value!r}.")
    return value


def check_choice(name: str, value: str, choices: Collection[str]) -> str:
    """Return `value` if it is one of `choices`.

    Args:
        name: The argument's name, for the message.
        value: The value to check.
        choices: The values allowed.

    Returns:
        The value itself.

    Raises:
        ValueError: If the value is not among the choices.
    """
    if value not in choices:
        raise ValueError(f"Expected argument `{name}` to be one of {sorted(choices)}, but got {value!r}.")
    return value
