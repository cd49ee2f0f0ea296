# SPDX-License-Identifier: Apache-2.0
"""research/: plans become runs, runs become tables, and a table whose plan was not carried out says nothing."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.records import RESULTS
from research import pages
from research.analyse import HELD, fieller, holm, judge, problems, welch
from research.corpus.build import LOCK
from research.corpus.debian import read_lock
from research.plan import ResearchError, entries_of, plan_names, plan_of, read_plan
from research.tables import KEPT, Table, read_tables, settings_of

TABLES = read_tables(KEPT)
PLAN = {
    "name": "small",
    "question": "Which is lower?",
    "arms": {"a": {"flags": {"lr": 1e-3}}, "b": {"flags": {"lr": 2e-3, "adagc": None}}},
    "claims": [{"says": "b is lower", "arm": "b", "than": "a"}],
    "sizes": [32],
}


def test_a_plan_becomes_runs_of_the_launcher() -> None:
    entries = entries_of(plan_of(PLAN), "text", lambda arm, size: {})
    assert [(entry.arm, entry.seed) for entry in entries] == [(arm, seed) for seed in (1, 2, 3) for arm in "ab"]
    flags = dict(entries[1].run.flags)
    assert [flags[name] for name in ("lr", "min-lr", "adagc", "hidden-size")] == ["0.002", "0.0002", "", "32"]
    assert int(flags["train-iters"]) == round(20 * 53536 / 2048) == 523 and flags["lr-warmup-iters"] == "26"
    assert "--adagc --eval-interval 524" in entries[1].run.words


@pytest.mark.parametrize("name", plan_names())
def test_every_plan_can_be_read(name: str) -> None:
    plan = read_plan(name)
    if plan.tuned_in in ("", *TABLES):
        assert entries_of(plan, "text", settings_of(plan, TABLES), quick=True)
    else:
        assert read_plan(plan.tuned_in).is_search


NO_PLANS = [
    ({"claims": [{"says": "?", "arm": "c", "than": "a"}]}, "names the arm c"),
    ({"colour": "red"}, "colour"),
    ({"arms": {"a": {"flag": {}}}, "claims": []}, "flag"),
]


@pytest.mark.parametrize(("change", "word"), NO_PLANS)
def test_files_that_are_no_plan_are_refused(change: dict, word: str, tmp_path: Path) -> None:
    import yaml

    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(PLAN | change))
    with pytest.raises(ResearchError, match=word):
        read_plan(str(tmp_path / "plan.yaml"))


@pytest.mark.parametrize("name", sorted(TABLES))
def test_the_runs_that_are_kept_are_those_of_their_plan(name: str) -> None:
    """By the digest of all flags, so also the tuned ones."""
    assert list(problems(name, TABLES)) == []


def test_the_pages_tables_follow_from_the_results() -> None:
    for name, text in pages.pages(TABLES).items():
        assert (RESULTS / f"{name}.md").read_text() == text, "python -m research keep"


def _without(table: Table, **changes: str) -> Table:
    first, *rest = table.rows
    return replace(table, rows=[{**first, **changes}, *rest])


FORBIDS = [
    (lambda table: replace(table, rows=table.rows[1:]), "is missing"),
    (lambda table: replace(table, rows=[*table.rows, table.rows[0]]), "stands in it twice"),
    (lambda table: _without(table, device="an H100"), "2 values of device"),
    (lambda table: _without(table, validation_loss="1.0"), "not the end of its curve"),
    (lambda table: replace(table, plan=replace(table.plan, seeds=2)), "fewer than 3 seeds"),
]


@pytest.mark.parametrize(("change", "word"), FORBIDS)
def test_what_forbids_a_conclusion(change, word: str) -> None:  # type: ignore[no-untyped-def]
    found = list(problems("edge", {**TABLES, "edge": change(TABLES["edge"])}))
    assert any(word in problem for problem in found), found


def test_a_search_takes_the_trial_with_the_lowest_mean_over_seeds() -> None:
    search, plan = TABLES["tuning"], read_plan("convergence")
    chosen = settings_of(plan, TABLES)("simreg", 64)
    own = [row for row in search.rows if (row["arm"], row["size"]) == ("simreg", "64")]
    lowest = min(own, key=lambda row: float(row["validation_loss"]))
    more = replace(search, rows=[*search.rows, {**lowest, "validation_loss": "9"}])  # as of another seed
    assert settings_of(plan, {**TABLES, "tuning": more})("simreg", 64) != chosen


def test_the_lock_and_the_evidence_are_of_one_corpus() -> None:
    lock = read_lock(LOCK)
    assert all(package.file.endswith("_all.deb") for package in lock)
    recorded = json.loads((RESULTS / "large_corpus.json").read_text())
    facts = [(one["name"], one["sha256"], one["read"]) for one in recorded["packages"]]
    assert facts == [(one.name, one.sha256, one.read) for one in lock]


def test_welch_is_scipys() -> None:
    from scipy import stats

    one, two = [1.0, 1.2, 1.1], [1.4, 1.9, 1.3, 1.6]
    found = welch(one, two)
    assert found.p_value == pytest.approx(stats.ttest_ind(one, two, equal_var=False).pvalue)
    assert found.low < found.difference < found.high and found.difference == pytest.approx(-0.45)
    assert welch([1.0, math.inf], [1.0, 2.0]).p_value == 1.0
    five = [1.0, 1.1, 1.2, 1.3, 1.4]
    found, edge = welch(five, five), stats.t.ppf(0.975, 8)
    assert stats.nct.sf(edge, 8, found.detectable * edge / found.high) == pytest.approx(0.8, abs=0.01)


def test_holm() -> None:
    assert holm([0.001, 0.02, 0.9]) == 2 and holm([0.02, 0.03]) == 2 and holm([0.03, 0.04]) == 0


def test_fieller_covers_the_ratio() -> None:
    ratio, low, high = fieller([2.0, 2.1, 1.9], [1.0, 1.1, 0.9], [3.0, 3.2, 2.8])  # type: ignore[misc]
    assert low < ratio < high and high - low < 0.3 and ratio == pytest.approx(0.5)
    assert fieller([2.0, 1.0], [1.0, 2.0], [1.1, 2.1]) is None  # the difference below is not away from 0


def test_the_gain_at_width_64_computed_by_hand() -> None:
    """Five seeds against the baseline's ten, which lie in two tables: 0.0994 lower (0.0784 to 0.1204)."""
    verdict = next(each for each in judge("convergence", TABLES) if each.place == ("64", "20"))
    assert len(verdict.arm) == 5 and len(set(verdict.than)) == 10 and verdict.word == HELD
    assert verdict.test.difference == pytest.approx(sum(verdict.arm) / 5 - sum(verdict.than) / 10)
    found = verdict.test.difference, verdict.test.low, verdict.test.high
    assert found == pytest.approx((-0.0994, -0.1204, -0.0784), abs=5e-5)
    assert verdict.saved == "at least 15% of the tokens (12% to 18%)"
