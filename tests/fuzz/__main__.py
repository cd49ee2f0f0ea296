# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.fuzz` (`make fuzz`): every target in turn, each in a process of its own, and what came of it.

Guided by atheris where that is installed, else by the lines that inputs reach. What is found, and the inputs that
reached something new, stay in the output folder, from which the next run goes on.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import records
from tests.fuzz.one import CURRENT, OUTCOME
from tests.fuzz.target import CORPUS

ROOT = Path(__file__).resolve().parents[2]
RESULTS = records.RESULTS / "fuzz.csv"
_LINE = "{target:24} {inputs:>10,} inputs {per_second:>8,.0f}/s {covered:>5} new coverage {findings:>3} findings"
_START = 120  # seconds a process may take beyond its time: libraries, seeds, a last slow input


def main() -> int:
    options = _options()
    names = options.only or sorted(path.name for path in CORPUS.iterdir())
    rows = []
    for name in names:
        row = _run(name, options, options.seconds / len(names))
        if row is None:
            continue
        rows.append(row)
        print(_LINE.format(**row), flush=True)
        if options.record:
            _append(row)
    print(f"in all {sum(row['inputs'] for row in rows):,} inputs, {sum(row['findings'] for row in rows)} findings")
    return 1 if len(rows) < len(names) or any(row["findings"] for row in rows) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600, help="for all targets together (default: 600)")
    parser.add_argument("--only", nargs="+", metavar="TARGET", help="these targets alone")
    parser.add_argument("--plain", action="store_true", help="without atheris, even where it is installed")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the mutations (default: the clock's)")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "fuzz", help="default: runs/fuzz")
    parser.add_argument("--record", action="store_true", help="keep a row per target in benchmarks/results/fuzz.csv")
    return parser.parse_args()


def _run(name: str, options: argparse.Namespace, seconds: float) -> dict[str, Any] | None:
    """What came of one target; None if its process ended before it read anything, which the others do not wait for."""
    folder = options.output / name
    for old in ("findings.txt", OUTCOME):
        (folder / old).unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.fuzz.one", name, str(folder), f"{seconds:g}", "--seed", str(options.seed)]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.txt").open("wb") as log:
        try:
            command += ["--plain"] * options.plain
            status = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, timeout=seconds + _START).returncode
        except subprocess.TimeoutExpired:
            status = -1
    outcome = _outcome(folder)
    if status and not (folder / CURRENT).is_file():
        print(f"{name}: ended with status {status} before it read anything: see {folder / 'log.txt'}", flush=True)
        return None
    if status:  # the library took the process down, or hangs: what it was reading is what did it
        shutil.copyfile(folder / CURRENT, folder / "died")
        outcome["findings"] += 1
        print(f"{name}: the process ended with status {status} while it read {folder / 'died'}")
    findings = folder / "findings.txt"
    if findings.is_file():
        print(findings.read_text(encoding="utf-8"), end="")
    per_second = outcome["inputs"] / max(outcome["seconds"], 1e-9)
    return {"target": name, **outcome, "per_second": per_second}


def _outcome(folder: Path) -> dict[str, Any]:
    """What the plain loop wrote down, or what libFuzzer told."""
    if (folder / OUTCOME).is_file():
        return dict(json.loads((folder / OUTCOME).read_text()))
    log = (folder / "log.txt").read_text(errors="replace")
    counts = [(int(number), int(cov)) for number, cov in re.findall(r"^#(\d+)\s.*?cov: (\d+)", log, re.MULTILINE)]
    done = re.search(r"Done (\d+) runs in (\d+) second", log)
    inputs, seconds = (int(done[1]), float(done[2])) if done else (counts[-1][0] if counts else 0, 0.0)
    seeds = re.search(r"INITED\s+cov: (\d+)", log)
    covered = counts[-1][1] - int(seeds[1]) if counts and seeds else 0
    findings = folder / "findings.txt"
    found = len(findings.read_text(encoding="utf-8").splitlines()) if findings.is_file() else 0
    return {"inputs": inputs, "seconds": seconds, "covered": covered, "findings": found, "engine": "atheris"}


def _append(row: dict[str, Any]) -> None:
    """At once: a campaign may be stopped."""
    kept: list[dict[str, Any]] = [*records.read(RESULTS)] if RESULTS.is_file() else []
    columns = ("target", "engine", "inputs", "seconds", "covered", "findings")
    told = {name: row[name] for name in columns} | {"seconds": f"{row['seconds']:.1f}"}
    records.write(RESULTS, [*kept, told | records.surroundings()])


if __name__ == "__main__":
    raise SystemExit(main())
