# SPDX-License-Identifier: Apache-2.0
"""The protocol as a program: what makes a table of results worthless is refused before anything is concluded from it.

A plan that is kept beside the table says which runs there must be. The flags of each follow from the plan and, where
arms take over the best trial of a search, from the search's own table; so a run that was left out, added, shortened,
tuned more than others or trained on another text shows.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from simreg_megatron.data.settings import read_json
from simreg_megatron.reproduce.dataset import Dataset
from simreg_megatron.reproduce.errors import ReproduceError
from simreg_megatron.reproduce.pace import EXPERIMENT
from simreg_megatron.reproduce.plan import Flags, Plan, plan_of, read_plan
from simreg_megatron.reproduce.presets import is_real
from simreg_megatron.reproduce.runs import Entry, Tuned, entries_of
from simreg_megatron.reproduce.store import PLAN, read_csv
from simreg_megatron.reproduce.tuned import nearest_size, searched_sizes, settings_of_paper, untuned
from simreg_megatron.reproduce.verdict import Row
from simreg_megatron.sentences import one_line

FEWEST_SEEDS = 3
FEWEST_SEEDS_OF_A_HEADLINE = 5
_LOSS = "validation_loss"


@dataclass(frozen=True)
class Table:
    """An experiment's plan, its rows, and the points of its curves."""

    plan: Plan
    rows: tuple[Row, ...]
    curves: tuple[Row, ...]


def read_tables(folder: Path) -> dict[str, Table]:
    """The experiments in a folder, by name.

    Raises:
        ReproduceError: there are none, or a file is missing or damaged.
    """
    found = {}
    for path in sorted(folder.glob(f"*{PLAN}")):
        name = path.name.removesuffix(PLAN)
        plan = plan_of(read_json(path), where=str(path))
        found[name] = Table(plan, _read(folder / f"{name}.csv"), _read(folder / f"{name}-curves.csv"))
    if not found:
        raise ReproduceError(f"{folder} holds no results: name the --output folder of `simreg-megatron reproduce`")
    return found


def _read(path: Path) -> tuple[Row, ...]:
    try:
        return tuple(read_csv(path))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ReproduceError(
            f"{path} cannot be read ({error}): make it again with `simreg-megatron reproduce`"
        ) from None


def violations(name: str, tables: dict[str, Table]) -> list[str]:
    """One sentence for everything that forbids a conclusion from the table `name`; empty where nothing does."""
    try:
        return _violations(name, tables)
    except (AttributeError, LookupError, ValueError, TypeError, ArithmeticError) as error:
        return [
            f"{name}: its tables are not what `simreg-megatron reproduce` writes ({type(error).__name__}: "
            f"{one_line(error)}): make them again, or copy them again from where they were made"
        ]


def _violations(name: str, tables: dict[str, Table]) -> list[str]:
    table = tables[name]
    found = list(_about_rows(table))
    if found:  # what follows would only repeat it in other words
        return found
    try:
        expected = entries_of(table.plan, _dataset(table), settings_of(table.plan, tables))
    except ReproduceError as error:
        return [f"{name}: {error}"]
    return [*_about_the_set(table, expected), *_about_curves(table)]


def measured_steps(tables: dict[str, Table]) -> tuple[Row, ...]:
    """The rows of the experiment that measures the seconds of a step; none where it was not run, or may not be used."""
    return tables[EXPERIMENT].rows if EXPERIMENT in tables and not violations(EXPERIMENT, tables) else ()


