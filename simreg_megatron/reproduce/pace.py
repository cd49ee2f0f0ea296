# SPDX-License-Identifier: Apache-2.0
"""How much longer a step of one arm takes than one of another: what turns tokens saved into time saved.

    time saved = 1 - (1 - tokens saved) * seconds of the arm's step / seconds of the other's

A step that seems shorter only by chance counts as equally long. The experiment `runtime` measures steps on purpose,
one run at a time. The seconds that the judged runs logged are not used: they mean nothing where several shared the
cores, and nothing in a table tells whether they did.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from simreg_megatron.report.welch import mean, welch
from simreg_megatron.reproduce.verdict import Place, Row, machines_of

EXPERIMENT = "runtime"
_OFF = "off"


class Pace(NamedTuple):
    """Seconds of one arm's step over those of another's, and the two-sided 95 % interval."""

    times: float
    low: float
    high: float

    @property
    def told(self) -> str:
        more, low, high = (f"{100 * (times - 1):+.1f}" for times in self)
        return f"a step takes {more} %, {low} to {high}"

    def saved(self, tokens: float) -> float:
        """Share of the time that so large a share of the tokens is worth."""
        times = self.times if self.times > 1 or self.high < 1 else 1.0
        return 1 - (1 - tokens) * times


def pace(rows: Sequence[Row], arm: str, than: str, place: Place, measured: Sequence[Row]) -> Pace | None:
    """How long the arm's step takes beside the other's; None where nobody measured both kinds at that size there.

    Args:
        rows: of the experiment judged.
        measured: of `runtime`.
    """
    kinds = [{_kind(row) for row in _of(rows, name, place)} for name in (arm, than)]
    of_machine = [row for row in measured if machines_of([row]) == machines_of(rows)]
    at_size = [row for row in of_machine if row["size"] == place.size and not _idles(row)]
    long, base = (_log_seconds([row for row in at_size if {_kind(row)} == kind]) for kind in kinds)
    if min(len(long), len(base)) < 2:
        return None
    found = welch(long, base)
    return Pace(math.exp(mean(long) - mean(base)), math.exp(found.low), math.exp(found.high))


def _of(rows: Sequence[Row], arm: str, place: Place) -> list[Row]:
    return [row for row in rows if row["arm"] == arm and (row["size"], row["tokens_per_parameter"]) == place]


def _log_seconds(rows: Sequence[Row]) -> list[float]:
    return [math.log(float(row["seconds_per_step"])) for row in rows if row.get("seconds_per_step")]


def _idles(row: Row) -> bool:
    """The plugin at work without a term: a cost is told against Megatron without the plugin."""
    return _kind(row)[0] == _OFF and "--plain" not in row["flags"].split()


def _kind(row: Row) -> tuple[str, ...]:
    """What a step costs by: clipping, the objectives and their chunks. Weights, temperatures and rates cost nothing."""
    words = row["flags"].split()
    given = {word: after for word, after in zip(words, [*words[1:], ""], strict=True) if word.startswith("--")}
    clipping = ("adagc",) if "--adagc" in given else ()
    objective = given.get("--simreg-objective", "simreg")
    weighted = ":" in objective  # several, or one, whose weights stand there and not in --simreg-lambda
    if objective == "none" or (not weighted and given.get("--simreg-lambda", "0") == "0"):
        return (_OFF, *clipping)
    costly = (
        "--simreg-objective-options", "--simreg-chunk-size", "--simreg-similarity", "--simreg-layers", "--simreg-impl",
        "--simreg-off-after", "--simreg-every",
    )  # fmt: skip
    names = re.sub(":[^,]*", "", objective)
    return (names, *clipping, *(f"{name} {given[name]}" for name in costly if name in given))
