# SPDX-License-Identifier: Apache-2.0
"""Statistics of a claim: difference, 95 % interval and p-value after Welch, and its worth in tokens.

    difference = mean(arm) - times * mean(than)
    detectable = (t_.975 + t_.80) * error

A true difference of the detectable size would be found four times in five. What a difference of losses is worth:

    ratio  = difference / (mean(shorter baseline) - mean(baseline)),   its interval after Fieller
    needed = steps - ratio (steps - shorter steps),                    saving = 1 - (steps of the arm) / needed

The loss is taken to fall along a straight line, and it falls ever slower: so a saving is an underestimate where the arm
ends lower than the baseline, and an overestimate where it ends higher.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import NamedTuple

from research.plan import Arm, Claim, ResearchError, entries_of
from research.tables import Row, Table, settings_of

LEVEL, POWER = 0.05, 0.8
FEWEST_SEEDS = 3
HELD, OPPOSITE, NOT_SHOWN, DIVERGED = (
    "Held", "Did not hold, the opposite was seen", "Not shown", "Not decided, as runs diverged",
)  # fmt: skip
_UNITS = {
    "validation_loss": "nats per token", "train_loss": "nats per token", "bits_per_byte": "bits per byte",
    "simreg_loss": "nats per token", "seconds_per_step": "seconds",
}  # fmt: skip


class Welch(NamedTuple):
    """mean(arm) - mean(than), or a weighted sum of means; its 95 % interval, and the p-value of either side."""

    difference: float
    low: float
    high: float
    p_value: float
    detectable: float


def welch(arm: Sequence[float], than: Sequence[float]) -> Welch:
    """Compare two groups with unequal variances."""
    return contrast((1.0, arm), (-1.0, than))


def contrast(*parts: tuple[float, Sequence[float]]) -> Welch:
    """Sum weight * mean over groups, with Satterthwaite's degrees of freedom; undecided where a value is not finite."""
    from scipy import stats

    difference = sum(weight * mean(values) for weight, values in parts)
    is_finite = all(math.isfinite(value) for _, values in parts for value in values)
    variances = [weight**2 * stdev(values) ** 2 / len(values) if is_finite else 0.0 for weight, values in parts]
    if sum(variances) == 0:
        return Welch(difference, -math.inf, math.inf, 1.0, math.inf)
    counts = (len(values) - 1 for _, values in parts)
    freedom = sum(variances) ** 2 / sum(each**2 / count for each, count in zip(variances, counts, strict=True))
    error = math.sqrt(sum(variances))
    half = float(stats.t.ppf(1 - LEVEL / 2, freedom)) * error
    detectable = half + float(stats.t.ppf(POWER, freedom)) * error
    p_value = 2 * float(stats.t.sf(abs(difference) / error, freedom))
    return Welch(difference, difference - half, difference + half, p_value, detectable)


def fieller(arm: Sequence[float], than: Sequence[float], other: Sequence[float]) -> tuple[float, float, float] | None:
    """r = (mean(arm) - mean(than)) / (mean(other) - mean(than)) with its 95 % interval; None where that has no end.

    The interval holds all r for which the seeds do not refute arm - than = r (other - than), by Student's t with
    Satterthwaite's degrees of freedom at the ratio found. With the variances V of the means:

        (upper - r lower)^2 <= t^2 (V_arm + (1 - r)^2 V_than + r^2 V_other)
    """
    from scipy import stats

    upper, lower = mean(arm) - mean(than), mean(other) - mean(than)
    ratio = upper / lower
    of_arm, of_than, of_other = (stdev(group) ** 2 / len(group) for group in (arm, than, other))
    parts = ((of_arm, len(arm)), ((1 - ratio) ** 2 * of_than, len(than)), (ratio**2 * of_other, len(other)))
    total = sum(variance for variance, _ in parts)
    if total == 0:
        return ratio, ratio, ratio
    freedom = total**2 / sum(variance**2 / (count - 1) for variance, count in parts)
    square = float(stats.t.ppf(1 - LEVEL / 2, freedom)) ** 2
    leading = lower**2 - square * (of_than + of_other)
    half = upper * lower - square * of_than
    root = half**2 - leading * (upper**2 - square * (of_arm + of_than))
    if leading <= 0 or root < 0:
        return None
    return ratio, (half - math.sqrt(root)) / leading, (half + math.sqrt(root)) / leading


