# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.claims`: the table of docs/evidence.md that says of each claim of the paper what was seen here.

It is made of the tables in benchmarks/results/evidence alone, through the checks of `simreg-megatron report check`: a
claim whose experiment breaks the protocol, or was not run, has no verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import NamedTuple

from benchmarks import records
from benchmarks.records import RESULTS, ROOT
from simreg_megatron.reproduce.check import Table, read_tables, violations
from simreg_megatron.reproduce.conclusion import Together, verdicts_on
from simreg_megatron.reproduce.verdict import HELD, NOT_SHOWN, OPPOSITE, Verdict

FOLDER = RESULTS / "evidence"
PAGE = ROOT / "docs" / "evidence.md"
_USUAL = 20  # tokens a parameter, of nearly every plan


class Claimed(NamedTuple):
    """A sentence, and the claims of a plan that decide it."""

    says: str
    source: str
    experiment: str = ""  # a plan that ships with the package
    claims: tuple[int, ...] = ()  # of that plan's, from 0: where they hold, so does this one
    refuting: tuple[int, ...] = ()  # of that plan's, from 0: where they hold, this one does not
    untestable: str = ""  # why no experiment at these sizes could decide it


OF_THE_PAPER = (
    Claimed("a lower validation loss after the same tokens", "Figure 3", "convergence", (0, 1)),
    Claimed("convergence over 30 % faster, read as 30 % fewer tokens to the same loss", "abstract", "saving", (0,)),
    Claimed("... with 10 or 20 % fewer tokens", "abstract", "fewer", (0, 1)),
    Claimed("the gain lasts in longer training, over baselines tuned for the shortest", "Figure 3", "horizon", (0,)),
    Claimed("chunks end where whole sequences end (at width 32: lower)", "Table 1", "convergence", refuting=(2,)),
    Claimed("the size of a chunk matters", "announced", "chunks", (0,)),
    Claimed("a temperature of 0.01 is better than 0.1", "Tables 6, 8", "sweep", (0,)),
    Claimed("lambda 10, the best at width 1024, is better than 1 here, too", "Tables 6, 8", "sweep", refuting=(1,)),
    Claimed("lambda = 10 sqrt(width / 1024) gains at these widths, too", "Table 7", "scaling", (0,)),
    Claimed("the last layer's states are the right ones", "Figure 5", "layers", (0,)),
    Claimed("better than SimCSE, CPretrain, CReg and SCE, at one weight each", "Table 1", "baselines", (0, 1, 2, 3)),
    Claimed("states become less alike", "Figures 1, 7, 8", "similarity", (0, 2)),
    Claimed("states of the same label become more alike", "Figure 1", "similarity", (1,)),
    Claimed("larger margins, also of the hardest tokens", "Lemma 1, Figure 2a", "histogram", (0, 1)),
    Claimed("cross-entropy alone stops lowering the SimReg loss", "Figure 2b", "plateau", refuting=(0,)),
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
    Claimed("a larger initialisation lets cross-entropy end lower", "ours", "initialisation", (0,)),
    Claimed("a gain over cross-entropy where both have the larger initialisation", "ours", "initialisation", (1,)),
    Claimed("... and over it where SimReg alone has the preset's", "ours", "initialisation", (2,)),
    Claimed("states of rare labels become longer or shorter", "ours", "histogram", (2,)),
    Claimed("SimReg is needed after the first half of the training", "ours", "schedule", (0,)),
    Claimed("SimReg in the first quarter alone is a gain", "ours", "schedule", (1,)),
    Claimed("... also at width 96", "ours", "early", (0,)),
    Claimed("... and a larger one there than SimReg throughout", "ours", "early", (1,)),
    Claimed("a lambda that falls to 0 ends like one that stays", "ours", "schedule", refuting=(2,)),
    Claimed("AdaGC is better than the global clip", "ours", "clipping", (0, 1)),
    Claimed("the plugin costs no time where it is off", "ours", "runtime", refuting=(2,)),
    Claimed("the baseline would be better with a higher rate than was searched", "ours", "edge", (0,)),
)
_WHERE_REFUTING = {HELD: OPPOSITE, OPPOSITE: HELD, NOT_SHOWN: "Not refuted"}
HEADS = "| claim | where | verdict | what was seen: difference (95 % interval), seeds |"


