# SPDX-License-Identifier: Apache-2.0
"""Profiles of single training steps, and what a step with SimReg does beyond a plain one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch
from torch.profiler import profile

_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
_SPANS = ("SimReg", "Contrast", "AddGradient", "autograd::engine")  # of the host, that belong to the term or run it


def profiled(step: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """Run the step under torch's profiler: its result, and ms by kernel (without a GPU: by operator), wait and span."""
    with profile() as seen:
        began = time.perf_counter()
        result = step()
        torch.cuda.synchronize()
        wall = time.perf_counter() - began
    of_device = [event for event in seen.key_averages() if "CUDA" in str(event.device_type)]
    of_host = [event for event in seen.key_averages() if "CUDA" not in str(event.device_type)]
    kernels = [event for event in of_device if not event.is_user_annotation]  # a span of kernels that count already
    operators = [event for event in of_host if event.key.startswith("aten::")]
    kinds = {
        "idle": _idle_before([event for event in seen.events() if "CUDA" in str(event.device_type)]),
        "kernels": {event.key[:120]: event.self_device_time_total / 1e3 for event in kernels}
        or {event.key: event.self_cpu_time_total / 1e3 for event in operators},
        "waits": {event.key: event.cpu_time_total / 1e3 for event in of_host if event.key.startswith(_WAITS)},
        "host": {e.key[:120]: e.cpu_time_total / 1e3 for e in of_host if any(word in e.key for word in _SPANS)},
    }
    return result, {"wall_ms": 1e3 * wall, "launches": sum(event.count for event in kernels or operators), **kinds}


def table(steps: Sequence[dict[str, Any]], rows: int = 15) -> Iterator[str]:
    """Medians of the plain steps and of those with SimReg, and where they differ most; nothing if one kind is missing.

    Where kernels take less than the time on the wall, the device was idle, as it waited for the host. The last table
    lists the kernels before which it was idle for longer.
    """
    plain, ours = ([step for step in steps if step["plain"] is kind] for kind in (True, False))
    if not plain or not ours:
        return
    yield "| a profiled step | plain | with SimReg |"
    yield "| --- | --- | --- |"
    titles = {"wall_ms": "wall, ms", "kernels": "kernels, ms", "waits": "waits, ms", "launches": "launches"}
    for name, title in titles.items():
        sums = [median(_sum(step[name]) for step in kind) for kind in (plain, ours)]
        yield f"| {title} | {sums[0]:.4g} | {sums[1]:.4g} |"
    for kind in ("kernels", "host", "idle"):
        title = "idle before" if kind == "idle" else kind
        yield from ("", f"| {title} | ms more with SimReg |", "| --- | --- |")
        names = {name for step in steps for name in step[kind]}
        both = {name: [median(step[kind].get(name, 0.0) for step in one) for one in (plain, ours)] for name in names}
        more = sorted(((its[1] - its[0], name) for name, its in both.items()), key=lambda pair: -abs(pair[0]))
        yield from (f"| {name.replace('|', '/')} | {ms:+.3f} |" for ms, name in more[:rows])


def _idle_before(of_device: Sequence[Any]) -> dict[str, float]:
    """ms in which the device computed nothing before a kernel, by the kernel's name."""
    waits: dict[str, float] = {}
    ends = 0.0
    for event in sorted((e for e in of_device if not e.is_user_annotation), key=lambda e: e.time_range.start):
        if ends:
            name = event.key[:120]
            waits[name] = waits.get(name, 0.0) + max(0.0, event.time_range.start - ends) / 1e3
        ends = max(ends, event.time_range.end)
    return waits


def _sum(times: dict[str, float] | float) -> float:
    return sum(times.values()) if isinstance(times, dict) else times
