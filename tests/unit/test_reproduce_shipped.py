# SPDX-License-Identifier: Apache-2.0
"""Whoever has not searched takes over the settings of the search that ships, and `report check` knows of it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from simreg_megatron.cli import app
from simreg_megatron.reproduce import dataset, local, shipped
from simreg_megatron.reproduce.check import read_tables, settings_of
from simreg_megatron.reproduce.dataset import Dataset
from simreg_megatron.reproduce.plan_file import read_plan
from simreg_megatron.reproduce.runs import entries_of
from simreg_megatron.reproduce.store import DONE, Store
from simreg_megatron.reproduce.tuned import untuned
from tests.unit.test_reproduce_local import TRAINER


@pytest.fixture
def own_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    text = Dataset(tmp_path, digest="1" * 64, bytes_per_token=4.0, validation_tokens=20_481)
    monkeypatch.setattr(dataset, "open_dataset", lambda name: text)
    return text


@pytest.fixture
def search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A search on another text: the third trial of cross-entropy and the fifth of SimReg are the best."""
    plan, other = read_plan("tuning"), Dataset(tmp_path, digest="0" * 64, bytes_per_token=4.0, validation_tokens=9)
    store, entries = Store(tmp_path / "shipped"), [e for e in entries_of(plan, other, untuned) if e.size == 64]
    for entry in entries:
        best = {"cross-entropy": 3, "simreg": 5}[entry.arm]
        loss = 4.0 + abs(entry.trial - best)
        curve = [(entry.run.steps, loss)]
        store.run_folder(entry.run).mkdir(parents=True)
        store.keep(
            entry.run,
            {"status": DONE, "validation_loss": loss, "curves": {"validation_loss": curve, "train_loss": curve},
             "version": "0", "commit": "0"},
        )  # fmt: skip
    store.write_tables(plan, entries)
    monkeypatch.setattr(shipped, "RESULTS", tmp_path / "shipped")
    return tmp_path / "shipped"


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(TRAINER)
    monkeypatch.setattr(local, "launcher_of", lambda family: tmp_path / "train.py")
    monkeypatch.setattr(local, "_POLL_SECONDS", 0.02)
    return tmp_path / "train.py"


def run_tiny(folder: Path, *words: str) -> Result:
    command = ["reproduce", "convergence", "--model", "tiny", "--jobs", "2", "--output", str(folder), *words]
    return CliRunner().invoke(app, command)


def planned(folder: Path) -> tuple[str, dict[str, str]]:
    """What a dry run says, and the flags of each arm's first run."""
    done = run_tiny(folder, "--seeds", "1", "--dry-run")
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    runs = {line.split()[1].strip(","): after for line, after in itertools.pairwise(lines) if line.startswith("# ")}
    return done.output, runs


def test_its_best_settings_are_taken_over(own_text: Dataset, search: Path, tmp_path: Path) -> None:
    said, runs = planned(tmp_path / "out")
    assert "Settings: the best of tuning as it ships with the package" in said
    plan = read_plan("tuning")
    for arm, best, name in (("cross-entropy", 3, "cross-entropy"), ("simreg-chunk", 5, "simreg")):
        for flag, value in plan.arm(name).trials_of(64)[best - 1].items():
            assert f"--{flag} {value} " in f"{runs[arm]} "
    assert not (tmp_path / "out").exists(), "a dry run writes nothing"
    assert (
        "fewer than 3 seeds there will be no verdict, and size tiny has 1"
        in run_tiny(tmp_path / "out", "--seeds", "1", "--dry-run").output
    )
    assert "no verdict" not in run_tiny(tmp_path / "out", "--seeds", "3", "--dry-run").output
    assert "3 runs of 12.3 million tokens in all; 3 are left, and how long they take here is measured before" in said


def test_it_ends_with_a_report_that_judges_by_it(
    own_text: Dataset, search: Path, trainer: Path, tmp_path: Path
) -> None:
    done = run_tiny(tmp_path / "out", "--seeds", "3")
    assert done.exit_code == 0, done.output
    assert "9 runs of 36.9 million tokens in all; 9 are left, about 19 minutes here with 2 at a time" in done.output
    end = done.output[done.output.index("9 of 9 runs") :]
    assert "refused: convergence: the headline 'SimReg in chunks ends lower than cross-entropy' rests on 3 seeds" in end
    assert f"Written: {tmp_path / 'out' / 'experiments.html'}, " in end and "tuning" not in end
    assert "Which learning rate and weight decay" in (tmp_path / "out" / "experiments.html").read_text()
    tables = read_tables(tmp_path / "out")
    assert (
        settings_of(read_plan("convergence"), tables)("simreg", "tiny") == read_plan("tuning").arm("simreg").trials[4]
    )
    more = run_tiny(tmp_path / "out", "--seeds", "4", "--dry-run").output
    assert "3 are left, about 8 minutes here with 2 at a time" in more, "a pair, and one alone"
    (tmp_path / "out" / "other.plan.json").write_text("[]")
    again = run_tiny(tmp_path / "out", "--seeds", "3")
    assert again.exit_code == 0 and "0 are left, about 0 minutes" in again.output
    assert "The runs have ended, and this is missing in their report: " in again.output


def test_a_search_of_ones_own_comes_first(own_text: Dataset, search: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "out")
    plan = read_plan("tuning")
    for entry in entries_of(plan, own_text, untuned):
        if entry.size == 64:
            store.run_folder(entry.run).mkdir(parents=True)
            store.keep(
                entry.run,
                {"status": DONE, "validation_loss": 4.0 + entry.trial, "curves": {}, "version": "0", "commit": "0"},
            )
    said, runs = planned(tmp_path / "out")
    assert "as it ships" not in said
    for flag, value in plan.arm("simreg").trials_of(64)[0].items():
        assert f"--{flag} {value} " in f"{runs['simreg-chunk']} "


def test_without_any_the_way_out_is_named(own_text: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "RESULTS", tmp_path / "none")
    done = CliRunner().invoke(
        app, ["reproduce", "convergence", "--model", "tiny", "--dry-run", "--output", str(tmp_path / "out")]
    )
    assert done.exit_code == 2 and "run `simreg-megatron reproduce tuning` with the same --output first" in done.output
