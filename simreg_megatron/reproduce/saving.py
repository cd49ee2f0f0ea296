# SPDX-License-Identifier: Apache-2.0
"""What a difference of losses is worth in training: steps that the baseline needs more, or could do without.

    gained   = mean(shorter baseline) - mean(baseline)
    exchange = 100 gained / (steps of the baseline - steps of the shorter one)
    ratio    = difference / gained
    needed   = steps - ratio (steps - shorter steps)    at which the baseline would end as low as the arm
    saving   = 1 - (steps of the arm) / needed

The loss is taken to fall along a straight line, and it falls ever slower. So a saving is an underestimate where the arm
ends lower than the baseline (the line goes on beyond its end), and an overestimate where it ends higher. The interval
is that of the ratio (`report.welch.ratio`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from simreg_megatron.report.welch import ratio, welch


class Group(NamedTuple):
    """The seeds of an arm: where they ended, and after how many steps."""

    losses: Sequence[float]
    steps: int


@dataclass(frozen=True)
class Saving:
    """What a claim's difference is worth.

    Attributes:
        exchange: nats that the baseline gains with 100 more steps.
        exchange_interval: its two-sided 95 % interval.
        tokens: share of the baseline's tokens; negative where the arm needs more than the baseline.
        interval: its two-sided 95 % interval.
        shorter: the arm that tells the exchange rate, with its table where that is another one.
        is_underestimate: else it is an overestimate.
    """

    exchange: float
    exchange_interval: tuple[float, float]
    tokens: float
    interval: tuple[float, float]
    shorter: str
    is_underestimate: bool

    @property
    def told(self) -> str:
        bound = "at least" if self.is_underestimate else "at most"
        low, high = self.interval
        return f"{bound} {self.tokens:.0%} of the tokens ({low:.0%} to {high:.0%})"


def saving(arm: Group, than: Group, short: Group, shorter: str) -> Saving | None:
    """None where nothing can be saved, or the shorter baseline does not end higher for sure: what is a step worth then?

    Args:
        shorter: name of the arm `short`.
    """
    if min(len(group.losses) for group in (arm, than, short)) < 2 or short.steps >= than.steps:
        return None
    gained = welch(short.losses, than.losses)
    if not gained.low > 0 or not all(map(math.isfinite, arm.losses)):
        return None
    found, interval = ratio(arm.losses, than.losses, short.losses)
    if interval is None or (found > 0 and arm.steps >= than.steps):
        return None
    per_step = 100 / (than.steps - short.steps)
    low, high = interval

    def share(of_gained: float) -> float:
        needed = than.steps - of_gained * (than.steps - short.steps)
        return 1 - arm.steps / needed if needed > 0 else -math.inf

    return Saving(
        per_step * gained.difference, (per_step * gained.low, per_step * gained.high),
        share(found), (share(high), share(low)), shorter, found <= 0,
    )  # fmt: skip
