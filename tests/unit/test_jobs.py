# SPDX-License-Identifier: Apache-2.0
"""What tests start ends with them, and shows where it stood if it hangs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import jobs
from tests.helpers.jobs import HungError

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
