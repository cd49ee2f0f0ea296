# SPDX-License-Identifier: Apache-2.0
"""Every experiment by its name, as docs/evidence.md says: six steps of each arm, then its table."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

from simreg_megatron.reproduce.plan_file import plan_names, read_plan
from tests.helpers import jobs
from tests.megatron.runs import ROOT

_FEW_TRIALS = 4  # of a search, --quick takes these alone


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder, so that experiments share the runs that they share."""
    return tmp_path_factory.mktemp("experiments")


@pytest.mark.slow
@pytest.mark.parametrize("name", plan_names())
def test_it_runs(name: str, output: Path) -> None:
    words = ["--quick", "--jobs", "1", "--seeds", "1", "--data", "builtin", "--output", str(output)]
    done = jobs.run([sys.executable, "-m", "simreg_megatron.cli", "reproduce", name, *words], cwd=ROOT, timeout=3600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    with (output / "quick" / f"{name}.csv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    plan = read_plan(name)
    assert {row["status"] for row in rows} == {"done"}
    if plan.is_search:
        assert len(rows) == _FEW_TRIALS
        return
    assert {row["arm"] for row in rows} == {arm.name for arm in plan.arms}
    for claim in plan.claims:  # what it is about was measured
        lacking = [row["arm"] for row in rows if row["arm"] in (claim.arm, claim.than) and not row[claim.metric]]
        assert not lacking, f"{lacking} lack {claim.metric}"
