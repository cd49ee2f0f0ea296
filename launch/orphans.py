# SPDX-License-Identifier: Apache-2.0
"""What a rank has started ends with it, however it ends.

Megatron's writer of checkpoints keeps a process that answers it through a queue; it has imported all that a rank has
(700 MB). torchrun takes the helpers of the ranks that it ends itself, but one that was killed, by the system where
memory ran out or by a fault of its own, would leave its helper on the machine for ever (seen with 0.19.2).
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from functools import partial
from multiprocessing.managers import BaseManager
from typing import Any

_PR_SET_PDEATHSIG = 1


def bind_managers() -> None:
    """Every process that multiprocessing's managers start from now on is killed when this thread's process ends."""
    start = BaseManager.start
    if getattr(start, "binds", False):
        return

    def bound(manager: Any, initializer: Callable[..., object] | None = None, initargs: Any = ()) -> None:
        start(manager, partial(_begin, os.getpid(), initializer), initargs)

    bound.binds = True  # type: ignore[attr-defined]
    BaseManager.start = bound  # type: ignore[method-assign, assignment]


def _begin(parent: int, initializer: Callable[..., object] | None, *arguments: Any) -> None:
    """In the new process: ask the kernel for a signal, unless the parent was faster to end."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    if initializer is not None:
        initializer(*arguments)