def _about_rows(table: Table) -> Iterator[str]:
    """What the rows alone show."""
    plan, rows = table.plan, table.rows
    name = plan.name
    runs = Counter((row["arm"], row["size"], row["tokens_per_parameter"], row["seed"], row["trial"]) for row in rows)
    for (arm, size, _, seed, _), count in runs.items():
        if count > 1:
            yield f"{name}: {arm} at size {size} has seed {seed} {count} times: each seed counts once"
    if len({row["data"] for row in rows}) > 1:
        yield f"{name}: its runs were trained on {len({row['data'] for row in rows})} different texts: compare on one"
    for row in rows:
        asked = _flag(row, "train-iters")
        decay = _flag(row, "lr-decay-iters") or asked
        if row["status"] == "done" and int(row["steps"]) < max(int(asked), int(decay)):
            yield (
                f"{name}: {row['arm']}, seed {row['seed']}, is read at step {row['steps']} of a schedule of "
                f"{max(int(asked), int(decay))}: before the end of the decay nothing can be compared"
            )
    if plan.is_search:
        trials = Counter((row["arm"], row["size"]) for row in rows)
        for size in {row["size"] for row in rows}:
            counts = {arm.name: trials[arm.name, size] for arm in plan.arms}
            if len(set(counts.values())) > 1:
                told = ", ".join(f"{arm} {count}" for arm, count in counts.items())
                yield f"{name}: the arms were tuned unequally at size {size} ({told} trials): run what is missing"
        return
    for planned in plan.sizes:
        if plan.seeds_at(planned) < FEWEST_SEEDS:
            yield f"{name}: {plan.seeds_at(planned)} seeds at size {planned} are too few: run at least {FEWEST_SEEDS}"
    for claim in plan.claims:
        for row in rows:
            if row["arm"] in (claim.arm, claim.than) and row["status"] == "done" and not row.get(claim.metric):
                yield (
                    f"{name}: {row['arm']}, seed {row['seed']}, has no {claim.metric}, which {claim.says!r} is about: "
                    "it was run by a version that did not measure it, so run it again in another folder"
                )
    most = max(map(plan.seeds_at, plan.sizes))
    for claim in plan.claims:
        if claim.headline and most < FEWEST_SEEDS_OF_A_HEADLINE:
            yield (
                f"{name}: the headline {claim.says!r} rests on {most} seeds: run at least {FEWEST_SEEDS_OF_A_HEADLINE}"
            )


def _about_the_set(table: Table, expected: Sequence[Entry]) -> Iterator[str]:
    """Whether the rows are the runs of the plan: all of them, and no others."""
    name = table.plan.name
    rows = {
        (row["arm"], row["size"], row["tokens_per_parameter"], row["seed"], row["trial"]): row for row in table.rows
    }
    for entry in expected:
        place = (entry.arm, str(entry.size), f"{entry.tokens_per_parameter:g}", str(entry.seed), str(entry.trial))
        row = rows.pop(place, None)
        who = f"{entry.arm} at size {entry.size}, seed {entry.seed}"
        if row is None:
            yield f"{name}: {who} is missing: leaving out planned runs selects among results, so run the rest"
        elif int(row["steps"]) != entry.run.steps:
            yield f"{name}: {who} stopped at step {row['steps']}, and the plan says {entry.run.steps}"
        elif row["run"] != entry.run.digest[:16] or row["flags"] != entry.run.words:
            yield f"{name}: {who} was not run with the settings that the plan and its search call for"
    for arm, size, _, seed, _ in rows:
        yield f"{name}: {arm} at size {size}, seed {seed}, is not in the plan: add it to the plan, or remove it"


def _about_curves(table: Table) -> Iterator[str]:
    last = {point["run"]: point for point in table.curves if point["tag"] == _LOSS}
    for row in table.rows:
        if not row[_LOSS]:
            continue
        point = last.get(row["run"])
        who = f"{table.plan.name}: the validation loss of {row['arm']}, seed {row['seed']},"
        if point is None:
            yield f"{who} has no curve behind it"
        elif int(point["step"]) != int(row["steps"]) or abs(float(point["value"]) / float(row[_LOSS]) - 1) > 1e-4:
            yield f"{who} is {row[_LOSS]}, and its curve ends at {point['value']} in step {point['step']}"


def _dataset(table: Table) -> Dataset:
    """Where the text lies is of no account, which text it is decides."""
    return Dataset(Path(), digest=table.rows[0]["data"], bytes_per_token=1.0, validation_tokens=1)


def sizes_of(search: Table) -> list[int | str]:
    """Where all arms of a search were tuned."""
    return searched_sizes(search.plan, Counter((row["arm"], row["size"]) for row in search.rows))


def settings_of(plan: Plan, tables: dict[str, Table]) -> Tuned:
    """The best trials, from the search's own rows."""
    if not plan.tuned_in:
        return untuned

    def best(arm: str, size: int | str) -> Flags:
        if is_real(size):
            return settings_of_paper(read_plan(plan.tuned_in), arm)
        if plan.tuned_in not in tables:
            raise ReproduceError(f"the table of {plan.tuned_in}, where the arms were tuned, is missing")
        search = tables[plan.tuned_in]
        sizes = sizes_of(search)
        if not sizes:
            raise ReproduceError(f"the search {plan.tuned_in} is complete at no size: run what is missing")
        nearest = nearest_size(sizes, size)
        own = [row for row in search.rows if (row["arm"], row["size"]) == (arm, str(nearest))]
        chosen = min(own, key=lambda row: float(row[_LOSS] or "inf"))
        searched = search.plan.arm(arm)
        return searched.flags | searched.trials_of(nearest)[int(chosen["trial"]) - 1]

    return best


def _flag(row: Row, name: str) -> str:
    words = row["flags"].split()
    return words[words.index(f"--{name}") + 1] if f"--{name}" in words else ""
