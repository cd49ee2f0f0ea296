# SPDX-License-Identifier: Apache-2.0
"""Estimate what a run takes of its cluster: tokens, hours, slices, memory, disk."""

from __future__ import annotations

import argparse
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

from launch import checkpoints, data, sizes
from launch.dry_run import describe_simreg, vocabulary_of
from launch.estimate import gpu_memory
from launch.flags import LaunchError, flag_number
from launch.plan import Machine, Plan
from launch.slurm.chain import measured_rank_seconds
from launch.slurm.job import Job, seconds_of

_MOST_EPOCHS = 4  # up to which repeated text is worth about as much as new text


@dataclass(frozen=True)
class Step:
    """Seconds of one step, and where the number comes from."""

    seconds: float
    source: str
    is_guess: bool = False


def step_of(plan: Plan, machine: Machine, given: float | None) -> Step | None:
    """Take a step's time from the user, from its slices so far, or its FLOPs; None on CPUs before a slice."""
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
    flops = step_tokens(plan) * sizes.flops_per_token(plan.flags, vocabulary=vocabulary_of(plan))
    seconds = flops / (machine.world_size * sizes.PEAK * sizes.SHARE_OF_PEAK)
    return Step(seconds, f"guessed at {sizes.SHARE_OF_PEAK:.0%} of the peak; --step-seconds S sets it", is_guess=True)


def step_tokens(plan: Plan) -> int:
    return flag_number(plan.flags, "--global-batch-size", 1) * flag_number(plan.flags, "--seq-length", 1)


def check_save_interval(plan: Plan, name: str, step: Step | None, slice_seconds: float) -> None:
    """Raise a LaunchError if no save falls into a slice: one that crashes then has done nothing."""
    every = flag_number(plan.flags, "--save-interval", 1)
    if step is None or every * step.seconds < slice_seconds:
        return
    most = max(1, int(slice_seconds / step.seconds / 4))
    guessed = " (guessed; --step-seconds S sets it)" if step.is_guess else ""
    raise LaunchError(
        f"{name} {every} takes {every * step.seconds / 3600:.1f} h at {step.seconds:.1f} s a step{guessed}, and a "
        f"slice trains {slice_seconds / 3600:.1f} h: give --save-interval {most}, or a longer --time"
    )


@dataclass(frozen=True)
class Needs:
    """What a run takes, and what is there for it; bytes, tokens, and GiB of memory a GPU."""

    steps: int
    tokens: int
    tokens_there: int | None  # None if this machine does not see all of the text
    texts: str
    memory: tuple[float, float] | None  # weights with optimizer, activations; see `gpu_memory`
    checkpoint: int
    disk: int  # of the checkpoints that are still to be written
    free: int | None  # None if the disk is not seen


def needs_of(plan: Plan, job: Job, args: argparse.Namespace | None) -> Needs:
    """Count what is left of the run; `args` are Megatron's arguments, None if it cannot be asked for memory."""
    vocabulary = vocabulary_of(plan)
    batch = flag_number(plan.flags, "--global-batch-size", 1)
    steps = flag_number(plan.flags, "--train-samples", batch * flag_number(plan.flags, "--train-iters", 1)) // batch
    steps = max(0, steps - (checkpoints.newest_whole(job.save) or 0))
    texts = [] if plan.builtin_corpus else data.prefixes(plan.flags, ("--data-path", "--train-data-path"))
    saved = checkpoints.size(job.save)
    size = saved or sizes.checkpoint_bytes(plan.flags, vocabulary=vocabulary)
    there = next(path for path in (job.save, *job.save.parents) if path.exists())
    return Needs(
        steps=steps,
        tokens=steps * step_tokens(plan),
        tokens_there=None if plan.builtin_corpus else data.tokens_there(plan.flags),
        texts=" and ".join(texts),
        memory=gpu_memory(args, vocabulary) if args and job.site.gpus_per_node else None,
        checkpoint=size,
        disk=max(0, (job.keep + 1) * size - saved * len(checkpoints.iterations(job.save))),
        free=shutil.disk_usage(there).free if there != there.parent else None,  # at / another disk is yet to be mounted
    )


def check_limits(found: Needs, job: Job) -> None:
    """Raise a LaunchError for what the card or the disk cannot hold, and for text that is read too often."""
    force = "or --force before the script to submit it all the same"
    if found.memory and sum(found.memory) > job.site.gpu_memory:
        raise LaunchError(
            f"the run needs {_memory(found.memory, job)}: give a smaller --micro-batch-size, more --nodes, "
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1, the GPU_MEMORY of your "
            f"cards in the cluster's file, {force}"
        )
    if found.free is not None and found.disk > found.free:
        raise LaunchError(
            f"{job.keep} checkpoints and one being written take {_size(found.disk)} more, and {_size(found.free)} are "
            f"free for {job.save}: give a smaller --keep, an --output on another disk, {force}"
        )
    if found.tokens_there and found.tokens > _MOST_EPOCHS * found.tokens_there:
        raise LaunchError(
            f"the run reads {_count(found.tokens)} tokens, {found.tokens / found.tokens_there:,.1f} epochs of the "
            f"{_count(found.tokens_there)} in {found.texts}: give more text, fewer --train-iters, {force}"
        )


def summary(found: Needs, plan: Plan, job: Job, step: Step | None) -> Iterator[str]:
    """Yield lines for the user who submits."""
    yield f"trains in {plan.number_type}, SimReg: {describe_simreg(plan)}"
    again = ""
    if found.tokens_there is not None:
        again = f", of the {_count(found.tokens_there)} in {found.texts}"
        again += f", {found.tokens / found.tokens_there:,.1f} epochs" if found.tokens > found.tokens_there else ""
    yield f"reads  {_count(found.tokens)} tokens in {found.steps:,} iterations{again}"
    if step is not None:
        hours = found.steps * step.seconds / 3600
        slices = math.ceil(3600 * hours / (seconds_of(job.time) - job.reserve))
        gpus = job.nodes * job.site.gpus_per_node
        cost = f" on {gpus} GPUs, {hours * gpus:,.0f} GPU hours" if gpus else f" on {job.nodes} nodes"
        few = f"; --slices {job.slices} is too few for that" if slices > job.slices else ""
        many = f"{slices} slice{'s' if slices > 1 else ''}"
        yield f"takes  {hours:,.1f} h{cost}, {many}, at {step.seconds:.2f} s a step ({step.source}){few}"
    if found.memory:
        yield f"memory {_memory(found.memory, job)}"
    free = "" if found.free is None else f"; {_size(found.free)} are free"
    room = (job.keep + 1) * found.checkpoint
    yield f"disk   {_size(found.checkpoint)} a checkpoint, {_size(room)} for {job.keep} and one being written{free}"


def _memory(memory: tuple[float, float], job: Job) -> str:
    known = zip(memory, ("weights and optimizer", "activations"), strict=True)
    parts = " and ".join(f"{gib:,.1f} of {name}" for gib, name in known if gib)
    least = "" if all(memory) else "at least "
    return f"{least}{sum(memory):,.1f} GiB of a GPU's {job.site.gpu_memory}, by Megatron's estimate ({parts})"


def _count(number: int) -> str:
    for unit, name in ((10**9, "billion"), (10**6, "million")):
        if number >= unit:
            return f"{number / unit:,.3g} {name}"
    return f"{number:,}"


def _size(number: int) -> str:
    return f"{number / 2**30:,.1f} GiB" if number >= 2**30 else f"{number / 2**20:,.1f} MiB"
