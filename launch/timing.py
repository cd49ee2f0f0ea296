# SPDX-License-Identifier: Apache-2.0
"""Time per step as Megatron's own log tells it."""

from __future__ import annotations

import re

_LINE = re.compile(r"\] iteration +(\d+)/.*?elapsed time per iteration \(ms\): ([\d.]+)")


def interval_milliseconds(log: str, log_interval: int) -> list[float]:
    """Time per step of each logged interval after the first, in which things are set up.

    (Megatron 0.19 prints a line after the first step, too, and goes on counting its interval.)
    """
    return [float(time) for step, time in _LINE.findall(log) if int(step) > log_interval]
