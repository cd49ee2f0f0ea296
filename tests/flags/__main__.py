# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.flags`: combinations of flags until the given number is in the table.

Exit status 1 if something is wrong that neither a sentence of ours nor Megatron itself explains. A run goes on where
the last one ended, after a kill, too; `--record` keeps the table in benchmarks/results/flags.csv. To run one command
line alone: --only FLAGS.
"""

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "benchmarks" / "results" / "flags.csv"


def main() -> int:
    # Here and not above: every rank imports this file again, and needs none of it.
    from tests.flags import campaign, space

    options = _options()
    options.work.mkdir(parents=True, exist_ok=True)
    if options.only is not None:
        return _one(options.only, options.work)
    table = campaign.Table(options.record)
    _run(table, options.combinations, options.work)
    for row in table.wrong:
        print(f"{row.what}\n    {row.flags}\n    {row.detail}")
    print(f"{table.total} combinations, {len(table.wrong)} kinds of wrong ends: {options.record}")
    print(f"the next is of batch {table.batches}, of {space.BATCH} combinations at most")
    return 1 if table.wrong else 0


def _run(table: Any, number: int, work: Path) -> None:
    from rich.progress import Progress

    from tests.flags import campaign, space

    with Progress() as progress:
        bar = progress.add_task("combinations", total=number, completed=table.total)
        while table.total < number:
            for _ in campaign.run_batch(table, space.drawn(table.batches), work):
                progress.advance(bar)


def _one(words: list[str], work: Path) -> int:
    from tests.flags import campaign
    from tests.flags.combination import Combination

    split = " (2 processes)" if any("parallel-size=2" in word for word in words) else ""
    combination = Combination.of(shlex.join(words) + split)
    verdict = campaign.verdict_on(combination, work, compared=campaign.is_compared(0, combination))
    print("\n".join(verdict))
    return int(verdict.kind == "wrong")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.flags", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--combinations", type=int, default=600, help="in all, with those in the table (default: 600)")
    own = ROOT / "runs" / "flags" / "flags.csv"
    parser.add_argument("--record", nargs="?", type=Path, const=TABLE, default=own, metavar="FILE.csv",
                        help="default: runs/flags/flags.csv")  # fmt: skip
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "flags", help="default: runs/flags")
    parser.add_argument("--only", nargs=argparse.REMAINDER, metavar="FLAGS", help="run one command line, --flag=value")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
