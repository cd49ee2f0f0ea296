# SPDX-License-Identifier: Apache-2.0
"""Whole runs with models that SimReg cannot reach."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron import runs
from tests.megatron.runs import SIMREG

CONSTANT = ("--lr-decay-style", "constant")

CHUNK = ("--simreg-chunk-size", "16")


@pytest.mark.parametrize(
    ("breakage", "sentence"),
    [
        ("other_model_class", "SimReg supports only GPTModel and HybridModel, and this run builds Other"),
        ("overwritten_wrapper", "GPTModel ended a training forward pass without calling the function"),
    ],
)
def test_a_model_out_of_reach_is_refused_before_the_first_step(
    breakage: str, sentence: str, data_flags: tuple[str, ...], tmp_path: Path
) -> None:
    done = runs.attempt(tmp_path, [*data_flags, *SIMREG, "--train-iters", "1"], patch=f"breakage:{breakage}")
    assert done.status != 0 and "iteration        1/" not in done.output
    assert sentence in done.output, done.output[-3000:]


@pytest.mark.parametrize("guard", [(), ("--no-check-for-nan-in-loss-and-grad",)], ids=["megatrons-check", "ours-alone"])
def test_a_term_that_is_not_finite_never_reaches_the_optimizer(
    guard, data_flags: tuple[str, ...], tmp_path: Path
) -> None:
    flags = [*data_flags, *SIMREG, *CHUNK, *CONSTANT, *guard]
    patch = "breakage:not_finite_from_second_step"
    stopped = runs.attempt(tmp_path / "stopped", [*flags, "--train-iters", "3"], patch=patch)
    assert stopped.status != 0
    assert "the SimReg term is not finite while the language-model loss is" in stopped.output
    one_step = runs.train(tmp_path / "one", [*flags, "--train-iters", "1"])
    assert runs.same_bits(runs.read(tmp_path / "stopped"), one_step), "the second step must not be taken"


def test_a_resume_without_its_flags_says_so(data_flags: tuple[str, ...], tmp_path: Path) -> None:
    place = ["--save", str(tmp_path / "saved"), "--save-interval", "2"]
    first = runs.attempt(tmp_path / "first", [*data_flags, *place, *SIMREG, *CHUNK, "--train-iters", "2"])
    assert first.status == 0, first.output[-3000:]
    more = [*data_flags, "--load", str(tmp_path / "saved"), "--train-iters", "3", "--override-opt_param-scheduler"]
    again = runs.attempt(tmp_path / "again", more)
    assert again.status == 0, again.output[-3000:]
    assert "SimReg: --simreg-lambda was 10.0 when the checkpoint was written and is 0.0 now" in again.output
    assert "SimReg: --simreg-chunk-size was 16 when the checkpoint was written" in again.output
    same = runs.attempt(tmp_path / "same", [*more, *SIMREG, *CHUNK])
    assert same.status == 0 and "when the checkpoint was written" not in same.output
