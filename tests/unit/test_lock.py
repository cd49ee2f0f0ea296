# SPDX-License-Identifier: Apache-2.0
"""One run at a time in an output folder, and what becomes of the lock of a run that was killed."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from launch import launcher, lock
from launch.demo import Settings, run_demo
from launch.flags import LaunchError
from launch.lock import NAME, Holder, held
from launch.options import make_parser
from launch.planned import python_path
from tests.helpers import jobs


def put(folder: Path, holder: Holder | str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    path.write_text(holder if isinstance(holder, str) else json.dumps(asdict(holder)))
    return path


ELSEWHERE = Holder("node7", "another boot", 17, "1", "2026-01-01 00:00:00")


def never(_: float) -> None:
    pytest.fail("there is nothing to wait for")


def test_it_is_there_and_touched_while_it_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.01)
    with held(tmp_path / "a" / "run", tmp_path / "b", wait=never):
        for folder in (tmp_path / "a" / "run", tmp_path / "b"):
            assert [path.name for path in folder.iterdir()] == [NAME]
            assert json.loads((folder / NAME).read_text())["pid"] == os.getpid()
            os.utime(folder / NAME, (1, 1))
            end = time.monotonic() + 20
            while (folder / NAME).stat().st_mtime == 1:
                assert time.monotonic() < end, "nothing touches it"
                time.sleep(0.01)
    assert list((tmp_path / "b").iterdir()) == [] == list((tmp_path / "a" / "run").iterdir())


def test_a_second_run_is_refused_and_takes_nothing(tmp_path: Path) -> None:
    with held(tmp_path / "run"):
        before = (tmp_path / "run" / NAME).read_text()
        sentence = rf"in use by another run \(process {os.getpid()} on .*give another --output"
        with pytest.raises(LaunchError, match=sentence), held(tmp_path / "other", tmp_path / "run", wait=never):
            pytest.fail("both would train")
        assert (tmp_path / "run" / NAME).read_text() == before
    assert list((tmp_path / "other").iterdir()) == [], "what it held already is given back"


def test_a_killed_process_of_this_machine_is_seen_at_once(tmp_path: Path) -> None:
    script = "import os, sys; from pathlib import Path; from launch import lock\nwith lock.held(Path('.')): os._exit(9)"
    done = jobs.run(
        [sys.executable, "-c", script], cwd=tmp_path, env={**os.environ, "PYTHONPATH": python_path(os.getcwd())}
    )
    assert done.returncode == 9 and (tmp_path / NAME).is_file()
    with held(tmp_path, wait=never):
        assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()


def test_a_holder_elsewhere_lives_while_its_file_is_touched(tmp_path: Path) -> None:
    path = put(tmp_path, ELSEWHERE)
    waited: list[float] = []

    def beats_after_a_while(seconds: float) -> None:
        waited.append(seconds)
        if sum(waited) > lock.BEAT_SECONDS:
            os.utime(path, (len(waited), len(waited)))  # a clock far behind ours is no matter

    sentence = r"process 17 on node7, since 2026-01-01 .* is safe to delete if no such"
    with pytest.raises(LaunchError, match=sentence), held(tmp_path, wait=beats_after_a_while):
        pass
    assert sum(waited) <= 2 * lock.BEAT_SECONDS and path.is_file()


@pytest.mark.parametrize(
    "holder",
    [ELSEWHERE, replace(Holder.here(), machine=""), "", "{"],
    ids=["elsewhere", "of a machine without a name", "empty", "torn"],
)
def test_a_holder_elsewhere_whose_file_stands_still_is_gone(holder: Holder | str, tmp_path: Path, capsys) -> None:
    """A requeued job, or the next of a chain, goes on without help, no matter which host was killed."""
    put(tmp_path, holder)
    waited: list[float] = []
    put(tmp_path / "checkpoints", holder)
    with held(tmp_path, tmp_path / "checkpoints", wait=waited.append):
        assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()
    assert sum(waited) == (60 if isinstance(holder, Holder) else 120), "one look at a holder's files"
    assert "checking whether it is still running" in capsys.readouterr().out


@pytest.mark.parametrize("variable", ["SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT"])
def test_a_later_slice_waits_for_a_process_on_a_lost_node(variable: str, tmp_path: Path, monkeypatch, capsys) -> None:
    path, waited = put(tmp_path, ELSEWHERE), []

    def touched_for(seconds: float):
        def wait(each: float) -> None:
            waited.append(each)
            if sum(waited) < seconds:
                os.utime(path, ns=(0, len(waited)))

        return wait

    with pytest.raises(LaunchError, match="in use by another run"), held(tmp_path, wait=touched_for(300)):
        pytest.fail("the first slice of a chain does not wait")
    assert sum(waited) < 60
    monkeypatch.setenv(variable, "2")
    waited.clear()
    with held(tmp_path, wait=touched_for(300)):
        assert 300 < sum(waited) < 420
    assert "checking whether it is still running, for up to 8 minutes" in capsys.readouterr().out
    put(tmp_path, ELSEWHERE)
    waited.clear()
    with pytest.raises(LaunchError, match="in use by another run"), held(tmp_path, wait=touched_for(1e9)):
        pytest.fail("it lives")
    assert 480 < sum(waited) < 600, "less than the other ranks wait for the first"
    waited.clear()
    with pytest.raises(LaunchError), held(tmp_path, wait=touched_for(1e9), collective=1800):
        pytest.fail("it lives")
    assert 1680 < sum(waited) < 1800, "a process of a run that gives collectives half an hour lives as long"


def test_a_run_waits_for_its_earlier_slice_as_long_as_for_a_collective(tmp_path: Path, monkeypatch) -> None:
    """Real sizes give one 30 minutes: a lost node's process outlived a wait for 10, and the chain ended."""
    waits: list[float] = []
    monkeypatch.setattr(lock, "held", lambda *_, collective: waits.append(collective) or nullcontext())
    monkeypatch.setenv("RANK", "0")
    for words in ((), ("--distributed-timeout-minutes", "30")):
        with launcher._alone(planned(tmp_path, *words)):
            pass
    assert waits == [600, 1800]


