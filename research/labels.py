# SPDX-License-Identifier: Apache-2.0
"""`python -m research.labels PREFIX`: count the labels of a set, for the paper's Figure 2a.

Writes PREFIX.histogram.json and .png. Every token of a set but the first is the label of the one before it, so the
counts of tokens are those of labels. SimReg's positives are tokens with equal labels; the counts show how many.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from launch.data import read_manifest
from simreg_megatron.tools.indexed import DataError, read_tokens

_CHUNK = 1 << 22  # tokens; memory is that of the counts


def count_labels(prefix: Path, vocab_size: int | None = None) -> np.ndarray:
    """Count each token id of PREFIX.bin [vocab_size].

    Args:
        prefix: path of the pair without .bin and .idx.
        vocab_size: number of ids (default: that of the manifest, or the largest id plus one).

    Raises:
        DataError: there is no whole pair, or it has ids beyond the vocabulary.
    """
    tokens = read_tokens(prefix)
    vocab_size = vocab_size or read_manifest(str(prefix)).get("vocab_size")
    counts = np.zeros(vocab_size or 0, dtype=np.int64)
    for start in range(0, len(tokens), _CHUNK):
        found = np.bincount(tokens[start : start + _CHUNK], minlength=len(counts))
        if vocab_size and len(found) > vocab_size:
            raise DataError(f"{prefix}.bin has the id {len(found) - 1}, beyond the vocabulary of {vocab_size}")
        found[: len(counts)] += counts
        counts = found
    return counts


def top(counts: np.ndarray, share: float) -> tuple[int, float]:
    """Return how many ids the most frequent `share` of the vocabulary is, and their share of all labels."""
    count = max(1, math.ceil(share * len(counts) - 1e-9))
    return count, int(np.sort(counts)[::-1][:count].sum()) / int(counts.sum())


def draw(counts: np.ndarray, path: Path, share: float, title: str) -> None:
    """Draw the share of all labels by rank, and the running sum, with the most frequent `share` marked."""
    from matplotlib.figure import Figure

    ranked = np.sort(counts)[::-1] / counts.sum()
    ranks = np.arange(1, len(ranked) + 1)
    count, held = top(counts, share)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    frequency, together = figure.subplots(1, 2)
    frequency.loglog(ranks[ranked > 0], ranked[ranked > 0])
    frequency.set(xlabel="rank of the token id", ylabel="share of all labels")
    together.plot(ranks / len(ranked), np.cumsum(ranked))
    together.set(xlabel="share of the vocabulary, most frequent first", ylabel="share of all labels", ylim=(0, 1.02))
    frequency.axvline(count, color="0.5", linestyle=":")
    together.axvline(share, color="0.5", linestyle=":")
    arrow = {"arrowstyle": "->"}
    together.annotate(f"{share:.0%} of the ids: {held:.1%}", (share, held), (0.15, 0.5), arrowprops=arrow)
    figure.suptitle(f"{title}: {int(counts.sum()):,} labels, {len(counts):,} token ids")
    figure.savefig(path, dpi=150)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m research.labels", description="Count the labels of a set.")
    parser.add_argument("prefix", type=Path, help="of PREFIX.bin and PREFIX.idx")
    parser.add_argument(
        "--share", type=float, default=0.02, help="share of the vocabulary to report on (default: 0.02)"
    )
    parser.add_argument("--vocab-size", type=int, help="(default: the manifest's, else the largest id plus one)")
    options = parser.parse_args(argv)
    try:
        counts = count_labels(options.prefix, options.vocab_size)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    count, held = top(counts, options.share)
    facts = {
        "prefix": str(options.prefix),
        "labels": int(counts.sum()),
        "vocab_size": len(counts),
        "ids_that_occur": int((counts > 0).sum()),
        "top": {"share_of_vocabulary": options.share, "ids": count, "share_of_labels": held},
        "counts": counts.tolist(),
    }
    output = Path(f"{options.prefix}.histogram")
    output.with_suffix(".histogram.json").write_text(json.dumps(facts) + "\n")
    draw(counts, output.with_suffix(".histogram.png"), options.share, options.prefix.name)
    print(
        f"{facts['labels']:,} labels; the {count:,} most frequent of {len(counts):,} token ids ({options.share:.2%}) "
        f"hold {held:.2%} of them; {facts['ids_that_occur']:,} ids occur"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
