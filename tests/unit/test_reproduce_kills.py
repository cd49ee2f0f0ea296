# SPDX-License-Identifier: Apache-2.0
"""What a kill, a damaged file or an early end leaves behind: the same command goes on, or says why it does not."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from simreg_megatron.cli import app
from simreg_megatron.reproduce import dataset as datasets
from simreg_megatron.reproduce import local, store
from simreg_megatron.reproduce.check import read_tables
from simreg_megatron.reproduce.dataset import Dataset
from simreg_megatron.reproduce.errors import ReproduceError
from simreg_megatron.reproduce.outcome import outcome
from simreg_megatron.reproduce.runs import distinct, entries_of
from simreg_megatron.reproduce.store import DIVERGED, DONE, FAILED, Store
from simreg_megatron.reproduce.tuned import untuned
from tests.unit.test_reproduce_local import TRAINER, plan, run_all, starts


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    """Its runs are stand-ins, which take a moment."""
    (tmp_path / "train.py").write_text(TRAINER)
    monkeypatch.setattr(local, "launcher_of", lambda family: tmp_path / "train.py")
    monkeypatch.setattr(local, "_POLL_SECONDS", 0.02)
    found = Dataset(tmp_path, digest="0" * 64, bytes_per_token=4.0, validation_tokens=20_481)
    monkeypatch.setattr(datasets, "open_dataset", lambda name: found)
    return found


class KilledError(BaseException):
    """As by kill -9: nothing that comes after it happens."""


# ---- between two tables ----------------------------------------------------------------------------------------------


@pytest.fixture
def three(text: Dataset, tmp_path: Path) -> Path:
    """The tables of three of four runs."""
    run_all(entries_of(plan(), text, untuned)[:3], Store(tmp_path / "out"), text)
    return tmp_path / "out"


@pytest.mark.parametrize("number", [1, 4])
@pytest.mark.parametrize("written", [0, 1, 2])
@pytest.mark.parametrize("first", [True, False])
def test_it_goes_on_after_any_write_of_a_table(
    first: bool, written: int, number: int, three: Path, text: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries, writes = entries_of(plan(), text, untuned), iter(range(3))
    kept = Store(three)
    kept.run_folder(entries[3].run).mkdir()
    kept.keep(entries[3].run, kept.result(entries[0].run) or {})
    for path in three.glob("mine*") if first else ():
        path.unlink()

    def stop(write):
        def stopped(*words) -> None:
            if next(writes) == written:
                raise KilledError
            write(*words)

        return stopped

    with monkeypatch.context() as patch, pytest.raises(KilledError):
        for name in ("_write_csv", "write_json"):
            patch.setattr(store, name, stop(getattr(store, name)))
        kept.write_tables(plan(), entries[:number])
    Store(three).write_tables(plan(), entries)
    rows = [(row["arm"], row["seed"], row["status"]) for row in read_tables(three)["mine"].rows]
    assert rows == [(entry.arm, str(entry.seed), DONE) for entry in entries]


def test_a_plan_without_its_table_is_an_experiment_without_runs(three: Path, text: Dataset) -> None:
    """As an older version, which wrote the plan first, left it."""
    (three / "mine.csv").unlink()
    shutil.rmtree(three / "runs")
    assert Store(three).result(entries_of(plan(), text, untuned)[0].run) is None


def test_curves_of_runs_that_a_table_lacks_are_nobody_s(three: Path, text: Dataset) -> None:
    lines = (three / "mine.csv").read_text().splitlines()
    (three / "mine.csv").write_text("\n".join(lines[:2]) + "\n")
    shutil.rmtree(three / "runs")
    found = [Store(three).result(run) for run in distinct(entries_of(plan(), text, untuned))]
    assert [result is not None for result in found] == [True, False, False, False]
    assert found[0] is not None and [step for step, _ in found[0]["curves"]["validation_loss"]] == [3, 6]


# ---- ends that are none ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rate", "lacks"), [(0.2, "without a validation loss"), (0.3, "is of step 3, and it has 6")])
def test_an_end_without_the_last_loss_is_a_failure_and_tried_again(
    rate: float, lacks: str, text: Dataset, tmp_path: Path
) -> None:
    entries = entries_of(plan(lr=rate), text, untuned)[:1]
    kept, run = Store(tmp_path / "out"), entries[0].run
    run_all(entries, kept, text)
    found = kept.failure(run)
    assert found is not None and lacks in found["tail"] and kept.result(run) is None
    (kept.run_folder(run) / "ended.json").write_text('{"length": "6 iterations"}')
    (kept.run_folder(run) / "checkpoints").mkdir()
    (kept.run_folder(run) / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("3")
    run_all(entries, kept, text)
    assert not (kept.run_folder(run) / "ended.json").exists(), "the launcher would have nothing to do"
    assert starts(kept, run) == 2 and kept.result(run) is not None


@pytest.mark.parametrize(("trained", "status"), [(6, DONE), (4, FAILED)])
def test_a_loss_that_stands_in_the_log_alone_counts_after_the_last_step(
    trained: int, status: str, text: Dataset, tmp_path: Path
) -> None:
    """The process ends at once, as it may before TensorBoard's thread has written its last events."""
    end = f"""
for step in range(1, {trained} + 1):
    log(step, "lm loss", 4.5)
writer.close()
print("-" * 9)
print(" validation loss at iteration 6 on validation set | lm loss value: 4.250000E+00 | lm loss PPL: 7.0E+01 | ")
sys.stdout.flush()
__import__("os")._exit(0)
"""
    (tmp_path / "train.py").write_text(TRAINER.replace("loss = 4 +", f"{end}loss = 4 +"))
    kept, entries = Store(tmp_path / "out"), entries_of(plan(), text, untuned)[:1]
    run_all(entries, kept, text)
    found = outcome(kept.run_folder(entries[0].run), 0, 6, text)
    assert found["status"] == status
    if status == DONE:
        assert kept.result(entries[0].run) == json.loads(json.dumps(found))
        assert found["validation_loss"] == 4.25 and found["curves"]["validation_loss"] == [(6, 4.25)]
        assert found["train_loss"] == 4.5


