# SPDX-License-Identifier: Apache-2.0
"""Megatron-FSDP with SimReg: the losses and gradient norms of torch's FSDP2, which the parity table holds in full.

Megatron-FSDP loads no other checkpoints than its own, so these runs start from the seed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron import runs

_FSDP2 = ("--use-torch-fsdp2",)
_MEGATRON = (
    *("--use-megatron-fsdp", "--use-distributed-optimizer", "--ckpt-format", "fsdp_dtensor"),
    "--no-gradient-reduce-div-fusion",  # gloo has no such sum
)
_SHARDED = ("--data-parallel-sharding-strategy", "optim_grads_params")
_STEPS = ("--train-iters", "3", "--eval-iters", "0", *runs.SIMREG, "--simreg-chunk-size", "24")


@pytest.fixture(scope="module")
def fsdp2(data_flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> runs.Recorded:
    return runs.train(tmp_path_factory.mktemp("fsdp2"), (*data_flags, *_STEPS, *_FSDP2))


def is_close(one: runs.Recorded, other: runs.Recorded) -> bool:
    losses, norms = (
        max(abs(a - b) / abs(a) for a, b in zip(*pair, strict=True))
        for pair in ((one.losses, other.losses), (one.norms, other.norms))
    )
    return losses < 1e-6 and norms < 1e-5


@pytest.mark.parametrize(
    ("flags", "processes"),
    [
        (_SHARDED, 1),
        (_SHARDED, 2),
        (("--data-parallel-sharding-strategy", "optim"), 2),
        ((*_SHARDED, "--context-parallel-size", "2"), 2),
    ],
    ids=["1 process", "2 processes", "2 processes, optimizer only", "context parallel"],
)
def test_megatron_fsdp(
    flags: tuple[str, ...], processes: int, fsdp2: runs.Recorded, data_flags: tuple[str, ...], tmp_path: Path
) -> None:
    sharded = runs.train(tmp_path, (*data_flags, *_STEPS, *_MEGATRON, *flags), processes=processes)
    assert is_close(fsdp2, sharded)


def test_a_doubled_lambda_is_told(fsdp2: runs.Recorded, data_flags: tuple[str, ...], tmp_path: Path) -> None:
    flags = (*data_flags, *_STEPS, *_MEGATRON, *_SHARDED, "--simreg-lambda", "20")
    assert not is_close(fsdp2, runs.train(tmp_path, flags))
