# SPDX-License-Identifier: Apache-2.0
"""The table of docs/cluster.md is what `python -m launch.estimate` prints."""

from __future__ import annotations

import os
import sys

import pytest

from launch.plan import ROOT
from tests.helpers import jobs


@pytest.mark.megatron
def test_the_guides_table_is_the_commands() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = jobs.run([sys.executable, "-m", "launch.estimate"], cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 7 and lines[0].startswith("| model | nodes |")
    assert done.stdout in (ROOT / "docs" / "cluster.md").read_text(), "python -m launch.estimate, and put it there"
