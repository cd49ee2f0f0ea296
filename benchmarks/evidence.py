# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.evidence [FOLDER]`: keep what a folder of `simreg-megatron reproduce` has whole, and tell it.

Copies the experiments whose runs are complete and pass the protocol to benchmarks/results/evidence, with curves of few
points, and a search also to where the package ships it; the others to its folder `unfinished`, where they have no
verdict, but are not lost with the machine: a folder with the files of both is a queue that can go on. Then it makes
again what the pages say of the complete ones: the tables of the search, of the neighbouring objectives and of the
claims in docs/evidence.md, and docs/experiments.html. Without a folder it does only that.
"""

from __future__ import annotations

import argparse
import csv
import shutil
from pathlib import Path

from benchmarks import claims, neighbours, search
from benchmarks.claims import FOLDER as KEPT
from benchmarks.records import ROOT
from simreg_megatron.report.page import as_html
from simreg_megatron.reproduce import shipped
from simreg_megatron.reproduce.check import read_tables, violations
from simreg_megatron.reproduce.page import page_of
from simreg_megatron.reproduce.plan import Plan
from simreg_megatron.reproduce.store import CURVE_COLUMNS, PLAN, read_csv, thinned

PAGE = ROOT / "docs" / "experiments.html"
UNFINISHED = "unfinished"
"""Folder of experiments whose runs are not all there."""
POINTS, FEW = 60, 20
"""Of a curve: a line in a figure needs no more, and the repository keeps hundreds of them. Few are left of what an
experiment measured and makes no claim about; a claim's number is the mean over the end of its curve, which stays."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.evidence", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", help="the --output folder of `simreg-megatron reproduce`")
    options = parser.parse_args()
    if options.folder:
        keep(options.folder)
    search.main()
    neighbours.main()
    claims.main()
    PAGE.write_text(as_html(page_of(read_tables(KEPT))), encoding="utf-8")
    print(f"Written: {PAGE}")


def keep(folder: Path, kept: Path = KEPT) -> list[str]:
    """The names of the experiments that were copied as complete."""
    tables = read_tables(folder)
    whole = []
    for name in tables:
        if found := violations(name, tables):
            print(f"{name} has no verdict yet: {found[0]}")
            _copy(tables[name].plan, folder, kept / UNFINISHED)
            continue
        whole.append(name)
        _copy(tables[name].plan, folder, kept)
        for old in (kept / UNFINISHED).glob(f"{name}[.-]*"):
            old.unlink()
        if tables[name].plan.is_search and kept == KEPT:
            for path in kept.glob(f"{name}*"):
                shutil.copyfile(path, shipped.RESULTS / path.name)
    return whole


def _copy(plan: Plan, source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for ending in (PLAN, ".csv"):
        shutil.copyfile(source / f"{plan.name}{ending}", target / f"{plan.name}{ending}")
    whole = {"train_loss", *(claim.metric for claim in plan.claims)}
    _copy_curves(source / f"{plan.name}-curves.csv", target / f"{plan.name}-curves.csv", whole)


def _copy_curves(source: Path, target: Path, whole: set[str]) -> None:
    curves: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for point in read_csv(source):
        curves.setdefault((point["run"], point["tag"]), []).append((int(point["step"]), float(point["value"])))
    with target.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(CURVE_COLUMNS)
        for (run, tag), points in curves.items():
            few = thinned(points, POINTS if tag in whole else FEW)
            writer.writerows((run, tag, step, f"{value:.5g}") for step, value in few)


if __name__ == "__main__":
    main()
