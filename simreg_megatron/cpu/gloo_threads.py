# SPDX-License-Identifier: Apache-2.0
"""End a process over gloo without the abort that torch (seen in 2.13) risks there.

A thread of gloo that finished a collective may be the last holder of its tensors, and needs Python's lock to free
them. Where the interpreter has begun to end, asking for the lock unwinds the thread through C++ that must not be
unwound: "terminate called without an active exception", and a run that did all its work ends with status 134
(PyTorch issue 190489). Destroying the groups would help too, but take them from exit handlers that still need them.
So the process waits, with the lock free, until each of those threads is idle.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_NAME = "pt_gloo_runloop"
_TASKS = Path("/proc/self/task")
_PAUSE = 0.02  # seconds: a thread that waits for the lock has it at once while this one sleeps
_LIMIT = 5.0  # seconds: a collective that a lost peer will never finish must not keep the process


def settle() -> None:
    """Wait until gloo's threads have freed what they hold, `_LIMIT` seconds at most: for `atexit`."""
    end = time.monotonic() + _LIMIT
    time.sleep(_PAUSE)
    while _is_busy() and time.monotonic() < end:
        time.sleep(_PAUSE)


def _is_busy() -> bool:
    """Return whether a gloo thread runs or could run; unknown except on Linux, where one pause must do."""
    return any(_state(task) == "R" for task in os.listdir(_TASKS)) if _TASKS.is_dir() else False


def _state(task: str) -> str:
    """ "R" while it runs or waits for a core, "S" while it waits for work; nothing for threads that are not gloo's."""
    try:
        if (_TASKS / task / "comm").read_text().strip() != _NAME:
            return ""
        return (_TASKS / task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # it ended meanwhile
        return ""
