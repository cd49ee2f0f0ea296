# SPDX-License-Identifier: Apache-2.0
"""Time per step as Megatron's log has it, and how much longer the steps of one kind of run take than another's."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

_LINE = re.compile(r"\] iteration +(\d+)/.*?elapsed time per iteration \(ms\): ([\d.]+)")

_RESAMPLES = 2000


def interval_milliseconds(log: str, log_interval: int) -> list[float]:
    """Time per step of each logged interval after the first, in which things are set up.

    (Megatron 0.19 prints a line after the first step, too, and goes on counting its interval.)
    """
    return [float(time) for step, time in _LINE.findall(log) if int(step) > log_interval]


class Overhead(NamedTuple):
    """base, other: time per step, median over all intervals; the rest in percent of base."""

    base: float
    other: float
    percent: float
    low: float  # 95 % interval, by bootstrap over turns and over the intervals in each
    high: float


Turns = Sequence[Sequence[float]]
"""For each turn the times per step of its logged intervals."""


def overhead(base: Turns, other: Turns) -> Overhead:
    """Compare two kinds of run that took turns: the median over turns of the ratio of their medians.

    A machine that slows down slows both runs of a turn alike.

    Raises:
        ValueError: they did not take equally many turns, or a turn has no interval.
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
