# SPDX-License-Identifier: Apache-2.0
"""The end of a process over gloo, with a thread of gloo that still has to free a tensor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.helpers import jobs

ROOT = Path(__file__).resolve().parents[2]

# The main thread never gives Python's lock away between the collective and its end, so that gloo's thread, the last
# holder of the tensor, is sure to ask for it in the one moment in which that is fatal.
_SCRIPT = """
import atexit, sys, time
import torch
import torch.distributed as dist
from simreg_megatron.cpu import gloo_threads

if sys.argv[2] == "settle":
    atexit.register(gloo_threads.settle)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
held = dist.new_group([0])  # as Megatron's globals hold its groups to the end
sys.setswitchinterval(1000)


def collective():
    dist.all_reduce(torch.ones(100_000), group=held, async_op=True)


for _ in range(16):
    collective()
end = time.monotonic() + 1
while time.monotonic() < end:
    pass
print("all work done", flush=True)
"""


def _run(tmp_path: Path, mode: str) -> subprocess.CompletedProcess[str]:
    tmp_path.mkdir(exist_ok=True)
    command = [sys.executable, "-c", _SCRIPT, str(tmp_path / "store"), mode]
    return jobs.run(command, cwd=ROOT)


def test_a_run_that_did_its_work_ends_well(tmp_path: Path) -> None:
    done = _run(tmp_path, "settle")
    assert done.returncode == 0, done.stderr
    assert "all work done" in done.stdout
