# SPDX-License-Identifier: Apache-2.0
"""The harness tells a lost step, a wrong bit and a restart at 0; a handful of faults on real runs, one of each sort."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from tests.faults import campaign, disks, judge, table
from tests.faults.campaign import Campaign, Row, complaints
from tests.faults.faults import MOMENTS, OF_A_DISK, Fault, drawn, strikes
from tests.faults.layouts import LAYOUTS, SAVE_INTERVAL, STEPS
from tests.faults.life import Life
from tests.faults.starts import COMMAND, SHARED

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

    def test_names_that_differ(self) -> None:
        assert judge.differences({"a": "1", "b": "2"}, {"a": "1", "b": "2"}) == []
        assert judge.differences({"a": "1", "b": "2"}, {"a": "3", "c": "2"}) == ["a", "b", "c"]

    def test_apart(self) -> None:
        weight = torch.ones(4)
        assert judge._apart(weight, weight) == 0 and judge._apart(weight, weight * 1.01) > judge.ROUNDING
        assert judge._apart(weight, torch.full((4,), float("nan"))) == judge._apart(weight, weight[:2]) == float("inf")


class TestList:
    def test_every_kind_at_every_moment_in_every_layout(self) -> None:
        faults = drawn(220)
        assert len({fault.name for fault in faults}) == 220 and faults == drawn(220)
        assert {(fault.kind, fault.moment) for fault in faults if not fault.then} == {
            (kind, moment) for kind, moments in MOMENTS.items() for moment in moments
        }
        assert {fault.layout for fault in faults} == set(LAYOUTS)
        assert {fault.then for fault in faults} - {""} == {then for one in LAYOUTS.values() for then in one.goes_on_in}
        assert {fault.way for fault in faults} == {COMMAND, SHARED}

    @pytest.mark.parametrize("attempt", [0, 3])
    def test_strikes_are_the_same_for_the_same_fault(self, attempt: int) -> None:
        for fault in drawn(220):
            planned = strikes(fault, "out", "notes", attempt)
            assert planned == strikes(fault, "out", "notes", attempt) and planned[-1].kind == fault.kind
            assert all(strike.rank < LAYOUTS[fault.layout].processes for strike in planned)
            assert len(planned) == (2 if fault.moment in ("in a resume", "twice in a row") else 1)


def row(fault: Fault, **more: object) -> Row:
    values = {
        "what": "step 5", "status": 137, "reached": 5, "resumed": 3, "lost": 2, "starts": 2, "said": "error: no | yes",
        "seconds": 9.0, "left": 0, "equal": "yes", "wrong": "", "commit": "abc",
    }  # fmt: skip
    where = {name: getattr(fault, name) for name in ("layout", "then", "kind", "moment", "seed", "way")}
    return Row(**{**where, **values, **more})


class TestRows:
    def test_a_fault_that_has_a_row_is_not_run_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        done, other = Fault("one", "sigkill", "random", 0), Fault("one", "gil", "in a save", 1)
        results = tmp_path / "faults.csv"
        campaign.append(results, asdict(row(done)))
        ran: list[Fault] = []
        monkeypatch.setattr(Campaign, "text", lambda self: tmp_path)
        monkeypatch.setattr(Campaign, "undisturbed", lambda self, layout, text: tmp_path)
        monkeypatch.setattr(Campaign, "_one", lambda self, fault, text: ran.append(fault))
        Campaign(tmp_path, results).run([done, other])
        assert ran == [other]

    def test_what_was_wrong_runs_again_and_is_kept_beside(self, tmp_path: Path) -> None:
        results, faults = tmp_path / "faults.csv", drawn(3)
        for number, fault in enumerate(faults):
            campaign.append(results, asdict(row(fault, wrong="other bits" * (number == 1))))
        Campaign(tmp_path, results).forget_wrong()
        assert [campaign.name_of(each) for each in campaign.read(results)] == [faults[0].name, faults[2].name]
        (kept,) = campaign.read(tmp_path / "faults.wrong.csv")
        assert campaign.name_of(kept) == faults[1].name

    def test_the_table(self) -> None:
        faults = [Fault("one", "sigkill", "random", 0, COMMAND), Fault("one", "sigkill", "random", 1)]
        moved = replace(faults[0], then="pp2")
        rows = [
            row(faults[0]), row(faults[1], wrong="other bits", lost=7), row(moved, equal="1.0e-06"),
        ]  # fmt: skip
        lines = list(table.table([{key: str(value) for key, value in vars(each).items()} for each in rows]))
        assert lines[2] == "| sigkill | 1 of 2 | 0 | 0 | 0 | 0 | 0 | 7 | 9 | error: no / yes |"
        assert lines[3] == "| in another layout | 1 | 0 | 0 | 0 | 0 | 0 | 2 | 9 | 1.0e-06 away at most |"
        alone = list(table.table([{key: str(value) for key, value in vars(rows[2]).items()}]))
        assert len(alone) == 3, "a run that goes on elsewhere has a line of its own alone"


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
