# SPDX-License-Identifier: Apache-2.0
"""Tables of the benchmarks are made of their CSV files alone; what the repository keeps agrees with itself."""

from __future__ import annotations

import json

import pytest

from benchmarks import records, step_pairs, steps
from benchmarks.gpu import forms, tiles
from benchmarks.records import RESULTS

TABLES = {
    "step_pairs": step_pairs.table, "steps-tiny": steps.table, "gpu/h200/pairs-350m": step_pairs.table,
    "gpu/h200/pairs-1.3b": step_pairs.table, "gpu/h100-second/pairs-350m": step_pairs.table,
    "gpu/h200/forms": forms.table, "gpu/h100/tiles": tiles.table,
}  # fmt: skip


def test_tables_that_are_kept_are_those_of_their_lines() -> None:
    for name, table in TABLES.items():
        text = "\n".join(table(records.read(RESULTS / f"{name}.csv"))) + "\n"
        assert (RESULTS / f"{name}.md").read_text() == text, f"run it once more with --from {name}.csv"


@pytest.mark.parametrize("folder", sorted(path.name for path in (RESULTS / "gpu").iterdir()))
def test_rows_of_a_gpu_name_their_card_versions_and_commit(folder: str) -> None:
    facts = json.loads((RESULTS / "gpu" / folder / "machine.json").read_text())
    rows = [row for path in (RESULTS / "gpu" / folder).glob("*.csv") for row in records.read(path)]
    assert rows and facts["GPUs, memory, driver"]
    for name in ("machine", "commit", "torch", "megatron_core", "python"):
        assert {row[name] for row in rows} == {facts[name]}
