# SPDX-License-Identifier: Apache-2.0
"""tools/lowest.sh: without uv it says so and ends well (fails in CI); a folder that it did not make stays as it is."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.helpers import jobs

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "tools").mkdir()
    (tmp_path / "setup.py").touch()
    return Path(shutil.copy(ROOT / "tools" / "lowest.sh", tmp_path / "tools"))


@pytest.mark.parametrize(("ci", "code"), [("", 0), ("true", 1)])
def test_without_uv_it_is_skipped(script: Path, ci: str, code: int) -> None:
    """In CI a skip is a failure: nobody reads there what was skipped."""
    done = jobs.run(["bash", str(script)], env={**os.environ, "CI": ci})
    assert done.returncode == code and "skipped: uv" in done.stderr


def test_a_folder_of_others_is_left_alone(script: Path, tmp_path: Path) -> None:
    uv = tmp_path / ".venv" / "bin" / "uv"
    uv.parent.mkdir(parents=True)
    uv.write_text("#!/bin/sh\nexit 9\n")
    uv.chmod(0o755)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").write_text("dear")
    done = jobs.run(["bash", str(script)], env={**os.environ, "LOWEST_VENV": str(tmp_path / "mine")})
    assert done.returncode == 1 and "will not be overwritten" in done.stderr
    assert (tmp_path / "mine" / "letter").read_text() == "dear"
