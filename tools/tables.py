# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.tables`: which generated tables are older than the code under them, and how to make them again.

A table carries a stamp: the commit it was made at, and a digest of the code that matters to it. The digest is of what
Python reads: comments, docstrings, formatting and the words of errors do not count. It needs no history, so it holds in
a tarball and a shallow clone, too.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TOLERATED = "tools/tolerated_changes.txt"
_STAMP = re.compile(r"commit (?P<commit>[\w+]+), code (?P<code>[0-9a-f]{12})\b")


@dataclass(frozen=True)
class Table:
    """A page with a generated table.

    Attributes:
        page: where it stands.
        command: what makes it again, after `python -m`.
        minutes: how long that takes on two cores that do nothing else.
        code: globs of the files that decide what stands in it.
    """

    page: str
    command: str
    minutes: float
    code: tuple[str, ...]


_PLUGIN = (
    "simreg_megatron/__init__.py", "simreg_megatron/adagc/__init__.py", "simreg_megatron/notices.py",
    *(f"simreg_megatron/{room}/**/*.py" for room in
      ("config", "objectives", "kernels", "losses", "parallel", "contrib", "cpu", "plugin")),
)  # fmt: skip
_MODULES = ("compare", "driver", "expected", "inputs", "loops", "measure", "pretrain", "record", "releases", "tiny")
TABLES = {
    "estimate": Table(
        "docs/cluster.md",
        "launch.estimate --output docs/cluster.md",
        0.5,
        (*(f"launch/{name}.py" for name in ("estimate", "plan", "options", "sizes", "flags")),
         "launch/layouts/**/*.args", "launch/models/*.args"),
    ),
    "parity": Table(
        "benchmarks/results/parity.md",
        "tests.megatron.parity --output benchmarks/results/parity.md",
        5,
        (*_PLUGIN, "simreg_megatron/pretrain.py", "tests/megatron/parity/cells.py", "tests/megatron/parity/run.py"),
    ),
    "versions": Table(
        "benchmarks/results/versions.md",
        "tests.versions --output benchmarks/results/versions.md",
        30,
        (*_PLUGIN, "simreg_megatron/__main__.py", "patches/*.patch",
         *(f"tests/versions/{name}.py" for name in _MODULES)),
    ),
    "benchmarks": Table(
        "benchmarks/results/cpu.md",
        "benchmarks --device cpu --output benchmarks/results",
        25,
        ("simreg_megatron/kernels/**/*.py", "simreg_megatron/losses/simreg.py", "simreg_megatron/losses/_chunks.py",
         "simreg_megatron/losses/roles.py", "simreg_megatron/losses/_anchored.py",
         *(f"benchmarks/{name}.py" for name in ("__main__", "cases", "measure"))),
    ),
}  # fmt: skip


class Stamp(NamedTuple):
    """The stamp of a table: the commit, with +changes if the code had others, and the code's digest."""

    commit: str
    code: str


def stamp(name: str, root: Path = ROOT) -> str:
    """Return the line for a table that is made now."""
    return f"At commit {_commit(TABLES[name].code, root)}, code {digest(TABLES[name].code, root)} ({_WHY})."


_WHY = "the commit that brought this page comes after the one it names; `python -m tools.tables` compares the code"


def stamp_of(page: Path) -> Stamp | None:
    found = _STAMP.search(page.read_text(encoding="utf-8"))
    return Stamp(found["commit"], found["code"]) if found else None


