# SPDX-License-Identifier: Apache-2.0
"""Start the ranks of one job as a user's launcher would, each a fresh Python with its own Megatron on the path."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.distributed import TCPStore

from launch.planned import python_path
from tests.helpers import jobs

ROOT = Path(__file__).resolve().parents[2]
TIMED_OUT = 124  # the status that timeout(1) gives


def run(
    arguments: Sequence[str], *, processes: int, log: Path, path: Sequence[Path] = (),
    env: Mapping[str, str] | None = None, timeout: float = 300, python: str = sys.executable,
) -> int:  # fmt: skip
    """`PYTHON ARGUMENTS` on every rank, with the folders of `path` before others; output goes to `log`.

    Returns 0, the status of the first rank that failed, or TIMED_OUT; the others are then ended.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # the kernel's port: no race for it
    shared = {
        **os.environ,
        "PYTHONPATH": python_path(ROOT, *path),
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there already, rank 0 need not start one
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCH_CUDA_ARCH_LIST": "8.0",  # 0.15 asks nvcc, where one is installed, for a card that is not there
        **(env or {}),
    }
    with contextlib.ExitStack() as ends, log.open("w") as output:
        ranks = [
            ends.enter_context(
                jobs.started(
                    [python, *arguments],
                    cwd=ROOT,
                    env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
            for rank in range(processes)
        ]
        status = _first_failure(ranks, time.monotonic() + timeout)
        if status == TIMED_OUT:
            jobs.print_stacks(rank.pid for rank in ranks)
        return status


def _first_failure(ranks: list[subprocess.Popen[bytes]], deadline: float) -> int:
    while time.monotonic() < deadline:
        states = [rank.poll() for rank in ranks]
        failed = [state for state in states if state]
        if failed or None not in states:
            return failed[0] if failed else 0
        time.sleep(0.1)
    return TIMED_OUT


def last_error(log: Path) -> str:
    """The line of a log that says best what went wrong."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line or line.startswith("error: ")]
    return (errors or lines or ["nothing was printed"])[-1]
