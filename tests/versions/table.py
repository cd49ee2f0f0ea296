# SPDX-License-Identifier: Apache-2.0
"""The tables of `python -m tests.versions`, a row for each release; what did not fit a cell stands below, numbered."""

import datetime
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.versions import compare, driver, loops, measure, releases
from tests.versions.measure import Bench, Cell
from tools import tables

_LONG = 32  # characters beyond which a cell's text becomes a note


@dataclass(frozen=True)
class Row:
    name: str
    cells: dict[str, Cell]

    @property
    def holds(self) -> bool:
        return all(cell.holds is not False for cell in self.cells.values())


def row(bench: Bench, version: str) -> Row:
    """Drive one release in every way; one that cannot be had has its reason in every cell."""
    return Row(version, _core_cells(bench, version) | loops.cells(bench, version))


def row_of_python(bench: Bench, version: str, python: str) -> Row:
    """The same release under another interpreter, megatron-core alone."""
    name = f"{version}, Python {releases.python_version(python)}, torch {releases.torch_version(python)}"
    return Row(name, _core_cells(bench, version, python))


def _core_cells(bench: Bench, version: str, python: str = sys.executable) -> dict[str, Cell]:
    if version == "main" and bench.tree(version) is None:
        return dict.fromkeys(measure.COLUMNS, Cell(None, measure.NO_TREE))
    try:
        return measure.core_cells(bench, version, python)
    except (releases.ReleaseError, compare.RunError) as error:
        return dict.fromkeys(measure.COLUMNS, Cell(False, str(error)))


def one_line(row: Row) -> str:
    return f"{row.name}: " + "; ".join(f"{name}: {_word(cell)} ({cell.text})" for name, cell in row.cells.items())


def _word(cell: Cell) -> str:
    return {True: "yes", False: "NO", None: "-"}[cell.holds]


def markdown(rows: Sequence[Row], *, command: str, minutes: float) -> str:
    notes: list[str] = []
    core = _table(rows, measure.COLUMNS, notes)
    of_loops = _table([row for row in rows if loops.COLUMNS[0] in row.cells], loops.COLUMNS, notes)
    numbered = [f"{number}. {note}" for number, note in enumerate(notes, start=1)]
    parts = [_head(command, minutes), "## megatron-core alone\n", *core, "\n## Training loops\n", *of_loops, ""]
    return "\n".join([*parts, *numbered, *([""] if notes else []), _legend()]) + "\n"


def _table(rows: Sequence[Row], columns: Sequence[str], notes: list[str]) -> list[str]:
    lines = [_line(("release", *columns)), _line("---" for _ in range(len(columns) + 1))]
    return [*lines, *(_line((row.name, *(_shown(row.cells[name], notes) for name in columns))) for row in rows)]


def _line(words: object) -> str:
    return "| " + " | ".join(words) + " |"  # type: ignore[arg-type]


def _shown(cell: Cell, notes: list[str]) -> str:
    if len(cell.text) <= _LONG:
        return f"{_word(cell)}: {cell.text}" if cell.text else _word(cell)
    text = cell.text.replace("|", "/")
    if text not in notes:
        notes.append(text)
    return f"{_word(cell)} [{notes.index(text) + 1}]"


def _head(command: str, minutes: float) -> str:
    return f"""# What works with which Megatron

Made on {datetime.date.today().isoformat()} in {minutes:.0f} minutes by the command of `make versions`:

    {command}

on {platform.system()} {platform.machine()}, {os.cpu_count()} cores, no GPU, with Python {platform.python_version()}
and torch {torch.__version__} unless a row names others.
{tables.stamp("versions")}

yes: seen; NO: seen failing; -: not tried, and why.
"""


_LEGEND = Path(__file__).with_name("columns.md")


def _legend() -> str:
    return _LEGEND.read_text(encoding="utf-8").format(
        tolerance=f"{compare.TOLERANCE:.0e}", lambda_=f"{driver.LAMBDA:g}", temperature=f"{driver.TEMPERATURE:g}",
        reference=releases.REFERENCE, tag=releases.tag_of(releases.REFERENCE), scalars=driver.SCALARS,
        several=driver.SEVERAL,
    )  # fmt: skip
