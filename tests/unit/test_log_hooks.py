# SPDX-License-Identifier: Apache-2.0
"""What is written around Megatron's own `training_log`: the timer's share of one step, and numbers below 0."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from simreg_megatron import SimRegConfig
from simreg_megatron.plugin import compat, installation, log, loop
from simreg_megatron.plugin.term import Regularizer


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
    monkeypatch.setattr(log, "reduced_means", lambda **_: {})
    yield found
    installation.keep(None)


@pytest.mark.parametrize(("log_interval", "lines"), [(None, 4), (5, 4), (10, 2)])
def test_the_timer_shows_one_step(
    log_interval: int | None, lines: int, timers: Timers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever lies between two lines of SimReg's: Megatron's own interval, or several."""
    events: list[float] = []
    monkeypatch.setattr(log, "_writers", lambda: (events,))
    monkeypatch.setattr(log, "write_scalars", lambda means, iteration: None)
    installation.keep(installation.Installation(SimRegConfig(lambda_=1, log_interval=log_interval), lambda config: ()))
    megatrons_log = log.report(lambda total_loss_dict, iteration, skipped_iter, is_first_iteration=False: None)
    for iteration in range(1, 21):
        timers.seconds += 1.0
        megatrons_log({}, iteration, 0, is_first_iteration=False)
    assert timers.logged == events == [1.0] * lines


@pytest.mark.parametrize(
    ("log_interval", "iteration", "resets", "written"),
    [(4, 1, False, []), (4, 5, False, []), (1, 1, True, [1]), (4, 8, True, [8])],
)
def test_the_first_line_of_a_process(
    log_interval: int, iteration: int, resets: bool, written: list[int], timers: Timers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron prints one after any first step; only in the middle of an interval it is one beside the others."""
    asked, points = [], []
    monkeypatch.setattr(log, "reduced_means", lambda reset: asked.append(reset) or {})
    monkeypatch.setattr(log, "write_scalars", lambda means, iteration: points.append(iteration))
    monkeypatch.setattr(log, "log_timer", lambda *_: None)
    installation.keep(installation.Installation(SimRegConfig(lambda_=1, log_interval=log_interval), lambda config: ()))
    megatrons_log = log.report(lambda total_loss_dict, iteration, skipped_iter, is_first_iteration=False: None)
    megatrons_log({}, iteration, 0, is_first_iteration=True)
    assert asked == [resets] and points == written


@pytest.mark.parametrize(("prints", "measured"), [(True, [0, 3, 7]), (False, [3, 7])])
def test_the_geometry_is_measured_where_a_line_follows(
    prints: bool, measured: list[int], timers: Timers, monkeypatch: pytest.MonkeyPatch
) -> None:
    installation.keep(installation.Installation(SimRegConfig(lambda_=1, log_interval=4), lambda config: ()))
    monkeypatch.setattr(compat, "logs_first_step", lambda: prints)
    monkeypatch.setattr(Regularizer, "refuse_silence", lambda *_: None)
    seen = []

    def train_step(model: Any, iteration: int) -> None:
        if installation.regularizer().metrics.wants_geometry:
            seen.append(iteration)

    step = loop.count_steps(train_step)
    for iteration in range(8):
        step(None, iteration)
    assert seen == measured


def megatrons_line(total_loss_dict: dict, iteration: int, skipped_iter: int) -> None:
    """As `training_log` prints it, from 0.12 on to 0.19."""
    total_loss_dict["advanced iterations"] = 5
    averages = {name: total.item() / 5 for name, total in total_loss_dict.items() if name != "advanced iterations"}
    print(
        f" iteration {iteration} |" + "".join(f" {name}: {mean:.6E} |" for name, mean in averages.items() if mean > 0)
    )


def test_numbers_below_zero_reach_the_console(
    timers: Timers, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    means = {"simreg loss": 0.5, "simreg margin": -1.25, "simreg margin 10%": -4.0, "simreg negative cosine": -0.125}
    found = {name: torch.tensor(value) for name, value in means.items()}
    monkeypatch.setattr(log, "reduced_means", lambda **_: dict(found))
    monkeypatch.setattr(log, "write_scalars", lambda means, iteration: None)
    monkeypatch.setattr(log, "log_timer", lambda *_: None)
    installation.keep(installation.Installation(SimRegConfig(lambda_=1), lambda config: ()))
    megatrons_log = log.report(megatrons_line)
    megatrons_log({"advanced iterations": 4}, 5, 0)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        " iteration 5 | simreg loss: 5.000000E-01 |",
        "> SimReg at iteration 5, next to Megatron's line, which has no numbers below 0: "
        "simreg margin: -1.250000E+00 | simreg negative cosine: -1.250000E-01",
    ]
    found |= {name: value.abs() for name, value in found.items()}
    megatrons_log({"advanced iterations": 4}, 10, 0)
    assert len(capsys.readouterr().out.splitlines()) == 1, "where nothing is missing, nothing is said"
