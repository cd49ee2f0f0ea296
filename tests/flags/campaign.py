# SPDX-License-Identifier: Apache-2.0
"""Many combinations: each batch draws from its own number, and a table of what they came to keeps growing."""

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks import records
from tests.flags.combination import Combination
from tests.flags.judge import RAN, WRONG, Verdict, apart, judged
from tests.flags.life import live

COMPARED_EVERY = 5  # of those that train one is also compared with the same run of plain Megatron
_BATCHES = "batches"


class Row(NamedTuple):
    """A verdict that some combinations share, with words for a reader and the shortest flags."""

    kind: str
    what: str
    combinations: int
    compared: int  # how many of these were also run without us, and were as they should be next to those
    detail: str
    flags: str


class Table:
    """Rows by verdict, kept in a file; and how many batches they are of."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows: dict[tuple[str, str], Row] = {}
        self.batches = 0
        for line in records.read(path) if path.is_file() else ():
            self._read(line)

    def _read(self, line: dict[str, str]) -> None:
        if line["kind"] == _BATCHES:
            self.batches = int(line["combinations"])
            return
        counts = {name: int(line[name]) for name in ("combinations", "compared")}
        self.rows[line["kind"], line["what"]] = Row(**{**line, **counts})  # type: ignore[arg-type]

    @property
    def total(self) -> int:
        return sum(row.combinations for row in self.rows.values())

    @property
    def wrong(self) -> list[Row]:
        return [row for row in self.rows.values() if row.kind == WRONG]

    def add(self, verdict: Verdict, combination: Combination, *, compared: bool) -> None:
        new = Row(verdict.kind, verdict.what, 1, int(compared), verdict.detail, shown(combination))
        old = self.rows.get(verdict[:2], new._replace(combinations=0, compared=0))
        shortest = old if len(old.flags) <= len(new.flags) else new
        counts = {"combinations": old.combinations + 1, "compared": old.compared + new.compared}
        self.rows[verdict[:2]] = shortest._replace(**counts)

    def keep(self) -> None:
        batches = Row(_BATCHES, "", self.batches, 0, "", "")
        records.write(self._path, (row._asdict() for row in [*sorted(self.rows.values()), batches]))


def shown(combination: Combination) -> str:
    """Its flags in a cell: ASCII, and of thousands of digits the first ones."""
    return re.sub("9{31,}", "9" * 30 + "...", str(combination)).encode("unicode_escape").decode()


def is_compared(index: int, combination: Combination) -> bool:
    """Return whether the combination at this place in its batch is; a resumed run's losses depend on the first one."""
    return index % COMPARED_EVERY == 0 and not combination.resumes


def verdict_on(combination: Combination, folder: Path, *, compared: bool) -> Verdict:
    """Run it and judge it; `compared`: against plain Megatron also if it trains."""
    plain = functools.cache(functools.partial(live, folder=folder, plain=True))
    found = live(combination, folder)
    verdict = judged(combination, found, plain)
    if compared and verdict.kind == RAN:
        return apart(combination, found, plain(combination)) or verdict
    return verdict


def run_batch(table: Table, combinations: list[Combination], folder: Path) -> Iterator[Verdict]:
    """One after the other; the batch counts when it is whole."""
    rows = []
    for index, combination in enumerate(combinations):
        compared = is_compared(index, combination)
        verdict = verdict_on(combination, folder, compared=compared)
        rows.append((verdict, combination, compared and verdict.kind == RAN))
        yield verdict
    for verdict, combination, compared in rows:
        table.add(verdict, combination, compared=compared)
    table.batches += 1
    table.keep()
