# SPDX-License-Identifier: Apache-2.0
"""With Megatron's timers on, SimReg's time is among them; without them nothing waits for the GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.megatron import runs

PP2 = ("--pipeline-model-parallel-size", "2", "--train-iters", "4", "--log-interval", "2", "--eval-iters", "0")
_LINE = re.compile(r"simreg-forward \.*: \(([\d.]+), ([\d.]+)\)")


def test_its_time_is_in_the_log_and_in_tensorboard(data_flags: tuple[str, ...], tmp_path: Path) -> None:
    """The last of two stages computes SimReg, so one rank has the shortest time and the longest."""
    asked = ("--timing-log-level", "2", "--log-timers-to-tensorboard", "--tensorboard-dir", str(tmp_path / "events"))
    done = runs.attempt(tmp_path / "run", (*data_flags, *PP2, *runs.SIMREG, *asked), processes=2)
    assert done.status == 0, done.output[-2000:]
    times = [(float(least), float(most)) for least, most in _LINE.findall(done.output)]
    assert len(times) == 2 and all(0 < least == most for least, most in times), done.output[-2000:]
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    written = events.Scalars("simreg-forward-time")
    assert [point.step for point in written] == [2, 4]
    assert [point.value for point in written] == pytest.approx([most / 1e3 for _, most in times], abs=1e-5)  # seconds
