# SPDX-License-Identifier: Apache-2.0
"""The page's table of a campaign: for each kind of fault the runs of each layout, what they lost, and what was said."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from benchmarks.records import Record
from tests.faults.faults import MOMENTS
from tests.faults.layouts import LAYOUTS
from tests.faults.starts import COMMAND

_PATH = re.compile(r"/\S*/")
_LONGEST = 110


def table(rows: Sequence[Record]) -> Iterator[str]:
    yield "| fault | " + " | ".join(LAYOUTS) + " | steps lost, at most | s to go on | said most often |"
    yield "| --- " * (len(LAYOUTS) + 4) + "|"
    for kind in MOMENTS:
        if here := [row for row in rows if row["kind"] == kind and not row["then"]]:
            yield f"| {kind} | {_cells(here)} | {_lost(here)} | {_seconds(here)} | {_said(here)} |"
    moved = [row for row in rows if row["then"]]
    if moved:
        far = max(float(row["equal"]) for row in moved)
        yield f"| in another layout | {_cells(moved)} | {_lost(moved)} | {_seconds(moved)} | {far:.1e} away at most |"


def _cells(rows: Sequence[Record]) -> str:
    """How many runs, and how many of them were sound where that is another number."""
    cells = []
    for layout in LAYOUTS:
        of_layout = [row for row in rows if row["layout"] == layout]
        sound = sum(not row["wrong"] for row in of_layout)
        cells.append(str(len(of_layout)) if sound == len(of_layout) else f"{sound} of {len(of_layout)}")
    return " | ".join(cells)


def _lost(rows: Iterable[Record]) -> int:
    return max(int(row["lost"]) for row in rows)


def _seconds(rows: Iterable[Record]) -> str:
    """Summarise the runs that were started by the command: shared imports make the others quicker than a user's."""
    found = [float(row["seconds"]) for row in rows if row["way"] == COMMAND and float(row["seconds"])]
    return f"{median(found):.0f}" if found else ""


def _said(rows: Iterable[Record]) -> str:
    counted = Counter(_PATH.sub("", row["said"]).replace("|", "/")[:_LONGEST] for row in rows if row["status"] != "0")
    return counted.most_common(1)[0][0] if counted else "nothing: it went on"
