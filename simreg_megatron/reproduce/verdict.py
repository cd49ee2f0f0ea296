# SPDX-License-Identifier: Apache-2.0
"""What the runs say of a claim: difference, interval, p-value, and what these seeds could have shown at all.

    difference = mean(arm) - times * mean(than), its interval and p-value after Welch (`report.welch`)
    exchange   = (loss of the shortened baseline - loss of the baseline) / (steps between them) * 100
    saving     = 1 - (steps of the arm) / (steps + s),  s = -100 difference / exchange: steps that the baseline needs
                 more to end as low as the arm

The exchange rate is the mean slope before the end; the loss falls ever slower, so the saving is an underestimate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from simreg_megatron.report.welch import LEVEL, deviation, mean, welch
from simreg_megatron.reproduce.plan import Claim, Plan

Row = Mapping[str, str]
NOT_SHOWN = "Not shown"


class Place(NamedTuple):
    """Where a claim is judged."""

    size: str
    tokens_per_parameter: str


@dataclass(frozen=True)
class Verdict:
    """A claim at one size and length.

    Attributes:
        numbers: of runs, of the arm and of what it is compared with.
        noise: standard deviation of the baseline from seed to seed.
        exchange: nats that the baseline gains with 100 more steps; None where no shortened baseline was run.
        saving: share of the baseline's tokens; None as above, and where there is nothing to save.
    """

    claim: Claim
    place: Place
    numbers: tuple[int, int]
    means: tuple[float, float]
    difference: float
    interval: tuple[float, float]
    p_value: float
    noise: float
    detectable: float
    exchange: float | None = None
    saving: float | None = None

    @property
    def held(self) -> bool:
        return self.p_value < LEVEL

    @property
    def sentence(self) -> str:
        low, high = self.interval
        where = f"Size {self.place.size}, {self.place.tokens_per_parameter} tokens a parameter"
        told = (
            f"{self.difference:+.4f} ({low:+.4f} to {high:+.4f}, p {self.p_value:.2g}, "
            f"{self.numbers[0]} and {self.numbers[1]} seeds)"
        )
        missed = f" (a difference below {self.detectable:.4f} would be missed with these seeds)"
        return f"{self.word}{missed if self.word == NOT_SHOWN else ''}: {self.claim.says}. {where}: {told}."

    @property
    def word(self) -> str:
        """What became of the claim."""
        low, high = self.interval
        if self.held:
            return "Held"
        if self.claim.sign != "differs" and (low > 0 if self.claim.sign == "lower" else high < 0):
            return "Did not hold, the opposite was seen"
        return NOT_SHOWN


def judge(plan: Plan, rows: Sequence[Row]) -> list[Verdict]:
    """A verdict for each claim of the plan at each size and length that both of its arms have runs at.

    Args:
        rows: of the plan's CSV file.
    """
    places = dict.fromkeys(Place(row["size"], row["tokens_per_parameter"]) for row in rows)
    found = []
    for claim in plan.claims:
        for place in places:
            arm, than = (_values(rows, name, place, claim.metric) for name in (claim.arm, claim.than))
            than = [claim.times * value for value in than]
            if len(arm) > 1 and len(than) > 1:
                exchange = _exchange(plan, rows, claim, place)
                steps = (_steps(rows, claim.arm, place), _steps(rows, claim.than, place))
                found.append(_judged(claim, place, arm, than, exchange, steps))
    return found


def _values(rows: Sequence[Row], arm: str, place: Place, metric: str) -> list[float]:
    """A run that diverged counts as infinitely bad: it is part of what the arm does."""
    return [
        float(row[metric]) if row.get(metric) else math.inf
        for row in rows
        if row["arm"] == arm and (row["size"], row["tokens_per_parameter"]) == place
    ]


def _judged(
    claim: Claim, place: Place, arm: list[float], than: list[float], exchange: float | None, steps: tuple[int, int]
) -> Verdict:
    side = {"lower": "less", "higher": "greater", "differs": "two-sided"}[claim.sign]
    found = welch(arm, than, side=side)
    if not math.isfinite(found.detectable):  # a run diverged
        exchange = None
    saving = _saving(found.difference, exchange, steps)
    return Verdict(
        claim, place, (len(arm), len(than)), (mean(arm), mean(than)), found.difference, (found.low, found.high),
        found.p_value, deviation(than), found.detectable, exchange, saving,
    )  # fmt: skip


def _exchange(plan: Plan, rows: Sequence[Row], claim: Claim, place: Place) -> float | None:
    """Nats for 100 steps of the arm that the claim compares with: from a shortened arm, alike but for its length."""
    than = plan.arm(claim.than)
    for other in plan.arms:
        alike = (other.flags, other.tuned_as) == (than.flags, than.tuned_as)
        short = _values(rows, other.name, place, claim.metric)
        if alike and other.length < than.length and short:
            gained = mean(short) - mean(_values(rows, claim.than, place, claim.metric))
            return 100 * gained / (_steps(rows, claim.than, place) - _steps(rows, other.name, place))
    return None


def _steps(rows: Sequence[Row], arm: str, place: Place) -> int:
    return next(
        int(row["steps"])
        for row in rows
        if row["arm"] == arm and (row["size"], row["tokens_per_parameter"]) == place
    )  # fmt: skip


def _saving(difference: float, exchange: float | None, steps: tuple[int, int]) -> float | None:
    """steps: of the arm, and of what it is compared with."""
    if exchange is None or exchange <= 0 or difference >= 0:
        return None
    arm, than = steps
    return 1 - arm / (than - difference / exchange * 100)
