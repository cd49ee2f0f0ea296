# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.search`: the table of the search for settings, in docs/evidence.md.

It is made of benchmarks/results/evidence/tuning.csv, whose lines are the runs of `simreg-megatron reproduce tuning`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from benchmarks import records
from benchmarks.records import RESULTS, ROOT, Record

SOURCE = RESULTS / "evidence" / "tuning.csv"
PAGE = ROOT / "docs" / "evidence.md"
SECOND = {"cross-entropy": "weight-decay", "simreg": "simreg-lambda"}
"""What each arm searches beside the learning rate."""


def main() -> None:
    text = "\n".join(table(records.read(SOURCE))) + "\n"
    path = RESULTS / "search.md"
    path.write_text(text, encoding="utf-8")
    records.quote(path, text, PAGE)
    print(text)


def table(lines: Sequence[Record]) -> list[str]:
    """For each size and learning rate the losses of both arms, and the least of each arm in bold."""
    found = []
    for size in dict.fromkeys(line["size"] for line in lines):
        own = [line for line in lines if line["size"] == size]
        rates = sorted({flag(line, "lr") for line in own}, key=float)
        heads = [f"{arm}, {SECOND[arm].replace('-', ' ')} {_values(own, arm)}" for arm in SECOND]
        seeds = ", ".join(sorted({line["seed"] for line in own}))
        tokens = f"{float(own[0]['tokens']) / 1e6:.1f}"
        found += [f"Width {size}, {tokens} million tokens, seed {seeds}: validation loss in nats per token.", ""]
        found += [f"| learning rate | {' | '.join(heads)} |", "| --- | --- | --- |"]
        found += [f"| {rate} | {' | '.join(_cell(own, arm, rate) for arm in SECOND)} |" for rate in rates]
        found.append("")
    return found[:-1]


def flag(line: Record, name: str) -> str:
    """As the run was given it."""
    (value,) = re.findall(rf"--{name} (\S+)", line["flags"])
    return str(value)


def _of(lines: Sequence[Record], arm: str) -> list[Record]:
    return sorted((line for line in lines if line["arm"] == arm), key=lambda line: float(flag(line, SECOND[arm])))


def _values(lines: Sequence[Record], arm: str) -> str:
    return ", ".join(dict.fromkeys(flag(line, SECOND[arm]) for line in _of(lines, arm)))


def _cell(lines: Sequence[Record], arm: str, rate: str) -> str:
    best = min(float(line["validation_loss"]) for line in _of(lines, arm))
    losses = [float(line["validation_loss"]) for line in _of(lines, arm) if flag(line, "lr") == rate]
    return ", ".join(f"**{loss:.3f}**" if loss == best else f"{loss:.3f}" for loss in losses)


if __name__ == "__main__":
    main()