@pytest.mark.parametrize(
    ("log", "status", "kind"),
    [
        ("> found information on 2 nodes\n", -9, FAILED),
        ("RuntimeError: found NaN in local forward loss calculation\n", 1, DIVERGED),
        ("ValueError: the SimReg term is not finite while\n", 1, DIVERGED),
        ("RuntimeError: found Inf in local grad norm\n", 0, DIVERGED),
        ("all went well\n", 0, FAILED),
    ],
)
def test_what_a_log_ends_with(log: str, status: int, kind: str, text: Dataset, tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(log)
    assert outcome(tmp_path, status, 6, text)["status"] == kind


# ---- runs that go on alone -------------------------------------------------------------------------------------------


def test_runs_of_a_killed_program_count_and_those_of_a_living_one_do_not(text: Dataset, tmp_path: Path) -> None:
    kept, others = Store(tmp_path / "out"), Store(tmp_path / "out")
    entries = entries_of(plan(), text, untuned)
    claim = others.claim(entries[0].run)
    assert claim is not None and kept.orphans() == 0
    run_all(entries[1:], kept, text, jobs=1)
    assert all(kept.result(entry.run) for entry in entries[1:])
    os.close(claim.owner)  # killed, and its training goes on
    assert kept.orphans() == 1
    os.close(claim.lock)
    assert kept.orphans() == 0


def test_what_ended_by_itself_is_collected_and_not_trained_again(text: Dataset, tmp_path: Path) -> None:
    entries = entries_of(plan(), text, untuned)
    kept, run = Store(tmp_path / "out"), entries[0].run
    run_all(entries, kept, text)
    (kept.run_folder(run) / "result.json").unlink()
    (kept.run_folder(run) / "checkpoints").mkdir()
    for path in kept.folder.glob("mine*"):
        path.unlink()
    kept = Store(kept.folder)
    run_all(entries, kept, text)
    assert kept.result(run) is not None and starts(kept, run) == 1
    assert not (kept.run_folder(run) / "checkpoints").exists()


# ---- sentences -------------------------------------------------------------------------------------------------------


def ask(folder: Path, *words: str, **changes: object) -> tuple[int, str]:
    content = {"name": "mine", "question": "?", "sizes": ["tiny"], "steps": {"tiny": 6}, "seeds": 1}
    arms = {"plain": {"flags": {"lr": 2e-3}}, "simreg": {"flags": {"lr": 4e-3}}}
    (folder / "mine.yaml").write_text(json.dumps({**content, "arms": arms, **changes}))
    command = ["reproduce", str(folder / "mine.yaml"), "--jobs", "1", "--output", str(folder / "out"), *words]
    done = CliRunner().invoke(app, command)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


@pytest.mark.parametrize("content", ["{", "[]", '{"status": "done"}'])
def test_a_damaged_result_is_named(content: str, text: Dataset, tmp_path: Path) -> None:
    run = entries_of(replace(plan(), seeds=1), text, untuned)[0].run
    path = Store(tmp_path / "out").run_folder(run) / "result.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    status, said = ask(tmp_path)
    assert status == 2 and f"error: {path} is damaged: remove it, and the same command makes it again\n" in said
    with pytest.raises(ReproduceError, match="is damaged"):
        Store(tmp_path / "out").failure(run)


def test_a_measurement_that_fails_is_a_sentence(text: Dataset, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('error: no flag --foo')")
    status, said = ask(tmp_path)
    assert status == 2 and "error: no time of a step of size tiny was logged: mend what " in said
    assert "log.txt ends with: error: no flag --foo" in said and not (tmp_path / "out" / "speed.json").exists()


def test_a_run_without_a_result_is_told_with_its_reason(text: Dataset, tmp_path: Path) -> None:
    status, said = ask(tmp_path, arms={"plain": {"flags": {"lr": 0.3}}})
    assert status == 1 and "has no result (its last validation loss is of step 3, and it has 6): its log is" in said
