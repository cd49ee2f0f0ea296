# SPDX-License-Identifier: Apache-2.0
"""Say what a run takes of its cards and its disk, and refuse one that they cannot hold."""

from __future__ import annotations

import argparse
import shutil

from launch import checkpoints, data, sizes
from launch.dry_run import tokens_of, vocabulary_of
from launch.estimate import gpu_memory
from launch.flags import LaunchError
from launch.planned import Plan
from launch.slurm.job import Job

_MOST_EPOCHS = 4  # up to which repeated text is worth about as much as new text
_FORCE = "or --force before the script to submit it all the same"


def check_memory(plan: Plan, job: Job, args: argparse.Namespace | None, *, force: bool) -> list[str]:
    """Return Megatron's estimate of a GPU's memory, as lines; a LaunchError unless `force` if the card has less."""
    found = gpu_memory(args, vocabulary_of(plan)) if args and job.site.gpus_per_node else None
    if found is None:
        return []
    known = zip(found, ("weights and optimizer", "activations"), strict=True)
    parts = " and ".join(f"{gib:,.1f} of {name}" for gib, name in known if gib)
    least = "" if all(found) else "at least "
    says = f"{least}{sum(found):,.1f} GiB of a GPU's {job.site.gpu_memory}, by Megatron's estimate ({parts})"
    if sum(found) > job.site.gpu_memory and not force:
        raise LaunchError(
            f"the run needs {says}: give a smaller --micro-batch-size, more --nodes, --recompute-granularity full "
            "--recompute-method uniform --recompute-num-layers 1, the GPU_MEMORY of your cards in the cluster's file, "
            f"{_FORCE}"
        )
    return [f"memory    {says}"]


def check_disk(plan: Plan, job: Job, *, force: bool) -> list[str]:
    """Return the size of the run's checkpoints, as lines; a LaunchError unless `force` if they do not fit."""
    saved = checkpoints.size(job.save)
    size = saved or sizes.checkpoint_bytes(plan.flags, vocabulary=vocabulary_of(plan))
    most = (job.keep + 1) * size
    missing = max(0, most - saved * len(checkpoints.iterations(job.save)))
    there = next(path for path in (job.save, *job.save.parents) if path.exists())
    free = shutil.disk_usage(there).free
    is_seen = there != there.parent  # at / another disk is yet to be mounted
    if is_seen and missing > free and not force:
        raise LaunchError(
            f"{job.keep} checkpoints and one being written take {_gib(missing)} more, and {_gib(free)} are free for "
            f"{job.save}: give a smaller --keep, an --output on another disk, {_FORCE}"
        )
    left = f"; {_gib(free)} are free" if is_seen else ""
    return [f"disk      {_gib(size)} a checkpoint, {_gib(most)} for {job.keep} and one being written{left}"]


def check_epochs(plan: Plan, *, force: bool) -> None:
    """Raise a LaunchError unless `force` if the run reads its text more often than repeated text helps."""
    there = None if plan.builtin_corpus or force else data.tokens_there(plan.flags)
    if there and tokens_of(plan) > _MOST_EPOCHS * there:
        raise LaunchError(
            f"the run reads {tokens_of(plan):,} tokens, {tokens_of(plan) / there:,.1f} epochs of the {there:,} in its "
            f"text: give more text, fewer --train-iters, {_FORCE}"
        )


def _gib(number: int) -> str:
    return f"{number / 2**30:,.1f} GiB"