def _commit(code: Sequence[str], root: Path) -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", *(f":(glob){glob}" for glob in code))
        return git("rev-parse", "--short", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


# The code that matters ------------------------------------------------------------------------------------------------


def digest(code: Sequence[str], root: Path = ROOT) -> str:
    """Hash all files that the globs find, by name and content; twelve hexadecimal digits.

    Raises:
        FileNotFoundError: a glob finds nothing, so it is out of date itself.
    """
    total = hashlib.sha256()
    for path in sorted({path for glob in code for path in _files(glob, root)}):
        text = path.read_text(encoding="utf-8")
        content = "".join(_words(ast.parse(text))) if path.suffix == ".py" else text
        total.update(f"{path.relative_to(root).as_posix()}\0{content}\0".encode())
    return total.hexdigest()[:12]


def _files(glob: str, root: Path) -> list[Path]:
    found = list(root.glob(glob))
    if not found:
        raise FileNotFoundError(f"tools/tables.py: no file is found by {glob}")
    return found


def _words(node: object, *, is_error: bool = False) -> Iterator[str]:
    """Write a syntax tree as text, the same in every Python: without places, and without what is empty."""
    if isinstance(node, list):
        for each in node:
            if not _is_docstring(each):
                yield from _words(each, is_error=is_error)
    elif isinstance(node, ast.AST):
        is_error = is_error or isinstance(node, ast.Raise)
        yield f"({type(node).__name__}"
        for name, value in ast.iter_fields(node):
            if value is not None and value != [] and name not in ("kind", "type_comment"):
                yield f" {name}="
                yield from _words(value, is_error=is_error)
        yield ")"
    else:
        yield "''" if is_error and isinstance(node, str) else repr(node)


def _is_docstring(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


# Old tables -----------------------------------------------------------------------------------------------------------


class Tolerance(NamedTuple):
    """A change that leaves what stands in a table as it is: one line of the file, with its reason."""

    table: str
    made_from: str
    now: str
    reason: str


def tolerances(root: Path = ROOT) -> list[Tolerance]:
    """Raises ValueError for a line that is not `TABLE DIGEST DIGEST why`."""
    found = []
    for line in (root / TOLERATED).read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            words = line.split(maxsplit=3)
            if len(words) < 4 or words[0] not in TABLES:
                raise ValueError(f"{TOLERATED}: not a table, two digests and a reason: {line}")
            found.append(Tolerance(*words))
    return found


def why_stale(name: str, root: Path = ROOT) -> str:
    """Explain what to do about an old table; empty for one that is current."""
    table = TABLES[name]
    again = f"make it again with `python -m tools.tables --make {name}` ({table.minutes:g} minutes)"
    made, now = stamp_of(root / table.page), digest(table.code, root)
    if made is None:
        return f"{table.page} does not say which code it was made from: {again}"
    tolerated = {(one.made_from, one.now) for one in tolerances(root) if one.table == name}
    if made.code == now or (made.code, now) in tolerated:
        return ""
    return (
        f"the code under {table.page} is no longer that of its table, made at commit {made.commit}: {again}; or, if no "
        f"number in it can have changed, say why in {TOLERATED}: {name} {made.code} {now} REASON"
    )


# The command ----------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.tables", description=__doc__)
    parser.add_argument("--make", action="store_true", help="make the stale ones, or those named, again")
    parser.add_argument("names", nargs="*", metavar="TABLE", help=f"of {', '.join(TABLES)}")
    options = parser.parse_args(argv)
    unknown = [name for name in options.names if name not in TABLES]
    if unknown:
        parser.error(f"no table is called {unknown[0]}: there are {', '.join(TABLES)}")
    names = options.names or list(TABLES)
    if options.make:
        return _make([name for name in names if options.names or why_stale(name)])
    stale = {name: why for name in names if (why := why_stale(name))}
    for name in names:
        print(f"{name}: {stale.get(name, TABLES[name].page + ' is of the code that is here')}")
    print(f"{sum(TABLES[name].minutes for name in stale):g} minutes to make {len(stale)} again, on two quiet cores")
    return 1 if stale else 0


def _make(names: Sequence[str]) -> int:
    """Make them one after another: they are measured, or time each other out, if anything else runs."""
    failed = []
    for name in names:
        more = os.environ.get(f"{name.upper()}_ARGS", "")
        print(f"> {name}: python -m {TABLES[name].command} {more}", flush=True)
        words = [sys.executable, "-m", *shlex.split(f"{TABLES[name].command} {more}")]
        if subprocess.run(words, cwd=ROOT, check=False).returncode:
            failed.append(name)
    print(f"> failed: {', '.join(failed)}" if failed else f"> made: {', '.join(names) or 'none, as none is stale'}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
