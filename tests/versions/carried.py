# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.versions.carried`: what one release of Megatron saved, others resume, with all that has a state.

Each release's own pretrain_gpt.py trains four steps on one process with AdaGC, trained scalars, several objectives and
a ramp of lambda, and saves after the second. Each of the others goes on from there, on one process and with TP 2 + SP:
losses, gradient norms, SimReg's values and what AdaGC left of every gradient must be those of the run that never
stopped. A release older than the one that saved may refuse. `--record` keeps a row for each in
benchmarks/results/resumed_releases.csv.
"""

import argparse
import csv
import json
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.megatron import runs
from tests.versions import compare, loops, measure, record, tiny
from tests.versions.compare import RunError
from tests.versions.processes import ROOT

VERSIONS = ("0.16.1", "0.17.1", "0.18.2", "0.19.2")
# Releases count the tokenizer's tokens differently, and pad to multiples that grow with TP: here all pad to 1024.
LAYOUTS: dict[str, tuple[str, ...]] = {
    "one process": ("--make-vocab-size-divisible-by", "1024"),
    "TP 2 + SP": (
        *("--tensor-model-parallel-size", "2", "--sequence-parallel"),
        *("--make-vocab-size-divisible-by", "512"),
    ),
}
RESULTS = ROOT / "benchmarks" / "results" / "resumed_releases.csv"
_SAVED_AT, _LAST = 2, 4
_FLAGS = (*loops.STATEFUL, "--train-iters", f"{_LAST}")
_SECONDS = 1800


class Row(NamedTuple):
    """One resume: how far it is from the run that never stopped, or what was said."""

    saved_by: str
    resumed_by: str
    layout: str
    apart: str  # the largest relative difference; empty where it failed
    said: str


def saving(bench: measure.Bench, version: str) -> loops.Loop:
    loop = _loop(bench, version)
    shutil.rmtree(loop.out, ignore_errors=True)
    place = ("--save", str(loop.out / "checkpoint"), "--save-interval", f"{_SAVED_AT}")
    _run(bench, loop, "saves", [_as_run(loop, "one process", loop.out / "whole", place)])
    return loop


def resumes(bench: measure.Bench, version: str, saved: dict[str, loops.Loop]) -> Iterator[Row]:
    """From what each release saved."""
    loop = _loop(bench, version)
    cases = [(by, layout) for by in saved for layout in LAYOUTS]
    places = {case: loop.out / f"from {case[0]} {case[1]}" for case in cases}
    load = {by: ("--load", str(one.out / "checkpoint"), "--ckpt-step", f"{_SAVED_AT}") for by, one in saved.items()}
    _run(bench, loop, "resumes", [_as_run(loop, layout, places[by, layout], load[by]) for by, layout in cases])
    for by, layout in cases:
        try:
            apart = _apart(saved[by].out / "whole", places[by, layout], tiny.LAYOUTS[layout].processes)
            yield Row(by, version, layout, f"{apart:.0e}", "")
        except RunError as error:
            yield Row(by, version, layout, "", _cause(str(error)))


def _loop(bench: measure.Bench, version: str) -> loops.Loop:
    tree = bench.tree(version)
    if tree is None:
        raise SystemExit(f"error: --sources names no folder with Megatron's source tree of {version}")
    flags = runs.all_flags([*bench.text_flags, "--eval-iters", "0"])
    out = bench.cache / "out" / f"{version} carried"
    return loops.Loop(f"{version} tree", tree, tree / "pretrain_gpt.py", flags, out)


def _as_run(loop: loops.Loop, layout: str, out: Path, more: Sequence[str]) -> record.Run:
    flags = [*loop.flags, *LAYOUTS[layout], *_FLAGS, *more]
    return record.Run(str(out), tiny.LAYOUTS[layout].processes, True, str(loop.script), flags)


def _run(bench: measure.Bench, loop: loops.Loop, what: str, todo: Sequence[record.Run]) -> None:
    loop.out.mkdir(parents=True, exist_ok=True)
    listed = loop.out / f"{what}.json"
    listed.write_text(json.dumps(todo))
    words = ["-m", "tests.versions.record", str(loop.folder), str(listed)]
    bench.run(f"{loop.name} carried {what}", words, timeout=_SECONDS)


def _cause(error: str) -> str:
    """The error's first sentence, without the place on this machine."""
    error = re.sub(r"^from .*?: ", "", error)
    return re.sub(r"'[^']*/iter_", "'iter_", error).split(". ")[0]


def _apart(whole_at: Path, resumed_at: Path, processes: int) -> float:
    """The largest relative difference of any number of the later steps; RunError if the resumed run failed."""
    whole, resumed = loops.read(whole_at, 1), loops.read(resumed_at, processes)
    if len(resumed["norms"]) != _LAST - _SAVED_AT:
        raise RunError(f"{len(resumed['norms'])} steps after the resume")
    pairs = [pair for key in ("losses", "norms") for pair in zip(whole[key][_SAVED_AT:], resumed[key], strict=True)]
    for before, now in zip(whole["clipped"][_SAVED_AT:], resumed["clipped"], strict=True):
        pairs += [(norms[1], now[name][1]) for name, norms in before.items()]
    pairs.append((whole["simreg"][_SAVED_AT], resumed["simreg"][0]))  # later lines of a resumed run are means
    return compare.largest(abs(a - b) / max(abs(a), 1e-12) for a, b in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.versions.carried", description=__doc__)
    parser.add_argument("--cache", type=Path, default=ROOT / ".versions", metavar="DIR", help="installed releases")
    parser.add_argument("--sources", type=Path, metavar="DIR", help="Megatron-LM source trees by tag")
    parser.add_argument("--record", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    args = parser.parse_args()
    bench, rows = measure.Bench(args.cache, args.sources), list[Row]()
    saved = {version: saving(bench, version) for version in VERSIONS}
    for version in VERSIONS:
        for row in resumes(bench, version, saved):
            print(*row[:3], row.apart or f"NOT SO: {row.said}", sep=" | ", flush=True)
            rows.append(row)
    if args.record:
        with RESULTS.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([Row._fields, *rows])
    return 0 if all(holds(row) for row in rows) else 1


def holds(row: Row) -> bool:
    """An older release need not know what a newer one saved; a newer one must."""
    if not row.apart:
        return VERSIONS.index(row.saved_by) > VERSIONS.index(row.resumed_by)
    return float(row.apart) <= compare.TOLERANCE


if __name__ == "__main__":
    sys.exit(main())
