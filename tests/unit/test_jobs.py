# SPDX-License-Identifier: Apache-2.0
"""What tests start ends with them, and shows where it stood if it hangs."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.helpers import jobs
from tests.helpers.jobs import ROOT, HungError
from tests.helpers.processes import run_processes
from tests.megatron import forks

_LAUNCHER = """
import os, subprocess, sys, time

def the_launcher_waits(command):
    for rank in [subprocess.Popen(command, start_new_session=True) for _ in range(2)]:
        rank.wait()

def the_rank_hangs():
    with open("hanging", "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(600)

if sys.argv[1:] == ["rank"]:
    the_rank_hangs()
print("begun", flush=True)
the_launcher_waits([sys.executable, __file__, "rank"])
"""


@pytest.fixture
def lasts_until(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], bool]], None]:
    """Let the time limit of a command be when something has happened, however long that takes here."""

    def lasting(happened: Callable[[], bool]) -> None:
        def wait(process: subprocess.Popen, timeout: float | None = None) -> int:
            if timeout is None:
                return subprocess.Popen.wait(process)
            while not happened():
                assert process.poll() is None
                time.sleep(0.01)
            raise subprocess.TimeoutExpired(process.args, timeout)

        monkeypatch.setattr(jobs.Job, "wait", wait)

    return lasting


def is_there(pid: int) -> bool:
    return jobs._state(pid) not in ("Z", "")


def test_a_job_that_hangs_is_ended_and_shows_its_stacks(lasts_until, tmp_path: Path) -> None:
    """Its ranks have sessions of their own, as those of torchrun: no signal to the launcher or its group ends them."""
    script, hanging = tmp_path / "launcher.py", tmp_path / "hanging"
    script.write_text(_LAUNCHER)
    lasts_until(lambda: hanging.exists() and hanging.read_text().count("\n") == 2)
    with pytest.raises(HungError, match="no end after 7 s") as error:
        jobs.run([sys.executable, script], cwd=tmp_path, timeout=7)
    said = str(error.value)
    assert "begun" in said and said.count("in the_rank_hangs") == 2 and said.count("in the_launcher_waits") == 1
    assert not any(is_there(int(pid)) for pid in hanging.read_text().split())


def test_what_a_job_leaves_is_ended_with_it(tmp_path: Path) -> None:
    start = "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid)"
    done = jobs.run([sys.executable, "-c", start], check=True)
    assert not is_there(int(done.stdout))


def test_what_a_job_says() -> None:
    say = "import sys; print(input(), flush=True); print('error', file=sys.stderr); sys.exit(3)"
    done = jobs.run([sys.executable, "-c", say], input="given\n")
    assert (done.returncode, done.stdout, done.stderr) == (3, "given\n", "error\n")
    merged = jobs.run([sys.executable, "-c", say], input="given\n", merged=True)
    assert (merged.returncode, merged.stdout, merged.stderr) == (3, "given\nerror\n", "")
    with pytest.raises(AssertionError, match=r"(?s)status 3.*given\nerror"):
        jobs.run([sys.executable, "-c", say], input="given\n", check=True)


def never_joins(rank: int, folder: Path) -> None:
    (folder / f"rank{rank}").touch()
    if rank == 0:
        dist.all_reduce(torch.ones(1))
    else:
        time.sleep(600)


@pytest.mark.distributed
@pytest.mark.megatron  # forks have it in memory
def test_forked_ranks_that_hang_are_ended_and_show_their_stacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def none_ends(ranks: list, timeout: float) -> list:
        while len(list(tmp_path.glob("rank*"))) < 2:
            assert all(wait([rank], timeout=0.01) == [] for rank in ranks)
        return []

    wait = forks.wait
    monkeypatch.setattr(forks, "wait", none_ends)
    with pytest.raises(HungError) as error:
        run_processes(never_joins, 2, tmp_path, tmp_path)
    assert str(error.value).count("in never_joins") == 2


def test_tests_start_processes_in_this_way_alone() -> None:
    calls = ("subprocess.run", "subprocess.Popen", "subprocess.call", "subprocess.check_output", "os.system")
    found = [
        f"{path.name}:{node.lineno}"
        for path in (ROOT / "tests").rglob("*.py")
        if path.name.startswith(("test_", "conftest")) and path.parent.name != "faults"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in calls
    ]
    assert [place for place in found if not place.startswith("test_jobs")] == []
