# SPDX-License-Identifier: Apache-2.0
"""Records of benchmarks: a line of CSV for each measurement, and the table that is made of these lines alone."""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
Record = dict[str, str]


def surroundings(**more: Any) -> dict[str, Any]:
    """Describe the machine and software of a measurement."""
    return {
        "date": datetime.date.today().isoformat(), "commit": _commit(), "machine": _machine(),
        "cores": len(os.sched_getaffinity(0)), "python": platform.python_version(), "torch": torch.__version__,
        "megatron_core": metadata.version("megatron-core"), **more,
    }  # fmt: skip


def _machine() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"


def _commit() -> str:
    """Short, with a + where files that git knows were changed since."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "unknown"
    except OSError:  # there is no git
        return "unknown"


def add_options(parser: argparse.ArgumentParser, default: Path) -> None:
    parser.add_argument(
        "--output", type=Path, metavar="FILE.csv", default=default, help=f"keep the lines here (default: {default})"
    )
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="FILE.csv", help="measure nothing: make the table of these lines"
    )


def write(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """All lines; a measurement that is stopped leaves those it has in PATH.part, and PATH as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    with part.open("w", encoding="utf-8", newline="") as file:
        writer = None
        for record in records:
            if writer is None:
                writer = csv.DictWriter(file, list(record), lineterminator="\n")
                writer.writeheader()
            writer.writerow(record)
            file.flush()
    part.replace(path)


def read(path: Path) -> list[Record]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def finish(
    path: Path, measured: Iterable[dict[str, Any]] | None, table: Callable[[list[Record]], Iterable[str]]
) -> None:
    """Keep what is measured, if anything is, in `path`, and its table next to it; print the table."""
    if measured is not None:
        write(path, measured)
    text = "\n".join(table(read(path))) + "\n"
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


def command(
    name: str,
    description: str | None,
    rows: Callable[[], Iterable[dict[str, Any]]],
    table: Callable[[list[Record]], Iterable[str]],
) -> None:
    """`python -m benchmarks.NAME` of a benchmark on one thread that has no options of its own; `rows` measures."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, RESULTS / f"{name}.csv")
    options = parser.parse_args()
    where = surroundings(threads=1)
    measured = None if options.source else ({**row, **where} for row in rows())
    finish(options.source or options.output, measured, table)


def described(records: Sequence[Record]) -> str:
    """Date, versions and machine, each with all its values."""
    both = {name: ", ".join(sorted({record[name] for record in records})) for name in records[0]}
    return (
        f"{both['date']}, commit {both['commit']}, {both['machine']}, {both['cores']} cores, {both['threads']} "
        f"thread{'s' if both['threads'] != '1' else ''}, Python {both['python']}, torch {both['torch']}, "
        f"megatron-core {both['megatron_core']}"
    )
