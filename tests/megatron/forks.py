# SPDX-License-Identifier: Apache-2.0
"""Ranks forked from one process that has torch and Megatron in memory: a tiny run costs seconds, its imports nothing.

The server is multiprocessing's own, with one thread and no process group; every rank is a fresh fork of it.
"""

import contextlib
import faulthandler
import importlib.util
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from tests.helpers import jobs
from tests.helpers.old_torch import OLD_TORCH


@cache
def fork_server() -> Any:
    """Return the process that ranks are forked from: the tests' own has threads, and autograd refuses to work."""
    context = multiprocessing.get_context("forkserver")
    if OLD_TORCH:
        raise RuntimeError("ranks are forked with torch 2.8 or newer: with an older one some hang")
    has_megatron = importlib.util.find_spec("megatron") is not None
    context.set_forkserver_preload(["tests.megatron.preload" if has_megatron else "torch.distributed"])
    return context


def run_ranks(target: Callable[..., None], *arguments, processes: int, log: Path, timeout: float, context=None) -> int:
    """`target(*arguments)` on every rank of one job, in a context of multiprocessing; all output goes to `log`.

    Returns 0, or the status of the first rank that failed, and kills the others. HungError, with the stacks of all
    ranks, if some took longer than `timeout` seconds.
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
        status = _first_failure(ranks, time.monotonic() + timeout)
        if status is None:
            jobs.print_stacks(rank.pid for rank in ranks)
            raise jobs.HungError(f"no end after {timeout:g} s:\n{log.read_text(errors='replace')}")
        return status
    finally:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)  # and what it has started
            rank.kill()
            rank.join()


def _first_failure(ranks: list[Any], deadline: float) -> int | None:
    """None where the deadline came first."""
    running = {rank.sentinel: rank for rank in ranks}
    while running:
        ended = wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
        if not ended:
            return None
        for sentinel in ended:
            rank = running.pop(sentinel)
            rank.join()
            if rank.exitcode:
                return int(rank.exitcode)
    return 0


def _rank(rank: int, processes: int, port: int, log: Path, target: Callable[..., None], arguments: tuple) -> None:
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(output, stream.fileno())
        stream.reconfigure(line_buffering=True)  # a killed rank must leave what it said
    faulthandler.enable()
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


def quick_save() -> None:
    """On a rank that will save: the queue of Megatron's checkpoint writer, by a fork, which saves the imports."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()
