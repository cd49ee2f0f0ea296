# SPDX-License-Identifier: Apache-2.0
"""The table of `python -m tests.versions`: one row a release; what did not fit a cell stands below, numbered."""

from __future__ import annotations

import datetime
import platform
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.versions import compare, driver, measure, releases, tiny
from tests.versions.measure import Bench, Cell

COLUMNS = ("lambda 0", *tiny.LAYOUTS, "loop of the wheel", "loop of the source tree", "patch")
_LONG = 32  # characters beyond which a cell's text becomes a note


@dataclass(frozen=True)
class Row:
    version: str
    cells: dict[str, Cell]

    @property
    def holds(self) -> bool:
        return all(cell.holds is not False for cell in self.cells.values())


def row(bench: Bench, version: str) -> Row:
    """Drive one release in every way; one that cannot be had has its reason in every cell."""
    try:
        cells = measure.core_cells(bench, version)
    except (releases.ReleaseError, compare.RunError) as error:
        cells = dict.fromkeys(("lambda 0", *tiny.LAYOUTS), Cell(False, str(error)))
    ways = {
        "loop of the wheel": measure.wheel_cell,
        "loop of the source tree": measure.tree_cell,
        "patch": measure.patch_cell,
    }
    for name, way in ways.items():
        try:
            cells[name] = way(bench, version)
        except releases.ReleaseError as error:
            cells[name] = Cell(False, str(error))
    return Row(version, cells)


def one_line(row: Row) -> str:
    return f"{row.version}: " + "; ".join(f"{name}: {_word(cell)} ({cell.text})" for name, cell in row.cells.items())


def _word(cell: Cell) -> str:
    return {True: "yes", False: "NO", None: "-"}[cell.holds]


def markdown(rows: Sequence[Row], *, argv: Sequence[str]) -> str:
    notes: list[str] = []
    lines = [_line(("release", *COLUMNS)), _line("---" for _ in range(len(COLUMNS) + 1))]
    for row in rows:
        lines.append(_line((row.version, *(_shown(row.cells[name], notes) for name in COLUMNS))))
    numbered = [f"{number}. {note}" for number, note in enumerate(notes, start=1)]
    return "\n".join([_head(argv), *lines, "", *numbered, *([""] if notes else []), _LEGEND]) + "\n"


def _line(words: object) -> str:
    return "| " + " | ".join(words) + " |"  # type: ignore[arg-type]


def _shown(cell: Cell, notes: list[str]) -> str:
    if len(cell.text) <= _LONG:
        return f"{_word(cell)}: {cell.text}" if cell.text else _word(cell)
    text = cell.text.replace("|", "/")
    if text not in notes:
        notes.append(text)
    return f"{_word(cell)} [{notes.index(text) + 1}]"


def _head(argv: Sequence[str]) -> str:
    return f"""# What works with which Megatron

Made on {datetime.date.today().isoformat()} by `make versions` (`python -m tests.versions {shlex.join(argv)}`),
with Python {platform.python_version()} and torch {torch.__version__}, on a CPU.
"""


_LEGEND = f"""Each release is installed in a folder of its own. The columns up to PP 2 x VPP 2 drive megatron-core alone:
GPTModel (4 layers, RMSNorm, rotary positions, SwiGLU), Megatron's DistributedDataParallel, its forward-backward functions
(no pipelining, 1F1B, interleaved) and finalize_model_grads, on one set of weights and one piece of real text, a mask that leaves
every micro-batch another number of tokens, fp32.

- **lambda 0**: loss and every gradient with the plugin installed at lambda 0 are those without it, bit for bit, in both modes.
- **one process** to **PP 2 x VPP 2**: SimReg on (lambda {driver.LAMBDA:g}, temperature {driver.TEMPERATURE:g}) equals {releases.REFERENCE} on one process. The
  numbers are the largest relative differences of a micro-batch's loss and of a parameter's gradient, in the default mode and
  with --calculate-per-token-loss; up to {compare.TOLERANCE:.0e} is "yes". The loss is the language-model loss, whose value SimReg
  leaves alone: SimReg is in the gradient, and most of it.
- **loop of the wheel**: `megatron.training` of the wheel trains three steps, on one process and with TP 2 + SP: lambda 0 ends
  with the same parameters, bit for bit, as without the plugin; with SimReg on, the number is the largest relative difference
  of a loss or a gradient norm from {releases.REFERENCE}'s loop on one process.
- **loop of the source tree**: the tag's own pretrain_gpt.py, three steps on real text, on one process and with TP 2 + SP: lambda 0
  as before; and `python -m simreg_megatron pretrain_gpt.py ... --simreg-lambda 10` logs the given value after the last step.
- **patch**: the patch of patches/ applies to that tree by added lines only and comes off again, and the patched script logs it.
"""
