# SPDX-License-Identifier: Apache-2.0
"""With what weight SimReg trains in this step: lambda, its schedule, and steps in which it rests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from simreg_megatron.config import SimRegConfig
from simreg_megatron.notices import log_once
from simreg_megatron.parallel.learnable import wanted

_NEEDS_LOOP = (
    "a SimReg lambda that changes (--simreg-start-iter, --simreg-warmup-iters, --simreg-lambda-schedule, "
    "--simreg-off-after, --simreg-every) needs Megatron's training loop, or one that passes the number of the step and "
    "of all steps to simreg_megatron.loop.begin_step: call that before each step, or drop these settings"
)


class Strength:
    """The strength of the term in one run, from step to step."""

    def __init__(self, config: SimRegConfig) -> None:
        self.config = config
        self.factor: Tensor | None = None  # of lambda, 0-d on the device; None while lambda is constant
        self.is_off = False  # in this step, as the settings say
        self.repeats = False  # one step is captured and replayed: none may leave anything out
        self.follows_iterations = False  # set once a training loop passes the iteration
        self.iteration = 0  # without one: micro-batches so far

    def set_iteration(self, iteration: int, num_iterations: int | None = None) -> None:
        """Set the factor of lambda for step `iteration`, counted from 0."""
        self.follows_iterations, self.iteration = True, iteration
        self.is_off = iteration % self.config.every != 0
        schedule = self.config.schedule
        if schedule.is_constant:
            return
        if schedule.needs_length and num_iterations is None:
            raise RuntimeError(_NEEDS_LOOP)
        factor = schedule.factor(iteration, num_iterations)
        if self.factor is None:
            self.factor = torch.zeros((), dtype=torch.float32, device=torch.cuda.current_device())
        self.factor.fill_(factor)
        # Learned scalars need a (possibly zero) gradient in every step: Megatron's DDP waits for it.
        is_out = schedule.is_off(iteration, num_iterations) and not wanted(self.config)
        self.is_off = self.is_off or (is_out and not self.repeats)

    def lambdas(self, hidden_size: int) -> dict[str, Tensor]:
        """Return the weight of each objective in this step by its name in the log; empty while all are constant."""
        if self.factor is None:
            return {}
        return {f"{part.objective} lambda": self.factor * part.weight(hidden_size) for part in self.config.parts}

    def weight(self, part: SimRegConfig, hidden_size: int) -> Any:
        """Return the weight of one objective in this step."""
        lacks_factor = self.factor is None and not self.config.schedule.is_constant
        if lacks_factor or (self.config.every > 1 and not self.follows_iterations):
            raise RuntimeError(_NEEDS_LOOP)
        return self.config.every * part.weight(hidden_size) * (1 if self.factor is None else self.factor)

    def count_by_itself(self) -> None:
        """Count a micro-batch, for loops that do not pass the iteration."""
        self.iteration += not self.follows_iterations
        if not self.follows_iterations and any(part.record.draws for part in self.config.parts):
            log_once(
                "SimReg: nothing passes the step's number (simreg_megatron.loop.begin_step), so each micro-batch draws "
                "its own random directions, samples or permutations, and a resumed run repeats the first ones"
            )
