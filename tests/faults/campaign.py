# SPDX-License-Identifier: Apache-2.0
"""Many faults, each judged against the undisturbed run of its layout: a row for each, in a CSV that can go on."""

import csv
import fcntl
import json
import re
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from benchmarks import records
from tests.faults import disks, judge
from tests.faults.faults import HANGS, OF_A_DISK, Fault
from tests.faults.layouts import LAYOUTS, SAVE_INTERVAL
from tests.faults.life import Life, Runner
from tests.faults.starts import SHARED
from tests.faults.strike import FROM_OUTSIDE, NONE

_ATTEMPTS = 4
_TIMEOUT = re.compile("timed? ?out", re.IGNORECASE)
_DIGESTS = "digests.json"


@dataclass(frozen=True)
class Row:
    """A fault and what came of it: `what` is where it struck, `lost` the steps done again, `left` the processes that
    outlived the run, `wrong` what must not be."""

    layout: str
    then: str
    kind: str
    moment: str
    seed: int
    way: str
    what: str
    status: int
    reached: int
    resumed: int
    lost: int
    starts: int
    said: str
    seconds: float
    left: int
    equal: str
    wrong: str
    commit: str


class Campaign:
    """Runs faults in folders of its own below `work`; a fault with a row in `results`, a CSV, is not run again."""

    def __init__(self, work: Path, results: Path, *, keep: bool = False) -> None:
        self.work, self.results, self.keep = work.resolve(), results, keep
        self.commit = records.surroundings()["commit"]

    def run(self, faults: Iterable[Fault], jobs: int = 1) -> list[Row]:
        """Those that have no row yet."""
        done = {name_of(row) for row in read(self.results)}
        waiting = [fault for fault in faults if fault.name not in done and self._is_possible(fault)]
        if not waiting:
            return []
        text = self.text()
        for layout in dict.fromkeys(fault.layout for fault in waiting):
            self.undisturbed(layout, text)
        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(lambda fault: self._one(fault, text), waiting))

    def _is_possible(self, fault: Fault) -> bool:
        if fault.kind in OF_A_DISK and not disks.are_allowed():
            print(f"{fault.name}: left out, since only root may mount a disk")
            return False
        return True

    def text(self) -> Path:
        from tests.megatron.text import make_corpus

        return make_corpus(self.work / "text").directory

    def undisturbed(self, layout: str, text: Path) -> Path:
        """The last checkpoint of the run that nothing struck; made once."""
        folder = self.work / "undisturbed" / layout
        output = folder / "output"
        if not (folder / _DIGESTS).exists():
            life = Runner(Fault(layout, NONE, "", 0, SHARED), folder, text).live()
            if not life.has_ended or len(life.starts) != 1:
                raise RuntimeError(f"the undisturbed run of {layout} did not end: see {folder}")
            (folder / _DIGESTS).write_text(json.dumps(judge.bits(judge.newest(output)), indent=1))
        return judge.newest(output)

    def _one(self, fault: Fault, text: Path) -> Row:
        folder = self.work / "runs" / fault.name
        for attempt in range(_ATTEMPTS):
            life = Runner(fault, folder, text).live(attempt)
            if life.struck:
                break
        row = self.judged(fault, life)
        append(self.results, asdict(row))
        print(as_line(row), flush=True)
        if not row.wrong and not self.keep:
            shutil.rmtree(folder, ignore_errors=True)
        return row

    def judged(self, fault: Fault, life: Life) -> Row:
        loss = judge.losses(life.starts)
        equal, wrong = self._compared(fault, life)
        blow = life.starts[life.blow]
        wrong += [*loss.wrong, *complaints(fault, life, loss)]
        seconds = judge.seconds_to_go_on(life.starts[life.blow + 1 :])
        what = json.loads(life.struck[-1])["what"] if life.struck else ""
        return Row(
            fault.layout, fault.then, fault.kind, fault.moment, fault.seed, fault.way, what, blow.status, loss.reached,
            loss.resumed, loss.lost, len(life.starts), blow.said, round(seconds, 1), life.left, equal,
            "; ".join(wrong), self.commit,
        )  # fmt: skip

    def _compared(self, fault: Fault, life: Life) -> tuple[str, list[str]]:
        """How the final weights compare, in words, and what is wrong with them."""
        if not life.has_ended:
            return "no", ["the run did not come to its end"]
        try:
            return self._compared_bits(fault, judge.newest(life.output))
        except (Exception, CheckpointException) as error:  # torch raises errors of any type for a damaged checkpoint
            return "no", [f"{type(error).__name__}: {error}"]

    def _compared_bits(self, fault: Fault, checkpoint: Path) -> tuple[str, list[str]]:
        folder = self.work / "undisturbed" / fault.layout
        if fault.then:
            apart = judge.distance(judge.newest(folder / "output"), checkpoint)
            return f"{apart:.1e}", [] if apart <= judge.ROUNDING else [f"weights are {apart:.1e} away"]
        differ = judge.differences(json.loads((folder / _DIGESTS).read_text()), judge.bits(checkpoint))
        return ("no", [f"other bits in {', '.join(differ[:3])}"]) if differ else ("yes", [])


def complaints(fault: Fault, life: Life, loss: judge.Loss) -> list[str]:
    wrong = []
    if not life.struck:
        wrong.append("nothing struck")
    if loss.lost > SAVE_INTERVAL:
        wrong.append(f"{loss.lost} steps lost, and every {SAVE_INTERVAL}rd saves")
    if life.left:
        wrong.append(f"{life.left} processes outlived the run")
    wrong += [silence] if (silence := _silence(fault, life)) else []
    half = len(life.passes) // 2
    if fault.kind == "rerun" and (not half or life.passes[:half] != life.passes[half:]):
        wrong.append("SimReg's value of the second pass is another one")
    return wrong


def _silence(fault: Fault, life: Life) -> str:
    """Return whether a rank that could have logged an error did not: not a lost node, nor a single hanging process."""
    hangs, alone = fault.kind in HANGS, LAYOUTS[fault.layout].processes == 1
    if not life.starts or fault.kind in FROM_OUTSIDE or (hangs and alone):
        return ""
    blow = life.starts[life.blow]
    if hangs and not _TIMEOUT.search(blow.said):
        return "no timeout spoke"
    return "no error was logged" if blow.status and not blow.said else ""


def as_line(row: Row) -> str:
    verdict = row.wrong or f"equal {row.equal}, {row.lost} steps lost, {row.seconds:.0f} s"
    return f"{name_of(asdict(row)):60} {verdict}"


def name_of(row: dict[str, Any]) -> str:
    return Fault(row["layout"], row["kind"], row["moment"], int(row["seed"]), row["way"], row["then"]).name


def read(results: Path) -> list[dict[str, str]]:
    return records.read(results) if results.is_file() else []


def append(results: Path, row: dict[str, Any]) -> None:
    """Append one whole line, also if other processes write."""
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a", newline="") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if file.tell() == 0:
            writer.writeheader()
        writer.writerow(row)
