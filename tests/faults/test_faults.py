# SPDX-License-Identifier: Apache-2.0
"""The harness tells a lost step, a wrong bit and a restart at 0; a handful of faults on real runs, one of each sort."""

from __future__ import annotations

import json

import pytest

from tests.faults import campaign, disks, judge
from tests.faults.campaign import Campaign
from tests.faults.faults import OF_A_DISK, Fault
from tests.faults.layouts import SAVE_INTERVAL, STEPS
from tests.faults.starts import COMMAND

_LINE = " [2026-11-22 15:10:{:09.6f}] iteration {:8}/      10 | consumed samples: 16 | lm loss: 6.17E+00 |\n"
_SAVED = "  [2026-11-22 15:10:54.918347] successfully saved checkpoint from iteration {:7} to /out [ t 1/1 ]\n"
BEGAN = judge.datetime.fromisoformat("2026-11-22 15:10:00").timestamp()


def log(first: int, last: int, *, resumed: int | None = None, end: str = "") -> str:
    text = "" if resumed is None else f"> resuming from iteration {resumed} in /out/checkpoints\n"
    for step in range(first, last + 1):
        text += _LINE.format(float(step), step) + (_SAVED.format(step) if step % SAVE_INTERVAL == 0 else "")
    return text + end


def told(text: str, status: int = 0) -> judge.Told:
    return judge.told(text, began=BEGAN, status=status)


STRUCK = told(log(1, 5, end="error: rank 1 was ended by SIGKILL\n"), 137)


class TestLosses:
    def test_what_a_log_tells(self) -> None:
        assert (STRUCK.reached, STRUCK.saved, STRUCK.resumed) == (5, 3, None)
        assert STRUCK.said == "error: rank 1 was ended by SIGKILL" and STRUCK.first_step == BEGAN + 1
        assert told("Traceback\nValueError: no\nmore\n", 1).said == "ValueError: no"
        assert told(f"> /out: {STEPS} iterations are done, so there is nothing to do\n").resumed == STEPS

    def test_the_steps_since_the_last_save_and_no_more(self) -> None:
        loss = judge.losses([STRUCK, told(log(4, 10, resumed=3))])
        assert (loss.reached, loss.resumed, loss.lost, loss.wrong) == (5, 3, 2, ())
        assert judge.seconds_to_go_on([told("", 137), told(log(4, 10, resumed=3))]) == 4.0

    def test_a_restart_at_0_is_told(self) -> None:
        loss = judge.losses([STRUCK, told(log(1, 10))])
        assert loss.wrong == ("starts at step 0 although the checkpoint of step 3 was saved",) and loss.lost == 5


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    folder = tmp_path_factory.mktemp("faults")
    return Campaign(folder, folder / "faults.csv", keep=True)


QUICK = [
    Fault("one", "exception", "in a save", 0),
    Fault("tp2-sp", "sigkill", "twice in a row", 0),
    Fault("pp2", "sigterm", "random", 0, then="one"),
    Fault("cp2", "sigsegv", "in a resume", 0),
    Fault("dp2", "full-disk", "in a save", 0),
    Fault("dp2", "sigkill", "last step", 0),
    Fault("ep2", "rerun", "random", 0),
    Fault("one", "sigkill", "in a save", 0, COMMAND),
]


@pytest.mark.slow
@pytest.mark.megatron
@pytest.mark.parametrize("fault", QUICK, ids=lambda fault: fault.name)
def test_a_run_goes_on_as_if_nothing_had_been(fault: Fault, bench: Campaign) -> None:
    if fault.kind in OF_A_DISK and not disks.are_allowed():
        pytest.skip("only root may mount a small disk here")
    (found,) = bench.run([fault])
    assert not found.wrong, (found, bench.work)
    if fault.then:  # a step less, and it would be told
        digests = json.loads((bench.work / "undisturbed" / fault.layout / campaign._DIGESTS).read_text())
        output = bench.work / "runs" / fault.name / "output"
        before = output / "checkpoints" / f"iter_{STEPS - 1:07d}"
        if before.is_dir():
            last = judge.newest(bench.work / "undisturbed" / fault.layout / "output")
            assert judge.distance(last, before) > judge.ROUNDING and digests
