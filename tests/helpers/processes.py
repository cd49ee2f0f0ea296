# SPDX-License-Identifier: Apache-2.0
"""Run a function on several gloo processes, each with one thread."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers import jobs
from tests.megatron.forks import run_ranks


def _worker(store: str, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # new memory holds NaN: a read before a write shows
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        function(rank, *arguments)
    finally:
        dist.destroy_process_group()


def run_processes(function: Callable[..., None], size: int, folder: Path, *arguments: Any) -> None:
    """`function(rank, *arguments)` on `size` ranks; a failure on any rank is raised here."""
    place = Path(tempfile.mkdtemp(dir=folder))
    log = place / "log"
    given = (str(place / "store"), function, arguments)
    status = run_ranks(_worker, *given, processes=size, log=log, timeout=jobs.TIMEOUT)
    assert status == 0, log.read_text(encoding="utf-8", errors="replace")
