# SPDX-License-Identifier: Apache-2.0
"""Tables of the benchmarks are made of their CSV files alone; what the repository keeps agrees with itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import records, steps
from benchmarks.records import RESULTS

WHERE = {
    "date": "2026-11-22", "commit": "abc", "machine": "x86_64 CPU", "cores": "2", "threads": "2", "python": "3.12.1",
    "torch": "2.13.0", "megatron_core": "0.19.2", "model": "tiny", "steps": "60",
}  # fmt: skip


def lines_of(kind: str, *turns: tuple[float, ...], memory: float = 0.0) -> list[dict[str, object]]:
    return [
        {"kind": kind, "turn": turn, "interval": number, "ms": time, "peak_mb": memory, **WHERE}
        for turn, times in enumerate(turns)
        for number, time in enumerate(times)
    ]


def run_main(monkeypatch: pytest.MonkeyPatch, *argv: str) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.steps", *argv])
    steps.main()


def test_the_table_is_made_again_without_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "steps-tiny.csv"
    plain = lines_of(steps.PLAIN, (100.0, 102.0), (200.0, 204.0))
    records.write(path, [*plain, *lines_of("SimReg, chunks", (103.0, 105.06), (206.0, 210.12), memory=17.4)])
    monkeypatch.setattr(steps, "_measured", lambda options: pytest.fail("it measured"))
    run_main(monkeypatch, "--from", str(path))
    rows = [line for line in path.with_suffix(".md").read_text().splitlines() if line.startswith("|")]
    assert rows[2] == "| plain Megatron | 151.0 |  |  | 4 | not measured |"
    cells = [cell.strip() for cell in rows[3].strip("|").split("|")]
    assert cells[:3] == ["SimReg, chunks", "155.5", "+3.0 %"] and cells[4:] == ["4", "17"]
    low, high = (float(cell.rstrip(" %")) for cell in cells[3].split(" to "))
    assert -1.1 < low < 3.0 < high < 7.1


def test_plain_megatron_has_no_flag_of_the_plugin_and_takes_part_in_every_choice() -> None:
    assert steps.KINDS[steps.PLAIN] == ()
    assert list(steps._chosen("tiny", "chunks,AdaGC")) == [steps.PLAIN, "SimReg, chunks", "AdaGC alone"]
    assert not any("triton" in name for name in steps._chosen("tiny", ""))
    assert any("triton" in name for name in steps._chosen("350m", ""))


def test_the_paper_is_quoted_with_the_model_it_measured() -> None:
    assert "7B" in steps.PAPER and "350M" not in steps.PAPER and "H800" in steps.PAPER


def test_tables_that_are_kept_are_those_of_their_lines() -> None:
    kept = sorted(RESULTS.glob("steps-*.csv"))
    assert kept
    for path in kept:
        assert path.with_suffix(".md").read_text() == "\n".join(steps.table(records.read(path))) + "\n"
