# SPDX-License-Identifier: Apache-2.0
"""Run a plan of stacked models (research/plans/stacked/NAME.yaml) group by group, and report what its rows show.

FOLDER/NAME.csv         a row for each run that has ended
FOLDER/NAME-curves.csv  its mean training loss up to each of the steps round(steps * j / 25), j = 1 to 25
FOLDER/NAME.md          the report

The runs of a group are trained at once. A group with `search` tries settings; the others train arms at the settings
that were found, on other seeds. An arm with `as` takes the settings of another arm.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import yaml

from research.analyse import contrast
from research.plan import PLANS, ResearchError
from research.run import commit
from research.stacked import POINTS, Data, Run, Shape, Stack, train
from research.tables import read_csv, write_csv, write_whole

Row = Mapping[str, Any]
Setting = tuple[float, ...]
"""Values of SETTINGS."""

SETTINGS = ("lr", "std", "warm")
KEY = ("arm", *(each.name for each in fields(Run)), "steps", *(each.name for each in fields(Shape)))
_RESULTS = ("valid", "train", "cosine", "term", "bad_steps", "models", "seconds", "tokens_per_second")
_TEXTS = ("arm", "labels", "group", "device", "torch", "dtype", "commit")
_TABLES = {"": (*KEY, *_RESULTS, *_TEXTS[2:]), "-curves": ("arm", "seed", *SETTINGS, *map(str, range(1, POINTS + 1)))}
_HEAD = "lr | std | warm-up | seeds | mean | sd | lowest | highest | training - validation | cosine | term | bad steps"


@dataclass(frozen=True)
class Plan:
    """An experiment.

    Attributes:
        arms: fields of Run, and perhaps `as` and a `share` of the tokens.
        groups: `search` has values of each of SETTINGS; `settings` is "best", "best per std", or "taken" from the plan
            that `take` names (`from`), with the rate times `lr_times`.
        unplanned: pairs that were compared after the runs were seen.
        stds: standard deviations at which arms are compared, each at its best there.
        chunks, validation: of a tiny try: other lengths of chunks, and the `most` validation sequences.
    """

    name: str
    question: str
    written: str
    shape: Shape
    tokens: float
    arms: Mapping[str, Mapping[str, Any]]
    groups: Sequence[Mapping[str, Any]]
    compare: Sequence[Sequence[str]]
    rules: Sequence[str]
    primary: str = ""
    unplanned: Sequence[Sequence[str]] = ()
    stds: Sequence[float] = ()
    take: Mapping[str, Any] = field(default_factory=dict)
    chunks: Mapping[int, int] = field(default_factory=dict)
    validation: Mapping[str, int] = field(default_factory=dict)

    def run(self, arm: str, seed: int, setting: Setting) -> tuple[Run, int]:
        """Return a run of an arm, and its number of steps."""
        own: dict[str, Any] = {"share": 1.0, "chunk": 0, **self.arms[arm], **dict(zip(SETTINGS, setting, strict=True))}
        own["chunk"] = self.chunks.get(own["chunk"], own["chunk"])
        steps = round(self.tokens * own.pop("share") / self.shape.batch / self.shape.sequence)
        return Run(seed=seed, **{key: value for key, value in own.items() if key != "as"}), max(2, steps)


def read_plan(name: str, *, tiny: bool = False) -> Plan:
    """Read a plan; `tiny` applies what it has under `pretend`, to try its groups on a CPU.

    Raises:
        ResearchError: it is not there.
    """
    path = PLANS / "stacked" / f"{name}.yaml"
    if not path.is_file():
        raise ResearchError(
            f"{path} is not there: name one of {', '.join(each.stem for each in path.parent.iterdir())}"
        )
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    pretended = content.pop("pretend", {})
    if tiny:
        content |= pretended | {"name": f"{content['name']}-tiny"}
    return Plan(**content | {"shape": Shape(**content["shape"])})


class Results:
    """The rows of a plan in a folder, and the settings that follow from them."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.path, self.rows = plan, folder / f"{plan.name}.csv", []
        self.searches = {group["name"]: group for group in plan.groups if "search" in group}
        if self.path.exists():
            parts = (read_csv(folder / f"{plan.name}{ending}.csv") for ending in _TABLES)
            for one, other in zip(*parts, strict=True):
                cells = {key: value for key, value in {**one, **other}.items() if value}
                self.rows.append({key: cell if key in _TEXTS else float(cell) for key, cell in cells.items()})

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for ending, columns in _TABLES.items():
            cells = ([row.get(key, "") for key in columns] for row in self.rows)
            rows = [[cell if isinstance(cell, str) else f"{cell:.10g}" for cell in row] for row in cells]
            write_csv(self.path.with_name(f"{self.plan.name}{ending}.csv"), columns, rows)
        write_whole(self.path.with_suffix(".md"), "\n".join(report(self)) + "\n")

    def of(self, arm: str, setting: Setting | None, *, search: bool = False) -> list[Row]:
        """Return the rows of an arm at a setting: those that judge it, or those of its search."""
        of_arm = [row for row in self.rows if row["arm"] == arm and (row["group"] in self.searches) == search]
        return [row for row in of_arm if setting_of(row) == setting]

    def grid(self, arm: str) -> dict[Setting, set[int]]:
        """Return the settings that an arm's search tries, and the seeds of each."""
        grid: dict[Setting, set[int]] = {}
        for group in self.searches.values():
            if arm in group["arms"]:
                for setting in _product(group):
                    grid.setdefault(setting, set()).update(group["seeds"])
        return grid

    def lowest(self, arm: str, settings: Mapping[Setting, set[int]], *, search: bool) -> Setting | None:
        """Return the setting with the lowest mean validation loss; None if one lacks a row of one of its seeds."""
        means = {}
        for setting, seeds in settings.items():
            rows = self.of(arm, setting, search=search)
            if {row["seed"] for row in rows} != seeds:
                return None
            loss = mean(row["valid"] for row in rows)
            means[setting] = loss if math.isfinite(loss) else math.inf
        return min(means, key=lambda each: means[each], default=None)

    def best_of_search(self, arm: str, std: float | None = None) -> Setting | None:
        """Return the setting with the lowest mean over its seeds, of all or of one std; None while a run is missing."""
        grid = self.grid(arm)
        at_std = {setting: seeds for setting, seeds in grid.items() if std in (None, setting[1])}
        return self.lowest(arm, grid, search=True) and self.lowest(arm, at_std, search=True)

    def best(self, arm: str) -> Setting | None:
        """Return the best setting: by its judged seeds if each best per std has all of them, else by the search."""
        groups = (group for group in self.plan.groups if group.get("settings") == "best per std")
        seeds = {seed for group in groups if arm in group["arms"] for seed in group["seeds"]}
        per_std = [self.best_of_search(arm, std) for std in self.plan.stds if seeds]
        best = self.lowest(arm, {each: seeds for each in per_std if each}, search=False)
        return best or self.best_of_search(arm)

    def settings_for(self, arm: str) -> Setting | None:
        """Return what the plan's rules give an arm from the rows there are; None while a search is incomplete."""
        like, take = self.plan.arms[arm].get("as", arm), self.plan.take
        if not take:
            return self.best(like)
        other = read_plan(take["from"], tiny=self.plan.name.endswith("-tiny"))
        best = Results(other, self.path.parent).best(like)
        return best and (float(f"{best[0] * take['lr_times']:.10g}"), *best[1:])  # as it is read from a table

    def missing(self, group: Mapping[str, Any]) -> list[tuple[str, Run, int]] | None:
        """Return arm, run and steps of what has no row; None while a setting is unknown."""
        have, missing = {tuple(row[key] for key in KEY) for row in self.rows}, []
        for arm in group["arms"]:
            settings: list[Setting | None] = [*_product(group)] if "search" in group else [self.settings_for(arm)]
            if group.get("settings") == "best per std":
                settings = [self.best_of_search(arm, std) for std in self.plan.stds]
            for setting, seed in itertools.product(settings, group["seeds"]):
                if setting is None:
                    return None
                run, steps = self.plan.run(arm, seed, setting)
                if (arm, *asdict(run).values(), steps, *asdict(self.plan.shape).values()) not in have:
                    missing.append((arm, run, steps))
        return missing


