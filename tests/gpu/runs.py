# SPDX-License-Identifier: Apache-2.0
"""Tiny Megatron runs on GPUs under torchrun, and what their ranks observed."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import util
from pathlib import Path

import torch

from simreg_megatron.cpu.backend import MEGATRON_FLAGS
from simreg_megatron.cpu.installed import broken_transformer_engine
from simreg_megatron.losses.simreg import FAST_IMPLS
from tests.megatron.runs import PRETRAIN, torchrun

IMPLS = FAST_IMPLS  # every fast implementation of the loss
STEPS = 6  # layers are captured as CUDA graphs after the third
MODEL = (
    "--num-layers", "2", "--hidden-size", "128", "--num-attention-heads", "4", "--ffn-hidden-size", "256",
    "--seq-length", "128", "--max-position-embeddings", "128", "--micro-batch-size", "2", "--global-batch-size", "4",
    "--normalization", "RMSNorm", "--swiglu", "--position-embedding-type", "rope", "--disable-bias-linear",
    "--untie-embeddings-and-output-weights", "--hidden-dropout", "0", "--attention-dropout", "0",
    "--lr", "1e-3", "--eval-iters", "1", "--eval-interval", "1000", "--log-interval", "1", "--seed", "7",
    "--no-gradient-accumulation-fusion", "--num-workers", "0", "--train-iters", str(STEPS),
)  # fmt: skip
SIMREG = ("--simreg-lambda", "10", "--simreg-temperature", "0.5", "--simreg-chunk-size", "48")
# Plain torch in bf16: no kernel of Transformer Engine or Apex, which need not be installed.
LOCAL = (
    "--transformer-impl", "local", "--attention-backend", "unfused", "--no-persist-layer-norm",
    "--no-masked-softmax-fusion", "--no-rope-fusion",
)  # fmt: skip
ENGINE = ("--transformer-impl", "transformer_engine")
EXPERTS = (
    "--num-experts", "4", "--moe-router-topk", "2", "--moe-router-load-balancing-type", "none",
    "--moe-token-dispatcher-type", "alltoall",
)  # fmt: skip
# Its scalars are trained from where they begin: the checkpoints are without them.
LEARNABLE = ("--simreg-similarity", "learnable", "--simreg-temperature", "4", "--dist-ckpt-strictness", "log_all")
# With Transformer Engine importable, the last norm is its own and has an `_extra_state`, which no run on a CPU saves.
ANOTHER_NORM = ("--dist-ckpt-strictness", "log_all")
# A limit below the average, so that steps after the warm-up clip many parameters.
ADAGC = ("--adagc", "--adagc-lambda-rel", "0.9", "--adagc-beta", "0.8", "--adagc-warmup-iters", "2")
# As reproducible as the kernels allow. FSDP refuses the single connection that tensor parallelism demands.
_ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
_REPEATABLE = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}  # below sm_90 attention over context ranks has no such kernel


@dataclass(frozen=True)
class Run:
    flags: tuple[str, ...]  # added to the tiny model's; the last one wins
    processes: int = 1
    plugin: bool = True
    compares: bool = False  # its last step compares SimReg's gradient with an autograd reference
    connections: int = 1  # CUDA_DEVICE_MAX_CONNECTIONS
    half: bool = True  # in bf16; else in float32, and TensorFloat-32 is off
    on_cpu: bool = False
    repeatable: bool = False  # attention, too, must repeat itself bit for bit

    def with_flags(self, *flags: str) -> Run:
        return replace(self, flags=(*self.flags, *flags))

    def on_more(self, processes: int, *flags: str) -> Run:
        return replace(self.with_flags(*flags), processes=processes)


@dataclass(frozen=True)
class Observed:
    losses: list[float]
    norms: list[float]
    digests: list[str]  # of the trained parameters, rank by rank
    comparison: dict[str, float] | None  # see `tests.gpu.rank.Comparison`
    log: str
    logged: list[dict[str, float]]  # SimReg's values in every log line

    def simreg_losses(self) -> list[float]:
        return [float(value) for value in re.findall(r"simreg loss: (\S+)", self.log)]


@cache
def _engine_error() -> str | None:
    if util.find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed"
    return broken_transformer_engine()


@cache
def _norm_waits() -> bool:
    """Megatron falls back to a norm of its own, which reads the device, where Transformer Engine lacks one function."""
    from megatron.core.optimizer import clip_grads

    return clip_grads.l2_norm_impl.__name__.startswith("local")


def why_not(run: Run) -> str | None:
    """Why this machine cannot make the run; None if it can."""
    if run.on_cpu:
        return None
    devices = torch.cuda.device_count()
    if devices < run.processes:
        return f"{run.processes} GPUs are needed, {devices} here"
    if "fp8" in " ".join(run.flags) and torch.cuda.get_device_capability() < (8, 9):
        return "this GPU has no FP8"
    if "--optimizer-cuda-graph" in run.flags and _norm_waits():
        return "Megatron's gradient norm, without Apex and with this Transformer Engine, cannot be captured in a graph"
    return _engine_error() if {"transformer_engine", "te"} & set(run.flags) else None


def observe(run: Run, data_flags: Sequence[str], out: Path) -> Observed:
    mode = "plain" if not run.plugin else "compare" if run.compares else "plugin"
    flags = [*MODEL, *(("--bf16",) if run.half else ()), *data_flags, *run.flags]
    flags += MEGATRON_FLAGS if run.on_cpu else ()
    done = torchrun(
        ["-m", "tests.gpu.rank", str(out), mode, str(PRETRAIN), *flags],
        processes=run.processes,
        **_ENVIRONMENT | {"CUDA_DEVICE_MAX_CONNECTIONS": str(run.connections)},
        **(_REPEATABLE if run.repeatable else {}),
        **({} if run.half else {"NVIDIA_TF32_OVERRIDE": "0"}),
        SIMREG_CPU="force" if run.on_cpu else "",
    )
    assert done.status == 0, f"status {done.status}\n{done.output[-6000:]}"
    ranks = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(run.processes)]
    return Observed(
        losses=next(rank["losses"] for rank in reversed(ranks) if rank["losses"]),
        norms=ranks[0]["norms"],
        digests=[rank["digest"] for rank in ranks],
        comparison=ranks[-1]["comparison"],
        log=done.output,
        logged=next((rank["logged"] for rank in reversed(ranks) if rank["logged"]), []),
    )


def largest_gap(one: Sequence[float], other: Sequence[float]) -> float:
    """Largest relative difference of two series; their last steps may have been spent on a comparison."""
    assert len(one) == len(other) == STEPS
    return max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(one[:-1], other[:-1], strict=True))
