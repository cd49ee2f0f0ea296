# SPDX-License-Identifier: Apache-2.0
"""Layers on pipeline stages before the last are refused before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron import runs
from tests.megatron.parity.run import Bench
from tests.megatron.runs import SIMREG

STEPS = ("--train-iters", "2", "--eval-iters", "0")


@pytest.mark.parametrize("stages", ["2", pytest.param("4", marks=pytest.mark.slow)])
def test_a_layer_before_the_last_stage_is_refused(stages: str, bench: Bench, tmp_path: Path) -> None:
    flags = (*bench.data_flags, *STEPS, *SIMREG, "--simreg-layers", "2,final", "--pipeline-model-parallel-size", stages)
    done = runs.attempt(tmp_path, flags, model="deep", processes=int(stages))
    assert done.status != 0 and "iteration        1/" not in done.output
    assert "--simreg-layers 2 lies on an earlier pipeline stage than the loss, which has layers" in done.output
