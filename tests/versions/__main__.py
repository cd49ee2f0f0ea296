# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.versions`: drive every release of Megatron with the plugin and print what works where."""

import argparse
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.versions import loops, measure, releases, table
from tests.versions.processes import ROOT


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    parser.add_argument("--only", default="", metavar="REGEX", help="releases whose number it finds (0.13, main, ...)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the table there too, as Markdown")
    trees = "Megatron-LM source trees by tag (DIR/core_v0.13.1, DIR/main); MEGATRON_PATH names a single one"
    parser.add_argument("--sources", type=Path, metavar="DIR", help=trees)
    others = "drive megatron-core up to 0.16 with this interpreter and its torch, too; may be given again"
    parser.add_argument("--python", action="append", default=[], metavar="PATH", help=others)
    parser.add_argument("--cache", type=Path, default=ROOT / ".versions", metavar="DIR", help="installed releases")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    versions = [version for version in (*releases.VERSIONS, "main") if re.search(args.only, version)]
    if not versions:
        print(f"error: no release is found by --only {args.only}", file=sys.stderr)
        return 2
    bench, began, rows = measure.Bench(args.cache, args.sources), time.monotonic(), []
    for row in _rows(bench, versions, [os.path.abspath(python) for python in args.python]):
        print(table.one_line(row), flush=True)
        rows.append(row)
    minutes = (time.monotonic() - began) / 60
    shown = table.markdown(rows, command=_command(args), minutes=minutes)
    print("\n" + shown)
    if args.output:
        args.output.write_text(shown, encoding="utf-8")
    return 0 if all(row.holds for row in rows) else 1


def _command(args: argparse.Namespace) -> str:
    """Return the command that was run, with folders by their last name."""
    given = [("--only", args.only), ("--output", args.output)]
    given.append(("--sources", args.sources and Path("..") / args.sources.name))
    given += [("--python", f"python{releases.python_version(os.path.abspath(python))}") for python in args.python]
    words = [word for flag, value in given if value for word in (flag, str(value))]
    return shlex.join(["python", "-m", "tests.versions", *words])


def _rows(bench: measure.Bench, versions: Sequence[str], pythons: Sequence[str]) -> Iterator[table.Row]:
    for version in versions:
        yield table.row(bench, version)
    for python in pythons:
        for version in versions:
            if version != "main" and not loops.has_loop(version):  # those ask for Python 3.12
                yield table.row_of_python(bench, version, python)


if __name__ == "__main__":
    raise SystemExit(main())
