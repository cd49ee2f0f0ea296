# SPDX-License-Identifier: Apache-2.0
"""Runs of one kind, read from folders and CSV files; one name for several makes them seeds of an arm."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from simreg_megatron.report import runs
from simreg_megatron.report.runs import ReportError, Run, Series, read_run

_IN_TABLES = {  # columns and tags of `reproduce`, as Megatron's
    "validation_loss": runs.VALIDATION_LOSS,
    "train_loss": runs.TRAIN_LOSS,
    "simreg_loss": runs.SIMREG_LOSS,
    "positive_cosine": runs.POSITIVE_COSINE,
    "negative_cosine": runs.NEGATIVE_COSINE,
    "isotropy": runs.ISOTROPY,
}


@dataclass(frozen=True)
class Arm:
    """Runs of one kind, which differ in their seed."""

    name: str
    runs: tuple[Run, ...]
    folders: tuple[Path, ...]

    @property
    def losses(self) -> list[float]:
        """The last validation loss of each run that has one."""
        found = (run.last(runs.VALIDATION_LOSS) for run in self.runs)
        return [loss for loss in found if loss is not None]

    @property
    def ends(self) -> list[int]:
        """The steps at which its runs were validated last, each once."""
        found = (run.scalars.get(runs.VALIDATION_LOSS) for run in self.runs)
        return sorted({int(series.steps[-1]) for series in found if series is not None})

    @property
    def diverged(self) -> str:
        """Which of its runs ended with a validation loss that is no number, as a sentence begins; "" for none."""
        count = sum(not math.isfinite(loss) for loss in self.losses)
        several = f"{count} of {len(self.losses)} runs of {self.name} diverged"
        return "" if not count else several if len(self.losses) > 1 else f"{self.name} diverged"

    @property
    def seconds(self) -> float | None:
        """Of a step: the median over the runs, where they logged it."""
        found = [time for run in self.runs if (time := run.median(runs.ITERATION_TIME)) is not None]
        return float(np.median(found)) if found else None

    @property
    def objective(self) -> str:
        """What it trains on beside the language-model loss: "" for nothing, "?" where its settings are not known."""
        settings = self.runs[0].settings
        if not settings:
            return "?"
        weight, name = settings.get("simreg_lambda", "None"), settings.get("simreg_objective", "None")
        is_off = name == "none" or weight in ("None", "0", "0.0")
        return "" if is_off else "simreg" if name == "None" else name

    @property
    def curve(self) -> Run:
        """The mean over the runs, at the steps that all of them have."""
        if len(self.runs) == 1:
            return replace(self.runs[0], name=self.name)
        tags = set.intersection(*(set(run.scalars) for run in self.runs))
        mean = {tag: _mean([run.scalars[tag] for run in self.runs]) for tag in tags}
        name = f"{self.name}, mean of {len(self.runs)}"
        return Run(name, {tag: series for tag, series in mean.items() if len(series.steps)}, self.runs[0].settings)


def _mean(several: Sequence[Series]) -> Series:
    steps = several[0].steps
    for series in several[1:]:
        steps = np.intersect1d(steps, series.steps)
    values = [series.values[np.isin(series.steps, steps)] for series in several]
    return Series(steps, np.mean(values, axis=0))


def read_arms(words: Sequence[str]) -> list[Arm]:
    """`PATH` or `NAME=PATH` each: an output folder of a run, its TensorBoard folder, or a CSV file. One name given to
    several paths makes them seeds of one arm.

    Raises:
        ReportError: a path holds no run.
    """
    found: dict[str, list[tuple[Run, Path]]] = {}
    pairs = [name_and_path(word) for word in words]
    places = [path.resolve() for _, path in pairs]
    for place, count in Counter(places).items():
        if count > 1:
            raise ReportError(f"{place} is given {count} times, and counts once: a run is no seed beside itself")
    given = {named for named, _ in pairs if named}
    for (named, path), own in zip(pairs, _own_names(places), strict=True):
        if not named and own in given:
            raise ReportError(
                f"{path} has no name here and would be called {own}, as others are: give {own}={path}, or another"
            )
        for run in _read(path, own):
            found.setdefault(named or run.name, []).append((run, path))
    for name, members in found.items():
        _refuse_copies(name, members)
    return [Arm(name, *(tuple(part) for part in zip(*members, strict=True))) for name, members in found.items()]


def name_and_path(word: str) -> tuple[str, Path]:
    """A folder may have = in its name."""
    name, _, path = word.partition("=")
    return ("", Path(word)) if not path or Path(word).exists() else (name, Path(path))


def _own_names(places: Sequence[Path]) -> list[str]:
    """What runs are called that nobody has named: each by as many folders above it as set it apart."""
    names = [runs.own_name(place) for place in places]
    above = [place.parents[1 if place.name == "tensorboard" else 0] for place in places]
    while repeated := {name for name, count in Counter(names).items() if count > 1}:
        if all(not above[place].name for place, name in enumerate(names) if name in repeated):
            break  # up to the root
        for place, name in enumerate(names):
            if name in repeated:
                names[place], above[place] = f"{above[place].name}/{name}", above[place].parent
    return names


def _refuse_copies(name: str, members: Sequence[tuple[Run, Path]]) -> None:
    """Two seeds never log the same numbers, so what does is one run, copied."""
    for place, (run, path) in enumerate(members):
        for other, elsewhere in members[:place]:
            if run.scalars.keys() == other.scalars.keys() and all(
                np.array_equal(series.steps, other.scalars[tag].steps)
                and np.array_equal(series.values, other.scalars[tag].values, equal_nan=True)
                for tag, series in run.scalars.items()
            ):
                raise ReportError(f"{elsewhere} and {path} hold the same run, which counts once as a seed of {name}")


def _read(path: Path, name: str) -> Iterator[Run]:
    if path.suffix == ".csv":
        yield from _read_csv(path, name)
        return
    folder = path / "tensorboard" if (path / "tensorboard").is_dir() else path
    run = read_run(folder, name=name)
    if runs.FIRST_OF_SEVERAL in run.scalars:
        run.scalars.setdefault(runs.VALIDATION_LOSS, run.scalars[runs.FIRST_OF_SEVERAL])
    yield run


def _read_csv(path: Path, name: str) -> Iterator[Run]:
    """A line a value (tag, step, value, and run where there are several), or a line a step with a column a tag."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:  # spreadsheets begin with a mark
            rows = list(csv.DictReader(stream))
        points = list(_points(rows, name))
        np.array([step for _, _, step, _ in points], dtype=np.int64)  # see that they fit
    except (OSError, csv.Error, ValueError, KeyError, TypeError, OverflowError) as error:
        raise ReportError(
            f"{path} cannot be read as runs ({error}): its columns must be tag, step, value and, of several runs, run; "
            "or step and a tag each"
        ) from None
    if not points:
        raise ReportError(f"{path} holds no values")
    by_run: dict[str, dict[str, dict[int, float]]] = {}
    for run, tag, step, value in points:
        by_run.setdefault(run, {}).setdefault(_IN_TABLES.get(tag, tag), {})[step] = value
    for run, tags in by_run.items():
        yield Run(run, {tag: _series(values) for tag, values in tags.items()})


def _points(rows: Sequence[dict[str, str]], name: str) -> Iterator[tuple[str, str, int, float]]:
    long = bool(rows) and {"tag", "step", "value"} <= set(rows[0])
    for row in rows:
        run = row.get("run") or name
        if long:
            yield run, row["tag"], int(row["step"]), float(row["value"])
        else:
            columns = {tag: text for tag, text in row.items() if tag not in ("step", "run") and text}
            yield from ((run, tag, int(row["step"]), float(text)) for tag, text in columns.items())


def _series(values: dict[int, float]) -> Series:
    steps = sorted(values)
    return Series(np.array(steps, dtype=np.int64), np.array([values[step] for step in steps]))
