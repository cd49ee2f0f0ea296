# SPDX-License-Identifier: Apache-2.0
"""Calls before the first step, by Megatron's loop and by any other, and their arguments."""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import pytest

from simreg_megatron import SimRegConfig
from simreg_megatron.adagc.clipping import Clipping
from simreg_megatron.plugin import compat, installation, loop
from simreg_megatron.plugin.arguments import add_simreg_arguments
from tests.unit.test_other_loops import LENGTH, WIDTH, Model

# What Megatron says at import, of layers that are not installed, is not what is tested here.
pytestmark = [pytest.mark.megatron, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Record the calls, in order; the model has no decoder that could be refused."""
    made: list[tuple] = []
    for module, name in ((loop, "choose_form"), (loop, "open_row_group"), (Clipping, "attach")):
        monkeypatch.setattr(module, name, lambda *given, name=name: made.append((name, *given)))
    monkeypatch.setattr(loop, "refuse_models", lambda *given: None)
    monkeypatch.setattr(installation, "_installation", None)
    return made


def installed(config: SimRegConfig | None) -> None:
    installation.keep(installation.Installation(config, lambda config: ()))


def megatrons(monkeypatch: pytest.MonkeyPatch, *flags: str) -> argparse.Namespace:
    """Megatron has read these flags."""
    args = add_simreg_arguments(argparse.ArgumentParser()).parse_args(flags)
    more: dict[str, Any] = {"micro_batch_size": 3, "seq_length": LENGTH, "hidden_size": WIDTH, "log_interval": 1}
    vars(args).update(more, clip_grad=1.0)
    monkeypatch.setattr(compat, "arguments", lambda: args)
    installed(None)
    return args


@pytest.mark.parametrize("every", [1, 2])
def test_adagc_that_clips_most_of_the_term_away_is_logged(every: int, calls: list, monkeypatch) -> None:
    megatrons(monkeypatch, "--simreg-lambda", "1", "--adagc", "--simreg-every", str(every))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop.set_up(lambda: ([Model()], "optimizer", "scheduler"))()
    assert calls[-1][0] == "attach" and calls[-1][2] == "optimizer"
    sentence = "with --simreg-every 2 it clips most of the term away in the steps with it: drop one of the two"
    assert [sentence in str(each.message) for each in caught if "AdaGC" in str(each.message)] == [True] * (every == 2)
