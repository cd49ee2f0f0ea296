# SPDX-License-Identifier: Apache-2.0
"""The fuzzer without a library: seeds, mutations of them, and of every input that reached a line no other had."""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

from tests.fuzz.bar import Finding, ends_hangs, install, judge
from tests.fuzz.mutate import mutated
from tests.fuzz.target import Target


@dataclass
class Outcome:
    """What a run came to; `findings` has the first input of each."""

    inputs: int = 0
    seconds: float = 0.0
    covered: int = 0  # lines of the package that the seeds did not reach
    findings: dict[str, tuple[Finding, bytes]] = field(default_factory=dict)


def fuzz(
    target: Target,
    *,
    seconds: float = float("inf"),
    mutations: int | None = None,
    seed: int = 0,
    before: Callable[[bytes], object] = lambda data: None,
) -> Outcome:
    """Read the seeds, then mutations, until so many seconds or mutations are over.

    Args:
        before: is told each input before the reader gets it: a library that dies takes this process with it.
    """
    install()
    draw, outcome, pool = random.Random(seed), Outcome(), target.seeds()
    longest = max(4096, 2 * max(map(len, pool)))
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as name, _new_lines() as new_lines, ends_hangs():
        folder = Path(name).resolve()
        target.begin(folder)
        _warm_up(target, folder, pool)

        def read(data: bytes) -> None:
            before(data)
            outcome.inputs += 1
            if (finding := judge(target, folder, data)) is not None:
                outcome.findings.setdefault(finding.key, (finding, data))

        for data in list(pool):
            read(data)
        new_lines()
        last = float("inf") if mutations is None else outcome.inputs + mutations
        while time.monotonic() - start < seconds and outcome.inputs < last:
            data = mutated(draw.choice(pool), pool, target.words, draw, longest)
            read(data)
            if found := new_lines():
                outcome.covered += found
                pool.append(data)
    outcome.seconds = time.monotonic() - start
    return outcome


def _warm_up(target: Target, folder: Path, seeds: list[bytes]) -> None:
    """Libraries load their parts at the first good and the first bad input; that is not the input's memory."""
    for data in (*seeds, *(seed[: len(seed) // 2] for seed in seeds[:2]), b"", b"\0"):
        judge(target, folder, data)


@contextmanager
def _new_lines() -> Iterator[Callable[[], int]]:
    """How many lines of the package ran for the first time since it was last asked; 0 before Python 3.12."""
    monitoring: Any = getattr(sys, "monitoring", None)
    if monitoring is None:
        yield lambda: 0
        return
    tool, count = 4, 0

    def on_line(code: CodeType, line: int) -> object:
        nonlocal count
        if "/simreg_megatron/" in code.co_filename or "/launch/" in code.co_filename:
            count += 1
        return monitoring.DISABLE  # this line, and no other: what was seen once costs nothing more

    def asked() -> int:
        nonlocal count
        found, count = count, 0
        return found

    monitoring.use_tool_id(tool, "simreg-fuzz")
    monitoring.register_callback(tool, monitoring.events.LINE, on_line)
    monitoring.set_events(tool, monitoring.events.LINE)
    monitoring.restart_events()
    try:
        yield asked
    finally:
        monitoring.set_events(tool, 0)
        monitoring.free_tool_id(tool)
