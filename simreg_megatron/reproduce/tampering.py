# SPDX-License-Identifier: Apache-2.0
"""Numbers that do not fit what stands beside them: their curves, other seeds, the same run in other tables.

Each function yields a sentence for whatever was changed, copied or cut. `seconds_per_step` has nothing beside it: it is
the median over a run's steps, and curves of those would be most of a table.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from simreg_megatron.reproduce.plan import METRICS
from simreg_megatron.reproduce.store import DIVERGED, DONE, MACHINE
from simreg_megatron.reproduce.verdict import Row

LOSS = "validation_loss"
_OF_A_RUN = (*MACHINE, "status", "steps", *METRICS)
WITH_CURVES = set(METRICS) - {LOSS, "bits_per_byte", "seconds_per_step"}  # by the mean of their end


def flag_of(row: Row, name: str) -> str:
    """The value of a flag of a run; "" where it has none."""
    words = row["flags"].split()
    return words[words.index(f"--{name}") + 1] if f"--{name}" in words else ""


def across_tables(name: str, tables: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    """A run that stands in several tables has the same numbers in all that measured them."""
    own = {row["run"]: row for row in tables[name]}
    for other, rows in tables.items():
        for row in rows if other != name else ():
            mine = own.get(row["run"], row)
            both = [column for column in _OF_A_RUN if mine.get(column) and row.get(column)]
            if changed := [column for column in both if mine[column] != row[column]]:
                yield (
                    f"{name}: {mine['arm']}, seed {mine['seed']}, has another {changed[0]} ({mine[changed[0]]}) than "
                    f"the same run in {other} ({row[changed[0]]}): one of them was changed, so run it again"
                )


def of_ends(name: str, rows: Sequence[Row]) -> Iterator[str]:
    """Two seeds never end alike in all digits of both losses."""
    seen: dict[tuple[str, ...], str] = {}
    for row in rows:
        ends = (row["arm"], row["size"], row["tokens_per_parameter"], row[LOSS], row["train_loss"])
        if row["status"] == DONE and row["train_loss"] and seen.setdefault(ends, row["seed"]) != row["seed"]:
            yield (
                f"{name}: {row['arm']} at size {row['size']} ended with the same numbers for the seeds {seen[ends]} "
                f"and {row['seed']}: one of them is a copy, so run it again"
            )


def of_curves(name: str, rows: Sequence[Row], points: Sequence[Row], claimed: set[str]) -> Iterator[str]:
    """What the curves show.

    Args:
        claimed: the metrics that are concluded from.
    """
    curves: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for point in points:
        curves.setdefault((point["run"], point["tag"]), []).append((int(point["step"]), float(point["value"])))
    yield from _of_orders(name, rows, curves)
    yield from _of_diverged(name, rows, curves)
    yield from _of_losses(name, rows, curves)
    for metric in sorted(claimed & WITH_CURVES):
        yield from _of_measures(name, rows, curves, metric)
    if "bits_per_byte" in claimed:
        yield from _of_bits(name, rows)
    yield from _of_copies(name, rows, curves)


_Curves = Mapping[tuple[str, str], Sequence[tuple[int, float]]]


def _of_orders(name: str, rows: Sequence[Row], curves: _Curves) -> Iterator[str]:
    """A run passes each step once."""
    who = {row["run"]: f"{row['arm']}, seed {row['seed']}" for row in rows}
    for (run, tag), curve in curves.items():
        if run in who and any(after <= before for (before, _), (after, _) in pairwise(curve)):
            yield f"{name}: the {tag} curve of {who[run]} has a step twice, or before an earlier one: copy it again"


def _of_diverged(name: str, rows: Sequence[Row], curves: _Curves) -> Iterator[str]:
    for row in rows:
        *_, (step, loss) = curves.get((row["run"], LOSS)) or [(0, math.nan)]
        if row["status"] == DIVERGED and step == int(row["steps"]) and math.isfinite(loss):
            yield (
                f"{name}: {row['arm']}, seed {row['seed']}, is {DIVERGED}, and its curve ends at {loss:.5g} in its "
                f"last step, {step}: run it again"
            )


def _of_losses(name: str, rows: Sequence[Row], curves: _Curves) -> Iterator[str]:
    for row, who, curve in _behind(name, rows, curves, LOSS):
        if not curve:
            yield f"{who} has no curve behind it"
        elif curve[-1][0] != int(row["steps"]) or not abs(curve[-1][1] / float(row[LOSS]) - 1) <= 1e-4:
            yield f"{who} is {row[LOSS]}, and its curve ends at {curve[-1][1]:.5g} in step {curve[-1][0]}"


def _of_measures(name: str, rows: Sequence[Row], curves: _Curves, metric: str) -> Iterator[str]:
    """Other numbers are the mean over the last tenth of a curve (`report.runs.mean_of_end`)."""
    for row, who, curve in _behind(name, rows, curves, metric):
        if not curve:
            yield f"{who} has no curve behind it"
        elif curve[-1][0] + int(flag_of(row, "log-interval") or 1) <= int(row["steps"]):
            yield f"{who} has a curve that ends at step {curve[-1][0]} of {row['steps']}"
        elif not _is_end_of(curve, float(row[metric]), int(flag_of(row, "log-interval") or 1)):
            yield f"{who} is {row[metric]}, and its curve ends otherwise"


def _behind(
    name: str, rows: Sequence[Row], curves: _Curves, metric: str
) -> Iterator[tuple[Row, str, Sequence[tuple[int, float]]]]:
    """Each row that has the number, how a sentence about it begins, and the points behind it."""
    told = "validation loss" if metric == LOSS else metric
    for row in rows:
        if row[metric]:
            yield (
                row,
                f"{name}: the {told} of {row['arm']}, seed {row['seed']},",
                curves.get((row["run"], metric), ()),
            )


def _is_end_of(curve: Sequence[tuple[int, float]], value: float, interval: int) -> bool:
    """Whether `value` is the mean of the curve's last tenth, as exactly as a table that was thinned can tell.

    Args:
        interval: steps from one point to the next where none was left out.
    """
    last = [found for step, found in curve if step > 0.9 * curve[-1][0]]
    is_thinned = len(curve) > 1 and curve[-1][0] - curve[-2][0] > interval
    of_windows = 0.1 * (max(last) - min(last)) if is_thinned else 0.0  # one may reach over the border
    return abs(sum(last) / len(last) - value) <= 1e-4 + 1e-4 * abs(value) + of_windows


def _of_bits(name: str, rows: Sequence[Row]) -> Iterator[str]:
    of_nats = [float(row["bits_per_byte"]) / float(row[LOSS]) for row in rows if row["bits_per_byte"] and row[LOSS]]
    if of_nats and max(of_nats) > 1.0001 * min(of_nats):
        yield f"{name}: its bits per byte are not its losses by one factor, as on one text they are"


def _of_copies(name: str, rows: Sequence[Row], curves: _Curves) -> Iterator[str]:
    """Two seeds never take the same way, whatever their arms; one seed may, in arms that train alike at first."""
    seen: dict[tuple[str, int, float], Row] = {}
    for row in rows:
        way = curves.get((row["run"], "train_loss"), ())
        if not way and row["status"] == DONE:
            yield f"{name}: {row['arm']}, seed {row['seed']}, has no training curve: copy its curves again"
        places = [(row["size"], step, loss) for step, loss in way]
        met = Counter(
            (other["arm"], other["seed"])
            for place in places
            if (other := seen.setdefault(place, row))["seed"] != row["seed"]
        )
        for (arm, seed), count in met.items():
            if count > 0.5 * len(places):
                yield (
                    f"{name}: at size {row['size']} {row['arm']}, seed {row['seed']}, has the curve of {arm}, seed "
                    f"{seed}: one of them is a copy, so run it again"
                )
