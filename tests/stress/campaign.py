# SPDX-License-Identifier: Apache-2.0
"""Many cases: each batch draws from its own number, and the worst of each kind stays in a table that keeps growing."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import records
from tests.stress.cases import Case, draw
from tests.stress.judge import judge

IMPLS = ("reference", "tiled")
SMALL_BATCH = 500
_LARGE_ANCHORS = 64


class Row(NamedTuple):
    size: str
    impl: str
    kind: str
    cases: int
    value: float  # largest error over its bound
    gradient: float
    not_finite: int


class Table:
    """Rows by size, form and kind, kept in a file; and how many batches of each size they are of."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.rows: dict[tuple[str, str, str], Row] = {}
        self.batches = {"small": 0, "large": 0}
        for line in records.read(path) if path is not None and path.is_file() else ():
            if line["size"] == "batches":
                self.batches[line["impl"]] = int(line["kind"])
            else:
                *place, cases, value, gradient, not_finite = line.values()
                self.rows[tuple(place)] = Row(*place, int(cases), float(value), float(gradient), int(not_finite))

    def add(self, new: Row) -> None:
        place = new.size, new.impl, new.kind
        old = self.rows.get(place, new._replace(cases=0, not_finite=0))
        counts = {"cases": old.cases + new.cases, "not_finite": old.not_finite + new.not_finite}
        self.rows[place] = new._replace(
            value=max(old.value, new.value), gradient=max(old.gradient, new.gradient), **counts
        )

    def keep(self) -> None:
        if self._path is None:
            return
        rows = [row._replace(value=f"{row.value:.3f}", gradient=f"{row.gradient:.3f}") for row in self.rows.values()]
        rows = [row._asdict() for row in sorted(rows)]
        batches = [{"size": "batches", "impl": size, "kind": number} for size, number in self.batches.items()]
        records.write(self._path, [*rows, *batches])


def small(number: int) -> Iterator[Row]:
    """Sequences of 2 to 24 tokens of width 2 to 48, every token an anchor."""
    generator = torch.Generator().manual_seed(number)
    length, width = (int(torch.randint(2, most, (), generator=generator)) for most in (25, 49))
    case = draw(generator, SMALL_BATCH, length, width)
    for impl in IMPLS:
        yield _judged("small", case, impl, torch.arange(length).expand(SMALL_BATCH, -1))


def large(number: int) -> Iterator[Row]:
    """One sequence of up to 20,000 tokens of width up to 8,192, in the form that can; some tokens are anchors."""
    generator = torch.Generator().manual_seed(10**9 + number)
    length, width = (
        int(2 ** (math.log2(low) + math.log2(high / low) * float(torch.rand((), generator=generator))))
        for low, high in ((1000, 20000), (64, 8192))
    )
    case = draw(generator, 1, length, width)
    anchors = torch.randperm(length, generator=generator)[:_LARGE_ANCHORS].unsqueeze(0)
    yield _judged("large", case, "tiled", anchors)


def _judged(size: str, case: Case, impl: str, anchors: torch.Tensor) -> Row:
    found = judge(case, impl, anchors)
    return Row(size, impl, case.kind, len(case.rows), found.value, found.gradient, int(not found.finite))
