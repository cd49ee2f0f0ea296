# SPDX-License-Identifier: Apache-2.0
"""Generated tables are as new as the code under them and agree with their rows."""

import json

import pytest

from benchmarks import records, step_pairs
from benchmarks.gpu import forms, tiles
from benchmarks.records import RESULTS
from tools import budget, tables
from tools.tables import TABLES


@pytest.mark.parametrize("name", TABLES)
def test_the_table_is_of_the_code_that_is_here(name: str) -> None:
    assert not (why := tables.why_stale(name)), why


def test_every_tolerated_change_is_of_a_table_as_it_stands() -> None:
    made = {name: tables.stamp_of(tables.ROOT / table.page) for name, table in TABLES.items()}
    for one in tables.tolerances():
        stamp = made[one.table]
        assert stamp and stamp.code == one.made_from, f"the table was made again: remove the line of {one.reason!r}"


OF_BENCHMARKS = {
    "step_pairs": step_pairs.table, "gpu/h200/pairs-350m": step_pairs.table,
    "gpu/h200/pairs-1.3b": step_pairs.table, "gpu/h100-second/pairs-350m": step_pairs.table,
    "gpu/h200-fourth/pairs-350m": step_pairs.table, "gpu/h200-fourth/pairs-1.3b": step_pairs.table,
    "gpu/h200/forms": forms.table, "gpu/h100/tiles": tiles.table,
}  # fmt: skip


def test_tables_that_are_kept_are_those_of_their_lines() -> None:
    for name, table in OF_BENCHMARKS.items():
        text = "\n".join(table(records.read(RESULTS / f"{name}.csv"))) + "\n"
        assert (RESULTS / f"{name}.md").read_text() == text, f"run it once more with --from {name}.csv"


@pytest.mark.parametrize("folder", sorted(path.name for path in (RESULTS / "gpu").iterdir()))
def test_rows_of_a_gpu_name_their_card_versions_and_commit(folder: str) -> None:
    facts = json.loads((RESULTS / "gpu" / folder / "machine.json").read_text())
    rows = [row for path in (RESULTS / "gpu" / folder).glob("*.csv") for row in records.read(path)]
    assert rows and facts["GPUs, memory, driver"]
    for name in ("machine", "commit", "torch", "megatron_core", "python"):
        assert {row[name] for row in rows} == {facts[name]}


def test_nothing_has_outgrown_its_budget() -> None:
    assert budget.main() == 0
