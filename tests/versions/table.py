# SPDX-License-Identifier: Apache-2.0
"""The tables of `python -m tests.versions`, a row for each release; what did not fit a cell stands below, numbered."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass

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
    return "\n".join([*parts, *numbered, *([""] if notes else []), _LEGEND]) + "\n"


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


_LEGEND = f"""## What a column means

Each release is installed in a folder of its own.

**megatron-core alone**: GPTModel (4 layers, RMSNorm, rotary positions, SwiGLU), Megatron's DistributedDataParallel, its
forward-backward functions (no pipelining, 1F1B, interleaved) and finalize_model_grads, on one set of weights and one
piece of real text, a mask that leaves every micro-batch another number of tokens, fp32. Two numbers are the largest
relative differences of a micro-batch's loss and of a parameter's gradient; up to {compare.TOLERANCE:.0e} is "yes". The
loss is the language-model loss, whose value SimReg leaves alone: SimReg is in the gradient.

- **lambda 0**: loss and every gradient with the plugin installed at lambda 0 are those without it, bit for bit, in the
  default mode and with --calculate-per-token-loss.
- **one process** to **PP 2 x VPP 2**: SimReg on (lambda {driver.LAMBDA:g}, temperature {driver.TEMPERATURE:g}, chunks
  that do not divide the sequence) equals {releases.REFERENCE} on one process, in both modes, and is at least a tenth of
  the gradient. (A lambda wrong by a thousandth showed as 1e-03, fifty times the bound.)
- **defaults**: as users get it, which is --simreg-lambda {driver.LAMBDA:g} and no other flag: temperature 0.01, impl
  auto, so the tiled form. In all four layouts it equals plain torch (impl reference) in {releases.REFERENCE} on one
  process.
- **scalars**: `{driver.SCALARS}` with similarity learnable trains the two exponents of the norms, and sigmoid's t and
  bias. In all four layouts every gradient, those of the four scalars among them, equals {releases.REFERENCE}'s on one
  process.
- **several**: likewise for two objectives at once, `{driver.SEVERAL}`.

**Training loops**: `megatron.training` of the wheel with one set of weights and text for all releases, and the tag's
own pretrain_gpt.py on real text whose phrase ends are masked, with the weights that it draws itself. Each on one
process and with TP 2 + SP.

- **loop of the wheel**: three steps. Lambda 0 ends with the same parameters, bit for bit, as without the plugin; with
  SimReg on, and in the four steps of the column AdaGC, the first number is the largest relative difference of a loss or
  a gradient norm from {releases.REFERENCE}'s loop on one process. The second is that of the logged SimReg from a loop
  over pairs in float64, which is given what the output layer was given in that step and shares no code with SimReg's.
- **loop of the source tree**: three steps. Lambda 0 as before; the number is the logged SimReg against that loop over
  pairs, in every step; and `python -m simreg_megatron pretrain_gpt.py ... --simreg-lambda 10` logs the very same.
- **AdaGC**: four steps with --adagc, two objectives, trained scalars and a warm-up of lambda. The number is the largest
  relative difference of what became of a parameter's gradient norm between Megatron's preparation and its step from
  AdaGC's formula in float64.
- **resume**: that run saves after its second step; a run that resumes from there has the same losses, norms, clipping
  and, at the end, parameters as the run that never stopped, bit for bit. Format torch_dist; for 0.12 the old one, as
  its writer of torch_dist does not know torch 2.13, and for 0.15, whose writer compiles for a GPU.
- **patch**: the patch of patches/ applies to that tree by added lines only and comes off again; the patched
  pretrain_gpt.py trains three steps with --simreg-lambda 10 and logs the same values as without the patch. Scripts of
  hybrid models need a GPU: they are compiled, not run.

The tree of {releases.REFERENCE} is tag {releases.tag_of(releases.REFERENCE)}; that of main is the commit that
patches/README.md names.

## Source trees

A wheel holds no pretrain_gpt.py, and up to 0.16 no training loop: both come from a clone of Megatron-LM, a tree each:

    git -C Megatron-LM worktree add --detach ../sources/core_v0.13.1 core_v0.13.1
    make versions VERSIONS_ARGS="--sources ../sources"

`MEGATRON_PATH=/path/to/Megatron-LM` gives a single one, for the release line that it is of. Without trees, the columns
that need one say so. Releases are installed once, in .versions or in the folder that `--cache` names.

## Older Pythons

The wheels of 0.17 and later ask for Python 3.12. The plugin itself and the releases up to 0.16 take 3.10 and 3.11:
`--python /path/to/python3.10`, one that has torch, numpy and packaging, adds a row for each of those releases to the
first table. The columns of training loops and of patched scripts are of 3.12 alone.
On 2026-11-21 the unit tests of losses, settings, layouts, seams and patches passed on 3.10.13 with torch 2.6.0 and on
3.11.7 with torch 2.9.1 too. On 2026-11-25 pretrain_gpt.py of 0.12.3 and of 0.16.1 trained under
`python -m simreg_megatron` on 3.10.13 with torch 2.14.1, and `simreg-megatron export-hf` of 3.12 read their
checkpoints. `make lint` checks the types as of 3.10, so that nothing newer comes in.
"""
