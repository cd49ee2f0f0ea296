# SPDX-License-Identifier: Apache-2.0
"""A folder of runs: what is finished stays finished, and no two processes work on the same run.

    FOLDER/runs/NAME/   log.txt, TensorBoard, checkpoints while it runs; result.json when it has ended
    FOLDER/EXPERIMENT.csv, EXPERIMENT-curves.csv, EXPERIMENT.plan.json   made from the results, as often as they change

The lock of a run is the kernel's and is inherited by the training process, so it is held as long as that one lives,
even where the program that started it was killed.
"""

from __future__ import annotations

import csv
import fcntl
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from simreg_megatron.data.indexed import whole_file
from simreg_megatron.data.settings import read_json, write_json
from simreg_megatron.reproduce.errors import ReproduceError
from simreg_megatron.reproduce.plan import Plan, as_content
from simreg_megatron.reproduce.runs import Entry, Run, tokens_of

PLAN = ".plan.json"
DONE, DIVERGED, FAILED = "done", "diverged", "failed"

_MEASURES = (
    "validation_loss", "bits_per_byte", "train_loss", "simreg_loss", "positive_cosine", "negative_cosine", "isotropy",
    "margin", "margin_10", "margin_50", "margin_90", "margin_right", "margin_right_10", "margin_right_50",
    "margin_right_90", "right_share", "rare_norm_difference", "seconds_per_step",
)  # fmt: skip
COLUMNS = (
    "experiment", "arm", "size", "tokens_per_parameter", "seed", "trial", "steps", "tokens", "status", *_MEASURES,
    "flags", "version", "commit", "data", "run",
)  # fmt: skip
CURVE_COLUMNS = ("run", "tag", "step", "value")


class Store:
    """Runs and results below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tabled = _results_of_tables(folder)

    def run_folder(self, run: Run) -> Path:
        return self.folder / "runs" / run.name

    def result(self, run: Run) -> dict[str, Any] | None:
        """What a run came to; None while it has not ended. A failed run has not ended: it is tried again.

        A table that came from elsewhere, without the runs' own folders, counts: its runs are not made again.
        """
        found = read_json(self.run_folder(run) / "result.json") or self._tabled.get(run.digest[:16])
        return None if found is None or found["status"] == FAILED else found

    def failure(self, run: Run) -> dict[str, Any] | None:
        found = read_json(self.run_folder(run) / "result.json")
        return found if found is not None and found["status"] == FAILED else None

    def keep(self, run: Run, result: Mapping[str, Any]) -> None:
        write_json(self.run_folder(run) / "result.json", result)

    def claim(self, run: Run) -> int | None:
        """A file descriptor that holds the run's lock, to be inherited by who trains it; None if it is taken."""
        folder = self.run_folder(run)
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor

    def write_tables(self, plan: Plan, entries: Sequence[Entry]) -> None:
        """The plan as it is run, and the CSV files of the results that are there."""
        found = [(entry, result) for entry in entries if (result := self.result(entry.run)) is not None]
        if found:
            write_json(self.folder / f"{plan.name}{PLAN}", as_content(plan))
            _write_csv(self.folder / f"{plan.name}.csv", COLUMNS, (_row(*pair) for pair in found))
            _write_csv(self.folder / f"{plan.name}-curves.csv", CURVE_COLUMNS, _curves(found))


def _results_of_tables(folder: Path) -> dict[str, dict[str, Any]]:
    """The results in the folder's tables, by the first digits of their runs' digests."""
    found: dict[str, dict[str, Any]] = {}
    for plan in sorted(folder.glob(f"*{PLAN}")):
        table = plan.with_name(plan.name.removesuffix(PLAN))
        try:
            _add_table(found, table)
        except (OSError, csv.Error, LookupError, ValueError, TypeError) as error:
            raise ReproduceError(
                f"the tables of {table} are not what `simreg-megatron reproduce` writes ({error}): remove them or "
                "copy them again"
            ) from None
    return found


def _add_table(found: dict[str, dict[str, Any]], table: Path) -> None:
    for row in read_csv(table.with_suffix(".csv")):
        measured = {name: float(row[name]) if row.get(name) else None for name in _MEASURES}
        found[row["run"]] = {name: row[name] for name in ("status", "version", "commit")} | measured
        found[row["run"]]["curves"] = {}
    for point in read_csv(table.with_name(f"{table.name}-curves.csv")):
        curve = found[point["run"]]["curves"].setdefault(point["tag"], [])
        curve.append((int(point["step"]), float(point["value"])))


def _row(entry: Entry, result: Mapping[str, Any]) -> dict[str, Any]:
    run = entry.run
    return {
        "experiment": entry.experiment, "arm": entry.arm, "size": entry.size,
        "tokens_per_parameter": f"{entry.tokens_per_parameter:g}", "seed": entry.seed, "trial": entry.trial,
        "steps": run.steps, "tokens": tokens_of(run), "status": result["status"],
        **{name: _number(result.get(name)) for name in _MEASURES},
        "flags": run.words,
        "version": result["version"], "commit": result["commit"], "data": run.data, "run": run.digest[:16],
    }  # fmt: skip


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _curves(found: Iterable[tuple[Entry, Mapping[str, Any]]]) -> Iterable[dict[str, Any]]:
    for run, result in {entry.run: result for entry, result in found}.items():
        for tag, points in result["curves"].items():
            for step, value in thinned(points):
                yield {"run": run.digest[:16], "tag": tag, "step": step, "value": f"{value:.5g}"}


def thinned(points: Sequence[tuple[int, float]], most: int = 200) -> list[tuple[int, float]]:
    """At most so many points of a curve: means over windows of equal length, each at its last step.

    Megatron's TensorBoard has the training loss of every step, which would be megabytes an experiment.
    """
    width = -(-len(points) // most)
    if width <= 1:
        return list(points)
    windows = [points[max(0, end - width) : end] for end in range(len(points), 0, -width)][::-1]
    return [(window[-1][0], sum(value for _, value in window) / len(window)) for window in windows]


def _write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    with whole_file(path) as stream:
        stream.write(text.getvalue().encode())


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))
