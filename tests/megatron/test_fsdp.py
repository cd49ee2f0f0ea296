# SPDX-License-Identifier: Apache-2.0
"""Megatron-FSDP with SimReg: losses, gradient norms, every parameter's gradient and the log of a single process.

It loads no other checkpoints than its own, so these runs start from the seed; torch's FSDP2 is in the parity table.
"""

from pathlib import Path

import pytest

from tests.megatron import runs
from tests.megatron.parity.cells import Cell
from tests.megatron.parity.run import fits

_MEGATRON = (
    *("--use-megatron-fsdp", "--use-distributed-optimizer", "--ckpt-format", "fsdp_dtensor"),
    "--no-gradient-reduce-div-fusion",  # gloo has no such sum
)
_SHARDED = ("--data-parallel-sharding-strategy", "optim_grads_params")
_STEPS = ("--train-iters", "3", "--eval-iters", "0", *runs.SIMREG, "--simreg-chunk-size", "24")


@pytest.fixture(scope="module")
def one_process(data_flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> runs.Recorded:
    return runs.train(tmp_path_factory.mktemp("one"), (*data_flags, *_STEPS))


@pytest.mark.parametrize(
    ("flags", "processes"),
    [
        pytest.param(_SHARDED, 1, marks=pytest.mark.slow),
        (_SHARDED, 2),
        pytest.param(("--data-parallel-sharding-strategy", "optim"), 2, marks=pytest.mark.slow),
        pytest.param((*_SHARDED, "--context-parallel-size", "2"), 2, marks=pytest.mark.slow),
    ],
    ids=["1 process", "2 processes", "2 processes, optimizer only", "context parallel"],
)
def test_megatron_fsdp(flags, processes: int, one_process: runs.Recorded, data_flags, tmp_path: Path) -> None:
    sharded = runs.train(tmp_path, (*data_flags, *_STEPS, *_MEGATRON, *flags), processes=processes)
    gap = runs.difference(one_process, sharded)
    print(gap)
    assert fits(gap, Cell.bound), gap
    assert len(sharded.logged) == 3


def test_a_doubled_lambda_is_seen(one_process: runs.Recorded, data_flags: tuple[str, ...], tmp_path: Path) -> None:
    """In the gradients, too: the norm alone would do."""
    flags = (*data_flags, *_STEPS, *_MEGATRON, *_SHARDED, "--simreg-lambda", "20")
    gap = runs.difference(one_process, runs.train(tmp_path, flags, processes=2))
    assert gap.norm > 0.5 and gap.grad > 0.5, gap
