# SPDX-License-Identifier: Apache-2.0
"""`simreg-megatron watch`: what the files of a run say while it trains."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
from rich.console import Console
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import SummaryWriter
from typer.testing import CliRunner

from simreg_megatron.cli import app
from simreg_megatron.report import runs
from simreg_megatron.report.watch import State, Watched, duration, events_of, table_of, watch


def log(folder: Path, steps: range, *, start: float, seconds: float, **values: float) -> None:
    """One file of a run. TensorBoard reads a run's files by name, in which writers of one second are counted: 10 would
    come before 9, so these are counted otherwise."""
    place = folder / "tensorboard"
    before = set(place.glob("*"))
    _write(place, steps, start=start, seconds=seconds, **values)
    (new,) = set(place.glob("*")) - before
    new.rename(place / f"events.out.tfevents.{int(time.time()):010d}.{len(before):03d}")


def _write(place: Path, steps: range, *, start: float, seconds: float, **values: float) -> None:
    with SummaryWriter(str(place)) as writer:
        for name, value in {"train_iters": 400, "seq_length": 256, "global_batch_size": 8}.items():
            writer.add_text(name, str(value), 0)
        for step in steps:
            at = start + (step - steps.start) * seconds
            writer.add_scalar(runs.TRAIN_LOSS, 6.0 - step / 1000, step, walltime=at)
            for tag, value in values.items():
                writer.add_scalar(tag.replace("_", " "), value, step, walltime=at)


def shown(states: list[State]) -> list[list[str]]:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table_of(states))
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in console.export_text().splitlines()]


def test_what_a_run_says(tmp_path: Path) -> None:
    now = time.time()
    log(tmp_path / "a", range(10, 101, 10), start=now - 45, seconds=0.5, simreg_loss=0.0123, lm_loss_validation=5.4321)
    state = Watched(f"one={tmp_path / 'a'}").look(now)
    assert (state.name, state.step, state.steps, state.tokens_per_step) == ("one", 100, 400, 2048)
    assert state.seconds_per_step == pytest.approx(0.5, rel=1e-3) and state.seconds_left == pytest.approx(150, rel=1e-3)
    assert not state.is_done
    lines = {line[0]: line[1:] for line in shown([state])[1:]}
    assert lines["step"] == ["100 of 400"] and lines["lm loss"] == ["5.9000"]
    assert lines["simreg loss"] == ["0.0123"] and lines["validation loss"] == ["5.4321"]
    assert lines["tokens a second"] == ["4,096"] and lines["time left"] == ["2 min"]
    assert "isotropy" not in lines, "nobody has logged it"


def test_a_pause_and_a_resumed_run_do_not_move_the_pace(tmp_path: Path) -> None:
    now = time.time()
    log(tmp_path / "a", range(10, 101, 10), start=now - 9000, seconds=2.0)
    log(tmp_path / "a", range(60, 161, 10), start=now - 210, seconds=2.0)  # from its checkpoint at step 50
    state = Watched(str(tmp_path / "a")).look(now)
    assert state.name == "a" and state.step == 160
    assert state.seconds_per_step == pytest.approx(2.0, rel=1e-3)


def test_what_it_says_of_a_run_that_is_not_training() -> None:
    fresh = State("a")
    silent = State("a", step=10, steps=100, seconds_per_step=1.0, silent_for=700.0)
    done = State("a", step=100, steps=100, seconds_per_step=1.0, silent_for=7000.0)
    endless = State("a", step=5, seconds_per_step=1.0)
    assert shown([State("[red]"), State("[/x]")])[0] == ["[red]", "[/x]"], "a name is no markup"
    assert [shown([state])[-1][1:] for state in (fresh, silent, done, endless)] == [
        ["nothing logged yet"], ["silent for 12 min"], ["done"], [],
    ]  # fmt: skip


def test_it_ends_when_all_are_done(tmp_path: Path) -> None:
    """And reads what is new at each look."""
    log(tmp_path / "a", range(10, 51, 10), start=time.time() - 50, seconds=1.0)
    looks = []

    def pass_time(seconds: float) -> None:
        looks.append(seconds)
        assert len(looks) < 3
        log(
            tmp_path / "a",
            range(60 + 340 * (len(looks) - 1), 62 + 340 * (len(looks) - 1)),
            start=time.time(),
            seconds=1,
        )

    watch([str(tmp_path / "a")], every=7, once=False, console=Console(file=io.StringIO()), sleep=pass_time)
    assert looks == [7, 7]


def test_the_newest_run_of_a_folder(tmp_path: Path) -> None:
    for name in ("first", "second"):
        log(tmp_path / name, range(1, 3), start=time.time(), seconds=1.0)
        time.sleep(0.02)
    assert events_of(tmp_path) == tmp_path / "second" / "tensorboard"


def test_the_command(tmp_path: Path) -> None:
    missing = CliRunner().invoke(app, ["watch", str(tmp_path / "nowhere"), "--once"], env={"COLUMNS": "200"})
    assert missing.exit_code == 2 and "has no TensorBoard files below it" in missing.output
    for name in ("a", "b"):
        log(tmp_path / name, range(10, 31, 10), start=time.time() - 20, seconds=1.0)
    found = CliRunner().invoke(app, ["watch", f"plain={tmp_path / 'a'}", str(tmp_path / "b"), "--once"])
    assert found.exit_code == 0 and "plain" in found.output and "30 of 400" in found.output
    assert max(map(len, found.output.splitlines())) <= 80


@pytest.mark.parametrize(
    ("seconds", "text"), [(45, "45 s"), (720, "12 min"), (11100, "3 h 05 min"), (187200, "2 d 4 h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_rare_lines_are_no_silence(tmp_path: Path) -> None:
    now = time.time()
    log(tmp_path / "a", range(100, 301, 100), start=now - 1250 - 2, seconds=5.0)
    state = Watched(str(tmp_path / "a")).look(now)
    assert state.silent_for > 60 and shown([state])[-1][1:] == ["8 min"]


def test_the_last_validation_ends_a_run_whose_log_interval_does_not_divide_it(tmp_path: Path) -> None:
    now = time.time()
    log(tmp_path / "a", range(100, 351, 50), start=now - 900, seconds=1.0)
    with SummaryWriter(str(tmp_path / "a" / "tensorboard"), filename_suffix=".z") as writer:
        writer.add_scalar(runs.VALIDATION_LOSS, 5.0, 400, walltime=now - 600)
    assert Watched(str(tmp_path / "a")).look(now).is_done


def test_a_batch_that_grows_has_no_tokens_a_step(tmp_path: Path) -> None:
    log(tmp_path / "a", range(10, 51, 10), start=time.time() - 50, seconds=1.0)
    with SummaryWriter(str(tmp_path / "a" / "tensorboard"), filename_suffix=".z") as writer:
        writer.add_text("rampup_batch_size", "[4, 4, 100]", 0)
    assert Watched(str(tmp_path / "a")).look(time.time()).tokens_per_step is None


def test_names_and_damage_are_those_of_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log(tmp_path / "lr=1e-3", range(10, 51, 10), start=time.time() - 50, seconds=1.0)
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["watch", "--once", "lr=1e-3"]).exit_code == 0
    (folder := tmp_path / "bad" / "tensorboard").mkdir(parents=True)
    with (folder / "events.out.tfevents.1.a").open("wb") as file:
        RecordWriter(file).write(b"\xff no event")
    damaged = CliRunner().invoke(app, ["watch", "--once", "bad"])
    assert damaged.exit_code == 2 and "holds a damaged TensorBoard file" in damaged.stderr
    assert CliRunner().invoke(app, ["watch", "--every", "inf", "lr=1e-3"]).exit_code == 2
