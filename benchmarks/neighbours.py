# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.neighbours`: the table of the experiment `objectives`, in docs/evidence.md.

It is made of benchmarks/results/evidence/objectives.csv and .plan.json, which `simreg-megatron reproduce objectives`
left. The plan has no claims, since each weight is one guess; so the table has intervals and no verdict.
"""

from __future__ import annotations

from benchmarks import records
from benchmarks.claims import FOLDER
from benchmarks.records import RESULTS, ROOT, Record
from simreg_megatron.report.welch import deviation, mean, welch
from simreg_megatron.reproduce.check import Table, read_tables

PAGE = ROOT / "docs" / "evidence.md"
BASELINE = "cross-entropy"
_MEASURED = {"isotropy": ".3f", "negative_cosine": ".3f"}


def main() -> None:
    tables = read_tables(FOLDER)
    if "objectives" not in tables:  # not complete yet
        return
    text = "\n".join(table(tables["objectives"])) + "\n"
    path = RESULTS / "neighbours.md"
    path.write_text(text, encoding="utf-8")
    records.quote(path, text, PAGE)
    print(text)


def table(found: Table) -> list[str]:
    """A line for each arm: its end, the difference from the baseline's with its interval, what its states became."""
    heads = (
        "arm",
        "flags",
        "validation loss (standard deviation)",
        "than cross-entropy (95 % interval)",
        "isotropy",
        "cosine, other labels",
    )
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    than = _numbers(found.rows, BASELINE, "validation_loss")
    for arm in found.plan.arms:
        own = _numbers(found.rows, arm.name, "validation_loss")
        flags = " ".join(f"--{flag} {value}" for flag, value in arm.flags.items())
        apart = "" if arm.name == BASELINE else "{:+.4f} ({:+.4f} to {:+.4f})".format(*welch(own, than)[:3])
        measured = (format(mean(_numbers(found.rows, arm.name, measure)), form) for measure, form in _MEASURED.items())
        cells = (arm.name, f"`{flags}`" if flags else "", f"{mean(own):.4f} ({deviation(own):.4f})", apart, *measured)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _numbers(rows: list[Record], arm: str, measure: str) -> list[float]:
    return [float(row[measure]) for row in rows if row["arm"] == arm]


if __name__ == "__main__":
    main()
