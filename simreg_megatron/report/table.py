# SPDX-License-Identifier: Apache-2.0
"""What several runs came to, as a table and as a sentence."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from simreg_megatron.report import runs
from simreg_megatron.report.runs import Run
from simreg_megatron.report.steps import Overhead

SAME = 5e-4  # nats per token; smaller differences vanish in the three decimals shown

_COLUMNS = (
    ("validation_loss", "validation\nloss", ".4f"),
    ("simreg_loss", "simreg\nloss", ".4g"),
    ("mean_cosine", "cosine of\nother labels", ".4f"),
)


@dataclass(frozen=True)
class Summary:
    """A run's numbers; None where the run did not log them.

    validation_loss: cross-entropy on held-out text at the last evaluation, nats per token
    simreg_loss: in training, nats per token, mean over the last tenth of the steps
    mean_cosine: of tokens with different labels, in training, over the same steps
    """

    name: str
    validation_loss: float | None
    simreg_loss: float | None
    mean_cosine: float | None


def summarize(run: Run) -> Summary:
    return Summary(
        name=run.name,
        validation_loss=run.last(runs.VALIDATION_LOSS),
        simreg_loss=run.mean_of_end(runs.SIMREG_LOSS),
        mean_cosine=run.mean_of_end(runs.NEGATIVE_COSINE),
    )


def summary_table(first: Summary, other: Summary, *, steps: Overhead, title: str | None = None) -> Table:
    """A row for each run, then one with the differences; losses in nats per token. It fits 80 columns.

    Args:
        steps: seconds per step, measured apart from the two runs.
    """
    table = Table(title=title, title_justify="left")
    table.add_column("run", no_wrap=True)
    for _, name, _ in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("seconds\nper step", justify="right", no_wrap=True)
    table.add_row(first.name, *_cells(first), f"{steps.base:.3f}")
    table.add_row(other.name, *_cells(other), f"{steps.other:.3f}")
    table.add_section()
    percent = f"{steps.percent:+.1f} % (+-{steps.spread:.1f})"
    table.add_row("difference", *_differences(first, other), percent, style="bold")
    return table


def describe_steps(steps: Overhead) -> str:
    """What the last column of the table is, and whether it says anything."""
    what = (
        f"Seconds per step are of short runs that took turns, one at a time: plain Megatron, without any SimReg flag, "
        f"{steps.base:.3f}; SimReg {steps.other:.3f}"
    )
    found = f"{steps.percent:+.1f} %, 95 % interval {steps.low:+.1f} to {steps.high:+.1f} %"
    if steps.is_clear:
        return f"{what}: {found}."
    return f"{what}. They cannot be told apart here: this machine's spread is larger than the difference ({found})."


def _cells(summary: Summary) -> list[str]:
    return [_number(getattr(summary, key), form) for key, _, form in _COLUMNS]


def _differences(first: Summary, other: Summary) -> list[str]:
    cells = []
    for key, _, form in _COLUMNS:
        before, after = getattr(first, key), getattr(other, key)
        cells.append(_number(None if before is None or after is None else after - before, "+" + form))
    return cells


def _number(value: float | None, form: str) -> str:
    return "not logged" if value is None else format(value, form)


def compare_validation(first: Summary, other: Summary) -> str:
    """One sentence on which run has the lower validation loss, whichever it is."""
    before, after = first.validation_loss, other.validation_loss
    if before is None or after is None:
        return f"The validation losses of {first.name} and {other.name} cannot be compared: one was not logged."
    values = f"{after:.3f} and {before:.3f} nats per token"
    if not abs(after - before) < float("inf"):
        return f"{other.name} and {first.name} cannot be compared: their validation losses are {values}."
    if abs(after - before) < SAME:
        return f"No difference: {other.name} and {first.name} ended at a validation loss of {values}, one seed each."
    side = "better" if after < before else "worse"
    return (
        f"{other.name} ended {abs(after - before):.3f} nats per token {side} than {first.name} in validation loss "
        f"({values}), one seed each."
    )