def test_a_lock_that_is_given_back_meanwhile_is_taken(tmp_path: Path) -> None:
    path = put(tmp_path, ELSEWHERE)
    with held(tmp_path, wait=lambda _: path.unlink(missing_ok=True)):
        assert json.loads(path.read_text())["pid"] == os.getpid()


def test_a_slower_process_does_not_break_the_lock_of_a_faster_one(tmp_path: Path, monkeypatch) -> None:
    """The slower one once moved the living lock away to read it, and back: a third run began in between."""
    faster = put(tmp_path, replace(ELSEWHERE, pid=18))
    read, third = lock._read, replace(ELSEWHERE, pid=19)

    def third_comes(path: Path) -> Holder | None:
        assert not lock._created(faster, third)
        return read(path)

    monkeypatch.setattr(lock, "_read", third_comes)
    lock._remove_alone(faster, ELSEWHERE, never)
    assert read(faster) == replace(ELSEWHERE, pid=18) and [path.name for path in tmp_path.iterdir()] == [NAME]


def test_a_stale_lock_is_removed_by_one_process_at_a_time(tmp_path: Path) -> None:
    path, guard = put(tmp_path, ELSEWHERE), tmp_path / f"{NAME}.removing"
    guard.touch()
    lock._remove_alone(path, ELSEWHERE, lambda _: guard.unlink(missing_ok=True))  # another one's, for a moment
    assert path.is_file()
    guard.touch()  # and that of a process that was killed over it
    waited: list[float] = []
    with held(tmp_path, wait=waited.append):
        assert json.loads(path.read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def planned(folder: Path, *words: str) -> launcher.Plan:
    asked = ["--output", str(folder), "--auto-resume", "--save-interval", "2", *words]
    options, rest = make_parser("llama").parse_known_args(asked)
    return launcher.build_plan("llama", options, rest, launcher.Machine(), environ={})


def test_the_first_rank_alone_holds_output_and_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words, folders in (
        ((), ["out"]),  # saves below
        (("--save", str(tmp_path / "out" / ".." / "out")), ["out"]),  # the same folder by another name
        (("--save", str(tmp_path / "elsewhere")), ["elsewhere", "out"]),
    ):
        monkeypatch.setenv("RANK", "0")
        with launcher._alone(planned(tmp_path / "out", *words)):
            assert sorted(path.parent.name for path in tmp_path.glob(f"*/{NAME}")) == folders
        monkeypatch.setenv("RANK", "1")
        with launcher._alone(planned(tmp_path / "out", *words)):
            assert not list(tmp_path.glob(f"*/{NAME}"))


def test_a_second_demo_deletes_nothing_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "demo" / "simreg" / "log.txt"
    log.parent.mkdir(parents=True)
    log.touch()
    with held(tmp_path / "demo"), pytest.raises(LaunchError, match="in use by another run"):
        run_demo(Settings(2, 1, tmp_path / "demo", ()))
    assert log.is_file()


def test_ctrl_c_says_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("simreg_megatron.__main__.run", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setenv("RANK", "0")
    for newest, last in ((None, "none was saved"), (6, f"{tmp_path}/checkpoints/iter_0000006")):
        monkeypatch.setattr(launcher.checkpoints, "newest_whole", lambda _, newest=newest: newest)
        with pytest.raises(SystemExit) as ended:
            launcher._train(planned(tmp_path))
        said = capsys.readouterr().out
        assert ended.value.code == 130 and said == f"> Trains on cpu in fp32\nStopped. Last checkpoint: {last}\n"


def test_the_faster_process_keeps_a_stale_lock(tmp_path: Path) -> None:
    """Both saw the stale file; the slower one must not take the other's away."""
    path = put(tmp_path, replace(ELSEWHERE, pid=18))
    lock._remove(path, ELSEWHERE)
    assert json.loads(path.read_text())["pid"] == 18 and [one.name for one in tmp_path.iterdir()] == [NAME]
    lock._remove(path, replace(ELSEWHERE, pid=18))
    assert list(tmp_path.iterdir()) == []


def test_the_first_rank_alone_deletes_what_was_never_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one of another machine holds nothing: what it found torn may be on its way."""
    torn = tmp_path / "checkpoints" / "iter_0000004"
    torn.mkdir(parents=True)
    monkeypatch.setenv("LOCAL_RANK", "0")
    for rank, stays in (("8", True), ("0", False)):
        monkeypatch.setenv("RANK", rank)
        launcher._go_on(planned(tmp_path))
        assert torn.is_dir() == stays


def test_two_outputs_with_the_same_checkpoints_are_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    other = planned(tmp_path / "other", "--save", str(tmp_path / "out" / "checkpoints"))
    with launcher._alone(planned(tmp_path / "out")), pytest.raises(LaunchError, match="in use"), launcher._alone(other):
        pytest.fail("both would save there")
