# SPDX-License-Identifier: Apache-2.0
"""`make` with options and wrong words, and the launch scripts under another shell than bash. Nothing is run."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.helpers import jobs

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(shutil.which("dash") is None, reason="no other shell here")
@pytest.mark.parametrize("script", ["pretrain_llama.sh", "pretrain_mixtral.sh"])
def test_another_shell_hands_over_to_bash(script: str, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to("/bin/true")  # one that can import everything
    path, environment = ROOT / "launch" / script, {**os.environ, "VIRTUAL_ENV": str(tmp_path)}
    done = jobs.run(["dash", str(path), "--nnodes"], env=environment)
    assert (done.returncode, done.stderr) == (2, "error: --nnodes needs a value\n")


@pytest.mark.parametrize("script", ["evaluate.sh", "prepare_data.sh", "slurm/submit.sh"])
def test_a_script_of_bash_that_python_is_given_is_one_sentence(script: str) -> None:
    done = jobs.run([sys.executable, str(ROOT / "launch" / script), "--help"])
    sentence = f"error: this is a bash script, not Python: run bash launch/{script} ...\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", sentence)
