# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.host`: what SimReg costs the host in a micro-batch.

The path of a training step, from the hidden states to their gradient. Without a GPU so few rows are computed that the
CPU's own arithmetic is small, and Triton's kernels are replaced by functions that do nothing: what is left is Python
and torch's dispatch; Triton's launcher and the CUDA driver come on top. On a GPU all of that is measured, for a
micro-batch of 350M on an idle device. The time is the first decile in the fastest of ten rounds, as other processes
only add to it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from benchmarks import records
from benchmarks.records import ROOT, Record
from simreg_megatron.config import SimRegConfig
from simreg_megatron.kernels import triton as triton_kernels
from simreg_megatron.parallel.layout import ChunkRules, ShardLayout, row_plan
from simreg_megatron.plugin.term import Regularizer

HAS_GPU = torch.cuda.is_available()
BATCH, LENGTH, WIDTH, CHUNK = (16, 2048, 1024, 1024) if HAS_GPU else (2, 64, 16, 32)
CALLS, ROUNDS = 100 if HAS_GPU else 1000, 10
FORMS = ("triton", "tiled")
PLAN = "a packed row's plan: 131,072 tokens, 64 documents, CP 8"
PACKAGE = str(ROOT / "simreg_megatron")


def rows() -> Iterator[dict[str, Any]]:
    torch.set_num_threads(1)
    torch.autograd.set_multithreading_enabled(False)  # count the backward's calls, too
    for form in FORMS:
        with contextlib.nullcontext() if HAS_GPU else _kernels_that_do_nothing():
            step = _step(form)
            step()
            functions = _package_calls(step)
            time_ms = 1e3 * min(sorted(_seconds(step) for _ in range(CALLS))[CALLS // 10] for _ in range(ROUNDS))
        yield {
            "impl": form, "host_ms": f"{time_ms:.3f}", "calls": functions.total(),
            "functions": len(functions), "files": len({file for file, _ in functions}),
        }  # fmt: skip
    plans = sorted(_seconds(functools.partial(_plan_packed_row, 16 * number)) for number in range(1, 101))
    yield {"impl": PLAN, "host_ms": f"{1e3 * plans[10]:.3f}", "calls": "", "functions": "", "files": ""}


def table(lines: list[Record]) -> Iterator[str]:
    yield f"{records.described(lines)}. `python -m benchmarks.host`"
    yield ""
    yield "| impl | host, ms a micro-batch | calls of package functions | functions | files |"
    yield "| --- | --- | --- | --- | --- |"
    for line in lines:
        yield f"| {line['impl']} | {line['host_ms']} | {line['calls']} | {line['functions']} | {line['files']} |"


def _plan_packed_row(shift: int) -> None:
    """Plan one that was not seen before: documents of 2048 tokens but for the first two."""
    cu_seqlens = (0, 2048 - shift, *range(4096, 131073, 2048))
    row_plan(ShardLayout(131072, 8, cu_seqlens=cu_seqlens), (3, 0), ChunkRules(1024))


def _step(form: str) -> Callable[[], None]:
    """SimReg's part of a training step on one rank, forward and backward."""
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    model = SimpleNamespace(
        config=SimpleNamespace(sequence_parallel=False, hidden_size=WIDTH),
        pg_collection=SimpleNamespace(tp=group, cp=group, dp_cp=group),
    )
    regularizer = Regularizer(SimRegConfig(lambda_=1, chunk_size=CHUNK, impl=form))
    with torch.device("cuda" if HAS_GPU else "cpu"):
        hidden_states = torch.randn(LENGTH, BATCH, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        labels, mask = torch.randint(0, 9, (BATCH, LENGTH)), torch.ones(BATCH, LENGTH)
        loss, of_loss = torch.rand(BATCH, LENGTH, requires_grad=True), torch.ones(BATCH, LENGTH)
    regularizer.metrics._sums = regularizer.metrics._nothing(hidden_states.device)  # made once a run

    def step() -> None:
        regularizer.add_to(loss, regularizer.terms(model, hidden_states, labels, mask)).backward(of_loss)

    return step


@contextlib.contextmanager
def _kernels_that_do_nothing() -> Iterator[None]:
    """Replace Triton's kernels. Their outputs stay uninitialised and may not be finite, so no check looks at them."""
    with (
        mock.patch.object(triton_kernels, "run", lambda *_, **__: None),
        mock.patch.object(triton_kernels, "INTERPRETS", True),
        mock.patch.object(torch, "_assert_async", lambda *_: None),
    ):
        yield


def _seconds(step: Callable[[], None]) -> float:
    if HAS_GPU:
        torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def _package_calls(step: Callable[[], None]) -> Counter[tuple[str, str]]:
    """By file and name."""
    calls: Counter[tuple[str, str]] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE):
            calls[file, frame.f_code.co_qualname] += 1

    sys.setprofile(note)
    threading.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return calls


if __name__ == "__main__":
    records.command("host", __doc__, rows, table)
