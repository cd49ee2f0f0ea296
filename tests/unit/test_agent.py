# SPDX-License-Identifier: Apache-2.0
"""The bash form of the launch scripts ends as its processes ended; other shells and Python meet a sentence."""

import os
import shutil
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


OWN_END = ("print('error: no such file', file=sys.stderr); sys.exit(2)", 2, "error: no such file")
OUT_OF_MEMORY = "error: rank 1 was ended by SIGKILL, which the system does when memory runs out"
KILLED = ("os.kill(os.getpid(), 9)", 137, OUT_OF_MEMORY)


@pytest.mark.distributed
@pytest.mark.parametrize(("end", "status", "last"), [OWN_END, pytest.param(*KILLED, marks=pytest.mark.slow)])
def test_it_ends_as_its_processes(end: str, status: int, last: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import os, sys, time\nif os.environ['RANK'] == '1':\n    {end}\ntime.sleep(60)\n")
    done = started(script)
    assert (done.returncode, done.stderr.splitlines()) == (status, [last]), done.stderr


ENDS = [
    (3, 0, 0, ""),
    (0, 130, 130, ""),
    (0, -2, 130, "Stopped: rank 0 was interrupted."),
    (3, 130, 130, "Stopped: rank 3 was interrupted."),
    (3, -15, 143, "error: rank 3 was ended by SIGTERM"),
]


@pytest.mark.parametrize(("rank", "exitcode", "status", "said"), ENDS)
def test_the_status_of_an_end(rank: int, exitcode: int, status: int, said: str, capsys) -> None:
    assert agent.ended(rank, exitcode) == status
    assert capsys.readouterr().err.strip() == said


WITH_ADDRESS = ["--nnodes=2 --master-addr here", "--nnodes=1:4 --rdzv-endpoint h:1", ""]


@pytest.mark.parametrize(("words", "refused"), [("--nnodes 2", True), *((words, False) for words in WITH_ADDRESS)])
def test_several_nodes_need_an_address(words: str, refused: bool) -> None:
    """(The functions of start.bash alone: nothing is started.)"""
    asked = 'source "$1"; shift; count_gpus() { echo 1; }; split_words "$@"; complete_torchrun; demand_address'
    done = jobs.run(["bash", "-c", asked, "bash", str(ROOT / "launch" / "start.bash"), *words.split()])
    assert (done.returncode == 2 and "give --master-addr HOST" in done.stderr) == refused, done.stderr
    assert done.returncode == (2 if refused else 0)


def test_a_variable_of_the_environment_is_no_check_of_flags() -> None:
    asked = f"source {ROOT}/launch/start.bash; find_python /none os"
    assert jobs.run(["bash", "-c", asked], env={**os.environ, "CHECK": "x"}).returncode == 0


@pytest.mark.skipif(shutil.which("dash") is None, reason="no other shell here")
@pytest.mark.parametrize("script", ["pretrain_llama.sh", "pretrain_mixtral.sh"])
def test_another_shell_hands_over_to_bash(script: str, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to("/bin/true")  # one that can import everything
    path, environment = ROOT / "launch" / script, {**os.environ, "VIRTUAL_ENV": str(tmp_path)}
    done = jobs.run(["dash", str(path), "--nnodes"], env=environment)
    assert (done.returncode, done.stderr) == (2, "error: --nnodes needs a value\n")


BASH = {"evaluate.sh": "simreg-megatron evaluate ", "prepare_data.sh": "simreg-megatron data prepare "}


@pytest.mark.parametrize("script", [*BASH, "slurm/submit.sh"])
def test_a_script_of_bash_starts_its_program_and_is_not_for_python(script: str) -> None:
    environment = {**os.environ, "VIRTUAL_ENV": "", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    helped = jobs.run(["bash", str(ROOT / "launch" / script), "--help"], env=environment)
    assert helped.stdout.startswith(f"usage: {BASH.get(script, 'bash launch/slurm/submit.sh ')}"), helped.stderr
    done = jobs.run([sys.executable, str(ROOT / "launch" / script), "--help"])
    sentence = f"error: this is a bash script, not Python: run bash launch/{script} ...\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", sentence)
