# SPDX-License-Identifier: Apache-2.0
"""The tables behind docs/evidence.md, made of benchmarks/results/evidence alone: claims, search, neighbours."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

import yaml

from benchmarks.records import RESULTS
from research.analyse import HELD, NOT_SHOWN, OPPOSITE, Verdict, holm, judge, problems, welch
from research.tables import KEPT, Row, Table, read_tables


class Claimed(NamedTuple):
    """A sentence of claims.yaml, and the claims of a plan that decide it."""

    says: str
    source: str
    experiment: str = ""
    claims: Sequence[int] = ()
    refuting: Sequence[int] = ()
    untestable: str = ""


CLAIMED = [Claimed(**each) for each in yaml.safe_load(Path(__file__).with_name("claims.yaml").read_text("utf-8"))]
_REFUTED = {HELD: OPPOSITE, OPPOSITE: HELD, NOT_SHOWN: "Not refuted"}


def pages(tables: Mapping[str, Table]) -> dict[str, str]:
    """Make the pages of benchmarks/results: the text of each by its name."""
    lines = {
        "claims": claims_table(tables),
        "search": search_table(tables["tuning"].rows),
        "neighbours": neighbours_table(tables["objectives"]),
    }
    return {name: "\n".join(own) + "\n" for name, own in lines.items()}


def write_pages() -> None:
    for name, text in pages(read_tables(KEPT)).items():
        (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")


def claims_table(tables: Mapping[str, Table]) -> Iterator[str]:
    """Write a line for each claim; several lines in a cell if it has several parts, sizes or lengths."""
    yield "| claim | where | verdict | what was seen: difference (95 % interval), seeds |"
    yield "| --- | --- | --- | --- |"
    sure = surest([verdict for name in tables if not list(problems(name, tables)) for verdict in judge(name, tables)])
    for claimed in CLAIMED:
        if claimed.untestable:
            verdict, seen = "cannot be tested here", claimed.untestable
        elif claimed.experiment not in tables or list(problems(claimed.experiment, tables)):
            verdict, seen = "not tested yet", f"`python -m research run {claimed.experiment}`"
        else:
            verdicts = _verdicts_of(claimed, tables)
            verdict = "; ".join(dict.fromkeys(word.lower() for word, _ in verdicts))
            seen = "<br>".join(_seen(verdict, test_of(verdict) in sure) for _, verdict in verdicts)
        yield f"| {claimed.says} | {claimed.source} | {verdict} | {seen} |"


def test_of(verdict: Verdict) -> tuple[object, ...]:
    """Equal for verdicts on the same numbers, which are one test in all tables."""
    return (verdict.claim.metric, verdict.claim.sign, tuple(verdict.arm), tuple(verdict.than))


def surest(verdicts: Sequence[Verdict]) -> set[tuple[object, ...]]:
    """Select the tests that are decided when the number of all tests counts (Holm)."""
    tests = {test_of(verdict): verdict.test.p_value for verdict in verdicts if not verdict.diverged}
    in_order = sorted(tests, key=lambda test: tests[test])
    return set(in_order[: holm(list(tests.values()))])


def _verdicts_of(claimed: Claimed, tables: Mapping[str, Table]) -> list[tuple[str, Verdict]]:
    """Find the verdicts that decide a claim, each with what it means for this claim."""
    claims, verdicts = tables[claimed.experiment].plan.claims, judge(claimed.experiment, tables)
    supporting, refuting = ([claims[place] for place in places] for places in (claimed.claims, claimed.refuting))
    decided = [(verdict.word, verdict) for verdict in verdicts if verdict.claim in supporting]
    refuted = [verdict for verdict in verdicts if verdict.claim in refuting]
    return decided + [(_REFUTED.get(verdict.word, verdict.word), verdict) for verdict in refuted]


def _seen(verdict: Verdict, is_sure: bool) -> str:
    claim, (size, length) = verdict.claim, verdict.place
    where = f"width {size}" + ("" if float(length) == 20 else f", {float(length):g} tokens a parameter")
    numbers = f"{len(verdict.arm)} and {len(verdict.than)} seeds"
    if verdict.diverged:
        return f"{claim.says}: {verdict.diverged} of {numbers} diverged, {where}"
    test = verdict.test
    more = f"; saved: {verdict.saved}" if verdict.saved else ""
    unit = "" if "nats" in verdict.unit else f" {verdict.unit}".rstrip()
    multiple = "" if claim.times == 1 else f" against {claim.times:g} times the other's"
    more += f"; {test.detectable:.3f} would be found four times in five" if verdict.word == NOT_SHOWN else ""
    return (
        f"{claim.says}: {verdict.word.lower()}, {test.difference:+.3f}{unit} ({test.low:+.3f} to {test.high:+.3f})"
        f"{multiple}, p {test.p_value:.2g}{'†' if is_sure else ''}, {numbers}, {where}{more}"
    )


def search_table(rows: Sequence[Row]) -> Iterator[str]:
    """Write the losses of both arms of the search by size and learning rate, the least of each arm in bold."""
    second = {"cross-entropy": "weight-decay", "simreg": "simreg-lambda"}

    def flag(row: Row, name: str) -> str:
        return str(re.findall(rf"--{name} (\S+)", row["flags"])[0])

    for number, size in enumerate(dict.fromkeys(row["size"] for row in rows)):
        own = [row for row in rows if row["size"] == size]
        own.sort(key=lambda row: float(flag(row, second[row["arm"]])))
        of = {arm: [row for row in own if row["arm"] == arm] for arm in second}
        heads = []
        for arm, name in second.items():
            values = dict.fromkeys(flag(row, name) for row in of[arm])
            heads.append(f"{arm}, {name.replace('-', ' ')} {', '.join(values)}")
        if number:
            yield ""
        seeds, tokens = ", ".join(sorted({row["seed"] for row in own})), float(own[0]["tokens"]) / 1e6
        yield f"Width {size}, {tokens:.1f} million tokens, seed {seeds}: validation loss in nats per token."
        yield ""
        yield f"| learning rate | {' | '.join(heads)} |"
        yield "| --- | --- | --- |"
        best = {arm: min(float(row["validation_loss"]) for row in of[arm]) for arm in of}
        for rate in sorted({flag(row, "lr") for row in own}, key=float):
            cells = []
            for arm in of:
                losses = [float(row["validation_loss"]) for row in of[arm] if flag(row, "lr") == rate]
                cells.append(", ".join(f"**{loss:.3f}**" if loss == best[arm] else f"{loss:.3f}" for loss in losses))
            yield f"| {rate} | {' | '.join(cells)} |"


def neighbours_table(table: Table) -> Iterator[str]:
    """Write a line for each objective: its end, the difference from cross-entropy, what its states became."""
    heads = (
        "arm", "flags", "validation loss (standard deviation)", "than cross-entropy (95 % interval)", "isotropy",
        "cosine, other labels",
    )  # fmt: skip
    yield f"| {' | '.join(heads)} |"
    yield f"|{' --- |' * len(heads)}"

    def numbers(arm: str, metric: str) -> list[float]:
        return [float(row[metric]) for row in table.rows if row["arm"] == arm]

    for name, arm in table.plan.arms.items():
        own = numbers(name, "validation_loss")
        flags = " ".join(f"--{flag} {value}" for flag, value in arm.flags.items())
        test = welch(own, numbers("cross-entropy", "validation_loss"))
        apart = "" if name == "cross-entropy" else "{:+.4f} ({:+.4f} to {:+.4f})".format(*test[:3])
        measured = (f"{mean(numbers(name, metric)):.3f}" for metric in ("isotropy", "negative_cosine"))
        cells = (name, f"`{flags}`" if flags else "", f"{mean(own):.4f} ({stdev(own):.4f})", apart, *measured)
        yield f"| {' | '.join(cells)} |"
