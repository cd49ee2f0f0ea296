# SPDX-License-Identifier: Apache-2.0
"""The parity table, on a terminal and as Markdown."""

import os
import platform
import time
from collections.abc import Iterable, Sequence

import torch
from rich.console import Console
from rich.table import Table

from tests.megatron.parity.run import STEPS, Row
from tools import tables

COLUMNS = (
    *("model", "layout", "objective", "procs", "against"),
    *("loss", "norm", "grad", "logged", "share", "bound", "result", "s"),
)
LEGEND = f"""\
Each row trains {STEPS} steps on real text from a checkpoint of its model (hidden size 64, sequence 64, global batch 4)
and is compared with one process, or with what the column *against* names, at full precision.

- **loss**, **norm**: largest relative difference of the loss and of the gradient norm over the {STEPS} steps.
- **grad**: largest relative difference, in norm, of any parameter's gradient in the first step, after Megatron reduced
  and scaled it and before clipping. Shards are joined; replicas must be equal bit for bit, or the row fails.
- **logged**: largest relative difference of any value that SimReg logs, over the {STEPS} lines of the log (the second
  is of two steps): the loss of each objective, cosines, angle, norms, isotropy and effective rank,
  trained scalars. A difference of norms is compared as it is, in standard deviations: behind an RMSNorm these are a
  thousandth of the norm, and so magnify its rounding a thousand times. So are margins, in nats: some are near 0.
- What is logged of samples (isotropy, effective rank and mean cosine of at most 8192 tokens of a micro-batch, margins
  of at most 512) is of every k-th position, k by the size of the micro-batch: the same in every layout with the same
  micro-batch, as the rows *few samples* show, and of other tokens with another.
- **share**: SimReg's part of the single process's gradient, norm(g - g without SimReg) / norm(g). Below 0.1: fail.
- **bound**: on grad; loss, norm and logged have their own, in `tests/megatron/parity/cells.py`.
- *chunk 16* lies inside every rank's part of the 64 tokens, *chunk 24* spans ranks and leaves a shorter last chunk,
  *whole* is one chunk of 64. *local* is compared with the single process that has the chunk which ranks really use.
- *masked ends* leaves text ends out of the loss, so ranks count unequal tokens. Megatron's default mode is then a mean
  of the ranks' means: those rows are compared with one process that averages so, and differ from one that does not.
- Megatron's loss of multi-token prediction is a mean of local means in every mode, so under CP it depends on the layout
  without SimReg already; with its weight at 0 the row is exact.
- bf16 and fp16 are compared with fp32: their own rounding, not the layout, sets the bound. In the log it shows most in
  the spread and the differences of norms, which are no larger than it.
- Rows that are wrong on purpose must miss the bound: *fails, as it must*.
"""


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
