# SPDX-License-Identifier: Apache-2.0
"""The parity table, on a terminal and as Markdown."""

import os
import platform
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from tests.megatron.parity.run import STEPS, Row
from tools import tables

COLUMNS = (
    *("model", "layout", "objective", "procs", "against"),
    *("loss", "norm", "grad", "logged", "share", "bound", "result", "s"),
)
LEGEND = Path(__file__).with_name("legend.md").read_text(encoding="utf-8").format(steps=STEPS)


def cells(row: Row) -> tuple[str, ...]:
    cell, gap = row.cell, row.difference
    objective = ", ".join(word for word in (cell.objective.name, cell.mode.name, _aside(row)) if word)
    reference = cell.oracle.replace("_", " ") + " oracle" if cell.oracle else cell.reference.name
    measured = ["-"] * 5
    if gap:
        measured = [*(f"{value:.1e}" for value in (gap.loss, gap.norm, gap.grad, gap.logged)), f"{row.share:.2f}"]
    head = (cell.model, cell.layout.name, objective, str(cell.processes), reference)
    return (*head, *measured, f"{cell.bound.grad:.0e}", row.verdict, f"{row.seconds:.1f}")


def _aside(row: Row) -> str:
    setting = row.cell.setting.replace("_", " ")
    wrong = row.cell.breakage.replace("_", " ").upper() or (f"({row.cell.must_fail})" if row.cell.must_fail else "")
    return ", ".join(word for word in (setting, wrong) if word)


def headline(rows: Sequence[Row]) -> str:
    missed = sum(not row.as_expected for row in rows)
    broken = sum(bool(row.cell.must_fail) for row in rows)
    return f"{len(rows)} cells, {broken} of which must fail: {'all' if not missed else len(rows) - missed} as expected"


def print_row(console: Console, row: Row) -> None:
    """A line as soon as the row is known; the table follows when all are."""
    gap = row.difference
    found = f"{gap.grad:.1e} in {gap.parameter}, {gap.logged:.1e} in {gap.value or 'no value'}" if gap else row.trouble
    style = "" if row.as_expected else "bold red"
    console.print(f"{row.verdict:18} {row.seconds:5.1f} s  {row.cell.name}  {found}", style=style, markup=False)


def print_table(console: Console, rows: Sequence[Row]) -> None:
    table = Table(*COLUMNS, title=headline(rows), title_justify="left")
    for row in rows:
        table.add_row(*cells(row), style="" if row.as_expected else "bold red")
    console.print(table)
    for row in rows:
        if not row.as_expected and (row.trouble or row.difference):
            why = row.trouble or f"gradient of {row.difference.parameter}, logged {row.difference.value}"
            console.print(f"{row.cell.name}: {why}", markup=False, soft_wrap=True)


def markdown(rows: Sequence[Row], command: str) -> str:
    lines = [
        "# Parity: the same function in every layout",
        "",
        f"{time.strftime('%Y-%m-%d', time.gmtime())}, `{command}`: {headline(rows)}, "
        f"{sum(row.seconds for row in rows) / 60:.0f} minutes without the references.",
        "",
        _machine(),
        tables.stamp("parity"),
        "",
        LEGEND,
        *_rows_of_markdown([COLUMNS, ["---"] * len(COLUMNS), *map(cells, rows)]),
    ]
    return "\n".join(lines) + "\n"


def _rows_of_markdown(rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in rows]


def _machine() -> str:
    from importlib.metadata import version

    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{versions}, megatron-core {version('megatron-core')}; {os.cpu_count()} CPU cores, no GPU, gloo."
