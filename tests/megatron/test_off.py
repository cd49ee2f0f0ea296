# SPDX-License-Identifier: Apache-2.0
"""With lambda 0 a run is plain Megatron, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.megatron import runs


@pytest.mark.parametrize("processes", [1, 2], ids=["tp1", "tp2"])
def test_lambda_zero_is_plain_megatron(processes: int, data_flags: list[str], tmp_path: Path) -> None:
    flags = [*data_flags, "--train-iters", "20", "--tensor-model-parallel-size", str(processes)]
    zero = ["--simreg-lambda", "0"]
    plain = runs.train(tmp_path / "plain", flags, processes=processes, env={"SIMREG_RECORD_PLAIN": "1"})
    off = runs.train(tmp_path / "off", [*flags, *zero], processes=processes)
    assert plain.status == 0 == off.status, plain.output[-3000:] + off.output[-3000:]
    without, with_plugin = runs.read(tmp_path / "plain"), runs.read(tmp_path / "off")
    assert without.losses == with_plugin.losses and len(without.losses) == 20
    assert without.losses[-1] < without.losses[0], "the runs must train"
    for name, parameter in without.params.items():
        assert torch.equal(parameter, with_plugin.params[name]), name
    assert "simreg loss" not in off.output
