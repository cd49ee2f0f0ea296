# SPDX-License-Identifier: Apache-2.0
"""Run a function on several gloo processes, each with one thread."""

from __future__ import annotations

import importlib.util
import multiprocessing
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _worker(rank: int, size: int, store: str, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # new memory holds NaN: a read before a write shows
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        function(rank, *arguments)
    finally:
        dist.destroy_process_group()


@cache
def fork_server() -> Any:
    """Where ranks are forked from: a process that has imported what they need and run nothing.

    A fork of the process that runs the tests would inherit the threads that other tests have started, and autograd
    refuses to work in it. There is one such server for all tests of a process, so it is the same for all of them.
    """
    context = multiprocessing.get_context("forkserver")
    has_megatron = importlib.util.find_spec("megatron") is not None
    context.set_forkserver_preload(["tests.megatron.preload" if has_megatron else "torch.distributed"])
    return context


def run_processes(function: Callable[..., None], size: int, folder: Path, *arguments: Any) -> None:
    """`function(rank, *arguments)` on `size` ranks; a failure on any rank is raised here."""
    fork_server()
    store = str(folder / "store")
    mp.start_processes(
        _worker, args=(size, store, function, arguments), nprocs=size, join=True, start_method="forkserver"
    )
