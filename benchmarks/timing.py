# SPDX-License-Identifier: Apache-2.0
"""Compare the time of a step between two kinds of run that took turns."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

_RESAMPLES = 2000


class Overhead(NamedTuple):
    """base, other: time per step, median over all intervals; the rest in percent of base."""

    base: float
    other: float
    percent: float
    low: float  # 95 % interval, by bootstrap over turns and over the intervals in each
    high: float


Turns = Sequence[Sequence[float]]  # for each turn the times per step of its logged intervals


def overhead(base: Turns, other: Turns) -> Overhead:
    """Compare two kinds of run that took turns, by the median over turns of the ratio of their medians.

    A machine that slows down slows both runs of a turn alike.
    """
    if len(base) != len(other) or not base or not all(map(len, (*base, *other))):
        raise ValueError("both kinds must have run in every turn, with an interval or more in each")

    def ratio(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
        return median(median(two) / median(one) for one, two in pairs)

    draw = random.Random(0)
    pairs = list(zip(base, other, strict=True))
    ratios = sorted(
        ratio([(draw.choices(one, k=len(one)), draw.choices(two, k=len(two))) for one, two in chosen])
        for chosen in (draw.choices(pairs, k=len(pairs)) for _ in range(_RESAMPLES))
    )
    low, high = ratios[round(0.025 * _RESAMPLES)], ratios[round(0.975 * _RESAMPLES) - 1]
    medians = (median(time for turn in kind for time in turn) for kind in (base, other))
    return Overhead(*medians, *(100 * (found - 1) for found in (ratio(pairs), low, high)))
