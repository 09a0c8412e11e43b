"""Random programs keep their output under random elements of their traced groups."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_programs import OPERATIONS, Program
from trace_reference import assert_symmetric, normal

SETTINGS = settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
number = st.integers(0, 11)
instruction = st.tuples(st.integers(0, len(OPERATIONS) - 1), number, number, number)
ILL_CONDITIONED = 1e-8  # logarithms, cosines and variances after each other lose some digits


@SETTINGS
@given(st.lists(instruction, min_size=1, max_size=14))
def test_random_programs_keep_their_output(instructions):
    assert_symmetric(Program(instructions), normal(3, 6), ILL_CONDITIONED, elements=2)


def test_most_random_programs_have_symmetries_and_no_operation_is_unknown():
    draw = random.Random(0)
    with_groups = 0
    for _ in range(60):
        program = [(draw.randrange(len(OPERATIONS)), *(draw.randrange(12) for _ in range(3))) for _ in range(8)]
        spec = assert_symmetric(Program(program), normal(3, 6), ILL_CONDITIONED, elements=1)
        with_groups += bool(spec.groups)
        assert not spec.frozen_by
    assert with_groups > 40
