# SPDX-License-Identifier: Apache-2.0
"""How much longer a step of one arm takes than one of another: what turns tokens saved into time saved.

    time saved = 1 - (1 - tokens saved) * seconds of the arm's step / seconds of the other's

The experiment `runtime` measures steps on purpose, one run at a time. The seconds that the judged runs logged are not
used: they mean nothing where several shared the cores, and nothing in a table tells whether they did.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from simreg_megatron.report.welch import mean
from simreg_megatron.reproduce.verdict import Place, Row

EXPERIMENT = "runtime"


def slower(rows: Sequence[Row], arm: str, than: str, place: Place, measured: Sequence[Row]) -> float | None:
    """Seconds of the arm's step over those of the other's; None where nobody measured both kinds at that size.

    Args:
        rows: of the experiment judged.
        measured: of `runtime`.
    """
    kinds = [{_kind(row) for row in _of(rows, name, place)} for name in (arm, than)]
    at_size = [row for row in measured if row["size"] == place.size]
    long, base = (_seconds([row for row in at_size if {_kind(row)} == kind]) for kind in kinds)
    return None if long is None or base is None else long / base


def time_saved(tokens_saved: float, times: float) -> float:
    """Where a step takes so many times as long."""
    return 1 - (1 - tokens_saved) * times


def _of(rows: Sequence[Row], arm: str, place: Place) -> list[Row]:
    return [row for row in rows if row["arm"] == arm and (row["size"], row["tokens_per_parameter"]) == place]


def _seconds(rows: Sequence[Row]) -> float | None:
    found = [float(row["seconds_per_step"]) for row in rows if row.get("seconds_per_step")]
    return mean(found) if found else None


def _kind(row: Row) -> tuple[str, ...]:
    """What a step costs by: clipping, the objectives and their chunks. Weights, temperatures and rates cost nothing."""
    words = row["flags"].split()
    given = {word: after for word, after in zip(words, [*words[1:], ""], strict=True) if word.startswith("--")}
    clipping = ("adagc",) if "--adagc" in given else ()
    objective = given.get("--simreg-objective", "simreg")
    weighted = ":" in objective  # several, or one, whose weights stand there and not in --simreg-lambda
    if objective == "none" or (not weighted and given.get("--simreg-lambda", "0") == "0"):
        return ("off", *clipping)
    costly = (
        "--simreg-objective-options", "--simreg-chunk-size", "--simreg-similarity", "--simreg-layers", "--simreg-impl",
        "--simreg-off-after", "--simreg-every",
    )  # fmt: skip
    names = re.sub(":[^,]*", "", objective)
    return (names, *clipping, *(f"{name} {given[name]}" for name in costly if name in given))
