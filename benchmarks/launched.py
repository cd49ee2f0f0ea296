# SPDX-License-Identifier: Apache-2.0
"""One training of the benchmarks, by torchrun on one process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable

from benchmarks.records import ROOT

PRETRAIN = "launch/pretrain_llama.sh"


def run(script: str, words: Iterable[object], **environment: str) -> str:
    """What `script` of the repository printed; it runs in the environment of this process and what is given.

    Raises:
        SystemExit: it ended with another status than 0.
    """
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    command = [str(word) for word in (*torchrun, script, *words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **environment})
    if done.returncode:
        raise SystemExit(f"a run ended with status {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout
