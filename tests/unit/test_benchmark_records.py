# SPDX-License-Identifier: Apache-2.0
"""Tables of the benchmarks are made of their CSV files alone; what the repository keeps agrees with itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import records, step_pairs, steps
from benchmarks.alternating_run import is_plain
from benchmarks.gpu import forms, tiles
from benchmarks.records import RESULTS, ROOT

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


TABLES = {
    "step_pairs": step_pairs.table, "steps-tiny": steps.table, "gpu/h100/pairs-350m": step_pairs.table,
    "gpu/h100/pairs-1.3b": step_pairs.table, "gpu/h100/forms": forms.table, "gpu/h100/tiles": tiles.table,
}  # fmt: skip


def test_tables_that_are_kept_are_those_of_their_lines_on_the_page_too() -> None:
    for name, table in TABLES.items():
        text = "\n".join(table(records.read(RESULTS / f"{name}.csv"))) + "\n"
        assert (RESULTS / f"{name}.md").read_text() == text, f"run it once more with --from {name}.csv"
        page = ROOT / "docs" / "performance.md"
        assert records.quoted(page.read_text(encoding="utf-8"), name) == text


@pytest.mark.parametrize("folder", sorted(path.name for path in (RESULTS / "gpu").iterdir()))
def test_rows_of_a_gpu_name_their_card_versions_and_commit(folder: str) -> None:
    facts = json.loads((RESULTS / "gpu" / folder / "machine.json").read_text())
    rows = [row for path in (RESULTS / "gpu" / folder).glob("*.csv") for row in records.read(path)]
    assert rows and facts["GPUs, memory, driver"]
    for name in ("machine", "commit", "torch", "megatron_core", "python"):
        assert {row[name] for row in rows} == {facts[name]}


def test_a_page_is_changed_between_its_marks_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    page, path = tmp_path / "page.md", tmp_path / "one.csv"
    other = "<!-- table two -->\nstays\n<!-- end of table -->\n"
    page.write_text(f"before\n{other}<!-- table one -->\nold\n<!-- end of table -->\nafter\n")
    records.finish(path, [{"a": 1}, {"a": 2}], lambda lines: [line["a"] for line in lines], page=page)
    expected = f"before\n{other}<!-- table one -->\n1\n2\n<!-- end of table -->\nafter\n"
    assert page.read_text() == expected and records.quoted(expected, "one") == path.with_suffix(".md").read_text()
    elsewhere = tmp_path / "else" / "one.csv"
    records.finish(elsewhere, [{"a": 3}], lambda lines: [line["a"] for line in lines], page=page)
    assert page.read_text() == expected, "a trial's file leaves the page alone"
    with pytest.raises(ValueError, match="has no line '<!-- table three -->'"):
        records.finish(tmp_path / "three.csv", [{"a": 3}], lambda lines: ["3"], page=page)


def test_what_was_measured_before_a_stop_is_kept(tmp_path: Path) -> None:
    def stopped():
        yield {"a": 1}
        raise KeyboardInterrupt

    records.write(tmp_path / "one.csv", [{"a": 7}])
    with pytest.raises(KeyboardInterrupt):
        records.write(tmp_path / "one.csv", stopped())
    assert records.read(tmp_path / "one.csv") == [{"a": "7"}]
    assert records.read(tmp_path / "one.csv.part") == [{"a": "1"}]


def test_pairs_of_steps_are_compared_within_their_window() -> None:
    """A machine that slows down tenfold for a while changes nothing; steps with a log line may be left out."""
    lines = [
        {
            "kind": "SimReg", "step": str(20 + step), "plain": str(int(is_plain(step))), "seconds": str(slow * factor),
            "processor_seconds": str(factor + (0.5 if step % 10 == 9 and not is_plain(step) else 0)),
            **WHERE,
        }
        for step in range(60)
        for slow in (10.0 if 20 <= step < 40 else 1.0,)
        for factor in (1.0 if is_plain(step) else 1.02,)
    ]  # fmt: skip
    rows = [row.split(" | ") for row in step_pairs.table(lines) if row.startswith("| SimReg")]
    assert [row[3] for row in rows] == ["+2.0 %", "+2.0 %", "+7.0 %", "+2.0 %"] and {row[5] for row in rows} == {"3 |"}


def test_what_is_kept_stays_small() -> None:
    """A clone brings all of it; `python -m research keep` keeps few points of each curve."""
    assert sum(path.stat().st_size for path in RESULTS.rglob("*") if path.is_file()) < 4_000_000
