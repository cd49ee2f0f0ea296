# SPDX-License-Identifier: Apache-2.0
"""The signals of a rank: SIGURG is "save and leave", and what a rank has started is killed when the rank ends.

SLURM's signal reaches a job's helpers too. Megatron's checkpoint writer talks to one; SIGTERM kills it, and the save
that the same SIGTERM asked for fails with a broken pipe (seen with 0.19.2). SIGURG is ignored unless listened for.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from launch.flags import Flag, flag_names, flag_value

SAVE_AND_LEAVE = "URG"  # as SLURM writes it
_PR_SET_PDEATHSIG = 1


def listen(flags: Sequence[Flag]) -> None:
    """Pass SIGURG on to Megatron's --exit-signal-handler, in this process and none of its children."""
    if "--exit-signal-handler" not in flag_names(flags):
        return
    expected = signal.Signals[flag_value(flags, "--exit-signal") or "SIGTERM"]  # Megatron's parser knows the name
    process = os.getpid()

    def pass_on(*_: object) -> None:
        if os.getpid() == process:  # forked data loaders inherit this function
            signal.raise_signal(expected)

    if expected is not signal.SIGURG:
        signal.signal(signal.SIGURG, pass_on)


def bind_managers() -> None:
    """Have the kernel kill every process that multiprocessing's managers start when this thread's process ends.

    Megatron's checkpoint writer keeps one, of 700 MB; a rank that is killed would leave it on the machine for ever
    (seen with 0.19.2).
    """
    from multiprocessing.managers import BaseManager

    start = BaseManager.start
    if getattr(start, "binds", False):
        return

    def bound(manager: Any, initializer: Callable[..., object] | None = None, initargs: Any = ()) -> None:
        start(manager, partial(_begin, os.getpid(), initializer), initargs)

    bound.binds = True  # type: ignore[attr-defined]
    BaseManager.start = bound  # type: ignore[method-assign, assignment]


def _begin(parent: int, initializer: Callable[..., object] | None, *arguments: Any) -> None:
    """Bind the new process to its parent, which may have ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    if initializer is not None:
        initializer(*arguments)
