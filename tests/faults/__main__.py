# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.faults`: a campaign of faults; those that have a row already are not run again."""

import argparse
import fnmatch
from pathlib import Path

from tests.faults.campaign import Campaign, read
from tests.faults.faults import drawn
from tests.faults.starts import ROOT
from tests.faults.table import table


def main() -> int:
    options = _options()
    campaign = Campaign(options.work, options.results, keep=options.keep)
    faults = [fault for fault in drawn(options.count, options.seed) if _wanted(fault.name, options.only)]
    if not options.table:
        campaign.run(faults, options.jobs)
    rows = read(options.results)
    options.results.with_suffix(".md").write_text("\n".join(table(rows)) + "\n", encoding="utf-8")
    wrong = [row for row in rows if row["wrong"]]
    print(f"{len(rows)} faults, {len(wrong)} of them with something wrong: {options.results}")
    return 1 if wrong else 0


def _wanted(name: str, patterns: list[str]) -> bool:
    return not patterns or any(fnmatch.fnmatch(name, f"*{pattern}*") for pattern in patterns)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--count", type=int, default=220, help="faults in all (default: 220)")
    parser.add_argument("--seed", type=int, default=0, help="of their order (default: 0)")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="those with such a word in their name")
    parser.add_argument("--table", action="store_true", help="run nothing: make the table of the results")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: 1)")
    parser.add_argument("--keep", action="store_true", help="leave the folders of all runs, not of failed ones alone")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "faults", help="default: runs/faults")
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "faults" / "faults.csv", metavar="FILE.csv")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
