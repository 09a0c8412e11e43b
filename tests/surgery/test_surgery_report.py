"""The warning of layers that a conversion leaves alone."""

from __future__ import annotations

import warnings

import pytest
from torch import nn

from lightning_symmetry import asymmetrize, factorize, whiten
from lightning_symmetry.surgery import ConversionReport


def report() -> ConversionReport:
    found = ConversionReport("convert")
    found.add("first", "Linear", True, "done")
    found.add("second", "Linear", False, "skipped")
    found.add("third", "Conv3d", False, "it is not known")
    found.add("fourth", "Linear", False, "it has hooks")
    return found


def test_the_warning_names_what_is_not_expected_with_its_reasons():
    with pytest.warns(UserWarning) as caught:
        report().warn_left_alone(expected={"second"}, stacklevel=1)
    [warning] = caught
    assert str(warning.message) == "convert left 2 layer(s) alone: third (it is not known); fourth (it has hooks)."
    assert warning.filename == __file__


def test_nothing_is_said_where_all_is_expected():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report().warn_left_alone(expected={"second", "third", "fourth"})


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.register_forward_hook(lambda module, args, output: None)


@pytest.mark.parametrize("verb", [asymmetrize, whiten, factorize])
def test_each_verb_warns_at_the_line_that_calls_it(verb):
    with pytest.warns(UserWarning, match=rf"{verb.__name__} left 1 layer\(s\) alone: second \(it has hooks") as caught:
        verb(Hooked())
    assert caught[0].filename == __file__
