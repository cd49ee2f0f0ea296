# SPDX-License-Identifier: Apache-2.0
"""The small family of models: one rule from width to shape, so that sizes differ in nothing else.

    parameters outside the embeddings = layers * (4 d^2 + 3 d f + 2 d) + d,    f = 8/3 d rounded up to a multiple of 16

with d the width and f the width of the feed-forward part: four layers of LLaMA with heads of 32.
"""

from __future__ import annotations

from dataclasses import dataclass

from simreg_megatron.reproduce.errors import ReproduceError

LAYERS = 4
HEAD_WIDTH = 32
SEQUENCE = 256
BATCH = 8  # sequences a step: 2048 tokens
_WARMUP = 0.05  # of the steps
_FLOOR = 0.1  # the last learning rate, as a share of the peak


@dataclass(frozen=True)
class Shape:
    """A model of the family."""

    width: int

    def __post_init__(self) -> None:
        if self.width < HEAD_WIDTH or self.width % HEAD_WIDTH:
            raise ReproduceError(f"a width is a multiple of {HEAD_WIDTH}, the width of a head, not {self.width}")

    @property
    def ffn(self) -> int:
        return -(-8 * self.width // 3 // 16) * 16

    @property
    def parameters(self) -> int:
        """Outside the embeddings and the output layer."""
        d = self.width
        return LAYERS * (4 * d * d + 3 * d * self.ffn + 2 * d) + d

    def steps(self, tokens_per_parameter: float) -> int:
        return max(2, round(self.parameters * tokens_per_parameter / (SEQUENCE * BATCH)))

    @property
    def flags(self) -> dict[str, str]:
        return {
            "model": "tiny",
            "num-layers": f"{LAYERS}",
            "hidden-size": f"{self.width}",
            "ffn-hidden-size": f"{self.ffn}",
            "num-attention-heads": f"{self.width // HEAD_WIDTH}",
            "seq-length": f"{SEQUENCE}",
            "global-batch-size": f"{BATCH}",
        }


def schedule(steps: int) -> dict[str, str]:
    """A whole schedule for a run of that length: warm-up, and a decay that ends with the run."""
    return {"train-iters": f"{steps}", "lr-warmup-iters": f"{max(1, round(_WARMUP * steps))}"}


def last_rate(peak: str) -> str:
    """The learning rate at the end of the decay that belongs to a peak."""
    return f"{_FLOOR * float(peak):g}"
