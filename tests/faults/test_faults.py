# SPDX-License-Identifier: Apache-2.0
"""The harness tells a lost step, a wrong bit and a restart at 0; a handful of faults on real runs, one of each sort."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.faults import campaign, disks, judge
from tests.faults.campaign import Campaign, complaints
from tests.faults.faults import OF_A_DISK, Fault
from tests.faults.layouts import SAVE_INTERVAL, STEPS
from tests.faults.life import Life
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

    def test_an_older_checkpoint_is_told(self) -> None:
        later = told(log(4, 8, resumed=3), 137)
        loss = judge.losses([STRUCK, later, told(log(4, 10, resumed=3))])
        assert loss.wrong == ("goes on at step 3 although the checkpoint of step 6 was saved",)

    def test_a_refused_start_loses_nothing(self) -> None:
        refused = told("error: /out is in use by another run (process 7 on here): end that one first\n", 2)
        assert refused.refused and judge.losses([STRUCK, refused, told(log(4, 10, resumed=3))]).wrong == ()

    def test_complaints(self) -> None:
        fault = Fault("one", "sigkill", "random", 0)
        sound = judge.losses([STRUCK, told(log(4, 10, resumed=3))])
        assert complaints(fault, Life(Path(), struck=["{}"]), sound) == []
        assert complaints(fault, Life(Path()), sound) == ["nothing struck"]
        lost, left = replace(sound, lost=SAVE_INTERVAL + 1), Life(Path(), struck=["{}"], left=1)
        assert len(complaints(fault, left, lost)) == 2
        silent = Life(Path(), starts=[replace(STRUCK, said="")], struck=["{}"])
        assert complaints(fault, silent, sound) == ["nobody said a word"]
        assert complaints(replace(fault, kind="node"), silent, sound) == []
        hung = replace(fault, layout="pp2", kind="gil")
        spoken = Life(Path(), starts=[replace(STRUCK, said="RuntimeError: Timed out waiting 60000ms")], struck=["{}"])
        assert complaints(hung, spoken, sound) == []
        assert complaints(hung, Life(Path(), starts=[STRUCK], struck=["{}"]), sound) == ["no timeout spoke"]
        doubted = Fault("one", "rerun", "random", 0)
        assert complaints(doubted, Life(Path(), struck=["{}"], passes=("a", "b", "a", "b")), sound) == []
        for passes in ((), ("a", "b"), ("a", "b", "a", "c")):
            assert complaints(doubted, Life(Path(), struck=["{}"], passes=passes), sound)


class TestBits:
    def test_one_bit_in_one_weight_is_told(self) -> None:
        weight = torch.arange(6, dtype=torch.float32).view(2, 3)
        wrong = weight.clone()
        wrong.view(torch.int32)[1, 2] ^= 1
        assert judge._digest(weight) == judge._digest(weight.clone()) != judge._digest(wrong)
        assert judge._digest(torch.zeros(2)) != judge._digest(-torch.zeros(2)), "the sign of a zero, too"
        assert judge._digest(weight) != judge._digest(weight.view(3, 2))


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
