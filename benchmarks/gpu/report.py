# SPDX-License-Identifier: Apache-2.0
"""The report of `make gpu`, of what its parts left in the folder: what failed, what was measured, how to send it."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import torch

from benchmarks import records, step_pairs, step_profile
from benchmarks.gpu import forms
from benchmarks.gpu.run import ENDED, Outcome
from benchmarks.records import Record, surroundings

PRETENDED = "**Pretended: tiny sizes on a CPU, to try the plumbing. No number here says anything of a GPU.**"
PASS, FAIL, SKIP = "pass", "fail", "skip"
_PACKAGES = ("triton", "transformer-engine", "apex")
_TORCHRUN = "distributed/elastic/multiprocessing/api.py"  # its first line; a screen of others follows
_RESULTS = {"failure": FAIL, "error": FAIL, "skipped": SKIP}  # of two, the first counts
_LOGGED = re.compile(r"iteration +(\d+)/.*?per iteration \(ms\): *([\d.]+).*?lm loss: (\S+)")
_SEND = """
## Send it

Every report helps, failures most of all. Paste this page into the issue form "Results from a GPU" and attach the CSV
files, or add the folder as `benchmarks/results/gpu/NAME-OF-THE-GPU` in a pull request. Read it first: the ends of logs
may hold names of your folders."""


def facts() -> dict[str, Any]:
    """Describe this machine by name and value; `doctor` describes what can be imported."""
    installed = {dist.name.replace("_", "-"): dist.version for dist in metadata.distributions()}
    query = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    try:
        gpus = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        gpus = f"unknown: {type(error).__name__}"
    return {
        **surroundings(), "GPUs, memory, driver": gpus, "CUDA": torch.version.cuda,
        "cuDNN": torch.backends.cudnn.version(), **{name: installed.get(name, "not installed") for name in _PACKAGES},
    }  # fmt: skip


class Case(NamedTuple):
    """One of pytest's; `reason`: why it was skipped, or the first line of its failure."""

    name: str
    result: str
    seconds: float
    reason: str = ""


def tests(path: Path) -> list[Case]:
    """Read a junit file; a test that failed and then failed in its teardown, too, is one failure."""
    cases: dict[str, Case] = {}
    try:
        for case in ElementTree.parse(path).iter("testcase"):  # noqa: S314  (pytest wrote it, a moment ago)
            name = "::".join(filter(None, (case.get("classname", "").rpartition(".")[2], case.get("name", ""))))
            end = next((child for tag in _RESULTS for child in case.iter(tag)), None)
            result = PASS if end is None else _RESULTS[end.tag]
            reason = "" if end is None else (end.get("message") or end.text or "").strip().split("\n")[0][:300]
            if name not in cases or cases[name].result != FAIL:
                cases[name] = Case(name, result, float(case.get("time", "0")), reason)
    except FileNotFoundError:
        return []
    except ElementTree.ParseError as error:  # pytest was killed while it wrote
        return [Case(path.name, FAIL, 0.0, f"the file is not whole: {error}")]
    return list(cases.values())


def lines(path: Path) -> list[Record]:
    """Read a CSV file; of one that was still being written, the lines that it has."""
    source = path if path.exists() else path.with_name(f"{path.name}.part")
    return records.read(source) if source.exists() else []


def training(log: Path) -> tuple[str, ...]:
    """First and last logged step of a run with their language-model losses, and ms of the last; empty if none is."""
    lines = _LOGGED.findall(log.read_text(encoding="utf-8", errors="replace")) if log.exists() else []
    return (lines[0][0], lines[0][2], lines[-1][0], lines[-1][2], lines[-1][1]) if lines else ()


def tail(path: Path, count: int = 60) -> str:
    """The last lines of a log, without what progress bars wrote over and what torchrun says of a rank that failed."""
    if not path.exists():
        return "no log"
    text = path.read_bytes().decode("utf-8", errors="replace")  # read as text, a return would be a new line
    before, failed, _ = text.partition(_TORCHRUN)
    text = (before.rpartition("\n")[0] if failed else text).strip()
    return "\n".join(line.rpartition("\r")[2][:300] for line in text.split("\n")[-count:])