def main() -> None:
    text = "\n".join(table(read_tables(FOLDER))) + "\n"
    path = RESULTS / "claims.md"
    path.write_text(text, encoding="utf-8")
    records.quote(path, text, PAGE)
    print(text)


def table(tables: Mapping[str, Table]) -> list[str]:
    """A line for each claim; several lines of one cell where it has several parts, sizes or lengths."""
    sure = surest(tables)
    lines = (_line(each, tables, sure) for each in (*OF_THE_PAPER, *BEYOND_THE_PAPER))
    return [HEADS, "| --- | --- | --- | --- |", *lines]


def together(tables: Mapping[str, Table]) -> Together:
    """All tests of all experiments that break no rule."""
    return Together.of(
        verdict for name in tables if not violations(name, dict(tables)) for verdict in verdicts_on(name, tables)
    )


def surest(tables: Mapping[str, Table]) -> set[object]:
    """Those that are decided once the number of all counts."""
    found = together(tables)
    return {verdict.test for verdict in found.tests[: found.left]}


def _line(claimed: Claimed, tables: Mapping[str, Table], sure: Set[object]) -> str:
    told, seen = _found(claimed, tables, sure)
    return f"| {claimed.says} | {claimed.source} | {told} | {seen} |"


def _found(claimed: Claimed, tables: Mapping[str, Table], sure: Set[object]) -> tuple[str, str]:
    if claimed.untestable:
        return "cannot be tested here", claimed.untestable
    if claimed.experiment not in tables:
        return "not tested yet", f"`simreg-megatron reproduce {claimed.experiment}`"
    if found := violations(claimed.experiment, dict(tables)):
        return "not tested yet", f"`{claimed.experiment}` is under way: {len(found)} of the protocol's conditions unmet"
    found = verdicts_of(claimed, tables)
    words = dict.fromkeys(word.lower() for word, _ in found)
    return "; ".join(words), "<br>".join(_seen(verdict, sure) for _, verdict in found)


def verdicts_of(claimed: Claimed, tables: Mapping[str, Table]) -> list[tuple[str, Verdict]]:
    """Those of the plan's claims that decide this one, each with what it means for this one."""
    claims = tables[claimed.experiment].plan.claims
    supporting, refuting = ([claims[place] for place in places] for places in (claimed.claims, claimed.refuting))
    found = verdicts_on(claimed.experiment, tables)
    return [
        *((verdict.word, verdict) for verdict in found if verdict.claim in supporting),
        *((_refuted(verdict), verdict) for verdict in found if verdict.claim in refuting),
    ]


def _refuted(verdict: Verdict) -> str:
    """What the plan's claim means for the opposite one. That "the opposite was seen" needs an interval beyond 0."""
    word = NOT_SHOWN if verdict.word == HELD and not verdict.is_beyond_chance else verdict.word
    return _WHERE_REFUTING.get(word, word)


def _where(verdict: Verdict) -> str:
    size, length = verdict.place
    return f"width {size}" + ("" if float(length) == _USUAL else f", {float(length):g} tokens a parameter")


def _seen(verdict: Verdict, sure: Set[object]) -> str:
    """With what became of the plan's own claim, which may be the opposite of the line's; † marks the surest."""
    if any(verdict.diverged):
        return f"{verdict.claim.says}: {verdict.told}, {_where(verdict)}"
    low, high = verdict.interval
    saved = f"; saved: {verdict.worth.told}" if verdict.worth is not None else ""
    unit = "" if "nats" in verdict.unit else f" {verdict.unit}".rstrip()
    multiple = "" if verdict.claim.times == 1 else f" against {verdict.claim.times:g} times the other's"
    return (
        f"{verdict.claim.says}: {verdict.word.lower()}, {verdict.difference:+.3f}{unit} "
        f"({low:+.3f} to {high:+.3f}){multiple}, p {verdict.p_value:.2g}{'†' if verdict.test in sure else ''}, "
        f"{verdict.numbers[0]} and {verdict.numbers[1]} seeds, {_where(verdict)}"
        f"{saved}"
    )


if __name__ == "__main__":
    main()
