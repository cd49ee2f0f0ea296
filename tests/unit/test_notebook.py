# SPDX-License-Identifier: Apache-2.0
"""examples/simreg.ipynb: its cells run, without Jupyter, and show what its text says."""

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CELLS = json.loads((ROOT / "examples" / "simreg.ipynb").read_text(encoding="utf-8"))["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]


def execute(cells: list[dict[str, Any]]) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for cell in cells:
        exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    return names


def test_the_term_and_the_geometry(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(CELLS) <= 12 and not any(cell["outputs"] for cell in CODE)
    monkeypatch.chdir(ROOT / "examples")
    names = execute(CODE[:-2])  # the last two start Megatron and read its logs
    assert names["losses"][0] < 1e-6 and names["losses"][10] > 1
    (loss, same, different), (last, same_after, different_after) = names["history"][0], names["history"][-1]
    assert loss > 1 and last < 0.1 and different - different_after > 2 * (same - same_after) > 0
    table = names["table"]
    assert table["random", 0.01][2] < 1e-6 and table["random", 1.0][0] > 1, "a temperature of 1 acts on all states"
    assert all(row == sorted(row) for (name, _), row in table.items() if name == "parallel"), "by size of the chunk"


@pytest.mark.slow
@pytest.mark.megatron
def test_the_tiny_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "examples")
    monkeypatch.setenv("SIMREG_NOTEBOOK_STEPS", "4")
    measured, simreg = execute(CODE)["runs"]
    assert measured.last("lm loss validation") != simreg.last("lm loss validation")
    assert "simreg loss" in measured.scalars and "simreg loss" in simreg.scalars
