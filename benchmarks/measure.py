# SPDX-License-Identifier: Apache-2.0
"""Time and memory of one loss, forward and backward, in a process of its own."""

from __future__ import annotations

import resource
import statistics
import time
from dataclasses import dataclass

import torch

from benchmarks.cases import LOSSES, hidden_states


@dataclass(frozen=True)
class Case:
    """`batch` sequences of `length` tokens, each one chunk."""

    loss: str
    batch: int
    length: int
    width: int
    dtype: str
    device: str

    @property
    def size(self) -> str:
        return f"{self.batch} x {self.length} x {self.width} {self.dtype}"


@dataclass(frozen=True)
class Cost:
    """Median seconds of one forward and backward, and the bytes it takes at its peak beside what is there before it.

    On a CPU the peak is the process's; what the allocator of the system keeps is in it.
    """

    seconds: float
    peak_bytes: int


def cost(case: Case, repeats: int = 5) -> Cost:
    rows, labels = hidden_states(case.batch, case.length, case.width, getattr(torch, case.dtype), case.device)
    rows.requires_grad_()
    loss = LOSSES[case.loss]
    small, small_labels = hidden_states(1, 64, 64, torch.float32, case.device)
    loss(small.requires_grad_(), small_labels).backward()  # libraries loaded, kernels found

    def once() -> float:
        rows.grad = None
        _synchronize(case.device)
        started = time.perf_counter()
        loss(rows, labels).backward()
        _synchronize(case.device)
        return time.perf_counter() - started

    before = _peak(case.device, reset=True)
    first = once()
    peak = _peak(case.device) - before
    times = [once() for _ in range(repeats)] if first < 20 else [first]
    return Cost(statistics.median(times), peak)


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _peak(device: str, *, reset: bool = False) -> int:
    if device != "cuda":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if reset:
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    return torch.cuda.max_memory_allocated()
