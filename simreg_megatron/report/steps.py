# SPDX-License-Identifier: Apache-2.0
"""How much longer the steps of one kind of run take than another's, from runs that took turns.

A machine that slows down slows the runs of one turn alike, so the ratio is taken within each turn.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

Turns = Sequence[Sequence[float]]  # for each turn the times per step of its logged intervals

_RESAMPLES = 2000


class Overhead(NamedTuple):
    """base, other: time per step, median over all intervals; the rest in percent of base."""

    base: float
    other: float
    percent: float
    low: float  # 95 % interval, by bootstrap over turns and over the intervals in each
    high: float

    @property
    def spread(self) -> float:
        return (self.high - self.low) / 2

    @property
    def is_clear(self) -> bool:
        """Whether the difference is larger than what the machine's other work does to it."""
        return self.spread < abs(self.percent)


def overhead(base: Turns, other: Turns) -> Overhead:
    """What `other` takes over `base`: the median over turns of the ratio of their medians.

    Raises:
        ValueError: they did not take equally many turns, or a turn has no interval.
    """
    if len(base) != len(other) or not base or not all(map(len, (*base, *other))):
        raise ValueError("both kinds must have run in every turn, with an interval or more in each")
    draw = random.Random(0)
    pairs = list(zip(base, other, strict=True))
    ratios = []
    for _ in range(_RESAMPLES):
        chosen = draw.choices(pairs, k=len(pairs))
        ratios.append(_ratio([(_resampled(one, draw), _resampled(two, draw)) for one, two in chosen]))
    ratios.sort()
    low, high = ratios[round(0.025 * _RESAMPLES)], ratios[round(0.975 * _RESAMPLES) - 1]
    medians = (median(time for turn in kind for time in turn) for kind in (base, other))
    return Overhead(*medians, *(100 * (ratio - 1) for ratio in (_ratio(pairs), low, high)))


def _ratio(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
    return median(median(other) / median(base) for base, other in pairs)


def _resampled(times: Sequence[float], draw: random.Random) -> list[float]:
    return draw.choices(times, k=len(times))
