# SPDX-License-Identifier: Apache-2.0
"""Trained scalars in Megatron's own loop; those of `--simreg-similarity learnable` in all layouts: the parity table."""

import math
from pathlib import Path

import pytest
import torch

from tests.megatron import runs
from tests.megatron.parity.cells import Cell
from tests.megatron.parity.run import fits

QUERY = "simreg_similarity.query"
ON = (*runs.SIMREG, "--simreg-chunk-size", "24", "--simreg-similarity", "learnable", "--lr-decay-style", "constant")
STEPS = ("--train-iters", "4", "--eval-iters", "0")


def test_weights_do_not_decay_towards_them(data_flags: tuple[str, ...], tmp_path: Path) -> None:
    """Weight decay so strong that a step of it would be seen."""
    flags = (*data_flags, *ON, *STEPS)
    flags += ("--train-iters", "1", "--weight-decay")
    plain, decayed = (runs.train(tmp_path / decay, (*flags, decay)) for decay in ("0", "100"))
    assert torch.equal(plain.params[QUERY], decayed.params[QUERY])
    weight = "decoder.layers.0.mlp.linear_fc1.weight"
    assert not torch.equal(plain.params[weight], decayed.params[weight])


@pytest.mark.slow
def test_a_learned_scale_of_cpretrain(data_flags: tuple[str, ...], tmp_path: Path) -> None:
    learned = "--simreg-objective cpretrain --simreg-objective-options scale=learned --lr-decay-style constant"
    flags = (*data_flags, "--simreg-lambda", "10", "--simreg-chunk-size", "24", *learned.split())
    alone = runs.train(tmp_path / "one", (*flags, *STEPS))
    scale = alone.params["simreg_cpretrain.log_scale"].item()
    assert alone.grads["simreg_cpretrain.log_scale"].item() != 0 and scale != math.log(10.0)
    for name, layout in (("cp2", "--context-parallel-size 2"), ("dp2", "--micro-batch-size 1")):
        got = runs.train(tmp_path / name, (*flags, *STEPS, *layout.split()), processes=2)
        gap = runs.difference(alone, got)
        assert fits(gap, Cell.bound), gap
