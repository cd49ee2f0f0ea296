# SPDX-License-Identifier: Apache-2.0
"""Wrappers around Megatron's own `training_log`: the timer's share of one step, and numbers below 0."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from simreg_megatron import SimRegConfig
from simreg_megatron.plugin import compat, installation, log


def megatrons_line(total_loss_dict: dict, iteration: int, skipped_iter: int) -> None:
    """As `training_log` prints it, from 0.12 on to 0.19."""
    total_loss_dict["advanced iterations"] = 5
    averages = {name: total.item() / 5 for name, total in total_loss_dict.items() if name != "advanced iterations"}
    print(
        f" iteration {iteration} |" + "".join(f" {name}: {mean:.6E} |" for name, mean in averages.items() if mean > 0)
    )


def test_numbers_below_zero_reach_the_console(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    means = {"simreg loss": 0.5, "simreg margin": -1.25, "simreg margin 10%": -4.0, "simreg negative cosine": -0.125}
    found = {name: torch.tensor(value) for name, value in means.items()}
    monkeypatch.setattr(log, "reduced_means", lambda **_: dict(found))
    monkeypatch.setattr(log, "write_scalars", lambda means, iteration: None)
    monkeypatch.setattr(log, "log_timer", lambda *_: None)
    monkeypatch.setattr(compat, "arguments", lambda: SimpleNamespace(log_interval=5))
    made = installation.Installation(SimRegConfig(lambda_=1), lambda config: ())
    monkeypatch.setattr(installation, "_installation", made)
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
