# SPDX-License-Identifier: Apache-2.0
"""`make` with options and wrong words, and the launch scripts under another shell than bash. Nothing is run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import jobs

ROOT = Path(__file__).resolve().parents[2]


def made(*words: str) -> subprocess.CompletedProcess[str]:
    """`make -n`, as from a shell: `make test` hands its own level and flags to every make below it."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKELEVEL", "MAKEFLAGS", "MFLAGS")
    }
    return jobs.run(["make", "-n", *words], cwd=ROOT, env=environment)


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
class TestMake:
    @pytest.mark.parametrize("word", ["foo", "launch", "tests", "demos"])
    def test_a_target_that_is_none(self, word: str) -> None:
        """Without the rule, a folder's name is a target that is up to date, and nothing happens."""
        done = made(word)
        assert done.returncode == 2 and f"there is no target {word}: `make` alone lists them" in done.stderr

    @pytest.mark.parametrize(
        ("words", "command"),
        [
            ((), "launch/demo.py"),
            (("STEPS=5",), "launch/demo.py --steps 5"),
            (("STEPS=5", "DEMO_ARGS=--seed 3"), "launch/demo.py --steps 5 --seed 3"),
        ],
    )
    def test_the_demo_takes_its_options(self, words: tuple[str, ...], command: str) -> None:
        assert made("demo", *words).stdout.split("\n")[-2].strip().endswith(command)

    def test_a_python_that_is_given_is_taken_as_it_is(self) -> None:
        assert made("gpu", "PY=python3").stdout.split("\n") == ["python3 -m benchmarks.gpu ", ""]
        assert made("gpu").stdout.startswith("bash tools/setup.sh\n")


@pytest.mark.skipif(shutil.which("dash") is None, reason="no other shell here")
@pytest.mark.parametrize("script", ["pretrain_llama.sh", "pretrain_mixtral.sh"])
def test_another_shell_hands_over_to_bash(script: str, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to("/bin/true")  # one that can import everything
    path, environment = ROOT / "launch" / script, {**os.environ, "VIRTUAL_ENV": str(tmp_path)}
    done = jobs.run(["dash", str(path), "--nnodes"], env=environment)
    assert (done.returncode, done.stderr) == (2, "error: --nnodes needs a value\n")


@pytest.mark.parametrize("script", ["evaluate.sh", "prepare_data.sh", "slurm/submit.sh"])
def test_scripts_of_bash_alone_hand_over_before_they_say_anything_else(script: str) -> None:
    text = (ROOT / "launch" / script).read_text()
    assert text.partition("\nbash\n")[2].startswith('[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"')


@pytest.mark.parametrize("script", ["evaluate.sh", "prepare_data.sh", "slurm/submit.sh"])
def test_a_script_of_bash_that_python_is_given_is_one_sentence(script: str) -> None:
    done = jobs.run([sys.executable, str(ROOT / "launch" / script), "--help"])
    sentence = f"error: this is a bash script, not Python: run bash launch/{script} ...\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", sentence)
