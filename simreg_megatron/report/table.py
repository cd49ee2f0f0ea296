# SPDX-License-Identifier: Apache-2.0
"""What several runs came to, as a table and as a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from simreg_megatron.report import runs
from simreg_megatron.report.runs import Run

SAME = 5e-4  # nats per token; smaller differences vanish in the three decimals shown

_COLUMNS = (
    ("validation_loss", "validation loss", "nats per token", ".4f"),
    ("simreg_loss", "simreg loss", "nats per token", ".4g"),
    ("mean_cosine", "mean cosine", "different labels", ".4f"),
    ("seconds_per_step", "time per step", "seconds", ".3f"),
)


@dataclass(frozen=True)
class Summary:
    """A run's numbers; None where the run did not log them.

    validation_loss: cross-entropy on held-out text at the last evaluation, nats per token
    simreg_loss: in training, nats per token, mean over the last tenth of the steps
    mean_cosine: of tokens with different labels, in training, over the same steps
    seconds_per_step: median over the run
    """

    name: str
    validation_loss: float | None
    simreg_loss: float | None
    mean_cosine: float | None
    seconds_per_step: float | None


def summarize(run: Run) -> Summary:
    return Summary(
        name=run.name,
        validation_loss=run.last(runs.VALIDATION_LOSS),
        simreg_loss=run.mean_of_end(runs.SIMREG_LOSS),
        mean_cosine=run.mean_of_end(runs.NEGATIVE_COSINE),
        seconds_per_step=run.median(runs.ITERATION_TIME),
    )


def summary_table(summaries: Sequence[Summary], *, title: str | None = None) -> Table:
    """One row per run, then one row per later run with its difference from the first."""
    table = Table(title=title, title_justify="left")
    table.add_column("run", no_wrap=True)
    for _, name, unit, _ in _COLUMNS:
        table.add_column(f"{name}\n({unit})", justify="right")
    for summary in summaries:
        table.add_row(summary.name, *_cells(summary))
    table.add_section()
    first, *others = summaries
    for summary in others:
        table.add_row(f"{summary.name} minus {first.name}", *_differences(first, summary), style="bold")
    return table


def _cells(summary: Summary) -> list[str]:
    return [_number(getattr(summary, key), form) for key, _, _, form in _COLUMNS]


def _differences(first: Summary, other: Summary) -> list[str]:
    cells = []
    for key, _, _, form in _COLUMNS:
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
