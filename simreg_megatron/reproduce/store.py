# SPDX-License-Identifier: Apache-2.0
"""A folder of runs: what is finished stays finished, and no two processes work on the same run.

    FOLDER/runs/NAME/   log.txt, TensorBoard, checkpoints while it runs; result.json when it has ended
    FOLDER/EXPERIMENT.csv, EXPERIMENT-curves.csv, EXPERIMENT.plan.json   made from the results, as often as they change

The locks of a run are the kernel's. `lock` is inherited by the training process, so it is held as long as that one
lives, even where the program that started it was killed; `owner` is that program's alone.
"""

from __future__ import annotations

import csv
import fcntl
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from simreg_megatron.data.indexed import DataError, whole_file
from simreg_megatron.data.settings import read_json, write_json
from simreg_megatron.reproduce.errors import ReproduceError
from simreg_megatron.reproduce.plan import METRICS, Plan, as_content
from simreg_megatron.reproduce.runs import Entry, Run, tokens_of

PLAN = ".plan.json"
DONE, DIVERGED, FAILED = "done", "diverged", "failed"

MACHINE = {"device": "cpu", "number_type": "fp32"}  # what compared runs share; these of results that do not name it
COLUMNS = (
    "experiment", "arm", "size", "tokens_per_parameter", "seed", "trial", "steps", "tokens", "status", *METRICS,
    "flags", "version", "commit", *MACHINE, "data", "run",
)  # fmt: skip
CURVE_COLUMNS = ("run", "tag", "step", "value")


