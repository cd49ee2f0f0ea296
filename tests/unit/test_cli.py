# SPDX-License-Identifier: Apache-2.0
"""`simreg-megatron doctor` tells the truth about this machine, and about a Megatron without a seam."""

from __future__ import annotations

import subprocess
import sys

import pytest

from simreg_megatron import cli


@pytest.mark.megatron
def test_doctor_finds_the_seams() -> None:
    done = subprocess.run([sys.executable, "-m", "simreg_megatron.cli", "doctor"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "GPTModel._postprocess" in done.stdout.replace("\n", "") and "missing" not in done.stdout
    assert "SimReg can be installed" in done.stdout


@pytest.mark.megatron
def test_doctor_fails_where_a_seam_is_missing() -> None:
    code = (
        "from simreg_megatron import cli; cli._use_cpu_if_alone(); "
        "import megatron.training.training as t; del t.training_log; cli.app(['doctor'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "missing" in done.stdout and "SimReg cannot be installed" in done.stdout


@pytest.mark.parametrize(
    ("present", "sentence"),
    [
        (set(), "apex: not installed"),
        ({"apex"}, "apex: NOT NVIDIA's"),
        ({"apex", "apex.optimizers", "apex.normalization"}, "apex: NVIDIA's."),
    ],
)
def test_which_apex(present: set[str], sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: object() if name in present else None)
    assert cli._apex_sentence().startswith(sentence)
