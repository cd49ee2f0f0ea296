# SPDX-License-Identifier: Apache-2.0
"""Tiny Megatron runs, started as a user would or on forked ranks, and what they computed, put together and compared."""

from __future__ import annotations

import math
import os
import re
import runpy
import signal
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from launch.planned import python_path
from simreg_megatron.cpu.backend import MEGATRON_FLAGS
from tests.helpers import jobs
from tests.megatron import forks
from tests.megatron.parameters import Shard
from tests.megatron.record import record
from tests.versions.tiny import whole

ROOT = Path(__file__).resolve().parents[2]
PRETRAIN = ROOT / "simreg_megatron" / "pretrain.py"
TIMEOUT = 300  # seconds; under torchrun a run takes about 20, on forked ranks 1 to 4
T = TypeVar("T")
_TAIL = 4000  # characters of a log that an error shows
# What glibc says as it aborts: "malloc(): unaligned tcache chunk detected", "free(): invalid pointer", ...
_HEAP = re.compile(r"^(malloc|free|realloc)\(\): |^(double free or )?corrupt", re.MULTILINE)

_BASE = (
    "--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--ffn-hidden-size", "128",
    "--seq-length", "64", "--max-position-embeddings", "64", "--micro-batch-size", "2", "--global-batch-size", "4",
    "--normalization", "RMSNorm", "--swiglu", "--position-embedding-type", "rope", "--disable-bias-linear",
    "--hidden-dropout", "0", "--attention-dropout", "0",
    "--lr", "1e-3", "--eval-iters", "1", "--eval-interval", "1000", "--log-interval", "1", "--seed", "7",
)  # fmt: skip
_UNTIED = ("--untie-embeddings-and-output-weights",)
# No load-balancing loss: Megatron takes it over each rank's own tokens, so it depends on the layout.
_EXPERTS = ("--num-experts", "4", "--moe-router-topk", "2", "--moe-router-load-balancing-type", "none")
MODELS = {
    "dense": _UNTIED,
    "deep": (*_UNTIED, "--num-layers", "4"),
    "tied": (),
    "gqa": (*_UNTIED, "--group-query-attention", "--num-query-groups", "2"),
    "mtp": (*_UNTIED, "--mtp-num-layers", "1"),
    "moe": (*_UNTIED, *_EXPERTS, "--moe-token-dispatcher-type", "alltoall"),
}
SIMREG = ("--simreg-lambda", "10", "--simreg-temperature", "0.5")


@dataclass(frozen=True)
class Finished:
    status: int
    output: str


class RunError(AssertionError):
    """A run that had to succeed did not; the message is the end of its log."""


class ReplicasDifferError(AssertionError):
    """Ranks that hold the same parameter do not hold the same numbers."""


def torchrun(command: Sequence[str], processes: int = 1, meets=("--standalone",), **env: str) -> Finished:
    """`torchrun MEETS --nproc-per-node N COMMAND`, one thread each."""
    launcher = [sys.executable, "-m", "torch.distributed.run", *meets, "--nproc-per-node", str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(ROOT), **env}
    done = jobs.run([*launcher, *command], cwd=ROOT, env=environment, timeout=TIMEOUT, merged=True)
    return Finished(done.returncode, done.stdout)


def two_nodes(command: Sequence[str]) -> tuple[Finished, Finished]:
    """`torchrun --nnodes 2` on each of two nodes, here both on this machine, with one process each."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    address = ("--nnodes", "2", "--master-addr", "localhost", "--master-port", port)
    places = [(*address, "--node-rank", rank) for rank in ("0", "1")]
    first, second = ThreadPoolExecutor(2).map(lambda place: torchrun(command, meets=place), places)
    return first, second


def forked(target: Callable[..., None], *arguments: Any, folder: Path, processes: int = 1) -> Finished:
    """A function on forked ranks: Megatron is in their memory, on the stand-ins for CUDA."""
    log = Path(tempfile.mkdtemp(dir=folder), "log")
    status = forks.run_ranks(target, *arguments, processes=processes, log=log, timeout=TIMEOUT)
    return Finished(status, log.read_text(errors="replace"))


def launched(words: Sequence[str], folder: Path, *, processes: int = 1) -> Finished:
    """The same script on forked ranks: what torchrun's own start costs is saved."""
    return forked(_launch, tuple(words), folder=folder, processes=processes)


def _launch(words: Sequence[str]) -> None:
    forks.quick_save()
    sys.argv = list(words)
    runpy.run_path(str(ROOT / words[0]), run_name="__main__")


def all_flags(flags: Sequence[str], model: str = "dense") -> list[str]:
    """The tiny model's flags and those of the CPU, then `flags`: the last one wins."""
    return [*_BASE, *MODELS[model], *MEGATRON_FLAGS, *flags]


def attempt(
    out: Path, flags: Sequence[str], *, model: str = "dense", processes: int = 1, plain: bool = False, patch: str = ""
) -> Finished:
    """Train the tiny model on forked ranks and record it in `out`, without the plugin if `plain`; it may fail.

    `patch` is called before: "breakage:doubled_scale".
    """
    patch = f"tests.megatron.{patch}" if patch else ""
    log = out / "log"
    options = (out, PRETRAIN, all_flags(flags, model), plain, patch)
    status = forks.run_ranks(_record, *options, processes=processes, log=log, timeout=TIMEOUT)
    return Finished(status, log.read_text(errors="replace"))


def _record(out: Path, script: Path, flags: Sequence[str], plain: bool, patch: str) -> None:
    if "--save" in flags:
        forks.quick_save()
    record(out, script, flags, plain=plain, patch=patch)


