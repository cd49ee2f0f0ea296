# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.budget`: compare lines of the package and of the other folders, and flags, with tools/budget.csv.

Part of `make lint`, which fails where one has grown. A commit that raises a budget says why.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, BUDGET = ROOT / "simreg_megatron", ROOT / "tools" / "budget.csv"
LONGEST_FILE = 300


def counted(package: Path = PACKAGE) -> dict[str, int]:
    """Count lines by folder, blank ones left out; files above LONGEST_FILE lines; and flags of Megatron's parser."""
    from simreg_megatron.config.flags import add_simreg_arguments

    lines: Counter[str] = Counter()
    long_files = 0
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8").splitlines()
        parts = path.relative_to(package).parts
        lines[parts[0] if len(parts) > 1 else "modules of their own"] += sum(bool(line.strip()) for line in text)
        long_files += len(text) > LONGEST_FILE
    found = dict(lines) | {
        f"files above {LONGEST_FILE} lines": long_files,
        "flags": len(add_simreg_arguments(argparse.ArgumentParser(add_help=False))._actions),
        "core": sum(lines.values()) - lines["contrib"] - lines["tools"],
        "wheel": sum(lines.values()),
    }
    for part in ("launch", "benchmarks", "research", "tests"):
        paths = (ROOT / part).rglob("*.py")
        found[f"{part}/"] = sum(bool(line.strip()) for path in paths for line in path.read_text("utf-8").splitlines())
    return found


def allowed() -> dict[str, int]:
    """Return the most that each number may be."""
    with BUDGET.open(encoding="utf-8", newline="") as stream:
        return {row["what"]: int(row["most"]) for row in csv.DictReader(stream)}


def main() -> int:
    """Print each number next to its budget; return 1 if one is larger, or has none."""
    most, is_over = allowed(), False
    for what, number in sorted(counted().items()):
        grown = number > most.get(what, -1)
        is_over |= grown
        print(f"{what:<24}{number:>8}{most.get(what, 0):>8}{'  make it smaller, or raise its budget' * grown}")
    return int(is_over)


if __name__ == "__main__":
    sys.exit(main())
