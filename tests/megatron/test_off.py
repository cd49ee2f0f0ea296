# SPDX-License-Identifier: Apache-2.0
"""With lambda 0 a run is plain Megatron, bit for bit; with SimReg on, its evaluation still is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.megatron import runs
from tests.megatron.runs import SIMREG


@pytest.mark.parametrize("processes", [1, 2], ids=["tp1", "tp2"])
def test_lambda_zero_is_plain_megatron(processes: int, data_flags: tuple[str, ...], tmp_path: Path) -> None:
    flags = (*data_flags, "--train-iters", "20", "--tensor-model-parallel-size", str(processes))
    plain = runs.train(tmp_path / "plain", flags, processes=processes, plain=True)
    off = runs.train(tmp_path / "off", (*flags, "--simreg-lambda", "0"), processes=processes)
    assert (plain.losses, plain.norms) == (off.losses, off.norms) and len(plain.losses) == 20
    assert plain.losses[-1] < plain.losses[0], "the runs must train"
    assert runs.same_bits(plain, off)
    assert "simreg loss" not in (tmp_path / "off" / "log").read_text()


def test_evaluation_is_untouched(data_flags: tuple[str, ...], tmp_path: Path) -> None:
    """A learning rate of 0 keeps the weights of both runs equal, while SimReg computes gradients in every step."""
    frozen = ("--lr", "0", "--min-lr", "0", "--train-iters", "4", "--eval-interval", "2", "--eval-iters", "2")
    on = (*SIMREG, "--simreg-chunk-size", "16")
    plain = runs.train(tmp_path / "plain", (*data_flags, *frozen), plain=True, patch="watch:evaluation")
    regularized = runs.train(tmp_path / "on", (*data_flags, *frozen, *on), patch="watch:evaluation")
    assert regularized.norms[0] > 2 * plain.norms[0] and runs.same_bits(plain, regularized)
    wanted, seen = (evaluations(tmp_path / name / "log") for name in ("plain", "on"))
    assert len(wanted) >= 2 and [loss for loss, _ in seen] == [loss for loss, _ in wanted]
    assert all(calls == "0" for _, calls in seen), "SimReg must not be called while evaluating"
    assert "SimReg calls in training: 8" in (tmp_path / "on" / "log").read_text(), "four steps of two micro-batches"


def evaluations(log: Path) -> list[tuple[str, str]]:
    """(every bit of the loss, calls of SimReg) of each evaluation."""
    return re.findall(r"^evaluated: (\S+), SimReg calls: (\d+)", log.read_text(), re.M)
