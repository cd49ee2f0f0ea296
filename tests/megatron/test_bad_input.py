# SPDX-License-Identifier: Apache-2.0
"""Whole runs with models that SimReg cannot reach."""

from pathlib import Path

import pytest

from tests.megatron import runs
from tests.megatron.runs import SIMREG


@pytest.mark.parametrize(
    ("breakage", "sentence"),
    [
        ("other_model_class", "SimReg supports only GPTModel and HybridModel, and this run builds Other"),
        ("overwritten_wrapper", "GPTModel ended a training forward pass without calling the function"),
    ],
)
def test_a_model_out_of_reach_is_refused_at_once(breakage: str, sentence: str, data_flags, tmp_path: Path) -> None:
    done = runs.attempt(tmp_path, [*data_flags, *SIMREG, "--train-iters", "1"], patch=f"breakage:{breakage}")
    assert done.status != 0 and "iteration        1/" not in done.output
    assert sentence in done.output, done.output[-3000:]
