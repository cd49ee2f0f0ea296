# SPDX-License-Identifier: Apache-2.0
"""Compute the cells: every run starts from one trained checkpoint of its model, and each reference is run once."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from simreg_megatron.tools.builtin_corpus import BuiltinCorpus
from tests.megatron import runs, text
from tests.megatron.parity.cells import CHATS, OFF, ONE, Bound, Cell, Part
from tests.megatron.runs import Difference, Recorded, ReplicasDifferError, RunError

STEPS = 3
_SMALLEST_SHARE = 0.1  # of the gradient norm: in a smaller part an error could hide
_START = ("--finetune", "--no-load-optim", "--no-load-rng", "--eval-iters", "0", "--train-iters", str(STEPS))


@dataclass(frozen=True)
class Row:
    cell: Cell
    seconds: float
    difference: Difference | None = None
    share: float = 0.0
    trouble: str = ""  # why there is nothing to compare

    @property
    def within_bound(self) -> bool:
        return self.difference is not None and fits(self.difference, self.cell.bound)

    @property
    def as_expected(self) -> bool:
        if self.cell.must_fail:
            return not self.within_bound and (self.difference is not None or "differ between" in self.trouble)
        return self.within_bound and self.share >= _SMALLEST_SHARE

    @property
    def verdict(self) -> str:
        if self.cell.must_fail:
            return "fails, as it must" if self.as_expected else "DOES NOT FAIL"
        if self.as_expected:
            return "pass"
        return "SHARE TOO SMALL" if self.within_bound else "FAIL"


def fits(difference: Difference, bound: Bound) -> bool:
    return (
        difference.loss <= bound.loss
        and difference.norm <= bound.norm
        and difference.grad <= bound.grad
        and difference.logged <= bound.logged
    )


class Bench:
    """Text, checkpoints and references of one invocation, each made when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_runs = 0
        self.checkpoint = cache(self._train_checkpoint)
        self.compute = cache(self._compute)

    @cached_property
    def corpus(self) -> BuiltinCorpus:
        return text.make_corpus(self._folder / "corpus")

    @cached_property
    def data_flags(self) -> tuple[str, ...]:
        phrases = text.cut_into_phrases(self.corpus, self._folder / "phrases")
        return text.flags(self.corpus, self._folder / "cache", phrases)

    @cached_property
    def chat_flags(self) -> tuple[str, ...]:
        return text.chats(self.corpus, self._folder / "chats")

    def _train_checkpoint(self, model: str) -> Path:
        """The model after ten steps of plain pretraining; every layout starts from it."""
        place = self._folder / f"checkpoint-{model}"
        flags = (*self.data_flags, "--train-iters", "10", "--save", str(place), "--save-interval", "10")
        runs.train(place / "record", (*flags, "--eval-iters", "0"), model=model, plain=True)
        return place

    def _compute(self, model: str, layout: Part, objective: Part, mode: Part, patch: str = "") -> Recorded:
        """Three steps from the model's checkpoint."""
        flags = (*self.data_flags, *(self.chat_flags if mode in CHATS else ()), *_START)
        flags = (*flags, "--load", str(self.checkpoint(model)))
        self._num_runs += 1
        return runs.train(
            self._folder / f"run{self._num_runs}",
            (*flags, *mode.flags, *layout.flags, *objective.flags),
            model=model,
            processes=layout.processes,
            patch=patch,
        )

    def reference(self, cell: Cell) -> Recorded:
        objective = cell.reference_objective or cell.objective
        return self.compute(
            cell.model, cell.reference, objective, cell.mode, _patch("oracles", cell.oracle or cell.setting)
        )

    def share(self, cell: Cell) -> float:
        """SimReg's part of the single process's gradient."""
        objective = cell.reference_objective or cell.objective
        with_simreg, without = (self.compute(cell.model, ONE, part, cell.mode) for part in (objective, OFF))
        return runs.share(with_simreg, without)

    def judge(self, cell: Cell) -> Row:
        """Run a cell and compare it; a run that fails is a row too."""
        started = time.monotonic()
        try:
            reference, share = self.reference(cell), self.share(cell)
            started = time.monotonic()  # references are shared by many cells
            patch = _patch("breakage", cell.breakage) or _patch("oracles", cell.setting)
            computed = self.compute(cell.model, cell.layout, cell.objective, cell.mode, patch)
        except (RunError, ReplicasDifferError) as error:
            return Row(cell, time.monotonic() - started, trouble=_last_words(error))
        return Row(cell, time.monotonic() - started, runs.difference(reference, computed), share)


def _patch(module: str, function: str) -> str:
    return f"{module}:{function}" if function else ""


def _last_words(error: Exception) -> str:
    """The line of a log that names the error, as Python writes it last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line or line.startswith("error:")]
    return (named or lines)[-1][:160]
