# SPDX-License-Identifier: Apache-2.0
"""Every experiment by its name, as docs/evidence.md says: six steps of each arm in Megatron, then its table."""

import sys
from pathlib import Path

import pytest

from research.plan import plan_names, read_plan
from research.tables import read_table
from tests.helpers import jobs
from tests.megatron.runs import ROOT


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder, so that experiments share the runs that they share."""
    return tmp_path_factory.mktemp("experiments")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in plan_names() if not read_plan(name).is_search])
def test_an_experiment_runs(name: str, output: Path) -> None:
    words = ["--quick", "--jobs", "1", "--seeds", "1", "--data", "builtin", "--output", str(output)]
    done = jobs.run([sys.executable, "-m", "research", "run", name, *words], cwd=ROOT, timeout=3600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    table = read_table(output, name)
    assert {row["status"] for row in table.rows} == {"done"}
    assert {row["arm"] for row in table.rows} == set(table.plan.arms)
    for claim in table.plan.claims:  # what it is about was measured
        lacking = [row["arm"] for row in table.rows if row["arm"] in (claim.arm, claim.than) and not row[claim.metric]]
        assert not lacking, f"{lacking} lack {claim.metric}"
