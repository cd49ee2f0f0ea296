# SPDX-License-Identifier: Apache-2.0
"""What is written around Megatron's own `training_log`: the timer's share of one step."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from simreg_megatron import SimRegConfig
from simreg_megatron.plugin import compat, installation, loop_hooks, writers


class Timers:
    """Each step took one second; Megatron's divide what they counted since the last reset."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.logged: list[float] = []

    def write(self, names: list[str], writer: Any, iteration: int, normalizer: float, reset: bool) -> None:
        assert not reset, "the log comes afterwards"
        writer.append(self.seconds / normalizer)

    def log(self, names: list[str], normalizer: float) -> None:
        self.logged.append(self.seconds / normalizer)
        self.seconds = 0.0


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Timers]:
    found = Timers()
    args = SimpleNamespace(log_interval=5, timing_log_level=2, log_timers_to_tensorboard=True)
    monkeypatch.setattr(compat, "timers", lambda: found)
    monkeypatch.setattr(compat, "arguments", lambda: args)
    monkeypatch.setattr(loop_hooks, "reduced_means", lambda **_: {})
    yield found
    installation.keep(None)


@pytest.mark.parametrize(("log_interval", "lines"), [(None, 4), (5, 4), (10, 2)])
def test_the_timer_shows_one_step(
    log_interval: int | None, lines: int, timers: Timers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever lies between two lines of SimReg's: Megatron's own interval, or several."""
    events: list[float] = []
    monkeypatch.setattr(writers, "_writers", lambda: (events,))
    monkeypatch.setattr(loop_hooks, "write_scalars", lambda means, iteration: None)
    installation.keep(installation.Installation(SimRegConfig(lambda_=1, log_interval=log_interval), lambda config: ()))
    log = loop_hooks.report(lambda total_loss_dict, iteration, skipped_iter, is_first_iteration=False: None)
    for iteration in range(1, 21):
        timers.seconds += 1.0
        log({}, iteration, 0, is_first_iteration=False)
    assert timers.logged == events == [1.0] * lines
