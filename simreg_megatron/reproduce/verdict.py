# SPDX-License-Identifier: Apache-2.0
"""What the runs say of a claim: difference, interval, p-value, and what these seeds could have shown at all.

    difference = mean(arm) - times * mean(than), its interval and p-value after Welch (`report.welch`)

What a difference of losses is worth in tokens is said in `saving`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from simreg_megatron.report.welch import LEVEL, deviation, mean, welch
from simreg_megatron.reproduce.plan import Arm, Claim, Plan
from simreg_megatron.reproduce.saving import Group, Saving, saving

Row = Mapping[str, str]
Runs = tuple[Plan, Sequence[Row]]
FEWEST_SEEDS_OF_A_HEADLINE = 5
HELD, OPPOSITE, NOT_SHOWN, DIVERGED = (
    "Held", "Did not hold, the opposite was seen", "Not shown", "Not decided, as runs diverged",
)  # fmt: skip
_UNITS = {
    "validation_loss": "nats per token", "train_loss": "nats per token", "bits_per_byte": "bits per byte",
    "simreg_loss": "nats per token", "seconds_per_step": "seconds",
}  # fmt: skip
_WORTH_TOKENS = ("validation_loss", "bits_per_byte")


def machines_of(rows: Iterable[Row]) -> set[str]:
    """The devices, each with a number type, that runs were trained on."""
    return {f"{row['device']} in {row['number_type']}" for row in rows}


class Place(NamedTuple):
    """Where a claim is judged."""

    size: str
    tokens_per_parameter: str


@dataclass(frozen=True)
class Verdict:
    """A claim at one size and length.

    Attributes:
        numbers: of runs, of the arm and of what it is compared with.
        diverged: how many of these have no end, of both.
        noise: standard deviation of the baseline from seed to seed.
        detectable: a true difference of this size would be found four times in five.
        worth: in tokens; None where the claim is undecided or not about a loss of the text, or no shortened baseline
            tells.
        lender: the size whose settings both arms have; "" where they are of this size.
        is_tuned: whether both arms are as a search on this text left them.
    """

    claim: Claim
    place: Place
    numbers: tuple[int, int]
    diverged: tuple[int, int]
    means: tuple[float, float]
    difference: float
    interval: tuple[float, float]
    p_value: float
    noise: float
    detectable: float
    worth: Saving | None = None
    lender: str = ""
    is_tuned: bool = True

    @property
    def held(self) -> bool:
        return self.p_value < LEVEL

    @property
    def two_sided(self) -> float:
        """The p-value where the difference may go either way."""
        return self.p_value if self.claim.sign == "differs" else 2 * min(self.p_value, 1 - self.p_value)

    @property
    def test(self) -> tuple[object, ...]:
        """Equal where two verdicts are of the same numbers, whatever their tables and their claims call them."""
        return (self.claim.metric, self.claim.sign, self.claim.times, self.numbers, self.means, self.interval)

    @property
    def is_beyond_chance(self) -> bool:
        """Whether the interval, which has two sides, leaves out 0."""
        low, high = self.interval
        return low > 0 or high < 0

    @property
    def unit(self) -> str:
        """Of the difference; "" where it is a pure number."""
        return "nats" if self.claim.metric.startswith("margin") else _UNITS.get(self.claim.metric, "")

    @property
    def is_headline(self) -> bool:
        many = min(self.numbers) >= FEWEST_SEEDS_OF_A_HEADLINE
        return self.claim.headline and many and self.is_tuned and not self.lender

    @property
    def word(self) -> str:
        """What became of the claim."""
        low, high = self.interval
        if any(self.diverged):
            return DIVERGED
        if self.held:
            return HELD
        if self.claim.sign != "differs" and (low > 0 if self.claim.sign == "lower" else high < 0):
            return OPPOSITE
        return NOT_SHOWN

    @property
    def told(self) -> str:
        """The difference with all that says how sure it is."""
        seeds = f"{self.numbers[0]} and {self.numbers[1]} seeds"
        if any(self.diverged):
            return f"{self.diverged[0]} and {self.diverged[1]} of {seeds} diverged, so there is no difference to tell"
        low, high = self.interval
        unit = f" {self.unit}" if self.unit else ""
        return f"{self.difference:+.4f}{unit} ({low:+.4f} to {high:+.4f}, p {self.p_value:.2g}, {seeds})"

    @property
    def compared(self) -> str:
        """What the difference is one of: a claim's own words are its author's, these are not."""
        claim = self.claim
        multiple = "" if claim.times == 1 else f"{claim.times:g} times "
        return f"{claim.metric.replace('_', ' ')} of {claim.arm} less {multiple}that of {claim.than}"

    @property
    def sentence(self) -> str:
        where = f"Size {self.place.size}, {self.place.tokens_per_parameter} tokens a parameter, {self.compared}"
        missed = f" (a difference of {self.detectable:.4f} would be found four times in five, smaller ones less often)"
        if self.word != NOT_SHOWN:
            missed = ""
        untuned = f", but at the settings of width {self.lender}, not tuned for this size" if self.lender else ""
        return f"{self.word}{missed}{untuned}: {self.claim.says}. {where}: {self.told}.{self._of_the_headline}"

    @property
    def _of_the_headline(self) -> str:
        if not self.claim.headline or self.is_headline:
            return ""
        needed, seeds = FEWEST_SEEDS_OF_A_HEADLINE, min(self.numbers)
        if seeds >= needed:
            return " No headline: how well each arm is tuned decides it as much as the claim does."
        return f" No headline: at this size it rests on {seeds} seeds, and {needed} are needed."


def judge(plan: Plan, rows: Sequence[Row], others: Sequence[Runs] = ()) -> list[Verdict]:
    """A verdict for each claim of the plan at each size and length that both of its arms have runs at.

    Args:
        rows: of the plan's CSV file.
        others: plans and rows of other tables on the same text and from the same search, which may hold a baseline
            that was trained shorter.
    """
    places = dict.fromkeys(Place(row["size"], row["tokens_per_parameter"]) for row in rows)
    found = []
    for claim in plan.claims:
        for place in places:
            arm, than = (_values(rows, name, place, claim.metric) for name in (claim.arm, claim.than))
            if len(arm) > 1 and len(than) > 1:
                verdict = _judged(claim, place, arm, [claim.times * value for value in than])
                if verdict.word in (HELD, OPPOSITE):
                    verdict = replace(verdict, worth=_worth(plan, rows, others, claim, place))
                found.append(verdict)
    return found


def _values(rows: Sequence[Row], arm: str, place: Place, metric: str) -> list[float]:
    """A run that diverged counts as infinitely bad: it is part of what the arm does."""
    return [
        float(row[metric]) if row.get(metric) else math.inf
        for row in rows
        if row["arm"] == arm and (row["size"], row["tokens_per_parameter"]) == place
    ]


def _judged(claim: Claim, place: Place, arm: list[float], than: list[float]) -> Verdict:
    side = {"lower": "less", "higher": "greater", "differs": "two-sided"}[claim.sign]
    found = welch(arm, than, side=side)
    diverged = [sum(not math.isfinite(value) for value in values) for values in (arm, than)]
    return Verdict(
        claim, place, (len(arm), len(than)), (diverged[0], diverged[1]), (mean(arm), mean(than)), found.difference,
        (found.low, found.high), found.p_value, deviation(than), found.detectable,
    )  # fmt: skip


def _worth(plan: Plan, rows: Sequence[Row], others: Sequence[Runs], claim: Claim, place: Place) -> Saving | None:
    if claim.metric not in _WORTH_TOKENS or claim.sign != "lower" or claim.times != 1:
        return None
    arm, than = (_group(rows, name, place, claim.metric) for name in (claim.arm, claim.than))
    baseline = plan.arm(claim.than)
    shorter = [
        (group.steps, mean(group.losses), group, other.name if table is plan else f"{other.name} of {table.name}")
        for table, of_table in ((plan, rows), *others)
        for other in _shortened(table, baseline)
        if (group := _group(of_table, other.name, place, claim.metric)).losses
    ]
    if not shorter:
        return None
    *_, short, name = min(shorter, key=lambda found: found[:2])
    return saving(arm, than, short, name)


def _shortened(plan: Plan, baseline: Arm) -> Iterator[Arm]:
    """Arms that differ from the baseline in their length, and perhaps in a learning rate that suits that length.

    The best of the shortest length tells what tokens are worth to a baseline that is tuned for each length: the
    longer the lever, the less the seeds decide.
    """
    for arm in plan.arms:
        alike = {**arm.flags, "lr": ""} == {**baseline.flags, "lr": ""}
        if alike and arm.tuned_as == baseline.tuned_as and arm.length < baseline.length:
            yield arm


def _group(rows: Sequence[Row], arm: str, place: Place, metric: str) -> Group:
    steps = [
        int(row["steps"])
        for row in rows
        if row["arm"] == arm and (row["size"], row["tokens_per_parameter"]) == place
    ]  # fmt: skip
    return Group(_values(rows, arm, place, metric), steps[0] if steps else 0)
