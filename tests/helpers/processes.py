# SPDX-License-Identifier: Apache-2.0
"""Run a function on several gloo processes, each with one thread."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _worker(rank: int, size: int, store: str, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        function(rank, *arguments)
    finally:
        dist.destroy_process_group()


def run_processes(function: Callable[..., None], size: int, folder: Path, *arguments: Any) -> None:
    """`function(rank, *arguments)` on `size` ranks; a failure on any rank is raised here.

    The ranks are forked from a process that has imported torch and run nothing: a fork of this one would inherit
    threads that other tests have started, and autograd refuses to work in it.
    """
    multiprocessing.set_forkserver_preload(["torch", "torch.distributed", function.__module__])
    store = str(folder / "store")
    mp.start_processes(
        _worker, args=(size, store, function, arguments), nprocs=size, join=True, start_method="forkserver"
    )