def holm(p_values: Sequence[float]) -> int:
    """Count the tests, from the lowest p-value on, that hold together at the level of one (Holm, 1979)."""
    for number, p_value in enumerate(sorted(p_values)):
        if p_value >= LEVEL / (len(p_values) - number):
            return number
    return len(p_values)


@dataclass(frozen=True)
class Verdict:
    """A claim at one size and length. `saved`: share of the baseline's tokens, with its interval and direction."""

    claim: Claim
    place: tuple[str, str]
    arm: Sequence[float]
    than: Sequence[float]
    test: Welch
    saved: str = ""

    @property
    def diverged(self) -> int:
        return sum(not math.isfinite(value) for value in (*self.arm, *self.than))

    @property
    def word(self) -> str:
        """Judge by the interval: a claim with a direction is judged at a level of 0.025 on its side."""
        if self.diverged:
            return DIVERGED
        if not (self.test.low > 0 or self.test.high < 0):
            return NOT_SHOWN
        seen = "lower" if self.test.high < 0 else "higher"
        return HELD if self.claim.sign in (seen, "differs") else OPPOSITE

    @property
    def unit(self) -> str:
        return "nats" if self.claim.metric.startswith("margin") else _UNITS.get(self.claim.metric, "")

    def __str__(self) -> str:
        size, length = self.place
        seeds = f"{len(self.arm)} and {len(self.than)} seeds"
        where = f"size {size}, {length} tokens a parameter"
        if self.diverged:
            return f"{self.word}: {self.claim.says}; {where}: {self.diverged} of {seeds} diverged"
        test = self.test
        small = f"; {test.detectable:.4f} would be found four times in five" if self.word == NOT_SHOWN else ""
        saved = f"; saves {self.saved}" if self.saved else ""
        return (
            f"{self.word}: {self.claim.says}; {where}: {test.difference:+.4f} {self.unit} ({test.low:+.4f} to "
            f"{test.high:+.4f}, p {test.p_value:.2g}, {seeds}){small}{saved}"
        )


def judge(name: str, tables: Mapping[str, Table]) -> list[Verdict]:
    """Judge each claim of an experiment at each size and length at which both of its arms have two runs or more.

    An arm's seeds are those of all tables that have runs with the same settings, so that a baseline that several
    experiments share is the same in all of them.
    """
    table, verdicts = tables[name], []
    for claim, place in itertools.product(table.plan.claims, table.places):
        arm, than = (_values(seeds_of(table.of(each, place), tables), claim.metric) for each in (claim.arm, claim.than))
        if min(len(arm), len(than)) > 1:
            than = [claim.times * value for value in than]
            verdict = Verdict(claim, place, arm, than, welch(arm, than))
            if verdict.word in (HELD, OPPOSITE) and (claim.metric, claim.sign) == ("validation_loss", "lower"):
                verdict = replace(verdict, saved=_saved(name, tables, claim, place))
            verdicts.append(verdict)
    return verdicts


def seeds_of(rows: Sequence[Row], tables: Mapping[str, Table]) -> list[Row]:
    """Add the runs of other tables that differ from these in their seed alone."""
    if not rows or int(rows[0]["trial"]):
        return list(rows)

    def settings(row: Row) -> tuple[str, ...]:
        return (re.sub(r"--seed \S+", "", row["flags"]), row["data"], row["device"], row["number_type"])

    own = {settings(row) for row in rows}
    others = [row for table in tables.values() for row in table.rows if not int(row["trial"]) and settings(row) in own]
    return list({row["run"]: row for row in (*others, *rows)}.values())


def _values(rows: Sequence[Row], metric: str) -> list[float]:
    """Read a metric; a run that diverged counts as infinitely bad, one that did not measure it is left out."""
    measured = [row for row in rows if row.get(metric) or row["status"] != "done"]
    return [float(row[metric]) if row.get(metric) else math.inf for row in measured]


