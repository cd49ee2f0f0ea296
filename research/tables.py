# SPDX-License-Identifier: Apache-2.0
"""The files of an experiment: NAME.plan.json, NAME.csv (a row a run), NAME-curves.csv (run, tag, step, value)."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

from research.plan import ROOT, Entry, Flags, Plan, ResearchError, Settings, is_real, parameters_of_width, plan_of

KEPT = ROOT / "benchmarks" / "results" / "evidence"
METRICS = (
    "validation_loss", "bits_per_byte", "train_loss", "simreg_loss", "positive_cosine", "negative_cosine", "isotropy",
    "margin", "margin_10", "margin_50", "margin_90", "margin_right", "margin_right_10",
    "margin_right_50", "margin_right_90", "right_share", "rare_norm_difference", "seconds_per_step",
)  # fmt: skip
MACHINE = {"device": "cpu", "number_type": "fp32"}  # of rows that do not name theirs
_COLUMNS = (
    "experiment", "arm", "size", "tokens_per_parameter", "seed", "trial", "steps", "tokens", "status", *METRICS,
    "flags", "version", "commit", *MACHINE, "data", "run",
)  # fmt: skip
_CURVE = ("run", "tag", "step", "value")

Row = Mapping[str, str]
Curves = Mapping[str, Sequence[tuple[int, float]]]
"""By tag."""


@dataclass(frozen=True)
class Table:
    """An experiment: its plan, a row for each run that has ended, and the curves of each run by its digest."""

    plan: Plan
    rows: Sequence[Row]
    curves: Mapping[str, Curves]

    def place_of(self, row: Row) -> tuple[str, str]:
        return row["size"], row["tokens_per_parameter"]

    @property
    def places(self) -> list[tuple[str, str]]:
        """Sizes and lengths, each once."""
        return list(dict.fromkeys(map(self.place_of, self.rows)))

    def of(self, arm: str, place: tuple[str, str]) -> list[Row]:
        return [row for row in self.rows if row["arm"] == arm and self.place_of(row) == place]


def read_table(folder: Path, name: str) -> Table:
    """Read one experiment.

    Raises:
        ResearchError: a file is missing or damaged.
    """
    try:
        plan = plan_of(json.loads((folder / f"{name}.plan.json").read_text(encoding="utf-8")))
        curves: dict[str, dict[str, list[tuple[int, float]]]] = {}
        for point in read_csv(folder / f"{name}-curves.csv"):
            curve = curves.setdefault(point["run"], {}).setdefault(point["tag"], [])
            curve.append((int(point["step"]), float(point["value"])))
        return Table(plan, [MACHINE | row for row in read_csv(folder / f"{name}.csv")], curves)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ResearchError(f"the tables of {name} in {folder} cannot be read: {error}") from None


def read_tables(folder: Path) -> dict[str, Table]:
    """Read all experiments of a folder, by name."""
    names = sorted(path.name.removesuffix(".plan.json") for path in folder.glob("*.plan.json"))
    if not names:
        raise ResearchError(f"{folder} holds no results: name the --output folder of `python -m research run`")
    return {name: read_table(folder, name) for name in names}


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def write_table(folder: Path, plan: Plan, results: Iterable[tuple[Entry, Row, Curves]], *, most: int = 200) -> None:
    """Write the rows and curves of the runs that have ended.

    Args:
        most: points that are kept of a curve: means over windows of equal length.
    """
    results = list(results)
    if not results:
        return
    rows = []
    for entry, row, _ in results:
        run = entry.run
        place = {
            "experiment": plan.name, "arm": entry.arm, "size": entry.size, "seed": entry.seed,
            "trial": entry.trial, "tokens_per_parameter": f"{entry.tokens_per_parameter:g}", "steps": run.steps,
            "flags": run.words, "tokens": run.steps * run.step_tokens, "data": run.data, "run": run.digest[:16],
        }  # fmt: skip
        rows.append({**row, **place})
    points = [
        (run, tag, step, f"{value:.5g}")
        for run, curves in {entry.run.digest[:16]: curves for entry, _, curves in results}.items()
        for tag, curve in curves.items()
        for step, value in thinned(curve, most)
    ]
    write_csv(folder / f"{plan.name}-curves.csv", _CURVE, points)
    write_csv(folder / f"{plan.name}.csv", _COLUMNS, [[row.get(name, "") for name in _COLUMNS] for row in rows])
    content = asdict(plan)
    for arm in content["arms"].values():
        del arm["name"]
    write_whole(folder / f"{plan.name}.plan.json", json.dumps(content, indent=1) + "\n")


def thinned(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """Replace a curve by at most `most` means over windows of equal length, each at its last step."""
    width = max(1, -(-len(points) // most))
    windows = [points[max(0, end - width) : end] for end in range(len(points), 0, -width)][::-1]
    return [(window[-1][0], sum(value for _, value in window) / len(window)) for window in windows]


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows([columns, *rows])
    write_whole(path, stream.getvalue())


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one step, so that a kill leaves the old one or the new one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def settings_of(plan: Plan, tables: Mapping[str, Table]) -> Settings:
    """Look up the best trials of the plan's search; at a size that was not searched, those of the nearest one.

    Raises:
        ResearchError: (the look-up) the search is not there, or complete at no size.
    """

    def best(arm: str, size: int | str) -> Flags:
        if plan.tuned_in not in tables:
            raise ResearchError(
                f"{plan.name} takes its settings from {plan.tuned_in}: run that first, with this --output"
            )
        search = tables[plan.tuned_in]
        searched = search.plan.arms[arm]
        if is_real(size):  # the preset has the paper's settings
            return searched.flags | searched.preset
        nearest = min(_searched_sizes(search), key=lambda own: _distance(own, size), default=None)
        if nearest is None:
            raise ResearchError(f"the search {plan.tuned_in} is complete at no size: run what is missing")
        rows = [row for row in search.rows if (row["arm"], row["size"]) == (arm, str(nearest))]
        losses = [(int(row["trial"]), float(row["validation_loss"] or "inf")) for row in rows]
        chosen = min(dict(losses), key=lambda trial: mean(loss for own, loss in losses if own == trial))
        return searched.flags | searched.trials_of(nearest)[chosen - 1]

    return best


def _searched_sizes(search: Table) -> list[int | str]:
    """Return the sizes at which all trials of all arms of a search have ended."""
    plan = search.plan
    ended = [(row["arm"], row["size"]) for row in search.rows]
    wanted = {size: len(next(iter(plan.arms.values())).trials_of(size)) * plan.seeds_at(size) for size in plan.sizes}
    return [size for size in plan.sizes if all(ended.count((arm, str(size))) >= wanted[size] for arm in plan.arms)]


def _distance(searched: int | str, wanted: int | str) -> float:
    """Compare two sizes by the ratio of their parameters; "tiny" has about those of width 192."""
    one, other = (parameters_of_width(size if isinstance(size, int) else 192) for size in (searched, wanted))
    return max(one, other) / min(one, other)
