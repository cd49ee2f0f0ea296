# SPDX-License-Identifier: Apache-2.0
"""How lambda changes over a training: a factor computed from the iteration alone, so a resumed run continues it.

    factor(i) = min(1, (i + 1) / warmup) * shape(i / N),   0 from iteration N on where N is not the whole training
    linear:    shape(p) = 1 + (final - 1) p
    cosine:    shape(p) = final + (1 - final) (1 + cos(pi p)) / 2

of iteration i, counted from 0; N = round(off_after * iterations of the training), or all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SHAPES = ("constant", "linear", "cosine")
_HIGHEST = 1000  # times lambda


@dataclass(frozen=True)
class Schedule:
    """Settings of one run.

    Attributes:
        shape: of the way to `final`.
        final: what is left of lambda at the end, as a share of it.
        warmup_iters: iterations over which lambda rises linearly from 0.
        off_after: share of the training after which the term is off; 1 is never.
    """

    shape: str = "constant"
    final: float = 1.0
    warmup_iters: int = 0
    off_after: float = 1.0

    @property
    def is_constant(self) -> bool:
        return not (self.warmup_iters or self.needs_length)

    @property
    def needs_length(self) -> bool:
        """Whether the factor depends on how long the training is."""
        return self.shape != "constant" or self.off_after < 1

    def factor(self, iteration: int, num_iterations: int | None = None) -> float:
        """What lambda is multiplied by in this iteration, counted from 0.

        Args:
            num_iterations: of the whole training; needed where `needs_length`.

        Raises:
            ValueError: the training is so short that it would be off from the start, or never.
        """
        rise = min(1.0, (iteration + 1) / self.warmup_iters) if self.warmup_iters else 1.0
        if not self.needs_length:
            return rise
        assert num_iterations is not None
        if self.has_ended(iteration, num_iterations):
            return 0.0
        return rise * self._shape(min(1.0, iteration / self._length(num_iterations)))

    def has_ended(self, iteration: int, num_iterations: int | None) -> bool:
        """Whether the term is off in this iteration, and in all that follow."""
        if self.off_after == 1:
            return False
        assert num_iterations is not None
        return iteration >= self._length(num_iterations)

    def _length(self, num_iterations: int) -> int:
        """Iterations in which the term is on."""
        length = round(self.off_after * num_iterations)
        if self.off_after < 1 and not 0 < length < num_iterations:
            raise ValueError(
                f"--simreg-off-after {self.off_after:g} of {num_iterations} iterations is "
                f"{'no iteration' if length == 0 else 'all of them'}: give another share, or drop it"
            )
        return length

    def _shape(self, progress: float) -> float:
        if self.shape == "linear":
            return 1.0 + (self.final - 1.0) * progress
        if self.shape == "cosine":
            return self.final + (1.0 - self.final) * (1.0 + math.cos(math.pi * progress)) / 2
        return 1.0

    def __str__(self) -> str:
        """ "linear to 0.1 of it" and so on, for one line of a log; empty where it is constant."""
        words = [f"rising over {self.warmup_iters} iterations"] if self.warmup_iters else []
        if self.shape != "constant":
            words.append(f"{self.shape} to {self.final:g} of it")
        if self.off_after < 1:
            words.append(f"off after {self.off_after:g} of the training")
        return ", ".join(words)


def parsed(text: str, warmup_iters: int, off_after: float | None) -> Schedule:
    """ "constant", "linear:0.1" or "cosine:0", with the other settings.

    Raises:
        ValueError: it is none of them, or would change nothing.
    """
    shape, colon, number = text.partition(":")
    if shape not in SHAPES or bool(colon) == (shape == "constant"):
        raise ValueError(
            f"the SimReg lambda schedule must be constant, or linear or cosine with the share of lambda that is left "
            f"at the end, such as linear:0.1 or cosine:0, not {text!r}"
        )
    final = _number(number) if colon else 1.0
    if not final >= 0 or not math.isfinite(final):
        raise ValueError(f"the SimReg lambda schedule {shape} ends at a finite share of 0 or more, not {number!r}")
    if final > _HIGHEST:
        raise ValueError(f"the SimReg lambda schedule {shape} ends at a share of at most {_HIGHEST:,}, not {number!r}")
    if colon and final == 1:
        raise ValueError(f"the SimReg lambda schedule {text} changes nothing, as it ends where it begins: drop it")
    if off_after is not None and not 0 < off_after < 1:
        raise ValueError(
            f"SimReg is off after a share of the training above 0 and below 1, not {off_after:g}: "
            f"{'drop it' if off_after >= 1 else 'set lambda 0 for a run without it'}"
        )
    return Schedule(shape, final, warmup_iters, 1.0 if off_after is None else off_after)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