def _saved(name: str, tables: Mapping[str, Table], claim: Claim, place: tuple[str, str]) -> str:
    """Describe the tokens that a difference saves, by the shortest baseline that surely ends higher; or return ""."""
    table = tables[name]
    arm, than = table.of(claim.arm, place), table.of(claim.than, place)
    baseline = table.plan.arms[claim.than]
    shorter = [
        rows
        for other in tables.values()
        if other is table or _kind(other) == _kind(table)
        for each in other.plan.arms.values()
        if _is_shortened(each, baseline) and (rows := other.of(each.name, place))
    ]
    if not shorter:
        return ""
    short = min(shorter, key=lambda rows: (int(rows[0]["steps"]), mean(_values(rows, claim.metric))))
    losses = [_values(seeds_of(rows, tables), claim.metric) for rows in (arm, than, short)]
    steps, whole, less = (int(rows[0]["steps"]) for rows in (arm, than, short))
    if len(short) < 2 or less >= whole or not welch(losses[2], losses[1]).low > 0:
        return ""
    ratio = fieller(*losses)
    if ratio is None or (ratio[0] > 0 and steps >= whole):
        return ""
    shares = [1 - steps / needed if (needed := whole - each * (whole - less)) > 0 else -math.inf for each in ratio]
    bound = "at least" if ratio[0] <= 0 else "at most"
    return f"{bound} {shares[0]:.0%} of the tokens ({shares[2]:.0%} to {shares[1]:.0%})"


def _kind(table: Table) -> tuple[object, ...]:
    """Return what two experiments must share to be compared."""
    machines = frozenset((row["device"], row["number_type"], row["data"]) for row in table.rows)
    return table.plan.tuned_in, table.plan.family, machines


def _is_shortened(arm: Arm, baseline: Arm) -> bool:
    """Return whether an arm differs from the baseline in its length, and perhaps in a learning rate that suits it."""
    alike = {**arm.flags, "lr": ""} == {**baseline.flags, "lr": ""} and arm.tuned_as == baseline.tuned_as
    return alike and arm.length < baseline.length


def problems(name: str, tables: Mapping[str, Table]) -> Iterator[str]:
    """Yield what forbids a conclusion from a table: runs missing, added or other than planned; unequal machines."""
    table = tables[name]
    plan = table.plan
    for column in ("data", "device", "number_type"):
        if len(values := {row[column] for row in table.rows}) > 1:
            yield f"{name}: its runs have {len(values)} values of {column}: compare runs that share it"
    columns = ("arm", "size", "tokens_per_parameter", "seed", "trial")
    for place, count in Counter(" ".join(row[column] for column in columns) for row in table.rows).items():
        if count > 1:
            yield f"{name}: the run {place} stands in it twice"
    if not plan.is_search and (few := [size for size in plan.sizes if plan.seeds_at(size) < FEWEST_SEEDS]):
        yield f"{name}: fewer than {FEWEST_SEEDS} seeds at size {few[0]}"
    if plan.tuned_in in tables and (of_search := list(problems(plan.tuned_in, tables))):
        yield f"{name}: its settings come from a search that allows no conclusion: {of_search[0]}"
    try:
        planned = entries_of(plan, table.rows[0]["data"] if table.rows else "", settings_of(plan, tables))
    except ResearchError as error:
        yield f"{name}: {error}"
        return
    runs = {row["run"] for row in table.rows}
    wanted = {entry.run.digest[:16]: f"{entry.arm} at size {entry.size}, seed {entry.seed}" for entry in planned}
    yield from (
        f"{name}: {who} is missing, or was run with other settings" for run, who in wanted.items() if run not in runs
    )
    if extra := runs - wanted.keys():
        yield f"{name}: {len(extra)} of its runs are not those of the plan"
    for row in table.rows:
        curve = table.curves.get(row["run"], {}).get("validation_loss", ())
        if row["status"] == "done" and not (curve and abs(curve[-1][1] / float(row["validation_loss"]) - 1) < 1e-4):
            yield f"{name}: the validation loss of {row['arm']}, seed {row['seed']}, is not the end of its curve"
