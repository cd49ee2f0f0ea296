# SPDX-License-Identifier: Apache-2.0
"""Two groups of runs, seeds of each: the difference of their means, after Welch (unequal variances).

    error = sqrt(s_a^2 / n_a + s_b^2 / n_b)
    detectable = (t_.95 + t_.80) * error, of a claim that has a direction; (t_.975 + t_.80) * error where it has none

A true difference of the detectable size would be found four times in five.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

LEVEL = 0.05
POWER = 0.8


class Welch(NamedTuple):
    """difference: mean(arm) - mean(than); low, high: its two-sided 95 % interval; p_value: for the side asked."""

    difference: float
    low: float
    high: float
    p_value: float
    detectable: float


def welch(arm: Sequence[float], than: Sequence[float], *, side: str = "two-sided") -> Welch:
    """Both need two values or more. A value that is not finite, of a run that diverged, decides for nothing; nor do
    values without any scatter, from which no error can be told.

    Args:
        side: "less" where the arm is claimed to lie lower, "greater", or "two-sided".
    """
    from scipy import stats

    difference = mean(arm) - mean(than)
    if not all(map(math.isfinite, (*arm, *than))) or deviation(arm) == deviation(than) == 0:
        return Welch(difference, -math.inf, math.inf, 1.0, math.inf)
    tested = stats.ttest_ind(arm, than, equal_var=False, alternative=side)
    interval = stats.ttest_ind(arm, than, equal_var=False).confidence_interval(1 - LEVEL)
    error = math.sqrt(deviation(arm) ** 2 / len(arm) + deviation(than) ** 2 / len(than))
    level = LEVEL / 2 if side == "two-sided" else LEVEL
    detectable = float(stats.t.ppf(1 - level, tested.df) + stats.t.ppf(POWER, tested.df)) * error
    return Welch(difference, float(interval.low), float(interval.high), float(tested.pvalue), detectable)


def ratio(
    arm: Sequence[float], than: Sequence[float], other: Sequence[float]
) -> tuple[float, tuple[float, float] | None]:
    """(mean(arm) - mean(than)) / (mean(other) - mean(than)) and its two-sided 95 % interval; None where it has no end.

    After Fieller: all r for which the seeds do not refute arm - than = r (other - than), by Student's t with
    Satterthwaite's degrees of freedom at the ratio found. With the variances V of the means this is quadratic in r:

        (upper - r lower)^2 <= t^2 (V_arm + (1 - r)^2 V_than + r^2 V_other)
    """
    from scipy import stats

    upper, lower = (mean(group) - mean(than) for group in (arm, other))
    found = upper / lower
    of_arm, of_than, of_other = (deviation(group) ** 2 / len(group) for group in (arm, than, other))
    parts = ((of_arm, len(arm)), ((1 - found) ** 2 * of_than, len(than)), (found**2 * of_other, len(other)))
    total = sum(variance for variance, _ in parts)
    if total == 0:
        return found, (found, found)
    freedom = total**2 / sum(variance**2 / (count - 1) for variance, count in parts)
    square = float(stats.t.ppf(1 - LEVEL / 2, freedom)) ** 2
    leading = lower**2 - square * (of_than + of_other)
    half = upper * lower - square * of_than
    root = half**2 - leading * (upper**2 - square * (of_arm + of_than))
    if leading <= 0 or root < 0:
        return found, None
    return found, ((half - math.sqrt(root)) / leading, (half + math.sqrt(root)) / leading)


def holm(p_values: Sequence[float]) -> int:
    """How many of these tests, those with the lowest p-values, hold together at the level of one (Holm, 1979)."""
    for number, p_value in enumerate(sorted(p_values)):
        if p_value >= LEVEL / (len(p_values) - number):
            return number
    return len(p_values)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    """Of the population that the values are a sample of."""
    middle = mean(values)
    return math.sqrt(sum((value - middle) ** 2 for value in values) / (len(values) - 1))