class Claim(NamedTuple):
    """A run that is this program's to train: two descriptors, of which the training inherits `lock`."""

    lock: int
    owner: int

    def give_back(self) -> None:
        for descriptor in self:
            os.close(descriptor)


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
        found = self._kept(run) or self._tabled.get(run.digest[:16])
        return None if found is None or found["status"] == FAILED else found

    def failure(self, run: Run) -> dict[str, Any] | None:
        found = self._kept(run)
        return found if found is not None and found["status"] == FAILED else None

    def _kept(self, run: Run) -> dict[str, Any] | None:
        path = self.run_folder(run) / "result.json"
        found = read_kept(path, "status", "version", "commit", "curves")
        if found is not None and not isinstance(found["curves"], dict):
            raise ReproduceError(f"{path} is damaged: remove it, and the same command makes it again")
        return None if found is None else MACHINE | found

    def keep(self, run: Run, result: Mapping[str, Any]) -> None:
        write_json(self.run_folder(run) / "result.json", result)

    def claim(self, run: Run) -> Claim | None:
        """None if the run is somebody else's."""
        folder = self.run_folder(run)
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        owner = os.open(folder / "owner", os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(owner, fcntl.LOCK_EX)  # at once: who has the first lock meets nobody here but a look of `orphans`
        return Claim(lock, owner)

    def orphans(self) -> int:
        """How many runs are being trained whose program was killed."""
        owners = self.folder.glob("runs/*/owner")
        return sum(_is_free(owner) and not _is_free(owner.with_name("lock")) for owner in owners)

    def write_tables(self, plan: Plan, entries: Sequence[Entry]) -> None:
        """The CSV files of the results that are there, and the plan as it is run.

        In this order: a kill in between leaves curves that no row asks for, or tables that no plan names yet.
        """
        found = [(entry, result) for entry in entries if (result := self.result(entry.run)) is not None]
        if found:
            self.refuse_to_lose(plan.name, entries)
            _write_csv(self.folder / f"{plan.name}-curves.csv", CURVE_COLUMNS, _curves(found))
            _write_csv(self.folder / f"{plan.name}.csv", COLUMNS, (_row(*pair) for pair in found))
            write_json(self.folder / f"{plan.name}{PLAN}", as_content(plan))

    def refuse_to_lose(self, name: str, entries: Sequence[Entry]) -> None:
        """A table may be all that is left of its runs, and would be written anew without those that nobody asks for.

        Raises:
            ReproduceError: that would lose some.
        """
        path = self.folder / f"{name}.csv"
        if not path.is_file():
            return
        kept = {entry.run.digest[:16] for entry in entries if self.result(entry.run) is not None}
        lost = [
            row for row in _rows_of(path)
            if row["run"] not in kept and not list(self.folder.glob(f"runs/*-{row['run'][:12]}/result.json"))
        ]  # fmt: skip
        if lost:
            places = ", ".join(dict.fromkeys(f"{row['arm']} at size {row['size']}" for row in lost[:3]))
            raise ReproduceError(
                f"{path} has {len(lost)} runs that this command does not ask for and that lie nowhere else ({places}): "
                "they would be lost, so ask for these as well (--sizes, --seeds), or give another --output"
            )


def _rows_of(path: Path) -> list[dict[str, str]]:
    try:
        rows = read_csv(path)
        if all(row["run"] and row["arm"] and row["size"] for row in rows):
            return rows
        error: object = "a row without run, arm or size"
    except (OSError, csv.Error, LookupError, ValueError) as found:
        error = found
    raise ReproduceError(f"{path} cannot be read ({error}): copy it again, or remove it") from None


def read_kept(path: Path, *needed: str) -> dict[str, Any] | None:
    """What this room wrote to a file, with the keys that are needed; None where there is no such file."""
    try:
        found = read_json(path)
        if found is None or all(name in found for name in needed):
            return found
    except DataError as error:
        if isinstance(error.__cause__, OSError):
            raise ReproduceError(str(error)) from None
    raise ReproduceError(f"{path} is damaged: remove it, and the same command makes it again")


def _is_free(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # held, or gone since it was listed
        return False
    return True


def _results_of_tables(folder: Path) -> dict[str, dict[str, Any]]:
    """The results in the folder's tables, by the first digits of their runs' digests."""
    found: dict[str, dict[str, Any]] = {}
    for plan in sorted(folder.glob(f"*{PLAN}")):
        table = plan.with_name(plan.name.removesuffix(PLAN))
        try:
            for run, result in _results_of_table(table).items():
                found[run] = _fuller(found[run], result) if run in found else result
        except (OSError, csv.Error, LookupError, ValueError, TypeError) as error:
            raise ReproduceError(
                f"the tables of {table} are not what `simreg-megatron reproduce` writes ({error}): remove them or "
                "copy them again"
            ) from None
    return found


def _fuller(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """What two tables tell of one run: each may lack a number, or have fewer points of what it makes no claim about."""
    if differing := [name for name in MACHINE if one[name] != other[name]]:
        raise ValueError(f"they have one run with another {differing[0]} each")
    curves = dict(one["curves"])
    for tag, points in other["curves"].items():
        curves[tag] = max(curves.get(tag, []), points, key=len)
    return other | {name: value for name, value in one.items() if value is not None} | {"curves": curves}


def _results_of_table(table: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    if not table.with_suffix(".csv").is_file():  # a copy, or an older version, was killed after the plan
        return found
    rows, points = read_csv(table.with_suffix(".csv")), read_csv(table.with_name(f"{table.name}-curves.csv"))
    if points and not rows:
        raise ValueError(f"{len(points)} points of curves, and no run that they belong to")
    for row in rows:
        measured = {name: float(row[name]) if row.get(name) else None for name in METRICS}
        found[row["run"]] = {name: row[name] for name in ("status", "version", "commit", *MACHINE)} | measured
        found[row["run"]]["curves"] = {}
    for point in points:
        if point["run"] in found:
            curve = found[point["run"]]["curves"].setdefault(point["tag"], [])
            curve.append((int(point["step"]), float(point["value"])))
    return found


def _row(entry: Entry, result: Mapping[str, Any]) -> dict[str, Any]:
    run = entry.run
    return {
        "experiment": entry.experiment, "arm": entry.arm, "size": entry.size,
        "tokens_per_parameter": f"{entry.tokens_per_parameter:g}", "seed": entry.seed, "trial": entry.trial,
        "steps": run.steps, "tokens": tokens_of(run), "status": result["status"],
        **{name: _number(result.get(name)) for name in METRICS},
        "flags": run.words,
        **{name: result[name] for name in ("version", "commit", *MACHINE)}, "data": run.data, "run": run.digest[:16],
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
    with path.open(encoding="utf-8-sig", newline="") as stream:  # spreadsheets begin with a mark
        return [MACHINE | row if "arm" in row else row for row in csv.DictReader(stream)]
