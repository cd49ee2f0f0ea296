# SPDX-License-Identifier: Apache-2.0
"""Time and memory of one loss, forward and backward, in a process of its own."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity

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

    The gradient of the embeddings is among them.
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

    peak = peak_bytes(once, case.device)
    first = once()
    times = [once() for _ in range(repeats)] if first < 20 else [first]
    return Cost(statistics.median(times), peak)


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def peak_bytes(run: Callable[[], Any], device: str = "cpu") -> int:
    """Most bytes of tensors that live at once, beside those that lived before."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    steps = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    steps.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate((event.nbytes() for event in steps), initial=0))
