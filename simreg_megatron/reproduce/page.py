# SPDX-License-Identifier: Apache-2.0
"""The report of all experiments in a folder: question, verdicts, figures, numbers beside the authors', commands."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from simreg_megatron.report.own import versions_here
from simreg_megatron.report.page import Grid, Page, Section
from simreg_megatron.report.welch import deviation, mean
from simreg_megatron.reproduce import authors, figures
from simreg_megatron.reproduce.check import Table, measured_steps, violations
from simreg_megatron.reproduce.conclusion import notes, verdicts_on
from simreg_megatron.reproduce.pace import pace
from simreg_megatron.reproduce.store import DIVERGED
from simreg_megatron.reproduce.verdict import Row, Verdict

_MEASURES = {
    "validation_loss": "validation loss (nats per token)",
    "bits_per_byte": "bits per byte",
    "seconds_per_step": "seconds per step",
}


def page_of(tables: dict[str, Table]) -> Page:
    """The page; `report.page` writes it."""
    return Page("SimReg: experiments", [_section(name, tables) for name in tables], _versions(tables))


def _section(name: str, tables: dict[str, Table]) -> Section:
    table = tables[name]
    source = f" ({table.plan.source} of the paper)" if table.plan.source else ""
    refused = violations(name, tables)[:10]
    verdicts = [] if refused else verdicts_on(name, tables)
    pictures = figures.pictures(table)
    return Section(
        name,
        f"{table.plan.question}{source}",
        verdicts=[verdict.sentence for verdict in verdicts],
        notes=[] if refused else notes(name, tables),
        refused=refused,
        pictures=pictures,
        grids=[
            *([_beside_the_authors(name, verdicts, tables)] if verdicts else []),
            *([_means(table)] if pictures else []),
        ],
        commands=_commands(table) if pictures else [],
    )


def _beside_the_authors(name: str, verdicts: list[Verdict], tables: dict[str, Table]) -> Grid:
    heads = (
        "claim", "size, tokens a parameter", "ours: difference", "95 % interval", "p", "spread of the baseline",
        "detectable", "100 more steps", "tokens saved", "time saved", "the authors'",
    )  # fmt: skip
    measured = measured_steps(tables)
    rows = [(*_cells(verdict, tables[name], measured), authors.found(name)) for verdict in verdicts]
    says = (
        "The interval has two sides; p has one where the claim has a direction, and a claim is held where p is below "
        "0.05. Spread: standard deviation from seed to seed. Detectable: a true difference of that size would be found "
        "four times in five. 100 more steps: what they are worth to the baseline. "
        "A time is told where the experiment runtime measured the steps."
    )
    return Grid(*_without_empty(heads, rows), says)


def _cells(verdict: Verdict, table: Table, measured: Sequence[Row]) -> list[str]:
    claim, place, worth = verdict.claim, verdict.place, verdict.worth
    where = [claim.says, f"{place.size}, {place.tokens_per_parameter}"]
    if any(verdict.diverged):
        return [*where, verdict.told, *["-"] * 7]
    low, high = verdict.interval
    numbers = [
        f"{verdict.difference:+.4f} {verdict.unit}".strip(), f"{low:+.4f} to {high:+.4f}", f"{verdict.p_value:.2g}",
        f"{verdict.noise:.4f}", f"{verdict.detectable:.4f}",
    ]  # fmt: skip
    if worth is None:
        return [*where, *numbers, "-", "-", "-"]
    found = pace(table.rows, claim.arm, claim.than, place, measured)
    in_time = "-" if found is None else f"{found.saved(worth.tokens):.0%} ({found.told})"
    return [*where, *numbers, f"{worth.exchange:.4f} {verdict.unit}", worth.told, in_time]


def _without_empty(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Without the columns that say nothing."""
    kept = [any(cell != "-" for cell in column) for column in zip(*rows, strict=True)]
    return list(compress(heads, kept)), [list(compress(row, kept)) for row in rows]


def _means(table: Table) -> Grid:
    """Mean of each arm at each size and length, and how its runs spread."""
    heads = ("arm", "size", "tokens a parameter", "runs", "steps", *_MEASURES.values())
    rows = []
    for key in dict.fromkeys(
        (row["arm"], row["size"], row["tokens_per_parameter"], row["steps"]) for row in table.rows
    ):
        own = [row for row in table.rows if (row["arm"], row["size"], row["tokens_per_parameter"], row["steps"]) == key]
        arm, size, ratio, steps = key
        means = (_mean([row[name] for row in own]) for name in _MEASURES)
        failed = sum(row.get("status") == DIVERGED for row in own)
        runs = f"{len(own)}, of which {failed} diverged" if failed else str(len(own))
        rows.append((arm, size, ratio, runs, steps, *means))
    over = "trials" if table.plan.is_search else "seeds"
    return Grid(heads, rows, f"Means over the {over}, and in brackets their standard deviation.")


def _mean(values: list[str]) -> str:
    there = [float(value) for value in values if value]
    spread = f" ({deviation(there):.2g})" if len(there) > 1 else ""
    return f"{mean(there):.5g}{spread}" if there else "-"


def _commands(table: Table) -> list[str]:
    script = f"launch/pretrain_{table.plan.family}.sh"
    text = "--data DATA/train --valid-data DATA/valid --tokenizer DATA/tokenizer.model"
    all_of_it = "" if table.plan.is_about_time else " --eval-iters BATCHES"
    hashes = ", ".join(dict.fromkeys(row["data"][:16] for row in table.rows))
    return [
        f"simreg-megatron reproduce {table.plan.name} --dry-run prints these with DATA, the folder of the text (hash "
        f"{hashes}), and BATCHES, which make up its whole validation text:",
        *(
            f"{row['arm']}, seed {row['seed']}, commit {row['commit']}: bash {script} {row['flags']} {text}{all_of_it}"
            for row in table.rows
        ),
    ]


def _versions(tables: dict[str, Table]) -> list[str]:
    made = sorted({(row["version"], row["commit"]) for table in tables.values() for row in table.rows if row["commit"]})
    return [*(f"runs: simreg-megatron {version}, commit {commit}" for version, commit in made), *versions_here()]