def _product(group: Mapping[str, Any]) -> Iterator[Setting]:
    return itertools.product(*(group["search"][name] for name in SETTINGS))


def setting_of(row: Row) -> Setting:
    return tuple(row[name] for name in SETTINGS)


def _named(setting: Setting) -> str:
    return "lr {:g}, std {:g}, warm-up {:g}".format(*setting)


def report(results: Results) -> list[str]:
    plan, lines = results.plan, [f"# {results.plan.name}: {results.plan.question}", ""]
    for title, search in (("search", True), ("judged", False)):
        table = []
        for arm in plan.arms:
            settings = {setting_of(row) for row in results.rows if row["arm"] == arm}
            ordered = sorted(settings, key=lambda each: (each[1:], each))
            table += [_line(rows) for each in ordered if (rows := results.of(arm, each, search=search))]
        if table:
            lines += [f"| {title} | {_HEAD} |", "|" + "---|" * 13, *table, ""]
        if search:
            lines += [*_bests(results), ""] if table else []
    lines += ["Differences of means, with two-sided 95 % intervals after Welch:", "", *_differences(results), ""]
    bad = [f"{row['arm']} seed {row['seed']:g}" for row in results.rows if not math.isfinite(row["valid"])]
    primary = f" (primary: {plan.primary})" if plan.primary else ""
    lines += [f"{len(results.rows)} runs; not finite: {', '.join(bad) or 'none'}.", ""]
    return [*lines, f"Rules, written {plan.written}{primary}:", "", *(f"- {rule}" for rule in plan.rules)]


