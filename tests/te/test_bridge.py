# SPDX-License-Identifier: Apache-2.0
"""Megatron-Bridge's own `pretrain` trains a tiny LLaMA, with SimReg through its callback and without."""

import re
import sys
from importlib import util

import pytest

from tests.helpers import jobs
from tests.megatron.runs import ROOT

if util.find_spec("megatron.bridge") is None:  # one that is there and cannot be imported fails below
    pytest.skip("Megatron-Bridge is not installed", allow_module_level=True)
NUMBER = r"([-+.\dE]+)"


@pytest.fixture(scope="module")
def logs() -> dict[str, str]:
    found = {}
    for kind in ("plain", "simreg"):
        command = [sys.executable, "-m", "tests.te.bridge_run", kind]
        done = jobs.run(command, cwd=ROOT, timeout=600)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        found[kind] = done.stdout
    return found


def series(log: str, name: str) -> list[float]:
    return [float(value) for value in re.findall(rf"{re.escape(name)}: {NUMBER}", log)]


def test_the_loop_is_bridges_and_trains_both(logs: dict[str, str]) -> None:
    """The first loss is of the same weights; SimReg's gradient has moved those of the second."""
    plain, simreg = (series(logs[kind], "lm loss") for kind in ("plain", "simreg"))
    assert len(plain) == len(simreg) == 2
    assert plain[0] == simreg[0] and plain[1] != simreg[1]
    assert plain[1] < plain[0] and simreg[1] < simreg[0]
    norms = {kind: series(logs[kind], "grad norm") for kind in logs}
    assert norms["simreg"][0] > 1.2 * norms["plain"][0], norms


def test_the_callback_announces_and_logs(logs: dict[str, str]) -> None:
    assert "SimReg" not in logs["plain"].split("\n", 1)[1]  # its first line is about the CPU backend
    assert "> SimReg: lambda 1, temperature 0.5, chunks of 16 tokens" in logs["simreg"]
    losses = series(logs["simreg"], "simreg loss")
    assert len(losses) == 2 and losses[1] < losses[0]
    assert len(series(logs["simreg"], "simreg negative cosine")) == 2
