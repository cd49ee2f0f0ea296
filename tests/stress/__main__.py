# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.stress --small CASES --large CASES [--record [FILE]]`: go on until the table has these numbers.

Exit status 1 if an error is above its bound, or a number is not finite. With `--record` the table is
benchmarks/results/stress.csv, and a run goes on where the last one ended, after a kill, too.
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import track

from tests.stress import campaign

TABLE = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "stress.csv"
_KEPT_EVERY = 20


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.stress", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", type=int, default=10_000, help="sequences of a few tokens in all (default 10,000)")
    parser.add_argument("--large", type=int, default=0, help="sequences of up to 20,000 tokens in all (default none)")
    parser.add_argument("--record", nargs="?", type=Path, const=TABLE, metavar="FILE", help=f"add to it ({TABLE.name})")
    options = parser.parse_args()
    console, table = Console(), campaign.Table(options.record)
    asked = {"small": (campaign.small, options.small // campaign.SMALL_BATCH), "large": (campaign.large, options.large)}
    for size, (cases_of, number) in asked.items():
        for batch in track(range(table.batches[size], number), description=f"{size} cases", console=console):
            for row in cases_of(batch):
                table.add(row)
            table.batches[size] = batch + 1
            if batch % _KEPT_EVERY == 0 or size == "large":
                table.keep()
    table.keep()
    worst = max(table.rows.values(), key=lambda row: max(row.value, row.gradient))
    broken = [row for row in table.rows.values() if max(row.value, row.gradient) > 1 or row.not_finite]
    total = sum(row.cases for row in table.rows.values())
    console.print(
        f"{total} cases, {len(broken)} kinds with an error above the bound; the largest is {worst.value:.2f} of it for "
        f"a value and {worst.gradient:.2f} for a gradient ({worst.impl}, {worst.kind})",
        soft_wrap=True,
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
