# SPDX-License-Identifier: Apache-2.0
"""What a run will take of its cluster: tokens, hours, slices, disk. Told before hours in a queue are spent on it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launch import checkpoints, data, sizes
from launch.dry_run import ASSUMED_VOCABULARY
from launch.flags import LaunchError, flag_names, flag_number
from launch.plan import Machine, Plan
from launch.slurm.chain import measured_rank_seconds
from launch.slurm.job import Job, seconds_of
from simreg_megatron.tools.indexed import is_pair


@dataclass(frozen=True)
class Step:
    """Seconds of one step, and where the number comes from."""

    seconds: float
    source: str
    is_guess: bool = False


def step_of(plan: Plan, machine: Machine, given: float | None) -> Step | None:
    """As the user says, as the run's slices took so far, or as FLOPs tell; None on CPUs before the first slice."""
    if given:
        return Step(given, "--step-seconds")
    measured = measured_rank_seconds(plan.output)
    if machine.world_size in measured:
        return Step(measured[machine.world_size] / machine.world_size, "as measured in its slices so far")
    if measured:  # on other nodes: what is shared out over more ranks takes that much less
        ranks = min(measured, key=lambda ranks: abs(ranks - machine.world_size))
        source = f"from its slices on {ranks} ranks; --step-seconds S sets it"
        return Step(measured[ranks] / machine.world_size, source, is_guess=True)
    if plan.on_cpu:
        return None
    flops = step_tokens(plan) * sizes.flops_per_token(plan.flags, vocabulary=ASSUMED_VOCABULARY)
    seconds = flops / (machine.world_size * sizes.PEAK * sizes.SHARE_OF_PEAK)
    return Step(seconds, f"guessed at {sizes.SHARE_OF_PEAK:.0%} of the peak; --step-seconds S sets it", is_guess=True)


def step_tokens(plan: Plan) -> int:
    return flag_number(plan.flags, "--global-batch-size", 1) * flag_number(plan.flags, "--seq-length", 1)


def check_save_interval(plan: Plan, name: str, step: Step | None, slice_seconds: float) -> None:
    """A slice that crashes before its first save has done nothing, and neither will the next one.

    Raises:
        LaunchError: no save falls into a slice.
    """
    every = flag_number(plan.flags, "--save-interval", 1)
    if step is None or every * step.seconds < slice_seconds:
        return
    most = max(1, int(slice_seconds / step.seconds / 4))
    guessed = " (guessed; --step-seconds S sets it)" if step.is_guess else ""
    raise LaunchError(
        f"{name} {every} takes {every * step.seconds / 3600:.1f} h at {step.seconds:.1f} s a step{guessed}, and a "
        f"slice trains {slice_seconds / 3600:.1f} h: give --save-interval {most}, or a longer --time"
    )


def told(plan: Plan, job: Job, step: Step | None) -> Iterator[str]:
    """Yield lines for the one who submits."""
    steps = _steps_left(plan, job.save)
    if steps is None:
        return
    yield f"reads  {_tokens(steps, plan)}"
    if step is not None:
        yield _time(job, steps * step.seconds, step)
    size = sizes.checkpoint_bytes(plan.flags, vocabulary=data.vocabulary(plan.flags, ASSUMED_VOCABULARY))
    room = (job.keep + 1) * size
    yield f"disk   {_size(size)} a checkpoint, {_size(room)} for {job.keep} and one being written"


def _tokens(steps: int, plan: Plan) -> str:
    """Compare the tokens of the run with those of its text, if this machine sees all of it."""
    asked = steps * step_tokens(plan)
    told = f"{_count(asked)} tokens in {steps:,} iterations"
    texts = data.prefixes(plan.flags, ("--data-path", "--train-data-path"))
    if plan.builtin_corpus or not texts or not all(map(is_pair, texts)):
        return told
    there = sum(map(data.count_tokens, texts))
    again = f", {asked / there:,.1f} times over" if asked > there else ""
    return f"{told}, of the {_count(there)} in {' and '.join(texts)}{again}"


def _count(number: int) -> str:
    for unit, name in ((10**9, "billion"), (10**6, "million")):
        if number >= unit:
            return f"{number / unit:,.3g} {name}"
    return f"{number:,}"


def _size(number: int) -> str:
    return f"{number / 2**30:,.1f} GiB" if number >= 2**30 else f"{number / 2**20:,.1f} MiB"


def _time(job: Job, seconds: float, step: Step) -> str:
    useful = seconds_of(job.time) - job.reserve
    hours, slices = seconds / 3600, math.ceil(seconds / useful)
    gpus = job.nodes * job.site.gpus_per_node
    cost = f" on {gpus} GPUs, {hours * gpus:,.0f} GPU hours" if gpus else f" on {job.nodes} nodes"
    many = f"{slices} slice{'s' if slices > 1 else ''}"
    short = f"; --slices {job.slices} is too few for that" if slices > job.slices else ""
    return f"takes  {hours:,.1f} h{cost}, {many}, at {step.seconds:.2f} s a step ({step.source}){short}"


def _steps_left(plan: Plan, save: Path) -> int | None:
    """None where the length is given in sequences."""
    if "--train-samples" in flag_names(plan.flags):
        return None
    done = checkpoints.newest_whole(save) or 0
    return max(0, flag_number(plan.flags, "--train-iters", 0) - done)
