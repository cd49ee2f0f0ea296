# SPDX-License-Identifier: Apache-2.0
"""The report of `make gpu`: what failed, what is slower than it should be, what passed, and how to send it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu import results
from benchmarks.gpu.parts import MACHINE
from benchmarks.gpu.results import FAIL, PASS, SKIP, Case, Slow
from benchmarks.gpu.run import ENDED, TOO_LONG, Outcome

PRETENDED = "**Pretended: tiny sizes on a CPU, to try the plumbing. No number here says anything of a GPU.**"
_IN_FULL = 10  # failed tests that are told with their traces: an issue holds 65536 characters
_SEND = (
    "Every report helps, failures most of all. Paste this page into the issue form \"Results from a GPU\", and attach",
    "the CSV files beside it; or add the folder as `benchmarks/results/gpu/NAME-OF-THE-GPU` in a pull request. Read it",
    "first: the ends of logs may hold names of your folders.",
)  # fmt: skip


def facts(output: Path) -> dict[str, str]:
    """What the machine said of itself; empty where it could not."""
    try:
        return json.loads((output / f"{MACHINE}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def all_tests(output: Path, outcomes: Iterable[Outcome]) -> list[Case]:
    found: list[Case] = []
    for outcome in outcomes:
        path = output / f"{outcome.name}.xml"
        if path.exists():
            try:
                found += results.tests(path)
            except ElementTree.ParseError as error:
                found.append(Case(f"{outcome.name}.xml", FAIL, 0.0, f"the file is not whole: {error}"))
    return found


def has_failed(output: Path, outcomes: Sequence[Outcome]) -> bool:
    """Whether a test failed, or a part did not run to its end."""
    return any(test.result == FAIL for test in all_tests(output, outcomes)) or not all(
        outcome.state == ENDED for outcome in outcomes
    )


def text(output: Path, outcomes: Sequence[Outcome], *, pretend: bool = False) -> str:
    """The page, of what lies in the folder."""
    tests = all_tests(output, outcomes)
    pages = (
        _head(facts(output), pretend),
        _summary(tests, outcomes),
        _failed(output, tests, outcomes),
        _slow(list(_slow_ones(output, outcomes))),
        _listed("Passed", [test for test in tests if test.result == PASS]),
        _listed("Skipped", [test for test in tests if test.result == SKIP]),
        _forms([line for name in _named(outcomes, "forms-") for line in results.lines(output / f"{name}.csv")]),
        *(_table_of(output / f"{name}.md") for name in _named(outcomes, "pairs", "steps")),
        _parts(outcomes),
        ("## Send it", "", *_SEND),
    )
    return "\n".join("\n".join(page) + "\n" for page in map(list, pages) if page)


def _head(found: dict[str, str], pretend: bool) -> Iterator[str]:
    yield f"# {found.get('GPUs', 'unknown GPUs')}, simreg-megatron at {found.get('commit', 'unknown')}"
    if pretend:
        yield from ("", PRETENDED)
    if found:
        yield from ("", *_table(("machine", ""), found.items()))


def _summary(tests: list[Case], outcomes: Sequence[Outcome]) -> Iterator[str]:
    counts = {result: sum(test.result == result for test in tests) for result in (PASS, FAIL, SKIP)}
    ended = sum(outcome.state == ENDED for outcome in outcomes)
    yield (
        f"Tests: {counts[PASS]} passed, {counts[FAIL]} failed, {counts[SKIP]} skipped. "
        f"{ended} of {len(outcomes)} parts ran to their end."
    )


def _failed(output: Path, tests: list[Case], outcomes: Iterable[Outcome]) -> Iterator[str]:
    yield "## Failed"
    nothing = True
    for outcome in outcomes:
        if outcome.state != ENDED:
            nothing = False
            why = "ran into its time limit" if outcome.state == TOO_LONG else f"ended with status {outcome.status}"
            yield from ("", f"The part `{outcome.name}` {why} after {outcome.seconds:.0f} s. The end of its log:")
            yield from _fenced(results.tail(output / f"{outcome.name}.log"))
    for number, test in enumerate(test for test in tests if test.result == FAIL):
        nothing = False
        yield from ("", f"`{test.name}`: {_plain(test.reason)}")
        if number < _IN_FULL:
            yield from _fenced("\n".join(test.detail.split("\n")[-25:]) or "no more is known")
    if nothing:
        yield from ("", "Nothing.")


def _slow_ones(output: Path, outcomes: Iterable[Outcome]) -> Iterator[Slow]:
    for outcome in outcomes:
        found = results.lines(output / f"{outcome.name}.csv")
        if outcome.name.startswith("forms-"):
            yield from results.slow_forms(found)
        elif outcome.name.startswith("pairs"):
            yield from results.slow_steps(outcome.name, found)


def _slow(found: list[Slow]) -> Iterator[str]:
    yield from ("## Slower than it should be", "")
    if not found:
        yield "Nothing that was measured."
        return
    yield from _table(("what", "measured", "aim"), ((one.what, one.measured, one.aim) for one in found))


def _listed(title: str, tests: list[Case]) -> Iterator[str]:
    yield from (f"## {title}", "")
    if not tests:
        yield "None."
        return
    yield from ("<details><summary>", f"{len(tests)} tests", "</summary>", "")
    yield from _table(
        ("test", "s", "reason"), ((f"`{test.name}`", f"{test.seconds:.1f}", test.reason) for test in tests)
    )
    yield from ("", "</details>")


def _forms(found: list[dict[str, str]]) -> Iterator[str]:
    yield from (
        "## Forms of the loss",
        "",
        "Chunks x tokens x width. Beside one plain product of all pairs of the same",
    )
    yield from ("rows, with which each took turns. MiB are beside the inputs; errors are relative, to float64.", "")
    yield from _table(
        ("form", "size", "pass", "ms", "/ product", "MiB", "error of loss", "of gradient", "remark"), map(_form, found)
    )


def _form(line: dict[str, str]) -> tuple[str, ...]:
    if not line["seconds"]:
        return (line["form"], line["size"], line["pass"], "", "", "", "", "", line["remark"])
    seconds, product = float(line["seconds"]), float(line["product_seconds"])
    errors = (f"{float(line[name]):.0e}" if line[name] else "" for name in ("loss_error", "gradient_error"))
    times = (f"{1e3 * seconds:.3f}", f"{seconds / product:.2f}", f"{int(line['extra_bytes']) / 2**20:.1f}")
    return (line["form"], line["size"], line["pass"], *times, *errors, line["remark"])


def _table_of(path: Path) -> Iterator[str]:
    if path.exists():
        yield from (f"## Steps: {path.stem}", "", *path.read_text(encoding="utf-8").strip().split("\n"))


def _parts(outcomes: Iterable[Outcome]) -> Iterator[str]:
    yield from ("## Parts", "")
    rows = (
        (outcome.name, outcome.state, f"{outcome.seconds:.0f}", "kept from an earlier call" if outcome.kept else "")
        for outcome in outcomes
    )
    yield from _table(("part", "state", "s", ""), rows)


def _named(outcomes: Iterable[Outcome], *begins: str) -> list[str]:
    return [outcome.name for outcome in outcomes if outcome.name.startswith(begins)]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(map(_plain, row))} |"


def _plain(cell: str) -> str:
    """In one line of a table."""
    return " ".join(cell.replace("|", "\\|").split())


def _fenced(words: str) -> Iterator[str]:
    yield from ("", "~~~~text", words.replace("~~~~", "~~~"), "~~~~")
