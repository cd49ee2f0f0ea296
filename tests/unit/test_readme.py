# SPDX-License-Identifier: Apache-2.0
"""The README is short and shows what the demo prints, and what it and the support table name is there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from launch.demo import table_of
from tests.megatron.parity.cells import CELLS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDES = "\n".join(path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("docs/*.md")))
SUPPORT = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
TABLE = SUPPORT[: SUPPORT.index("## Megatron releases")]
ROWS = [line for line in TABLE.splitlines() if line.startswith("| ") and not line.startswith("| |")]


def test_it_is_read_in_three_minutes() -> None:
    assert len(README.splitlines()) < 120


def test_the_numbers_are_what_the_demo_prints() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "demo.json").read_text(encoding="utf-8"))
    assert f"```text{table_of(result['runs'])}\n```\n" in README


@pytest.mark.parametrize("pattern", re.findall(r"\*parity '?([^']+?)'?\*(?= |,)", "\n".join(ROWS)))
def test_named_rows_of_the_parity_table_exist(pattern: str) -> None:
    assert any(re.search(pattern, cell.name) for cell in CELLS)


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"tests/[\w/.]+\.py|docs/[\w-]+\.(?:md|png)", README + SUPPORT)))
)
def test_named_files_exist(path: str) -> None:
    assert (ROOT / path).is_file()


def test_nobody_is_sent_to_a_package_index_for_this_package() -> None:
    """It is on none: a clone or a wheel installs it."""
    texts = [path for folder in ("simreg_megatron", "launch", "docs", "tools") for path in (ROOT / folder).rglob("*.*")]
    texts = [*ROOT.glob("*.md"), *ROOT.glob("patches/*.md"), *(path for path in texts if path.suffix != ".png")]
    asking = re.compile(r"pip install\s+(?:-\S+\s+)*['\"]?simreg[-_]megatron\b(?!-\d|\S*\.whl)")
    assert asking.search("pip install 'simreg-megatron[hf]'") and not asking.search("pip install '.[hf]'")
    found = [str(path) for path in texts if path.is_file() and asking.search(path.read_text("utf-8", "ignore"))]
    assert not found


@pytest.mark.parametrize("extra", sorted(set(re.findall(r"pip install '\.\[(\w+)\]'", README + GUIDES))))
def test_the_extras_that_are_named_exist(extra: str) -> None:
    assert re.search(rf'^    "{extra}": ', (ROOT / "setup.py").read_text(encoding="utf-8"), flags=re.MULTILINE)
