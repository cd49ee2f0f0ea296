# SPDX-License-Identifier: Apache-2.0
"""The table of `benchmarks.prefixes`: rows survive a stop, and each is made once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import prefixes
from simreg_megatron import SimRegConfig


def row(name: str, seed: int, loss: float, steps: int = 4) -> prefixes.Row:
    objective, options = prefixes.RUNS[name]
    made = dict.fromkeys(prefixes.COLUMNS, "") | dict.fromkeys(prefixes.FIELDS, f"{loss:.4f}")
    return made | {
        "run": name, "objective": objective, "options": options, "seed": str(seed), "steps": str(steps)
    }  # fmt: skip


def test_finished_runs_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, asked = tmp_path / "rows.csv", []

    def run(name: str, seed: int, steps: int, corpus: object) -> prefixes.Row:
        asked.append((name, seed))
        if len(asked) == 3:
            raise SystemExit("stopped")
        return row(name, seed, 4.0, steps)

    monkeypatch.setattr(prefixes, "run", run)
    monkeypatch.setattr(prefixes, "ensure_builtin_corpus", lambda place: None)
    monkeypatch.setattr(prefixes.os, "nice", lambda much: None)
    monkeypatch.setattr(sys, "argv", ["prefixes", "--seeds", "2", "--steps", "4", "--output", str(output)])
    with pytest.raises(SystemExit, match="stopped"):
        prefixes.main()
    assert len(prefixes.read(output)) == 2
    prefixes.main()
    assert len(prefixes.read(output)) == 2 * len(prefixes.RUNS)
    assert [asked.count(each) for each in dict.fromkeys(asked)] == [1, 1, 2, *[1] * (2 * len(prefixes.RUNS) - 3)]
    monkeypatch.setitem(prefixes.RUNS, "MIC", ("mic:0.1", ""))
    prefixes.main()
    assert asked[-2:] == [("MIC", 1), ("MIC", 2)], "another weight is another run"
    assert output.with_suffix(".md").read_text().count("| MIC |") == 2


def test_its_objectives_are_settings_that_exist() -> None:
    for objective, options in prefixes.RUNS.values():
        assert not objective or SimRegConfig(objective=objective, objective_options=options).trains
