# SPDX-License-Identifier: Apache-2.0
"""The table of the paper's claims: what a plan's claim means for it, in tables that support and that refute."""

from pathlib import Path

import pytest

from benchmarks import claims
from benchmarks.claims import BEYOND_THE_PAPER, OF_THE_PAPER, Claimed
from simreg_megatron.reproduce.check import Table
from simreg_megatron.reproduce.plan import Plan
from simreg_megatron.reproduce.plan_file import read_plan

DECIDED = [each for each in (*OF_THE_PAPER, *BEYOND_THE_PAPER) if not each.untestable]
NOISE = (0.004, -0.006, 0.001, 0.003, -0.002)


def table_where(plan: Plan, first: str, second: str, apart: float, metric: str) -> Table:
    """`metric` of `first` is `apart` above that of `second`, and all others lie between."""
    level = {first: 4.0 + apart, second: 4.0}
    rows = tuple(
        {
            "arm": arm.name, "size": str(plan.sizes[0]), "tokens_per_parameter": f"{plan.tokens_per_parameter[0]:g}",
            "seed": str(seed), "trial": "0", "steps": str(int(1000 * arm.length)), "status": "done", "flags": "",
            "data": "ab", "commit": "abc", metric: str(level.get(arm.name, 4.0 + apart / 2) + noise),
        }
        for arm in plan.arms
        for seed, noise in enumerate(NOISE, 1)
    )  # fmt: skip
    return Table(plan, rows, ())


@pytest.mark.parametrize("claimed", DECIDED, ids=lambda each: each.says)
def test_each_sentence_names_claims_of_its_plan(claimed: Claimed) -> None:
    count = len(read_plan(claimed.experiment).claims)
    places = (*claimed.claims, *claimed.refuting)
    assert places and len(set(places)) == len(places) and max(places) < count


def test_every_claim_of_a_plan_decides_a_sentence() -> None:
    decided = {(each.experiment, place) for each in DECIDED for place in (*each.claims, *each.refuting)}
    stated = {
        (name, place)
        for name in {each.experiment for each in DECIDED}
        for place in range(len(read_plan(name).claims))
    }  # fmt: skip
    assert stated == decided


@pytest.mark.parametrize("claimed", DECIDED, ids=lambda each: each.says)
def test_a_table_that_supports_it_says_held_and_one_that_refutes_it_does_not(claimed: Claimed) -> None:
    plan = read_plan(claimed.experiment)
    for places, holds in ((claimed.claims, True), (claimed.refuting, False)):
        for place in places:
            claim = plan.claims[place]
            for apart in (-1.0, 1.0):
                tables = {plan.name: table_where(plan, claim.arm, claim.than, apart, claim.metric)}
                (word,) = [word for word, found in claims.verdicts_of(claimed, tables) if found.claim == claim]
                seen = claim.sign == "differs" or (apart < 0) == (claim.sign == "lower")
                assert (word == "Held") == (seen == holds), (claim.says, apart)


def test_twice_the_tokens_with_a_lower_simreg_loss_refute_the_plateau() -> None:
    plan = read_plan("plateau")
    claimed = next(each for each in OF_THE_PAPER if each.says.startswith("cross-entropy alone stops"))
    tables = {"plateau": table_where(plan, "cross-entropy", "cross-entropy-50", -0.08, "simreg_loss")}
    ((word, verdict),) = claims.verdicts_of(claimed, tables)
    assert word == "Did not hold, the opposite was seen"
    assert claims._seen(verdict, set()).startswith(
        "cross-entropy with twice the tokens leaves a lower SimReg loss: held, -0.080 ("
    ), "the plan's own claim held"


def test_the_line_of_an_experiment_under_way_says_so(tmp_path: Path) -> None:
    plan = read_plan("chunks")
    claimed = next(each for each in OF_THE_PAPER if each.experiment == "chunks")
    told, seen = claims._found(
        claimed, {"chunks": table_where(plan, "chunk-64", "whole", -1.0, "validation_loss")}, set()
    )
    assert told == "not tested yet" and "conditions unmet" in seen
