# SPDX-License-Identifier: Apache-2.0
"""SIGURG: "save and leave", sent to every process of a job and heard by those that train alone.

A job's signal reaches helpers too. Megatron keeps one that its checkpoint writer talks to; SIGTERM kills it, and the
save that the same SIGTERM asked for fails with a broken pipe (seen with 0.19.2). SIGURG is ignored by whoever does
not listen for it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from launch.flags import Flag, LaunchError, flag_names, flag_value

SAVE_AND_LEAVE = "URG"  # as SLURM writes it


def listen(flags: Sequence[Flag]) -> None:
    """Pass the signal on to Megatron's --exit-signal-handler, in this process and none of its children.

    Raises:
        LaunchError: --exit-signal names no signal.
    """
    if "--exit-signal-handler" not in flag_names(flags):
        return
    name = flag_value(flags, "--exit-signal") or "SIGTERM"
    try:
        expected = signal.Signals[name]
    except KeyError:
        raise LaunchError(f"--exit-signal takes the name of a signal such as SIGTERM, not {name!r}") from None
    process = os.getpid()

    def pass_on(*_: object) -> None:
        if os.getpid() == process:  # forked data loaders inherit this function
            signal.raise_signal(expected)

    if expected is not signal.SIGURG:
        signal.signal(signal.SIGURG, pass_on)
