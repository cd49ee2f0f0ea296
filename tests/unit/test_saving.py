# SPDX-License-Identifier: Apache-2.0
"""What a difference is worth in tokens: the value, its interval, and where nothing can be said."""

import math

import numpy as np
import pytest

from simreg_megatron.reproduce.saving import Group, saving


def group(middle: float, steps: int, spread: float = 0.002) -> Group:
    return Group([middle + spread * each for each in (-1.0, -0.3, 0.1, 0.4, 0.8)], steps)


THAN, SHORT = group(4.0, 1000), group(4.06, 700)  # 100 more steps are worth 0.02


def test_an_arm_that_ends_lower_saves_what_the_baseline_would_need_more() -> None:
    found = saving(group(3.95, 1000), THAN, SHORT, "short")
    assert found.exchange == pytest.approx(0.02)
    assert found.tokens == pytest.approx(1 - 1000 / 1250)
    assert found.is_underestimate and found.told.startswith("at least 20% of the tokens (")


def test_a_shorter_arm_that_ends_higher_saves_the_rest_of_its_shortness() -> None:
    found = saving(group(4.01, 700), THAN, SHORT, "short")
    assert found.tokens == pytest.approx(1 - 700 / 950)
    assert not found.is_underestimate and found.told.startswith("at most 26% of the tokens (")


def test_a_convex_curve_lies_on_the_side_that_is_told() -> None:
    """loss(t) = 3 + 20 / sqrt(t): the baseline reaches a lower loss later than the line says, a higher one sooner."""

    def loss(steps: float) -> float:
        return 3 + 20 / math.sqrt(steps)

    than, short = group(loss(1000), 1000, 1e-5), group(loss(700), 700, 1e-5)
    for arm_steps, as_good_as in ((1000, 1200), (700, 800)):
        found = saving(group(loss(as_good_as), arm_steps, 1e-5), than, short, "short")
        true = 1 - arm_steps / as_good_as
        assert (found.tokens < true) == found.is_underestimate and found.tokens != pytest.approx(true, abs=1e-3)


@pytest.mark.parametrize(
    ("arm", "than", "short"),
    [
        (group(4.01, 1000), THAN, SHORT),  # as long, and higher
        (group(3.95, 1000), THAN, group(3.99, 700)),  # the shorter baseline ends lower
        (group(3.95, 1000), THAN, group(4.06, 700, spread=0.2)),  # or nobody knows
        (group(3.95, 1000), THAN, Group([4.06], 700)),
        (Group([3.9, math.inf, 3.9], 1000), THAN, SHORT),
        (group(3.95, 1000), THAN, Group([4.06, math.inf], 700)),
        (group(3.95, 1000), THAN, group(4.06, 1000)),
    ],
)
def test_nothing_is_told_where_nothing_is_known(arm: Group, than: Group, short: Group) -> None:
    assert saving(arm, than, short, "short") is None


def test_the_interval_misses_as_often_on_either_side_where_a_step_s_worth_is_hardly_known() -> None:
    """As at width 32 of our own runs; one of first order misses five times in a hundred above and never below."""
    generator = np.random.default_rng(0)
    true = 1 - 1000 / (1000 + 0.35 / 0.28 * 300)
    below = above = told = 0
    for _ in range(2000):
        arm, than, short = (
            Group(list(middle + spread * generator.standard_normal(5)), steps)
            for middle, spread, steps in ((3.65, 0.003, 1000), (4.0, 0.04, 1000), (4.28, 0.13, 700))
        )
        if found := saving(arm, than, short, "short"):
            told += 1
            below += found.interval[1] < true
            above += found.interval[0] > true
    assert told > 1800
    assert 0.01 < below / told < 0.04 and 0.01 < above / told < 0.04


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Also with unequal spreads; a thousand experiments, so that 95 % means 936 to 964 (two standard errors)."""
    generator = np.random.default_rng(0)
    true = 1 - 1000 / (1000 + 0.05 / 0.06 * 300)
    inside = 0
    for _ in range(1000):
        arm, than, short = (
            Group(list(middle + spread * generator.standard_normal(5)), steps)
            for middle, spread, steps in ((3.95, 0.006, 1000), (4.0, 0.002, 1000), (4.06, 0.004, 700))
        )
        low, high = saving(arm, than, short, "short").interval
        inside += low <= true <= high
    assert 930 <= inside <= 985
