# SPDX-License-Identifier: Apache-2.0
"""The bash form of the launch scripts ends as its processes ended, and adds nothing to their sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launch import agent
from tests.helpers import jobs

ROOT = Path(__file__).resolve().parents[2]


def started(script: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "launch" / "agent.py"), "--standalone", "--nproc-per-node=2", str(script)]
    return jobs.run([*command, *words])


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("end", "status", "last"),
    [
        pytest.param("print('error: no such file', file=sys.stderr); sys.exit(2)", 2, "error: no such file", id="own"),
        pytest.param(
            "os.kill(os.getpid(), 9)", 137,
            "error: rank 1 was ended by SIGKILL, which the system does when memory runs out", marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_it_ends_as_its_processes(end: str, status: int, last: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import os, sys, time\nif os.environ['RANK'] == '1':\n    {end}\ntime.sleep(60)\n")
    done = started(script)
    assert (done.returncode, done.stderr.splitlines()) == (status, [last]), done.stderr


@pytest.mark.parametrize(
    ("rank", "exitcode", "status", "said"),
    [
        (3, 0, 0, ""),
        (0, 130, 130, ""),
        (0, -2, 130, "Stopped: rank 0 was interrupted."),
        (3, 130, 130, "Stopped: rank 3 was interrupted."),
        (3, -15, 143, "error: rank 3 was ended by SIGTERM"),
    ],
)
def test_the_status_of_an_end(
    rank: int, exitcode: int, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert agent.ended(rank, exitcode) == status
    assert capsys.readouterr().err.strip() == said


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (["--nnodes", "2"], True),
        (["--nnodes=2", "--master-addr", "here"], False),
        (["--nnodes=1:4", "--rdzv-endpoint", "h:1"], False),
        ([], False),
    ],
)
def test_several_nodes_need_an_address(words: list[str], refused: bool) -> None:
    """(The functions of start.bash alone: nothing is started.)"""
    asked = 'source "$1"; shift; count_gpus() { echo 1; }; split_words "$@"; complete_torchrun; demand_address'
    done = jobs.run(["bash", "-c", asked, "bash", str(ROOT / "launch" / "start.bash"), *words])
    assert (done.returncode == 2 and "give --master-addr HOST" in done.stderr) == refused, done.stderr
    assert done.returncode == (2 if refused else 0)
