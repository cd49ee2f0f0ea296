# SPDX-License-Identifier: Apache-2.0
"""Ranks forked from one process that has torch and Megatron in memory: a tiny run costs seconds, its imports nothing.

The server is multiprocessing's own. It holds what `tests.megatron.preload` imports, has one thread and no process
group, and every rank is a fresh fork of it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from tests.helpers.processes import fork_server

TIMED_OUT = 124  # the status that timeout(1) gives


def run_ranks(
    target: Callable[..., None],
    *arguments: Any,
    processes: int,
    log: Path,
    timeout: float,
    context: Any = None,
) -> int:
    """`target(*arguments)` on every rank of one job; all output goes to `log`.

    Args:
        context: of multiprocessing, to start the ranks in; None is that of the fork server.

    Returns:
        0 if every rank succeeded; else the status of the first that failed, or TIMED_OUT. The others are then killed.
    """
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # the kernel's port: no race for it
    job = (processes, store.port, log)
    log.parent.mkdir(parents=True, exist_ok=True)
    # Not daemons: those may have no children, and Megatron writes checkpoints in some.
    start = (context or fork_server()).Process
    ranks = [start(target=_rank, args=(rank, *job, target, arguments)) for rank in range(processes)]
    for rank in ranks:
        rank.start()
    try:
        return _first_failure(ranks, time.monotonic() + timeout)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def _first_failure(ranks: list[Any], deadline: float) -> int:
    running = {rank.sentinel: rank for rank in ranks}
    while running:
        ended = wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
        if not ended:
            return TIMED_OUT
        for sentinel in ended:
            rank = running.pop(sentinel)
            rank.join()
            if rank.exitcode:
                return int(rank.exitcode)
    return 0


def _rank(
    rank: int, processes: int, port: int, log: Path, target: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(output, stream.fileno())
        stream.reconfigure(line_buffering=True)  # a killed rank must leave what it said
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(processes),
        LOCAL_WORLD_SIZE=str(processes),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store is there already, rank 0 need not start one
        TORCHELASTIC_RESTART_COUNT="0",
    )
    target(*arguments)
