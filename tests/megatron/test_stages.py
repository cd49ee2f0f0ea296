# SPDX-License-Identifier: Apache-2.0
"""Layers on pipeline stages before the last, in whole runs: the log, and a script that weighs tokens otherwise."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.megatron import runs
from tests.megatron.parity.run import Bench
from tests.megatron.runs import SIMREG

STEPS = ("--finetune", "--no-load-optim", "--no-load-rng", "--eval-iters", "0", "--train-iters", "2", "--eod-mask-loss")


def started(bench: Bench, layers: str) -> tuple[str, ...]:
    """From the trained model of four layers: one split into stages draws other weights from its seed."""
    load = ("--load", str(bench.checkpoint("deep")))
    return (*bench.data_flags, *STEPS, *load, *SIMREG, "--simreg-chunk-size", "24", "--simreg-layers", layers)


def logged(output: str) -> list[tuple[str, float]]:
    return [(name, float(value)) for name, value in re.findall(r"(simreg [a-z ]+): (\S+) \|", output)]


@pytest.mark.parametrize(
    ("layers", "stages"),
    [("1,2", 2), pytest.param("2,3", 4, marks=pytest.mark.slow), pytest.param("2,final", 4, marks=pytest.mark.slow)],
)
def test_the_log_is_that_of_one_process(layers: str, stages: int, bench: Bench, tmp_path: Path) -> None:
    """The last stage tells of states that it never saw; stages without any take part."""
    flags = started(bench, layers)
    alone = runs.attempt(tmp_path / "alone", flags, model="deep")
    split = ("--pipeline-model-parallel-size", str(stages))
    got = runs.attempt(tmp_path / "split", (*flags, *split), model="deep", processes=stages)
    assert (alone.status, got.status) == (0, 0), got.output[-3000:]
    expected, found = logged(alone.output), logged(got.output)
    assert {"simreg loss", "simreg norm", "simreg isotropy", "simreg positive cosine"} <= {name for name, _ in expected}
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert [value for _, value in found] == pytest.approx([value for _, value in expected], rel=1e-5)
    assert f"> SimReg: layers {layers.removesuffix(',final')} lie on earlier pipeline stages" in got.output
    assert "earlier pipeline stages" not in alone.output


def test_a_loss_function_of_another_kind_is_found_out(bench: Bench, tmp_path: Path) -> None:
    split, patch = ("--pipeline-model-parallel-size", "2"), "breakage:stage_doubled_scale_and_checked"
    done = runs.attempt(tmp_path, (*started(bench, "1"), *split), model="deep", processes=2, patch=patch)
    assert done.status != 0 and "iteration        2/" not in done.output
    assert "pipeline stage 0 computed its --simreg-layers with other labels, masks or weights" in done.output


def test_what_the_last_stage_alone_has_is_refused_elsewhere(bench: Bench, tmp_path: Path) -> None:
    objective = ("--simreg-objective", "sigmoid", "--simreg-objective-options", "pairs=hidden-head,trains=none")
    flags = ("--pipeline-model-parallel-size", "2", *objective)
    done = runs.attempt(tmp_path, (*started(bench, "1"), *flags), model="deep", processes=2)
    assert done.status != 0 and "iteration        1/" not in done.output
    assert "--simreg-layers 1 lies on an earlier pipeline stage, and SimReg objective sigmoid needs" in done.output
