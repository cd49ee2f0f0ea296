# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.claims`: the table of docs/evidence.md that says of each claim of the paper what was seen here.

It is made of the tables in benchmarks/results/evidence alone, through the checks of `simreg-megatron report check`: a
claim whose experiment breaks the protocol, or was not run, has no verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from benchmarks import records
from benchmarks.records import RESULTS, ROOT
from simreg_megatron.reproduce.check import Table, read_tables, violations
from simreg_megatron.reproduce.verdict import Verdict, judge

FOLDER = RESULTS / "evidence"
PAGE = ROOT / "docs" / "evidence.md"


class Claimed(NamedTuple):
    """A sentence of the paper, and where it is tested."""

    says: str
    source: str
    experiment: str = ""  # a plan that ships with the package
    claims: tuple[int, ...] = ()  # of that plan's, from 0; all of them where none is named
    untestable: str = ""  # why no experiment at these sizes could decide it


OF_THE_PAPER = (
    Claimed("a lower validation loss after the same tokens", "Figure 3", "convergence", (0, 1)),
    Claimed("the same loss with over 30 % fewer tokens", "abstract", "saving", (0,)),
    Claimed("... with 10 or 20 % fewer tokens", "abstract", "fewer"),
    Claimed("the gain lasts in longer training", "Figure 3", "horizon"),
    Claimed("chunks and whole sequences differ (the paper: hardly)", "Table 1", "convergence", (2,)),
    Claimed("the size of a chunk matters", "announced", "chunks"),
    Claimed("the temperature of 0.01 and a lambda of 10 are best", "Tables 6, 8", "sweep"),
    Claimed("lambda grows with the square root of the width", "Table 7", "scaling"),
    Claimed("the last layer's states are the right ones", "Figure 5", "layers"),
    Claimed("better than SimCSE, CPretrain, CReg and SCE", "Table 1", "baselines"),
    Claimed("states become less alike", "Figures 1, 7, 8", "similarity"),
    Claimed("larger margins, also of the hardest tokens", "Lemma 1, Figure 2a", "histogram"),
    Claimed("cross-entropy alone stops lowering the SimReg loss", "Figure 2b", "plateau"),
    Claimed("a gain with mixtures of experts, too", "Table 2", "moe"),
    Claimed("almost no cost in time", "Table 3", "runtime"),
    Claimed(
        "over 1 point better zero-shot accuracy", "Tables 1, 2",
        untestable="models of this size answer the nine tasks no better than chance",
    ),
)  # fmt: skip
BEYOND_THE_PAPER = (
    Claimed("a lower loss after 70 % of the tokens, against a baseline at lower rates", "ours", "shortened"),
    Claimed("better than a placebo and than simpler means", "ours", "controls"),
    Claimed("the right labels add to what permuted ones gain", "ours", "labels"),
    Claimed("SimReg is needed to the end of the training", "ours", "schedule"),
    Claimed("AdaGC is better than the global clip", "ours", "clipping"),
    Claimed("the baseline would be better with a higher rate than was searched", "ours", "edge"),
)
HEADS = "| claim | where | verdict | what was seen: difference (95 % interval), seeds |"


def main() -> None:
    text = "\n".join(table(read_tables(FOLDER))) + "\n"
    path = RESULTS / "claims.md"
    path.write_text(text, encoding="utf-8")
    records.quote(path, text, PAGE)
    print(text)


def table(tables: Mapping[str, Table]) -> list[str]:
    """A line for each claim; several lines of one cell where it has several parts, sizes or lengths."""
    return [HEADS, "| --- | --- | --- | --- |", *(_line(each, tables) for each in (*OF_THE_PAPER, *BEYOND_THE_PAPER))]


def _line(claimed: Claimed, tables: Mapping[str, Table]) -> str:
    told, seen = _found(claimed, tables)
    return f"| {claimed.says} | {claimed.source} | {told} | {seen} |"


def _found(claimed: Claimed, tables: Mapping[str, Table]) -> tuple[str, str]:
    if claimed.untestable:
        return "cannot be tested here", claimed.untestable
    if claimed.experiment not in tables:
        return "not tested yet", f"`simreg-megatron reproduce {claimed.experiment}`"
    if found := violations(claimed.experiment, dict(tables)):
        return "not tested yet", f"`{claimed.experiment}` is under way: {len(found)} of the protocol's conditions unmet"
    verdicts = verdicts_of(claimed, tables[claimed.experiment])
    return "; ".join(dict.fromkeys(each.word.lower() for each in verdicts)), "<br>".join(map(_seen, verdicts))


def verdicts_of(claimed: Claimed, table: Table) -> list[Verdict]:
    """Those of the plan's claims that decide this one."""
    claims = table.plan.claims
    wanted = [claims[place] for place in claimed.claims] or claims
    return [verdict for verdict in judge(table.plan, table.rows) if verdict.claim in wanted]


def _seen(verdict: Verdict) -> str:
    low, high = verdict.interval
    saved = f"; {verdict.saving:.0%} of the tokens saved" if verdict.saving is not None else ""
    return (
        f"{verdict.claim.says}: {verdict.word.lower()}, {verdict.difference:+.3f} ({low:+.3f} to {high:+.3f}), "
        f"{verdict.numbers[0]} and {verdict.numbers[1]} seeds, width {verdict.place.size}{saved}"
    )


if __name__ == "__main__":
    main()
