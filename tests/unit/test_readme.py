# SPDX-License-Identifier: Apache-2.0
"""The README is short and shows what the demo prints, and what it and the support table name is there."""

from __future__ import annotations

import json
import re
from pathlib import Path

from launch.demo import table_of
from tests.megatron.parity.cells import CELLS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDES = "\n".join(path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("docs/*.md")))
SUPPORT = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
TABLE = SUPPORT[: SUPPORT.index("## Megatron releases")]
ROWS = [line for line in TABLE.splitlines() if line.startswith("| ") and not line.startswith("| |")]


def test_the_numbers_are_what_the_demo_prints() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "demo.json").read_text(encoding="utf-8"))
    assert f"```text{table_of(result['runs'])}\n```\n" in README


def test_named_rows_of_the_parity_table_exist() -> None:
    patterns = re.findall(r"\*parity '?([^']+?)'?\*(?= |,)", "\n".join(ROWS))
    missing = [pattern for pattern in patterns if not any(re.search(pattern, cell.name) for cell in CELLS)]
    assert patterns and not missing


def test_named_files_and_extras_exist() -> None:
    files = set(re.findall(r"tests/[\w/.]+\.py|docs/[\w-]+\.(?:md|png)", README + SUPPORT))
    assert files and not [path for path in files if not (ROOT / path).is_file()]
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    extras = set(re.findall(r"pip install '\.\[(\w+)\]'", README + GUIDES))
    assert extras and not [extra for extra in extras if not re.search(rf'^    "{extra}": ', setup, re.MULTILINE)]
