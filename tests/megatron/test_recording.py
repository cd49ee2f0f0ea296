# SPDX-License-Identifier: Apache-2.0
"""The ground the parity table stands on: forked ranks, and ranks put together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.megatron import runs
from tests.megatron.runs import PRETRAIN, SIMREG

CHUNK = ("--simreg-chunk-size", "24")


@pytest.mark.slow  # quick: a start by torchrun, test_launch.py
def test_forked_ranks_compute_what_torchrun_does(data_flags: tuple[str, ...], tmp_path: Path) -> None:
    flags = (*data_flags, *SIMREG, *CHUNK, "--tensor-model-parallel-size", "2", "--train-iters", "2")
    command = ["-m", "tests.megatron.record", str(tmp_path / "torchrun"), str(PRETRAIN), *runs.all_flags(flags)]
    first, second = runs.two_nodes(command)
    assert first.status == 0 == second.status, first.output[-2000:] + second.output[-2000:]
    forked, started = runs.train(tmp_path / "forked", flags, processes=2), runs.read(tmp_path / "torchrun")
    assert forked.losses == started.losses and forked.norms == started.norms and len(forked.norms) == 2
    assert runs.same_bits(forked, started)
    assert all(torch.equal(grad, started.grads[name]) for name, grad in forked.grads.items())