def train(out: Path, flags: Sequence[str], **options: Any) -> Recorded:
    """The same for a run that must succeed: what it computed; RunError or ReplicasDifferError if it failed.

    A run that glibc ends over a damaged heap (torch 2.13 over gloo, once) gets a second chance and a warning unless
    it saves: no code of ours can damage it.
    """
    done = attempt(out, flags, **options)
    if done.status == -signal.SIGABRT and _HEAP.search(done.output) and "--save" not in flags:
        warnings.warn(f"a damaged heap ended a run, which is repeated:\n{done.output[-_TAIL:]}", stacklevel=2)
        done = attempt(out, flags, **options)
    if done.status:
        raise RunError(f"status {done.status}\n{done.output[-_TAIL:]}")
    return read(out)


@dataclass(frozen=True)
class Recorded:
    losses: list[float]
    norms: list[float]
    grads: dict[str, Tensor]
    params: dict[str, Tensor]
    logged: list[dict[str, float]] = field(default_factory=list)  # SimReg's values in every log line


def read(out: Path) -> Recorded:
    """Put the ranks of a run together: shards are joined; replicas must be equal bit for bit."""
    ranks = [torch.load(path, weights_only=True) for path in sorted(out.glob("rank*.pt"))]
    losses = _agreed("losses", [rank["losses"] for rank in ranks if rank["losses"]])
    norms = _agreed("gradient norms", [rank["norms"] for rank in ranks])
    return Recorded(losses, norms, _joined(ranks, "grads"), _joined(ranks, "params"), _lines(ranks))


def _agreed(what: str, values: list[T]) -> T:
    if any(repr(value) != repr(values[0]) for value in values):  # repr: NaN equals itself
        raise ReplicasDifferError(f"{what} differ between ranks: {values}")
    return values[0]


def _lines(ranks: list[dict]) -> list[dict[str, float]]:
    """The lines of the log; a rank that never sees final hidden states has no value of theirs."""
    lines = []
    for of_ranks in zip(*(rank["logged"] for rank in ranks), strict=True):
        names = {name: None for line in of_ranks for name in line}
        lines.append({name: _agreed(name, [line[name] for line in of_ranks if name in line]) for name in names})
    return lines


def _joined(ranks: list[dict], kind: str) -> dict[str, Tensor]:
    parts: dict[str, dict[int, Tensor]] = {}
    shards: dict[str, Shard] = {}
    for rank in ranks:
        for name, tensor in rank[kind].items():
            shards[name] = rank["shards"][name]
            known = parts.setdefault(name, {}).setdefault(shards[name][1], tensor)
            # Of a step that overflows they are NaN on all.
            if not torch.allclose(known, tensor, rtol=0, atol=0, equal_nan=True):
                raise ReplicasDifferError(f"{kind} of {name} differ between ranks that share them")
    return {name: whole(parts[name], name, shards[name]) for name in sorted(parts)}


@dataclass(frozen=True)
class Difference:
    """How far one run is from another, relative to the first: the largest over steps, parameters or log values."""

    loss: float
    norm: float
    grad: float
    parameter: str  # whose gradient differs most
    logged: float = 0.0
    value: str = ""  # that differs most in the log


def difference(one: Recorded, other: Recorded) -> Difference:
    assert one.grads.keys() == other.grads.keys(), one.grads.keys() ^ other.grads.keys()
    grad, parameter = max((_apart(one.grads[name], other.grads[name]), name) for name in one.grads)
    losses, norms = _steps_apart(one.losses, other.losses), _steps_apart(one.norms, other.norms)
    return Difference(losses, norms, grad, parameter, *_logs_apart(one.logged, other.logged))


def _logs_apart(one: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]]) -> tuple[float, str]:
    """The largest difference of any value in any line, and its name."""
    assert [line.keys() for line in one] == [line.keys() for line in other]
    gaps = [(0.0, "")]
    for expected, line in zip(one, other, strict=True):
        gaps += [(_values_apart(name, value, line[name]), name) for name, value in expected.items()]
    return max(gaps)


def _values_apart(name: str, one: float, other: float) -> float:
    """Relative, but absolute of a difference of norms, whose unit is their standard deviation, and of a margin in nats:
    some are near 0."""
    if repr(one) == repr(other):  # a value without a number, too
        return 0.0
    has_unit = "norm difference" in name or "margin" in name
    gap = abs(one - other) / (1.0 if has_unit else max(abs(one), 1e-12))
    return gap if gap == gap else math.inf


def _apart(one: Tensor, other: Tensor) -> float:
    gap, scale = (one.double() - other.double()).norm().item(), one.double().norm().item()
    return gap / max(scale, 1e-12) if gap == gap else float("inf")  # NaN is as far as it gets


def _steps_apart(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other) > 0
    gaps = (abs(a - b) / abs(a) for a, b in zip(one, other, strict=True))
    return max(gap if gap == gap else float("inf") for gap in gaps)


def share(of: Recorded, without: Recorded) -> float:
    """SimReg's part of the first gradient: norm(g - g_without) / norm(g); all of it for what SimReg alone trains."""
    parts = {name: grad - without.grads.get(name, torch.zeros(())) for name, grad in of.grads.items()}
    return total_norm(parts) / total_norm(of.grads)


def total_norm(tensors: Mapping[str, Tensor]) -> float:
    return sum(tensor.double().pow(2).sum().item() for tensor in tensors.values()) ** 0.5


def same_bits(one: Recorded, other: Recorded) -> bool:
    """Return whether two runs ended with exactly the same parameters."""
    names = one.params.keys()
    return names == other.params.keys() and all(torch.equal(one.params[name], other.params[name]) for name in names)
