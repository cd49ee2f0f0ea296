# SPDX-License-Identifier: Apache-2.0
"""examples/simreg.ipynb: its cells run, without Jupyter, and show what its text says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CELLS = json.loads((ROOT / "examples" / "simreg.ipynb").read_text(encoding="utf-8"))["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
ALONE = [code for code in CODE if "launch/pretrain" not in code and "read_run" not in code]


def execute(cells: list[str]) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for place, code in enumerate(cells):
        exec(compile(code, f"code cell {place}", "exec"), names)
    return names


def test_it_is_short_and_keeps_no_output() -> None:
    assert len(CELLS) <= 12 and len(ALONE) == len(CODE) - 2
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in CELLS if "outputs" in cell)


def test_the_term_and_the_geometry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "examples")
    names = execute(ALONE)
    assert names["losses"][0] < 1e-6 and names["losses"][10] > 1
    (loss, same, different), (last, same_after, different_after) = names["history"][0], names["history"][-1]
    assert loss > 1 and last < 0.1 and different - different_after > 2 * (same - same_after) > 0
    table = names["table"]
    assert table["random", 0.01][2] < 1e-6 and table["random", 1.0][0] > 1, "a temperature of 1 acts on all states"
    assert all(one < two < three for row, (one, two, three) in table.items() if row[0] == "parallel")


@pytest.mark.slow
@pytest.mark.megatron
def test_all_of_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT / "examples")
    monkeypatch.setenv("SIMREG_NOTEBOOK_STEPS", "4")
    names = execute(CODE)
    measured, simreg = names["runs"]
    assert measured.last("lm loss validation") != simreg.last("lm loss validation")
    assert "simreg loss" in capsys.readouterr().out
