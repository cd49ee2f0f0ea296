# SPDX-License-Identifier: Apache-2.0
"""The factor of lambda against the closed form, written out, and words that would change nothing."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from simreg_megatron.schedule import Schedule, parsed

LENGTH = 40
CLOSED_FORMS: dict[str, Callable[[int], float]] = {
    "linear:0": lambda i: 1 - i / 40,
    "linear:3": lambda i: 1 + 2 * i / 40,
    "cosine:0": lambda i: math.cos(math.pi * i / 80) ** 2,
    "cosine:0.2": lambda i: 0.2 + 0.8 * math.cos(math.pi * i / 80) ** 2,
}


@pytest.mark.parametrize("text", CLOSED_FORMS)
def test_lambda_follows_its_shape_to_the_end(text: str) -> None:
    schedule = parsed(text, 0, None)
    for iteration in (0, 1, 13, 20, 39):
        assert schedule.factor(iteration, LENGTH) == pytest.approx(CLOSED_FORMS[text](iteration), rel=1e-12)
    end = float(text.partition(":")[2])
    assert schedule.factor(40, LENGTH) == schedule.factor(60, LENGTH) == pytest.approx(end, abs=1e-12)


def test_a_warm_up_and_an_early_end_join_in() -> None:
    """With 40 iterations and half of them on, the way down is 20 iterations long and half as steep."""
    schedule = parsed("linear:0.5", 4, 0.5)
    expected = {0: 0.25, 1: 0.5 * (1 - 0.5 / 20), 3: 1 - 1.5 / 20, 10: 0.75, 19: 1 - 9.5 / 20, 20: 0.0, 39: 0.0}
    assert {i: schedule.factor(i, LENGTH) for i in expected} == pytest.approx(expected, rel=1e-12)
    assert [i for i in range(LENGTH) if schedule.is_off(i, LENGTH)] == list(range(20, LENGTH))
    assert parsed("constant", 4, None).factor(1) == 0.5, "a warm-up alone asks for no length"


@pytest.mark.parametrize(("share", "iterations", "on"), [(0.7, 10, 7), (0.25, 6, 2), (1 / 3, 10, 3), (0.5, 1001, 500)])
def test_a_share_of_the_training_is_whole_iterations(share: float, iterations: int, on: int) -> None:
    schedule = Schedule(off_after=share)
    assert sum(schedule.factor(i, iterations) for i in range(iterations)) == on
    assert not schedule.is_off(on - 1, iterations) and schedule.is_off(on, iterations)


@pytest.mark.parametrize(("share", "words"), [(0.01, "is no iteration"), (0.99, "is all of them")])
def test_a_share_that_the_training_is_too_short_for_is_refused(share: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Schedule(off_after=share).factor(0, 10)


def test_a_term_that_begins_under_way_rises_and_falls_from_there() -> None:
    """From 8 on, with half of 40 iterations: the way down is 12 iterations long."""
    schedule = parsed("linear:0.5", 4, 0.5, 8)
    expected = {0: 0.0, 7: 0.0, 8: 0.25, 9: 0.5 * (1 - 0.5 / 12), 11: 1 - 1.5 / 12, 14: 0.75, 19: 1 - 5.5 / 12, 20: 0.0}
    assert {i: schedule.factor(i, LENGTH) for i in expected} == pytest.approx(expected, rel=1e-12)
    assert [i for i in range(LENGTH) if not schedule.is_off(i, LENGTH)] == list(range(8, 20))
    alone = parsed("constant", 0, None, 8)
    assert not alone.is_constant and not alone.needs_length
    assert [alone.factor(i) for i in (0, 7, 8, 99)] == [0, 0, 1, 1]


def test_a_term_that_would_begin_after_its_end_is_refused() -> None:
    for start, share, end in ((40, None, 40), (20, 0.5, 20)):
        with pytest.raises(ValueError, match=f"--simreg-start-iter {start} leaves no iteration .* ends at {end}"):
            parsed("constant", 0, share, start).end(LENGTH)
        assert parsed("constant", 0, share, start - 1).end(LENGTH) == end
