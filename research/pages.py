# SPDX-License-Identifier: Apache-2.0
"""The tables behind docs/evidence.md, made of benchmarks/results/evidence alone: claims, search, neighbours."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, stdev
from typing import NamedTuple

from benchmarks.records import RESULTS
from research.analyse import HELD, NOT_SHOWN, OPPOSITE, Verdict, holm, judge, problems, welch
from research.tables import KEPT, Row, Table, read_tables


class Claimed(NamedTuple):
    """A sentence, and the claims of a plan that decide it."""

    says: str
    source: str
    experiment: str = ""
    claims: tuple[int, ...] = ()  # of that plan, from 0: where they hold, so does this sentence
    refuting: tuple[int, ...] = ()  # of that plan, from 0: where they hold, this sentence does not
    untestable: str = ""  # why no experiment at these sizes could decide it


OF_THE_PAPER = (
    Claimed("a lower validation loss after the same tokens", "Figure 3", "convergence", (0, 1)),
    Claimed("convergence over 30 % faster, read as 30 % fewer tokens to the same loss", "abstract", "saving", (0,)),
    Claimed("... with 10 or 20 % fewer tokens", "abstract", "fewer", (0, 1)),
    Claimed("the gain lasts in longer training, over baselines tuned for the shortest", "Figure 3", "horizon", (0,)),
    Claimed("chunks end where whole sequences end (at width 32: lower)", "Table 1", "convergence", refuting=(2,)),
    Claimed("the size of a chunk matters", "announced", "chunks", (0,)),
    Claimed("a temperature of 0.01 is better than 0.1", "Tables 6, 8", "sweep", (0,)),
    Claimed("lambda = 10 sqrt(width / 1024) gains at these widths, too", "Table 7", "scaling", (0,)),
    Claimed("the last layer's states are the right ones", "Figure 5", "layers", (0,)),
    Claimed("better than SimCSE, CPretrain, CReg, SCE (not tuned: one weight)", "Table 1", "baselines", (0, 1, 2, 3)),
    Claimed("states become less alike", "Figures 1, 7, 8", "similarity", (0, 2)),
    Claimed("states of the same label become more alike", "Figure 1", "similarity", (1,)),
    Claimed("larger margins, also of the hardest tokens", "Lemma 1, Figure 2a", "histogram", (0, 1)),
    Claimed(
        "cross-entropy alone stops lowering the SimReg loss", "Figure 2b",
        untestable="the authors' loss stops falling after billions of tokens",
    ),
    Claimed("with SimReg that loss ends lower", "Figure 2b", "plateau", (1,)),
    Claimed("a gain with mixtures of experts, too", "Table 2", "moe", (0,)),
    Claimed("almost no cost in time", "Table 3", "runtime", (0, 1)),
    Claimed(
        "over 1 point better zero-shot accuracy", "Tables 1, 2",
        untestable="models of this size answer the nine tasks no better than chance",
    ),
)  # fmt: skip
BEYOND_THE_PAPER = (
    Claimed("a lower loss after 70 % of the tokens than a baseline of that length", "ours", "saving", (1,)),
    Claimed("... and than such a baseline at lower rates", "ours", "shortened", (0, 1)),
    Claimed("a gain in training four times as long, also over baselines at lower rates", "ours", "lengthened", (0, 1)),
    Claimed(
        "better than a placebo (three of the five seeds below) and than simpler means", "ours", "controls", (0, 1, 2, 3)
    ),
    Claimed("a placebo with permuted labels changes nothing", "ours", "controls", refuting=(4,)),
    Claimed("larger margins than without it and with a placebo", "ours", "controls", (5, 6)),
    Claimed("the right labels add to what permuted ones gain", "ours", "labels", (0, 1)),
    Claimed("permuted labels alone gain something", "ours", "labels", (2, 3)),
    Claimed("SimReg is better than SimReg without labels at width 32", "ours", "self", (0, 1)),
    Claimed("... and without labels another result than with permuted ones", "ours", "self", (2,)),
    Claimed("without labels it gains something", "ours", "self", (3,)),
    Claimed("a larger initialisation lets cross-entropy end lower", "ours", "initialisation", (0,)),
    Claimed("a gain over cross-entropy where both have the larger initialisation", "ours", "initialisation", (1,)),
    Claimed("... and over it where SimReg alone has the preset's", "ours", "initialisation", (2,)),
    Claimed("a gain where both are tuned in rate, initialisation and warm-up", "ours", "started", (0,)),
    Claimed("... also with lambda 1 (the authors' rule asks for 1.77)", "ours", "started", (1,)),
    Claimed("... and where the search went on beyond its first edge", "ours", "confirmed", (0, 1)),
    Claimed("... and at width 64, by the rule and with lambda 1", "ours", "confirmed64", (0, 1)),
    Claimed("... and there where that search went on beyond its edges", "ours", "settled64", (0, 1)),
    Claimed("states become less alike at equal learning rates", "ours", "geometry", (0, 1)),
    Claimed("... and their isotropy rises", "ours", "geometry", (2, 3)),
    Claimed("states of rare labels become longer or shorter", "ours", "histogram", (2,)),
    Claimed("lambda 1 ends lower than lambda 10 (the authors' rule asks for 2.5)", "ours", "sweep", (1,)),
    Claimed("SimReg is needed after the first half of the training", "ours", "schedule", (0,)),
    Claimed("SimReg in the first quarter alone is a gain", "ours", "schedule", (1,)),
    Claimed("... also at width 96", "ours", "early", (0,)),
    Claimed("... and a larger one there than SimReg throughout", "ours", "early", (1,)),
    Claimed("a lambda that falls to 0 ends like one that stays", "ours", "schedule", refuting=(2,)),
    Claimed("AdaGC is better than the global clip", "ours", "clipping", (0, 1)),
    Claimed("the plugin costs no time where it is off", "ours", "runtime", refuting=(2,)),
    Claimed("the baseline would be better with a higher rate than was searched", "ours", "edge", (0,)),
)
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
    """A line for each claim; several lines in a cell where it has several parts, sizes or lengths."""
    yield "| claim | where | verdict | what was seen: difference (95 % interval), seeds |"
    yield "| --- | --- | --- | --- |"
    sure = surest([verdict for name in tables if not list(problems(name, tables)) for verdict in judge(name, tables)])
    for claimed in (*OF_THE_PAPER, *BEYOND_THE_PAPER):
        if claimed.untestable:
            verdict, seen = "cannot be tested here", claimed.untestable
        elif claimed.experiment not in tables or list(problems(claimed.experiment, tables)):
            verdict, seen = "not tested yet", f"`python -m research run {claimed.experiment}`"
        else:
            found = _verdicts_of(claimed, tables)
            verdict = "; ".join(dict.fromkeys(word.lower() for word, _ in found))
            seen = "<br>".join(_seen(verdict, test_of(verdict) in sure) for _, verdict in found)
        yield f"| {claimed.says} | {claimed.source} | {verdict} | {seen} |"


def test_of(verdict: Verdict) -> tuple[object, ...]:
    """Equal for verdicts on the same numbers, which are one test in all tables."""
    return (verdict.claim.metric, verdict.claim.sign, tuple(verdict.arm), tuple(verdict.than))


def surest(verdicts: Sequence[Verdict]) -> set[tuple[object, ...]]:
    """The tests that are decided when the number of all tests counts (Holm)."""
    tests = {test_of(verdict): verdict.two_sided for verdict in verdicts if not verdict.diverged}
    in_order = sorted(tests, key=lambda test: tests[test])
    return set(in_order[: holm(list(tests.values()))])


def _verdicts_of(claimed: Claimed, tables: Mapping[str, Table]) -> list[tuple[str, Verdict]]:
    """The verdicts that decide a claim, each with what it means for this claim."""
    claims, found = tables[claimed.experiment].plan.claims, judge(claimed.experiment, tables)
    supporting, refuting = ([claims[place] for place in places] for places in (claimed.claims, claimed.refuting))
    decided = [(verdict.word, verdict) for verdict in found if verdict.claim in supporting]
    refuted = [verdict for verdict in found if verdict.claim in refuting]
    return decided + [(_REFUTED.get(verdict.word, verdict.word), verdict) for verdict in refuted]


def _seen(verdict: Verdict, is_sure: bool) -> str:
    claim, (size, length) = verdict.claim, verdict.place
    where = f"width {size}" + ("" if float(length) == 20 else f", {float(length):g} tokens a parameter")
    numbers = f"{len(verdict.arm)} and {len(verdict.than)} seeds"
    if verdict.diverged:
        return f"{claim.says}: {verdict.diverged} of {numbers} diverged, {where}"
    test = verdict.test
    saved = f"; saved: {verdict.saved}" if verdict.saved else ""
    unit = "" if "nats" in verdict.unit else f" {verdict.unit}".rstrip()
    multiple = "" if claim.times == 1 else f" against {claim.times:g} times the other's"
    return (
        f"{claim.says}: {verdict.word.lower()}, {test.difference:+.3f}{unit} ({test.low:+.3f} to {test.high:+.3f})"
        f"{multiple}, p {test.p_value:.2g}{'†' if is_sure else ''}, {numbers}, {where}{saved}"
    )


def search_table(rows: Sequence[Row]) -> Iterator[str]:
    """For each size and learning rate the losses of both arms of the search, the least of each arm in bold."""
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
    """A line for each objective: its end, the difference from cross-entropy, what its states became."""
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
