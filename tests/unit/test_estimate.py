# SPDX-License-Identifier: Apache-2.0
"""The table of docs/cluster.md is what `python -m launch.estimate` prints."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from launch.plan import ROOT
from tests.megatron import runs


def print_the_table() -> None:
    sys.argv = ["launch.estimate"]
    runpy.run_module("launch.estimate", run_name="__main__")


@pytest.mark.megatron
def test_the_guides_table_is_the_commands(tmp_path: Path) -> None:
    done = runs.forked(print_the_table, folder=tmp_path)
    assert done.status == 0, done.output
    lines = done.output.splitlines()
    assert len(lines) == 7 and lines[0].startswith("| model | nodes |")
    assert done.output in (ROOT / "docs" / "cluster.md").read_text(), "python -m launch.estimate, and put it there"
