# SPDX-License-Identifier: Apache-2.0
"""For training loops other than Megatron's own: what they tell SimReg, and what they get for their log.

    install(config=SimRegConfig(lambda_=10))
    begin_run(models)
    for step in range(steps):
        begin_step(step, measures=step % 10 == 9, num_iterations=steps)
        ...                                             # forward, backward, optimizer
        log(end_step(models, reduces=step % 10 == 9))

A loop that calls none of these trains with SimReg all the same, if its models are given their labels. What it lacks is
the log, a lambda that changes from step to step, and `--simreg-impl auto` trying what is fastest.
`simreg_megatron.contract.check` tells whether a loop trains as it should.
"""

from __future__ import annotations

from typing import Any

from simreg_megatron.config import SimRegConfig
from simreg_megatron.plugin import foreign, installation, loop_hooks

__all__ = ["begin_run", "begin_step", "end_step", "settings"]


def begin_run(models: Any, *, micro_batch_size: int | None = None, seq_length: int | None = None) -> None:
    """Before the first step: refuse models that SimReg does not reach, and say that it is on.

    Args:
        models: the model, or the list of model chunks on this rank, with or without Megatron's wrappers around them.
        micro_batch_size, seq_length: of the run, so that impl auto can try what is fastest on a GPU; without them it is
            tiled.

    Raises:
        RuntimeError: SimReg is not installed.
        NotImplementedError: SimReg does not reach these models.
    """
    foreign.begin_run(models, micro_batch_size=micro_batch_size, seq_length=seq_length)


def begin_step(iteration: int, *, measures: bool, num_iterations: int | None = None) -> None:
    """Before each step.

    Args:
        iteration: of the training, from 0; a run that resumes goes on counting.
        measures: whether the log is to have this step's cosines, angles and margins. With objective none, and where a
            schedule of lambda has ended, nothing is computed in other steps.
        num_iterations: of the whole training; a schedule of lambda that ends with it needs to know.

    Raises:
        RuntimeError: a schedule needs `num_iterations`.
    """
    loop_hooks.begin_step(iteration, measures=measures, num_iterations=num_iterations)


def end_step(models: Any, *, reduces: bool) -> dict[str, Any]:
    """After each step: the means since the last reduction by their names in Megatron's log, or nothing.

    Args:
        reduces: whether to reduce them now. A collective: the same in all ranks.

    Raises:
        MegatronSeamError: SimReg is on, and no forward pass met it.
    """
    return foreign.end_step(models, reduces=reduces)


def settings() -> SimRegConfig:
    """Of the installation in this process."""
    return installation.regularizer().config
