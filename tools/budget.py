# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.budget`: count lines of the package, of the other folders, and flags, against their budgets.

Part of `make lint`, which fails where one has grown. `--write` puts the present numbers into tools/budget.csv: a commit
that does so says why. Shrinking needs no word, and `--write` keeps what was gained.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, BUDGET = ROOT / "simreg_megatron", ROOT / "tools" / "budget.csv"
LONGEST_FILE = 300
STEP = 50
"""A budget is at least half of this above what is there, and a multiple of it: a small fix needs no explanation."""


def counted(package: Path = PACKAGE) -> dict[str, int]:
    """Lines by room, blank ones left out; files above LONGEST_FILE lines; and flags of Megatron's parser."""
    lines: Counter[str] = Counter()
    long_files = 0
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8").splitlines()
        parts = path.relative_to(package).parts
        lines[parts[0] if len(parts) > 1 else "modules of their own"] += sum(bool(line.strip()) for line in text)
        long_files += len(text) > LONGEST_FILE
    found = dict(lines) | {
        f"files above {LONGEST_FILE} lines": long_files,
        "flags": _flags(),
        "core": sum(lines.values()) - lines["contrib"] - lines["tools"],
        "wheel": sum(lines.values()),
    }
    for part in ("launch", "benchmarks", "research", "tests"):
        paths = (ROOT / part).rglob("*.py")
        found[f"{part}/"] = sum(bool(line.strip()) for path in paths for line in path.read_text("utf-8").splitlines())
    return found


def _flags() -> int:
    from simreg_megatron.config.flags import add_simreg_arguments

    parser = add_simreg_arguments(argparse.ArgumentParser(add_help=False))
    return len(parser._actions)


def allowed(file: Path = BUDGET) -> dict[str, int]:
    with file.open(encoding="utf-8", newline="") as stream:
        return {row["what"]: int(row["most"]) for row in csv.DictReader(stream)}


def write(now: dict[str, int], file: Path = BUDGET) -> None:
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["what", "most"])
        for what, number in sorted(now.items()):
            writer.writerow([what, -(-(number + STEP // 2) // STEP) * STEP if number >= STEP else number])


def grown(now: dict[str, int], most: dict[str, int]) -> list[str]:
    """One sentence for each number that is above its budget, or has none."""
    return [
        f"{what}: {number}, and {most[what]} are allowed" if what in most else f"{what}: {number}, and it has no budget"
        for what, number in sorted(now.items())
        if number > most.get(what, -1)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.budget", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="allow what is there now")
    options = parser.parse_args()
    now = counted()
    if options.write:
        write(now)
    most = allowed()
    table = Table("room", "lines", "at most", box=None)
    for what, number in sorted(now.items()):
        table.add_row(what, str(number), str(most.get(what, "")))
    Console().print(table)
    wrong = grown(now, most)
    for sentence in wrong:
        print(f"{sentence}: make it smaller, or `python -m tools.budget --write` and say why in the commit")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
