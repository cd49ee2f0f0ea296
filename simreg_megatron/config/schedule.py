# SPDX-License-Identifier: Apache-2.0
"""How lambda changes over a training: a factor computed from the iteration alone, so a resumed run continues it.

    factor(i) = min(1, (i - S + 1) / warmup) * shape((i - S) / (N - S)),   0 before iteration S
    linear:    shape(p) = 1 + (final - 1) p                                and, with off_after, from iteration N on
    cosine:    shape(p) = final + (1 - final) (1 + cos(pi p)) / 2

of iteration i, counted from 0; S = start_iter; N = round(off_after * iterations of the training), or all of them.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from simreg_megatron.notices import refuse
from simreg_megatron.objectives.record import number_of

SHAPES = ("constant", "linear", "cosine")
_HIGHEST = 1000  # times lambda


@dataclass(frozen=True)
class Schedule:
    shape: str = "constant"  # of the way to `final`
    final: float = 1.0  # what is left of lambda at the end, as a share of it
    warmup_iters: int = 0  # iterations over which lambda rises linearly
    off_after: float = 1.0  # share of the training after which the term is off; 1 is never
    start_iter: int = 0  # iterations before the term begins

    @functools.cached_property
    def is_constant(self) -> bool:
        return not (self.start_iter or self.warmup_iters or self.needs_length)

    @functools.cached_property
    def needs_length(self) -> bool:
        """Return whether the factor depends on how long the training is."""
        return self.shape != "constant" or self.off_after < 1

    def factor(self, iteration: int, num_iterations: int | None = None) -> float:
        """Return the factor of lambda in this iteration, counted from 0; a schedule that `needs_length` needs it."""
        if self.is_off(iteration, num_iterations):
            return 0.0
        elapsed = iteration - self.start_iter
        rise = min(1.0, (elapsed + 1) / self.warmup_iters) if self.warmup_iters else 1.0
        if not self.needs_length:
            return rise
        progress = min(1.0, elapsed / (self.end(num_iterations) - self.start_iter))
        if self.shape == "cosine":
            return rise * (self.final + (1.0 - self.final) * (1.0 + math.cos(math.pi * progress)) / 2)
        return rise * (1.0 + (self.final - 1.0) * progress)  # final is 1 if constant

    def is_off(self, iteration: int, num_iterations: int | None = None) -> bool:
        """Return whether the term has not begun in this iteration, or has ended."""
        return (self.off_after < 1 and iteration >= self.end(num_iterations)) or iteration < self.start_iter

    def end(self, num_iterations: int | None) -> int:
        """Return the iteration at which the term ends: `off_after` of the length of the training, or all of it."""
        assert num_iterations is not None
        length = round(self.off_after * num_iterations)
        refuse(
            (self.off_after < 1 and not 0 < length < num_iterations,
             f"--simreg-off-after {self.off_after:g} of {num_iterations} iterations is "
             f"{'no iteration' if length == 0 else 'all of them'}: give another share, or drop it"),
            (self.start_iter >= length,
             f"--simreg-start-iter {self.start_iter} leaves no iteration with SimReg, which ends at {length}: give a "
             "smaller number, or a longer training"),
        )  # fmt: skip
        return length

    def __str__(self) -> str:
        """ "linear to 0.1 of it" and so on, for one line of a log; empty where it is constant."""
        words = [f"from iteration {self.start_iter} on"] if self.start_iter else []
        if self.warmup_iters:
            words.append(f"rising over {self.warmup_iters} iterations")
        if self.shape != "constant":
            words.append(f"{self.shape} to {self.final:g} of it")
        if self.off_after < 1:
            words.append(f"off after {self.off_after:g} of the training")
        return ", ".join(words)


def parsed(text: str, warmup_iters: int, off_after: float | None, start_iter: int = 0) -> Schedule:
    """Read "constant", "linear:0.1" or "cosine:0", with the other settings; ValueError if it is none of them."""
    shape, colon, number = text.partition(":")
    final, share = number_of(number) if colon else 1.0, 1.0 if off_after is None else off_after
    refuse(
        (shape not in SHAPES or bool(colon) == (shape == "constant"),
         "the SimReg lambda schedule must be constant, or linear or cosine with the share of lambda that is left at "
         f"the end, such as linear:0.1 or cosine:0, not {text!r}"),
        (not 0 <= final <= _HIGHEST,
         f"the SimReg lambda schedule {shape} ends at a share from 0 to {_HIGHEST:,}, not {number!r}"),
        (off_after is not None and not 0 < share < 1,
         f"SimReg is off after a share of the training above 0 and below 1, not {share:g}: "
         f"{'drop it' if share >= 1 else 'set lambda 0 for a run without it'}"),
    )  # fmt: skip
    return Schedule(shape, final, warmup_iters, share, start_iter)
