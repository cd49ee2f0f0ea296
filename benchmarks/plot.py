# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.plot FILE.csv`: time and memory against the length of a chunk, as FILE.png.

`python -m benchmarks --output` draws it of what it has just measured; this draws it again of the lines it kept.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from benchmarks import records
from benchmarks.cases import LOSSES, Size
from benchmarks.measure import Row
from simreg_megatron.tools.curves import COLOURS, DASHES, plain_axes

_SHORTEST = 512  # the sizes below are of other shapes
_NAMES = {"tiled": "tiled (ours)", "triton": "triton (ours)"}
_ORDER = sorted(LOSSES, key=lambda name: name not in _NAMES)  # ours in the first colours, with the plainest lines


def draw(rows: Iterable[Row], path: Path, *, title: str) -> Figure:
    """Forward and backward, for the middle width that was measured; time is per token, so that batches compare."""
    whole = [row for row in rows if row.backward and row.size.length >= _SHORTEST]
    widths = sorted({row.size.width for row in whole if row.seconds is not None})
    width = widths[len(widths) // 2 - (len(widths) % 2 == 0)]
    whole = [row for row in whole if row.size.width == width]
    figure = Figure(figsize=(9, 4.4), dpi=160, layout="constrained")
    time, memory = figure.subplots(1, 2)
    for index, name in enumerate(_ORDER):
        found = sorted(
            (row for row in whole if row.loss == name and row.seconds is not None), key=lambda row: row.size.length
        )
        if found:
            _line(time, index, name, found, [1e6 * _seconds(row) / (row.size.batch * row.size.length) for row in found])
            _line(memory, index, name, found, [(row.extra_bytes or 0) / 2**20 for row in found])
    lengths = sorted({row.size.length for row in whole if row.seconds is not None})
    for axes, what in ((time, "microseconds per token"), (memory, "MiB without the inputs")):
        _name_axes(axes, lengths, what)
    figure.suptitle(f"SimReg, forward and backward, width {width}: {title}", fontsize=12)
    if ends := list(_why_they_end(whole, lengths)):
        figure.supxlabel("; ".join(ends), fontsize=9)
    time.legend(frameon=False, fontsize=9)
    figure.savefig(path)
    return figure


def _seconds(row: Row) -> float:
    assert row.seconds is not None
    return row.seconds


def _line(axes: Axes, index: int, name: str, rows: Sequence[Row], values: Sequence[float]) -> None:
    axes.plot(
        [row.size.length for row in rows],
        values,
        label=_NAMES.get(name, name),
        color=COLOURS[index % len(COLOURS)],
        marker="o",
        linestyle=DASHES[index % len(DASHES)],
        linewidth=2.5 if name in _NAMES else 1.2,
        markersize=5,
    )


def _name_axes(axes: Axes, lengths: Sequence[int], what: str) -> None:
    axes.set(xscale="log", yscale="log", xlabel="tokens in a chunk", ylabel=f"{what}; lower is better")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    plain_axes(axes)


def _why_they_end(rows: Sequence[Row], lengths: Sequence[int]) -> Iterator[str]:
    """A word on each line that ends before the others, or that is not there at all."""
    for name in LOSSES:
        lacking = [row for row in rows if row.loss == name and row.seconds is None and row.size.length in lengths]
        if lacking:
            first = min(lacking, key=lambda row: row.size.length)
            where = "" if first.size.length == lengths[0] else f" at {first.size.length:,} tokens"
            yield f"{name}{where}: {first.remark}"


def rows_of(lines: Iterable[records.Record]) -> Iterator[Row]:
    """Yield the rows that `python -m benchmarks --output` wrote."""
    for line in lines:
        size = Size(int(line["batch"]), int(line["tokens"]), int(line["width"]))
        seconds = float(line["seconds"]) if line["seconds"] else None
        extra = int(line["extra_bytes"]) if line["extra_bytes"] else None
        yield Row(line["loss"], size, line["pass"] != "forward", seconds, extra, remark=line["remark"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE.csv")
    path = parser.parse_args().file
    lines = records.read(path)
    draw(rows_of(lines), path.with_suffix(".png"), title=lines[0]["machine"])


if __name__ == "__main__":
    main()
