# SPDX-License-Identifier: Apache-2.0
"""Time and memory against the length of a chunk."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from benchmarks.cases import LOSSES
from benchmarks.measure import Row


def draw(rows: Iterable[Row], path: Path, *, title: str) -> None:
    """Forward and backward, for the middle width that was measured; time is per token, so that batches compare."""
    whole = [row for row in rows if row.backward and row.seconds is not None and row.size.length >= 512]
    widths = sorted({row.size.width for row in whole})
    width = widths[len(widths) // 2 - (len(widths) % 2 == 0)]
    figure, (time, memory) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name in LOSSES:
        found = sorted(
            ((row.size.length, row) for row in whole if row.loss == name and row.size.width == width),
            key=lambda pair: pair[0],
        )
        if not found:
            continue  # nothing this machine can run
        lengths = [length for length, _ in found]
        style = {"marker": "o", "label": name, "linewidth": 2.5 if name in ("tiled", "triton") else 1.2}
        time.plot(lengths, [1e6 * row.seconds / (row.size.batch * row.size.length) for _, row in found], **style)
        memory.plot(lengths, [row.extra_bytes / 2**20 for _, row in found], **style)
    for axes, what in ((time, "microseconds per token"), (memory, "MiB beside the inputs")):
        axes.set(xscale="log", yscale="log", xlabel="tokens in a chunk", ylabel=what)
        axes.grid(alpha=0.3)
    time.legend()
    figure.suptitle(f"SimReg, forward and backward, width {width}: {title}")
    figure.savefig(path, dpi=130)
    plt.close(figure)
