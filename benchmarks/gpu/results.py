# SPDX-License-Identifier: Apache-2.0
"""What the parts of `make gpu` left in its folder, read back: tests, lines of the benchmarks, ends of logs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from benchmarks import records, step_pairs
from benchmarks.gpu.forms import PRODUCTS
from benchmarks.records import Record
from simreg_megatron.report.steps import overhead

PASS, FAIL, SKIP = "pass", "fail", "skip"
AIM_OF_STEP = 1.0  # percent over plain Megatron, of the 350M model, which is measured
_TORCHRUN = "distributed/elastic/multiprocessing/api.py"  # its first line; a screen of others follows
_RESULTS = {"failure": FAIL, "error": FAIL, "skipped": SKIP}


@dataclass(frozen=True)
class Case:
    """One of pytest's. `reason` is why it was skipped or the one line of its failure; `detail` all that pytest says."""

    name: str
    result: str
    seconds: float
    reason: str = ""
    detail: str = ""


def tests(path: Path) -> list[Case]:
    """Of a junit file; a test that failed and then failed in its teardown, too, is one failure.

    Raises:
        ElementTree.ParseError: pytest was killed while it wrote the file.
    """
    found: dict[str, Case] = {}
    for case in ElementTree.parse(path).iter("testcase"):  # noqa: S314  (pytest wrote it, a moment ago)
        test = _test(case)
        if found.get(test.name, test).result != FAIL or test.name not in found:
            found[test.name] = test
    return list(found.values())


def _test(case: ElementTree.Element) -> Case:
    name = "::".join(filter(None, (case.get("classname", "").rpartition(".")[2], case.get("name", ""))))
    seconds = float(case.get("time", "0"))
    told = sorted((child for child in case if child.tag in _RESULTS), key=lambda child: _RESULTS[child.tag] != FAIL)
    if not told:
        return Case(name, PASS, seconds)
    message = (told[0].get("message") or told[0].text or "").strip()
    return Case(name, _RESULTS[told[0].tag], seconds, message.split("\n")[0][:300], (told[0].text or message).strip())


def lines(path: Path) -> list[Record]:
    """Of a CSV file; of one that was still being written, those that it has."""
    part = path.with_name(f"{path.name}.part")
    source = path if path.exists() else part
    return records.read(source) if source.exists() else []


@dataclass(frozen=True)
class Slow:
    """A measurement beyond its aim."""

    what: str
    measured: str
    aim: str


def slow_forms(found: Iterable[Record]) -> Iterator[Slow]:
    """Forms that take longer than the products that a plain square of the same pairs would; the reference may."""
    for line in found:
        if not line["seconds"] or line["form"] == "reference":
            continue
        seconds, products = float(line["seconds"]), PRODUCTS[line["pass"]]
        limit = products * float(line["product_seconds"])
        if seconds > limit:
            aim = f"{1e3 * limit:.3f} ms: {products} plain square product{'s' if products > 1 else ''} of its pairs"
            yield Slow(f"{line['form']}, {line['size']}, {line['pass']}", f"{1e3 * seconds:.3f} ms", aim)


def slow_steps(name: str, found: list[Record]) -> Iterator[Slow]:
    """Kinds of steps that take clearly more than the aim over plain Megatron, by the clock of the wall."""
    for kind in dict.fromkeys(line["kind"] for line in found):
        steps = [line for line in found if line["kind"] == kind]
        if len(steps) < step_pairs.WINDOW:
            continue
        over = overhead(*step_pairs.windows_of(steps, "seconds", logged=False))
        if over.percent > AIM_OF_STEP:
            measured = f"{over.percent:+.2f} % (95 %: {over.low:+.2f} to {over.high:+.2f})"
            yield Slow(f"{name}: {kind}, steps without a log line", measured, f"{AIM_OF_STEP} % over plain Megatron")


def tail(path: Path, count: int = 40) -> str:
    """The last lines of a log, without what progress bars wrote over and what torchrun says of a rank that failed."""
    if not path.exists():
        return "no log"
    text = path.read_bytes().decode("utf-8", errors="replace")  # read as text, a return would be a new line
    before, failed, _ = text.partition(_TORCHRUN)
    text = (before.rpartition("\n")[0] if failed else text).strip()
    return "\n".join(line.rpartition("\r")[2][:300] for line in text.split("\n")[-count:])
