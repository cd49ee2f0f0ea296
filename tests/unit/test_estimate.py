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


@pytest.mark.megatron
def test_a_layout_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would put an empty table into the page."""
    from launch import estimate  # with megatron, which takes a while

    monkeypatch.setattr("sys.argv", ["estimate", "--layout", "nosuch"])
    with pytest.raises(SystemExit):
        estimate.main()
    assert "invalid choice: 'nosuch' (choose from" in capsys.readouterr().err