class Report:
    """The page OUTPUT/report.md, written again for each outcome.

    Attributes:
        failed: whether a test or a part failed.
    """

    def __init__(self, output: Path, *, pretend: bool) -> None:
        self.output, self.pretend, self.failed = output, pretend, True
        self._outcomes: list[Outcome] = []
        self._machine = facts()
        (output / "machine.json").write_text(json.dumps(self._machine, indent=1) + "\n", encoding="utf-8")

    def add(self, outcome: Outcome) -> None:
        print(f"{outcome.name}: {outcome.state}, {outcome.seconds:.0f} s", flush=True)
        self._outcomes.append(outcome)
        cases = {one.name: tests(self.output / f"{one.name}.xml") for one in self._outcomes}
        bad = [one for one in self._outcomes
               if one.state != ENDED or any(case.result == FAIL for case in cases[one.name])]  # fmt: skip
        self.failed = bool(bad)
        page = "\n".join(self._page([case for its in cases.values() for case in its], bad)) + "\n"
        (self.output / "report.md").write_text(page, encoding="utf-8")

    def _page(self, cases: Sequence[Case], bad: Sequence[Outcome]) -> Iterator[str]:
        yield f"# {self._machine['machine']}, simreg-megatron at {self._machine['commit']}"
        yield from ("", PRETENDED) if self.pretend else ()
        yield from ("", *_table(("machine", ""), self._machine.items()), "")
        counts = (f"{sum(case.result == kind for case in cases)} {kind}" for kind in (PASS, FAIL, SKIP))
        ended = sum(one.state == ENDED for one in self._outcomes)
        yield f"Tests: {', '.join(counts)}. {ended} of {len(self._outcomes)} parts ran to their end."
        yield from ("", "## Failed", "", *(() if bad else ("Nothing.",)))
        for one in bad:
            yield from (f"`{one.name}` {one.state}, status {one.status}, {one.seconds:.0f} s. The end of its log:", "")
            yield from ("~~~~text", tail(self.output / f"{one.name}.log").replace("~~~~", "~~~"), "~~~~", "")
        logs = {one.name: self.output / f"{one.name}.log" for one in self._outcomes}
        runs = ((name, *values) for name, log in logs.items() if (values := training(log)))
        yield from ("", "## Trainings", "", *_table(("run", "step", "lm loss", "step", "lm loss", "ms"), runs))
        yield from self._measured()
        yield from ("", "## Tests", "", "<details><summary>All</summary>", "")
        rows = ((f"`{case.name}`", case.result, f"{case.seconds:.1f}", case.reason) for case in cases)
        yield from (*_table(("test", "result", "s", "reason"), rows), "", "</details>", "", "## Parts", "")
        yield from _table(("part", "state", "s"), ((x.name, x.state, f"{x.seconds:.0f}") for x in self._outcomes))
        yield _SEND

    def _measured(self) -> Iterator[str]:
        measured = {one.name: its for one in self._outcomes if (its := lines(self.output / f"{one.name}.csv"))}
        of_forms = [line for name, its in measured.items() if name.startswith("forms-") for line in its]
        if of_forms:
            sizes = list(dict.fromkeys(line["size"] for line in of_forms))
            of_forms.sort(key=lambda line: sizes.index(line["size"]))
            yield from ("", "## Forms of the loss", "", *_made(forms.table, of_forms))
        for name, its in measured.items():
            if name.startswith("pairs"):
                profile = self.output / f"{name}.profile.json"
                profiles = json.loads(profile.read_text(encoding="utf-8")) if profile.exists() else []
                yield from ("", f"## {name}", "", *_made(step_pairs.table, its), "")
                yield from _made(step_profile.table, profiles)


def _made(table: Callable[[list[Any]], Iterable[str]], rows: list[Any]) -> list[str]:
    """The table; of rows that a part broke off, it may be impossible, which ends nothing else."""
    try:
        return list(table(rows))
    except Exception as error:
        return [f"No table of {len(rows)} rows: {type(error).__name__}: {error}"]


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * len(head)}"
    for row in rows:
        cells = (" ".join(str(cell).replace("|", "\\|").split()) for cell in row)  # in one line
        yield f"| {' | '.join(cells)} |"
