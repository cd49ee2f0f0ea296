# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.megatron.parity [--only REGEX] [--output benchmarks/results/parity.md]`: print the parity table.

With `--objective NAME`: of an objective that an installed package brings, in seven layouts.

Exit status 1 if a cell misses its expectation.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from simreg_megatron.objectives import find
from tests.megatron.parity.cells import CELLS, Cell, cells_of
from tests.megatron.parity.run import Bench
from tests.megatron.parity.table import markdown, print_row, print_table


def chosen(pattern: str, cells: Sequence[Cell] = CELLS) -> list[Cell]:
    return [cell for cell in cells if re.search(pattern, cell.name)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.megatron.parity", description="Print the parity table.")
    parser.add_argument("--only", default="", metavar="REGEX", help="cells whose name it is found in")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the table as Markdown, too")
    parser.add_argument("--list", action="store_true", help="print the cells' names and stop")
    parser.add_argument("--objective", metavar="NAME", help="of an installed package, in the place of the table")
    options = parser.parse_args(argv)
    cells = chosen(options.only, cells_of(find(options.objective)) if options.objective else CELLS)
    if not cells:
        parser.error(f"no cell's name holds {options.only!r}")
    if options.list:
        print("\n".join(cell.name for cell in cells))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 200)
    rows = []
    with tempfile.TemporaryDirectory(prefix="simreg-parity-") as folder:
        bench = Bench(Path(folder))
        for cell in cells:
            rows.append(bench.judge(cell))
            print_row(console, rows[-1])
    print_table(console, rows)
    if options.output:
        words = [f"--only '{options.only}'"] if options.only else []
        options.output.write_text(markdown(rows, " ".join(["python -m tests.megatron.parity", *words])))
    return 0 if all(row.as_expected for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
