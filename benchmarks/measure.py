# SPDX-License-Identifier: Apache-2.0
"""Time, memory and error of every way to compute the loss of one size, in one process."""

from __future__ import annotations

import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from benchmarks.cases import LOSSES, SAME_FUNCTION, Size, exact, hidden_states, multiply_adds

REPEATS = 5
LONG = 10.0  # seconds: what takes longer is measured once
_DENSE_BYTES = {"dense": 24, "reference": 24, "compiled": 24, "SupConLoss": 44}  # a pair, at the peak
_MOST_BYTES = {"cpu": 8 << 30, "cuda": 70 << 30}


@dataclass(frozen=True)
class Row:
    """One line of the table; None where there is nothing to say.

    seconds: median of runs that take turns with those of the other losses. extra_bytes: most bytes of tensors that
    live at once without the inputs; the gradient of the embeddings is among them. The errors are to float64.
    """

    loss: str
    size: Size
    backward: bool
    seconds: float | None = None
    extra_bytes: int | None = None
    loss_error: float | None = None
    gradient_error: float | None = None
    multiply_adds: int | None = None
    remark: str = ""


def measured(size: Size, dtype: torch.dtype, device: str) -> list[Row]:
    """All losses that this machine can run, forward alone and with backward."""
    torch.set_num_threads(1)
    rows, labels = hidden_states(size.batch, size.length, size.width, dtype, device)
    results = []
    for backward in (False, True):
        left_out = {name: reason for name in LOSSES if (reason := _left_out(name, size, device))}
        names = [name for name in LOSSES if name not in left_out]
        runs = {name: _run_of(name, rows, labels, backward) for name in names}
        for run in runs.values() if device == "cuda" else ():
            run()  # cuBLAS takes its workspace out of torch's memory at its first product
        peaks = {name: peak_bytes(run, device) for name, run in runs.items()}  # and libraries are loaded
        seconds = in_turns(runs, device)
        errors = dict(_errors(names, rows, labels)) if backward else {}
        for name in names:
            counted = multiply_adds(name, size, dtype, device, backward=backward)
            results.append(
                Row(name, size, backward, seconds[name], peaks[name], *errors.get(name, (None, None)), counted)
            )
        results += [Row(name, size, backward, remark=reason) for name, reason in left_out.items()]
    return results


def _left_out(name: str, size: Size, device: str) -> str:
    if name == "SupConLoss" and importlib.util.find_spec("pytorch_metric_learning") is None:
        return "pytorch-metric-learning is not installed"
    if name == "triton" and device == "cpu":
        return "needs a GPU"
    takes = _DENSE_BYTES.get(name, 0) * size.batch * size.length**2
    return f"would take {takes / 2**30:.0f} GiB" if takes > _MOST_BYTES[device] else ""


def _run_of(name: str, rows: Tensor, labels: Tensor, backward: bool) -> Callable[[], None]:
    def run() -> None:
        with torch.set_grad_enabled(backward):
            given = rows.detach().requires_grad_(backward)
            loss = LOSSES[name](given, labels)
            if backward:
                loss.backward()

    return run


def in_turns(runs: dict[str, Callable[[], Any]], device: str) -> dict[str, float]:
    """Median seconds of each: all run once, then all once more, so that a machine that slows down slows all of them."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(REPEATS):
        for name, run in runs.items():
            if not times[name] or times[name][0] < LONG:
                times[name].append(_seconds(run, device))
    return {name: statistics.median(taken) for name, taken in times.items()}


def _seconds(run: Callable[[], Any], device: str) -> float:
    synchronize(device)
    started = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - started


def _errors(names: list[str], rows: Tensor, labels: Tensor) -> Iterator[tuple[str, tuple[float, float]]]:
    """Relative, of the loss and (Frobenius) of the gradient; the loss is scaled up, so that no gradient underflows."""
    expected = _value_and_gradient(exact, rows.double(), labels)
    for name in names:
        if name in SAME_FUNCTION:
            got = _value_and_gradient(LOSSES[name], rows, labels)
            yield name, tuple(_apart(one, other) for one, other in zip(got, expected, strict=True))


def _value_and_gradient(loss: Callable[[Tensor, Tensor], Tensor], rows: Tensor, labels: Tensor) -> tuple[Any, Any]:
    rows = rows.detach().requires_grad_()
    value = loss(rows, labels)
    (value * 2.0**24).backward()
    return value.detach(), rows.grad


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


def gemm_multiply_adds_per_second(dtype: torch.dtype, device: str, side: int) -> float:
    """Measure one square product, by the fastest library of this machine."""
    left, right = torch.randn(2, side, side, device=device).to(dtype)
    seconds = min(_seconds(lambda: torch.mm(left, right), device) for _ in range(10))
    return side**3 / seconds


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def peak_bytes(run: Callable[[], Any], device: str = "cpu") -> int:
    """Return the peak of bytes of tensors, above those that lived before."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    steps = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    steps.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate((event.nbytes() for event in steps), initial=0))
