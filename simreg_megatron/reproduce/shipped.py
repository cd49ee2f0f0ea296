# SPDX-License-Identifier: Apache-2.0
"""Searches that ship with the package: whoever has not searched takes over their best settings.

The tables are those of benchmarks/results/evidence. Put beside an experiment's own, they are what `report check` judges
its settings by.
"""

from __future__ import annotations

from pathlib import Path

from simreg_megatron.data.indexed import whole_file
from simreg_megatron.reproduce.check import Table, read_tables
from simreg_megatron.reproduce.store import PLAN

RESULTS = Path(__file__).resolve().parent / "results"


def shipped_search(name: str) -> Table | None:
    """The table of the search of that name; None where none ships."""
    return read_tables(RESULTS)[name] if (RESULTS / f"{name}{PLAN}").is_file() else None


def put_beside(name: str, folder: Path) -> None:
    """Copy its files into a folder of results that has none of that name; the plan, by which they are found, last."""
    folder.mkdir(parents=True, exist_ok=True)
    for ending in ("-curves.csv", ".csv", PLAN):
        target = folder / f"{name}{ending}"
        if not target.exists():
            with whole_file(target) as stream:
                stream.write((RESULTS / target.name).read_bytes())
