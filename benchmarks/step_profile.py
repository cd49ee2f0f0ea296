# SPDX-License-Identifier: Apache-2.0
"""Profiles of single training steps, and what a step with SimReg does beyond a plain one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch
from torch.profiler import profile

_MEASURES = {
    "wall_ms": "time on the wall, ms", "kernels_ms": "kernels of the device, ms", "idle_ms": "device idle, ms",
    "waited_ms": "host waits for the device, ms", "launches": "launches",
}  # fmt: skip
_SHORT = 20_000  # ns: a device that idles less is between two kernels
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
_SPANS = ("SimReg", "Contrast", "AddGradient", "autograd::engine")  # of the host, that belong to the term or run it


def profiled(step: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """Run the step under torch's profiler: its result, and what ran (without a GPU: operators in place of kernels)."""
    with profile() as seen:
        began = time.perf_counter()
        result = step()
        torch.cuda.synchronize()
        wall = time.perf_counter() - began
    events = seen.profiler.kineto_results.events()
    on_host = [event for event in events if "CUDA" not in str(event.device_type())]
    kernels = [event for event in events if "CUDA" in str(event.device_type())]
    kernels = kernels or [event for event in on_host if event.name().startswith("aten::")]
    gaps = list(_gaps(kernels))
    return result, {
        "wall_ms": 1e3 * wall, "kernels_ms": sum(_by_name(kernels).values()), "idle_ms": sum(ms for ms, _ in gaps),
        "waited_ms": sum(_by_name(on_host, *_WAITS).values()), "launches": len(kernels),
        "gaps": sorted(gaps, reverse=True)[:15], "kernels": _by_name(kernels),
        "host": {name: ms for name, ms in _by_name(on_host).items() if any(word in name for word in _SPANS)},
    }  # fmt: skip


def _by_name(events: Sequence[Any], *begins: str) -> dict[str, float]:
    """Milliseconds by name, of all or of the names that begin so."""
    found: Counter[str] = Counter()
    for event in events:
        if event.name().startswith(begins or ("",)):
            found[event.name()[:120]] += event.duration_ns()
    return {name: nanoseconds / 1e6 for name, nanoseconds in found.most_common()}


def _gaps(kernels: Sequence[Any]) -> Iterator[tuple[float, str]]:
    """Milliseconds in which the device idles, and between which two kernels."""
    end, before = 0, ""
    for event in sorted(kernels, key=lambda event: event.start_ns()):
        if end and event.start_ns() - end > _SHORT:
            yield (event.start_ns() - end) / 1e6, f"{before[:60]} -> {event.name()[:60]}"
        if event.start_ns() + event.duration_ns() > end:
            end, before = event.start_ns() + event.duration_ns(), event.name()


def table(steps: Sequence[dict[str, Any]], rows: int = 15) -> Iterator[str]:
    """Medians of the steps with SimReg beyond those of the plain ones."""
    plain, ours = ([step for step in steps if step["plain"] is kind] for kind in (True, False))
    if not plain or not ours:
        return
    yield "| a profiled step | plain | with SimReg |"
    yield "| --- | --- | --- |"
    for name, title in _MEASURES.items():
        yield f"| {title} | {median(step[name] for step in plain):.4g} | {median(step[name] for step in ours):.4g} |"
    for kind, title in (("kernels", "kernel"), ("host", "on the host")):
        names = {name for step in steps for name in step[kind]}
        more = {name: _middle(ours, kind, name) - _middle(plain, kind, name) for name in names}
        yield from ("", f"| {title} | ms more with SimReg |", "| --- | --- |")
        for name, ms in sorted(more.items(), key=lambda item: -abs(item[1]))[:rows]:
            yield f"| {name} | {ms:+.3f} |".replace("||", "\\|\\|")
    yield from ("", "| the device idles, with SimReg | ms |", "| --- | --- |")
    yield from (f"| {where} | {ms:.3f} |" for ms, where in ours[0]["gaps"][:rows])


def _middle(steps: Sequence[dict[str, Any]], kind: str, name: str) -> float:
    return median(step[kind].get(name, 0.0) for step in steps)
