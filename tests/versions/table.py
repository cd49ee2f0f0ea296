# SPDX-License-Identifier: Apache-2.0
"""The table of `python -m tests.versions`: one row a release; what did not fit a cell stands below, numbered."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.versions import compare, driver, measure, releases, tiny
from tests.versions.measure import Bench, Cell

_CORE = ("lambda 0", *tiny.LAYOUTS)
_LOOPS = ("loop of the wheel", "loop of the source tree", "patch")
COLUMNS = (*_CORE, *_LOOPS)
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
    cells = _core_cells(bench, version)
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


def row_of_python(bench: Bench, version: str, python: str) -> Row:
    """The same release under another interpreter, megatron-core alone."""
    name = f"{version}, Python {releases.python_version(python)}, torch {releases.torch_version(python)}"
    others = dict.fromkeys(_LOOPS, Cell(None, "megatron-core alone with this Python"))
    return Row(name, _core_cells(bench, version, python) | others)


def _core_cells(bench: Bench, version: str, python: str = sys.executable) -> dict[str, Cell]:
    if version == "main" and bench.tree(version) is None:
        return dict.fromkeys(_CORE, Cell(None, "no source tree given"))
    try:
        return measure.core_cells(bench, version, python)
    except (releases.ReleaseError, compare.RunError) as error:
        return dict.fromkeys(_CORE, Cell(False, str(error)))


def one_line(row: Row) -> str:
    return f"{row.name}: " + "; ".join(f"{name}: {_word(cell)} ({cell.text})" for name, cell in row.cells.items())


def _word(cell: Cell) -> str:
    return {True: "yes", False: "NO", None: "-"}[cell.holds]


def markdown(rows: Sequence[Row], *, argv: Sequence[str], minutes: float) -> str:
    notes: list[str] = []
    lines = [_line(("release", *COLUMNS)), _line("---" for _ in range(len(COLUMNS) + 1))]
    for row in rows:
        lines.append(_line((row.name, *(_shown(row.cells[name], notes) for name in COLUMNS))))
    numbered = [f"{number}. {note}" for number, note in enumerate(notes, start=1)]
    return "\n".join([_head(argv, minutes), *lines, "", *numbered, *([""] if notes else []), _LEGEND]) + "\n"


def _line(words: object) -> str:
    return "| " + " | ".join(words) + " |"  # type: ignore[arg-type]


def _shown(cell: Cell, notes: list[str]) -> str:
    if len(cell.text) <= _LONG:
        return f"{_word(cell)}: {cell.text}" if cell.text else _word(cell)
    text = cell.text.replace("|", "/")
    if text not in notes:
        notes.append(text)
    return f"{_word(cell)} [{notes.index(text) + 1}]"


def _head(argv: Sequence[str], minutes: float) -> str:
    command = shlex.join(["python", "-m", "tests.versions", *argv])
    return f"""# What works with which Megatron

Made on {datetime.date.today().isoformat()} in {minutes:.0f} minutes by the command of `make versions`:

    {command}

on {platform.system()} {platform.machine()}, {os.cpu_count()} cores, no GPU, with Python {platform.python_version()}
and torch {torch.__version__} unless a row names others.
"""


_LEGEND = f"""yes: seen; NO: seen failing; -: not tried, and why.

## What a column means

Each release is installed in a folder of its own. The columns up to PP 2 x VPP 2 drive megatron-core alone: GPTModel
(4 layers, RMSNorm, rotary positions, SwiGLU), Megatron's DistributedDataParallel, its forward-backward functions (no
pipelining, 1F1B, interleaved) and finalize_model_grads, on one set of weights and one piece of real text, a mask that
leaves every micro-batch another number of tokens, fp32.

- **lambda 0**: loss and every gradient with the plugin installed at lambda 0 are those without it, bit for bit, in the
  default mode and with --calculate-per-token-loss.
- **one process** to **PP 2 x VPP 2**: SimReg on (lambda {driver.LAMBDA:g}, temperature {driver.TEMPERATURE:g}) equals
  {releases.REFERENCE} on one process. The numbers are the largest relative differences of a micro-batch's loss and of a
  parameter's gradient, in both modes; up to {compare.TOLERANCE:.0e} is "yes". The loss is the language-model loss,
  whose value SimReg leaves alone: SimReg is in the gradient, and at least a tenth of it. (A lambda wrong by a
  thousandth showed as 1e-03, fifty times the bound.)
- **loop of the wheel**: `megatron.training` of the wheel trains three steps, on one process and with TP 2 + SP:
  lambda 0 ends with the same parameters, bit for bit, as without the plugin; with SimReg on, the number is the largest
  relative difference of a loss or a gradient norm from {releases.REFERENCE}'s loop on one process.
- **loop of the source tree**: the tag's own pretrain_gpt.py, three steps on real text, on one process and with
  TP 2 + SP: lambda 0 as before; and `python -m simreg_megatron pretrain_gpt.py ... --simreg-lambda 10` logs SimReg in
  every step, on one process with the given value in the last. The weights are the tree's own.
- **patch**: the patch of patches/ applies to that tree by added lines only and comes off again; the patched
  pretrain_gpt.py trains three steps with --simreg-lambda 10 and logs the same values as without the patch under
  `python -m simreg_megatron`. Scripts of hybrid models need a GPU: they are compiled, not run.

The tree of {releases.REFERENCE} is tag {releases.tag_of(releases.REFERENCE)}; that of main is the commit that
patches/README.md names.

## Source trees

A wheel holds no pretrain_gpt.py, and up to 0.16 no training loop: both come from a clone of Megatron-LM, a tree each:

    git -C Megatron-LM worktree add --detach ../sources/core_v0.13.1 core_v0.13.1
    make versions VERSIONS_ARGS="--sources ../sources"

`MEGATRON_PATH=/path/to/Megatron-LM` gives a single one, for the release line that it is of. Without trees, the last two
columns say so.

## Older Pythons

The wheels of 0.17 and later ask for Python 3.12. The plugin itself and the releases up to 0.16 take 3.10 and 3.11:
`--python /path/to/python3.10`, one that has torch, numpy and packaging, adds a row for each of those releases.
On 2026-11-21 the unit tests of losses, settings, layouts, seams and patches passed on 3.10.13 with torch 2.6.0 and on
3.11.7 with torch 2.9.1 too, and a scan of the package (vermin) found nothing newer than 3.10. Training loops and
patched scripts were run on 3.12 only.
"""
