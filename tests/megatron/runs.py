# SPDX-License-Identifier: Apache-2.0
"""Start tiny Megatron runs as a user would, and compare what they computed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from simreg_megatron.plugin.cpu_backend import MEGATRON_FLAGS

ROOT = Path(__file__).resolve().parents[2]
PRETRAIN = ROOT / "simreg_megatron" / "pretrain.py"
TIMEOUT = 300  # seconds; a run takes about 20

MODEL = (
    "--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--ffn-hidden-size", "128",
    "--seq-length", "64", "--max-position-embeddings", "64", "--micro-batch-size", "2", "--global-batch-size", "4",
    "--normalization", "RMSNorm", "--swiglu", "--position-embedding-type", "rope", "--disable-bias-linear",
    "--untie-embeddings-and-output-weights", "--hidden-dropout", "0", "--attention-dropout", "0",
    "--lr", "1e-3", "--eval-iters", "1", "--eval-interval", "1000", "--log-interval", "1", "--seed", "7",
)  # fmt: skip
SIMREG = ("--simreg-lambda", "10", "--simreg-temperature", "0.5")


@dataclass(frozen=True)
class Finished:
    """A process that ended: its status and everything it printed."""

    status: int
    output: str


def torchrun(
    command: Sequence[str],
    *,
    processes: int = 1,
    rendezvous: Sequence[str] = ("--standalone",),
    env: Mapping[str, str] | None = None,
) -> Finished:
    """`torchrun RENDEZVOUS --nproc-per-node N COMMAND`, one thread each."""
    launcher = [sys.executable, "-m", "torch.distributed.run", *rendezvous, "--nproc-per-node", str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(env or {})}
    done = subprocess.run(
        [*launcher, *command],
        cwd=ROOT,
        env=environment,
        text=True,
        timeout=TIMEOUT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return Finished(done.returncode, done.stdout)


def train(out: Path, flags: Sequence[str], *, processes: int = 1, env: Mapping[str, str] | None = None) -> Finished:
    """Train the tiny model with `flags` and record it in `out`."""
    command = ["-m", "tests.megatron.record", str(out), str(PRETRAIN), *MODEL, *MEGATRON_FLAGS, *flags]
    return torchrun(command, processes=processes, env=env)


@dataclass(frozen=True)
class Recorded:
    """What one run computed, put together from its ranks."""

    losses: list[float]
    grads: dict[str, Tensor]
    params: dict[str, Tensor]


def read(out: Path) -> Recorded:
    """Put the ranks of a run together: tensor-parallel shards are joined, pipeline stages are added up."""
    ranks = [torch.load(path, weights_only=True) for path in sorted(out.glob("rank*.pt"))]
    losses = next(rank["losses"] for rank in reversed(ranks) if rank["losses"])
    return Recorded(losses, _join(ranks, "grads"), _join(ranks, "params"))


def _join(ranks: list[dict], kind: str) -> dict[str, Tensor]:
    joined = {}
    for name in sorted({name for rank in ranks for name in rank[kind]}):
        shards = [rank[kind][name] for rank in ranks if name in rank[kind]]
        dimension = next((rank["partition"][name] for rank in ranks if name in rank["partition"]), -1)
        joined[name] = _join_shards(name, shards, dimension)
    return joined


def _join_shards(name: str, shards: list[Tensor], dimension: int) -> Tensor:
    """Replicas must be equal; shards are concatenated, the two halves of a gated layer each by itself."""
    if dimension < 0 or all(torch.equal(shard, shards[0]) for shard in shards[1:]):
        for replica in shards[1:]:
            torch.testing.assert_close(replica, shards[0], rtol=0, atol=0, msg=f"replicas of {name} differ")
        return shards[0]
    if "linear_fc1" in name:
        gates, values = zip(*(shard.chunk(2, dim=dimension) for shard in shards), strict=True)
        return torch.cat([*gates, *values], dim=dimension)
    return torch.cat(shards, dim=dimension)


def grad_difference(left: Recorded, right: Recorded) -> tuple[float, str]:
    """Largest relative difference of any parameter's first-step gradient, in norm, and that parameter's name."""
    assert left.grads.keys() == right.grads.keys()
    return max((_relative(left.grads[name], right.grads[name]), name) for name in left.grads)


def _relative(left: Tensor, right: Tensor) -> float:
    scale = max(left.double().norm().item(), 1e-12)
    return (left.double() - right.double()).norm().item() / scale


def total_norm(tensors: Mapping[str, Tensor]) -> float:
    return sum(tensor.double().pow(2).sum().item() for tensor in tensors.values()) ** 0.5


def loss_difference(left: Recorded, right: Recorded) -> float:
    """Largest relative difference of the loss over the steps."""
    assert len(left.losses) == len(right.losses) > 0
    return max(abs(a - b) / abs(a) for a, b in zip(left.losses, right.losses, strict=True))
