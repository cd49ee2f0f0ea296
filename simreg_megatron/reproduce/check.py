# SPDX-License-Identifier: Apache-2.0
"""The protocol as a program: what makes a table of results worthless is refused before anything is concluded from it.

A plan that is kept beside the table says which runs there must be. The flags of each follow from the plan and, where
arms take over the best trial of a search, from the search's own table; so a run that was left out, added, shortened,
tuned more than others or trained on another text shows.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from simreg_megatron.data.indexed import DataError
from simreg_megatron.data.settings import read_json
from simreg_megatron.reproduce import tampering
from simreg_megatron.reproduce.dataset import Dataset
from simreg_megatron.reproduce.errors import ReproduceError
from simreg_megatron.reproduce.pace import EXPERIMENT
from simreg_megatron.reproduce.plan import METRICS, RANGES, Flags, Plan
from simreg_megatron.reproduce.plan_file import plan_of, read_plan
from simreg_megatron.reproduce.presets import is_real
from simreg_megatron.reproduce.runs import Entry, Tuned, entries_of, tokens_of
from simreg_megatron.reproduce.store import COLUMNS, CURVE_COLUMNS, DIVERGED, DONE, PLAN, read_csv
from simreg_megatron.reproduce.tampering import LOSS, flag_of
from simreg_megatron.reproduce.tuned import (
    nearest_size,
    ranked,
    refuse_unfit,
    searched_sizes,
    settings_of_paper,
    untuned,
)
from simreg_megatron.reproduce.verdict import FEWEST_SEEDS_OF_A_HEADLINE, Row, machines_of
from simreg_megatron.sentences import one_line

FEWEST_SEEDS = 3
_NEEDED = [name for name in COLUMNS if name not in METRICS] + [LOSS, "bits_per_byte", "train_loss", "seconds_per_step"]


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
        plan = plan_of(_plan_in(path), where=str(path))
        if plan.name != name:
            raise ReproduceError(
                f"{path} is the plan {plan.name}, and its name says {name}: copy the files of each again"
            )
        rows = _read(folder / f"{name}.csv", _NEEDED)
        found[name] = Table(plan, rows, _read(folder / f"{name}-curves.csv", CURVE_COLUMNS))
    for path in sorted(folder.glob("*-curves.csv")):
        if (name := path.name.removesuffix("-curves.csv")) not in found:
            raise ReproduceError(
                f"{folder / name}{PLAN} is missing beside {path.name}: copy it again, or continue with the command "
                "that made it"
            )
    if not found:
        raise ReproduceError(f"{folder} holds no results: name the --output folder of `simreg-megatron reproduce`")
    return found


def _plan_in(path: Path) -> object:
    try:
        return read_json(path)
    except DataError as error:
        cause = error.__cause__ or error
        raise ReproduceError(f"{path} cannot be read ({cause}): copy it again from where it was made") from None


def _read(path: Path, columns: Sequence[str]) -> tuple[Row, ...]:
    try:
        rows = read_csv(path)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ReproduceError(f"{path} cannot be read ({error}): copy it again from where it was made") from None
    if lacking := [column for column in columns if rows and column not in rows[0]]:
        raise ReproduceError(
            f"{path} has no column {lacking[0]} (columns are parted by commas): copy it again from where it was made"
        )
    return tuple(rows)


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
    if not table.rows:
        return [f"{name}: its table has no runs: copy it again, or run `simreg-megatron reproduce {name}`"]
    found = [
        *_about_rows(table),
        *tampering.across_tables(name, {other: found.rows for other, found in tables.items()}),
    ]
    if found:  # what follows would only repeat it in other words
        return found
    if of_search := _about_the_search(table.plan.tuned_in, tables):
        return [f"{name}: its settings come from a search that allows no conclusion: {of_search[0]}"]
    try:
        dataset = Dataset(Path(), digest=table.rows[0]["data"], bytes_per_token=1.0, validation_tokens=1)  # any place
        expected = entries_of(table.plan, dataset, settings_of(table.plan, tables))
    except ReproduceError as error:
        return [f"{name}: {error}"]
    claimed = {claim.metric for claim in table.plan.claims}
    return [*_about_the_set(table, expected), *tampering.of_curves(name, table.rows, table.curves, claimed)]


def _about_the_search(name: str, tables: dict[str, Table]) -> list[str]:
    """Of the sizes at which it is complete, as the settings come from these alone."""
    if name not in tables or not (sizes := sizes_of(tables[name])):
        return []  # which `settings_of` says
    search = tables[name]
    rows = tuple(row for row in search.rows if row["size"] in map(str, sizes))
    return violations(name, {**tables, name: Table(replace(search.plan, sizes=tuple(sizes)), rows, search.curves)})


def refused_headlines(plan: Plan) -> list[str]:
    """One sentence for each claim that the plan tells first and gives too few seeds for: its verdict is no headline."""
    most = max(map(plan.seeds_at, plan.sizes))
    return [
        f"{plan.name}: the headline {claim.says!r} rests on {most} seeds: run at least {FEWEST_SEEDS_OF_A_HEADLINE}"
        for claim in plan.claims
        if claim.headline and most < FEWEST_SEEDS_OF_A_HEADLINE
    ]


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
    if len(machines := machines_of(rows)) > 1:
        yield f"{name}: its runs were trained on {' and on '.join(sorted(machines))}: compare runs of one of these"
    yield from _about_ends(name, rows)
    yield from _about_ranges(name, rows)
    for row in rows:
        asked = flag_of(row, "train-iters")
        decay = flag_of(row, "lr-decay-iters") or asked
        if row["status"] == DONE and int(row["steps"]) < max(int(asked), int(decay)):
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
    yield from _about_measures(plan, rows)
    yield from tampering.of_ends(name, rows)


def _about_ends(name: str, rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        who = f"{name}: {row['arm']} at size {row['size']}, seed {row['seed']},"
        if row["status"] not in (DONE, DIVERGED):
            yield f"{who} is {row['status'] or 'of no status'}: a run is {DONE} or {DIVERGED}, so run it again"
        elif row[LOSS] and not math.isfinite(float(row[LOSS])):
            yield f"{who} has the validation loss {row[LOSS]}: no number can be compared with it"
        elif (row["status"] == DONE) != bool(row[LOSS]):
            told = "no validation loss" if row["status"] == DONE else f"a validation loss, {row[LOSS]}"
            yield f"{who} is {row['status']} and has {told}: run it again"


def _about_ranges(name: str, rows: Sequence[Row]) -> Iterator[str]:
    """Numbers that no run can have."""
    for row in rows:
        for metric, (low, high) in RANGES.items():
            value = float(row.get(metric) or "nan")
            if not (math.isnan(value) or low <= value <= high):
                yield (
                    f"{name}: {row['arm']}, seed {row['seed']}, has the {metric} {row[metric]}, which can only be from "
                    f"{low:g} to {high:g}: run it again"
                )


def _about_measures(plan: Plan, rows: Sequence[Row]) -> Iterator[str]:
    """Whether each run that ended has the number that a claim is about."""
    for claim in plan.claims:
        for row in rows:
            if row["arm"] not in (claim.arm, claim.than) or row["status"] != DONE:
                continue
            who = f"{plan.name}: {row['arm']}, seed {row['seed']},"
            if not row.get(claim.metric):
                yield (
                    f"{who} has no {claim.metric}, which {claim.says!r} is about: it was run by a version that did not "
                    "measure it, so run it again in another folder"
                )
            elif not math.isfinite(float(row[claim.metric])):
                yield f"{who} has the {claim.metric} {row[claim.metric]}: no number can be compared with it"


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
        elif row["tokens"] != str(tokens_of(entry.run)):
            yield f"{name}: {who} has {row['tokens']} tokens, and its settings make {tokens_of(entry.run)}"
        elif row["run"] != entry.run.digest[:16] or row["flags"] != entry.run.words:
            yield f"{name}: {who} was not run with the settings that the plan and its search call for"
    for arm, size, _, seed, _ in rows:
        yield f"{name}: {arm} at size {size}, seed {seed}, is not in the plan: add it to the plan, or remove it"


def sizes_of(search: Table) -> list[int | str]:
    """Where all arms of a search were tuned."""
    return searched_sizes(search.plan, Counter((row["arm"], row["size"]) for row in search.rows))


def settings_of(plan: Plan, tables: dict[str, Table]) -> Tuned:
    """The best trials, from the search's own rows."""
    if not plan.tuned_in:
        return untuned
    if plan.tuned_in in tables:
        refuse_unfit(plan, tables[plan.tuned_in].plan)

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
        chosen = min(own, key=lambda row: ranked(float(row[LOSS] or "inf")))
        searched = search.plan.arm(arm)
        return searched.flags | searched.trials_of(nearest)[int(chosen["trial"]) - 1]

    return best
