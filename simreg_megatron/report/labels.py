# SPDX-License-Identifier: Apache-2.0
"""How unequal labels are: the frequency of each token id by its rank, and what the first ones hold together."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def draw_label_histogram(counts: np.ndarray, path: Path, *, share: float = 0.02, title: str = "") -> Path:
    """Draw counts[id] as shares of all labels, the most frequent id first, and their running sum.

    Args:
        counts: labels of each token id [vocabulary].
        path: the picture to write.
        share: of the vocabulary, marked in both panels.
        title: what was counted.
    """
    import numpy as np
    from matplotlib.figure import Figure

    ranked = np.sort(counts)[::-1] / counts.sum()
    ranks = np.arange(1, len(ranked) + 1)
    top = max(1, math.ceil(share * len(ranked) - 1e-9))
    held = ranked[:top].sum()
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    frequency, together = figure.subplots(1, 2)
    seen = ranked > 0
    frequency.loglog(ranks[seen], ranked[seen])
    frequency.set(xlabel="rank of the token id", ylabel="share of all labels")
    together.plot(ranks / len(ranked), np.cumsum(ranked))
    together.set(xlabel="share of the vocabulary, most frequent first", ylabel="share of all labels", ylim=(0, 1.02))
    frequency.axvline(top, color="0.5", linestyle=":")
    together.axvline(share, color="0.5", linestyle=":")
    together.annotate(
        f"{share:.0%} of the ids: {held:.1%}", (share, held), (0.15, 0.5), arrowprops={"arrowstyle": "->"}
    )
    figure.suptitle(f"{title}: {int(counts.sum()):,} labels, {len(ranked):,} token ids" if title else "")
    figure.savefig(path, dpi=150)
    return path