def _line(rows: Sequence[Row]) -> str:
    losses = [row["valid"] for row in rows]
    gap, cosine, term = (mean(row[key] for row in rows) for key in ("train", "cosine", "term"))
    spread = f"{stdev(losses):.4f}" if len(rows) > 1 and all(map(math.isfinite, losses)) else ""
    cells = [rows[0]["arm"], *(f"{value:g}" for value in setting_of(rows[0])), f"{len(rows)}", f"{mean(losses):.4f}"]
    cells += [spread, f"{min(losses):.4f}", f"{max(losses):.4f}", f"{gap - mean(losses):+.3f}", f"{cosine:.3f}"]
    return f"| {' | '.join([*cells, f'{term:.5f}', format(sum(row['bad_steps'] for row in rows), 'g')])} |"


def _bests(results: Results) -> Iterator[str]:
    for arm, std in itertools.product(results.plan.arms, (*results.plan.stds, None)):
        if best := results.best_of_search(arm, std):
            tried = zip(SETTINGS, best, map(set, zip(*results.grid(arm), strict=True)), strict=True)
            ends = [(key, value, len(of)) for key, value, of in tried if value in (min(of), max(of))]
            few = {"std": 1 if std is None else math.inf}  # with this number of values, or fewer, none is an edge
            edges = [f"{key} {value:g}" for key, value, number in ends if number > few.get(key, 2)]
            edge = f"; at the edge of its grid: {', '.join(edges)}" if edges else ""
            yield f"- {arm}, best {'of all' if std is None else f'at std {std:g}'}: {_named(best)}{edge}"


def _differences(results: Results) -> Iterator[str]:
    plan, stds = results.plan, results.plan.stds

    def part(weight: float, arm: str, setting: Setting | None) -> tuple[float, list[float]]:
        judged = (group for group in plan.groups if "search" not in group and arm in group["arms"])
        rows, planned = results.of(arm, setting), {seed for group in judged for seed in group["seeds"]}
        return weight, [row["valid"] for row in rows] if {row["seed"] for row in rows} == planned else []

    def line(what: str, *parts: tuple[float, list[float]]) -> Iterator[str]:
        if all(len(values) > 1 and all(map(math.isfinite, values)) for _, values in parts):
            result = contrast(*parts)
            verdict = "lower" if result.high < 0 else "higher" if result.low > 0 else "not shown"
            interval = f"{result.low:+.4f} to {result.high:+.4f}"
            yield f"- {what}: {result.difference:+.4f} ({interval}), p {result.p_value:.2g}: {verdict}"

    for pair in (pair for pair in plan.compare if stds and all(map(results.grid, pair))):
        best = {(arm, std): results.best_of_search(arm, std) for arm in pair for std in stds}
        gains = [[part(sign, arm, best[arm, std]) for sign, arm in zip((1, -1), pair, strict=True)] for std in stds]
        for std, gain in zip(stds, gains, strict=True):
            yield from line(f"{' - '.join(pair)} at std {std:g}, each at its best there", *gain)
        opposite = [(-sign, values) for sign, values in gains[-1]]
        yield from line(f"that at std {stds[0]:g} less that at std {stds[-1]:g}", *gains[0], *opposite)
    for arm, than in (*plan.compare, *plan.unplanned):
        one, other = results.settings_for(arm), results.settings_for(than)
        if one and other:
            at = " and ".join(dict.fromkeys((f"({_named(one)})", f"({_named(other)})")))
            whether = "" if [arm, than] in plan.compare else ", not planned"
            yield from line(f"{arm} - {than} at {at}{whether}", part(1, arm, one), part(-1, than, other))


def work(options: argparse.Namespace) -> int:
    """Train the groups that fit into the time, if there is a text; print the report."""
    plan, end = read_plan(options.plan, tiny=options.tiny), time.monotonic() + options.seconds
    results, left_out = Results(plan, options.output), []
    if options.data:
        data = Data.of(options.data, "cuda" if torch.cuda.is_available() else "cpu")
        largest, size = int(max(data.train.max(), data.valid.max())), plan.shape.vocabulary
        if largest >= size:
            raise ResearchError(f"the text has token {largest}, and {plan.name} has a vocabulary of {size}")
        for group in plan.groups:
            if (missing := results.missing(group)) and time.monotonic() < end:
                print(f"{group['name']}: {group['what']}", flush=True)
                stack = Stack(plan.shape, [run for _, run, _ in missing], missing[0][2], data)
                shared = {"group": group["name"], "commit": commit()}
                rows = train(stack, lambda: end - time.monotonic(), plan.validation.get("most"))
                results.rows += [{**row, **shared, "arm": arm} for row, (arm, *_) in zip(rows, missing, strict=False)]
                results.write()
            left_out += [group["name"]] if missing is None or results.missing(group) else []
    elif not results.rows:
        raise ResearchError(f"{results.path} has no rows: give --data to train them, or another --output")
    results.write()
    print(*report(results), sep="\n")
    if left_out:
        print(f"left out, for want of time or of runs they depend on: {', '.join(left_out)}", file=sys.stderr)
    return int(bool(left_out))
