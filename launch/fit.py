# SPDX-License-Identifier: Apache-2.0
"""Fit a preset's sizes to each other and to the ranks: FFN and its split, batch and replicas, warm-up and length."""

from __future__ import annotations

import math
from collections.abc import Sequence

from launch import preflight, sizes
from launch.flags import Flag, LaunchError, flag_name, flag_names, flag_number, flag_value, without
from launch.planned import Machine


def fit_preset(
    preset: list[Flag], user: Sequence[Flag], ffn: str, machine: Machine, *, strict: bool
) -> tuple[list[Flag], list[str]]:
    """Return the preset with fitting sizes, and notes; `strict` refuses another global batch than the preset's."""
    notes: list[str] = []
    preflight.check_layout([*preset, *user], machine.world_size, machine.local_world_size if machine.whole_nodes else 0)
    for name in ("--num-layers", "--save-interval", "--log-interval", "--eval-interval", "--seq-length"):
        flag_number(user, name, 1)  # refuses what is no positive number
    preset = _fit_ffn(preset, user, ffn, notes)
    preset = _fit_batch(preset, user, machine, notes, strict=strict)
    preset = _fit_warmup(_in_samples(preset, user, notes), user, notes)
    return [*preset, ("--max-position-embeddings", flag_value([*preset, *user], "--seq-length") or "")], notes


def _fit_ffn(preset: list[Flag], user: Sequence[Flag], ffn: str, notes: list[str]) -> list[Flag]:
    name = "--ffn-hidden-size"
    split, literal = sizes.ffn_split([*preset, *user]), flag_number(preset, name, 1)
    if ffn != "literal":
        if name in flag_names(user):
            raise LaunchError(f"--ffn and {name} name the same size: give one")
        if ffn != "aligned" and not (ffn.isdecimal() and int(ffn)):
            raise LaunchError(f"--ffn takes literal, aligned or a positive number, not {ffn!r}")
        size = sizes.aligned_size(literal, split) if ffn == "aligned" else int(ffn)
        preset = _replace(preset, name, str(size))
    warning = sizes.check_ffn(flag_number([*preset, *user], name, 1), split)
    notes += [warning] if warning else []
    return preset


def _fit_batch(
    preset: list[Flag], user: Sequence[Flag], machine: Machine, notes: list[str], *, strict: bool
) -> list[Flag]:
    """Choose a micro-batch that divides each replica's share of the global batch, unless the user chose one."""
    if "--step-batch-size-schedule" in flag_names(user):
        raise LaunchError(
            "--step-batch-size-schedule excludes the preset's --global-batch-size: leave it out, or start "
            "`torchrun -m simreg_megatron simreg_megatron/pretrain.py` with all flags of your own"
        )
    both = [*preset, *user]
    replicas = machine.world_size // math.prod(sizes.model_parallel_sizes(both))
    batch = flag_number(both, "--global-batch-size", 1)
    if batch % replicas:
        fitting = -(-batch // replicas) * replicas
        if strict or "--global-batch-size" in flag_names(user):
            raise LaunchError(
                f"the global batch of {batch} sequences cannot be shared by {replicas} data-parallel ranks: "
                f"give --global-batch-size {fitting}, or another number of ranks"
            )
        notes.append(f"{replicas} data-parallel ranks cannot share {batch} sequences: using {fitting}")
        batch, preset = fitting, _replace(preset, "--global-batch-size", str(fitting))
    share = batch // replicas
    if "--rampup-batch-size" in flag_names(user):  # a tiny preset names no micro-batch, and 1 divides every size
        return preset if "--micro-batch-size" in flag_names(both) else [*preset, ("--micro-batch-size", "1")]
    if "--micro-batch-size" in flag_names(user):
        micro = flag_number(user, "--micro-batch-size", 1)
        if share % micro:
            raise LaunchError(
                f"each of {replicas} data-parallel ranks has {share} sequences of the global batch, which "
                f"micro-batches of {micro} cannot share: give --micro-batch-size {sizes.largest_divisor(share, micro)}"
            )
        return preset
    # The tiny presets name none: the whole share, or what leaves each pipeline stage a micro-batch.
    stages = flag_number(both, "--pipeline-model-parallel-size", 1)
    limit = flag_number(preset, "--micro-batch-size", max(1, share // stages))
    return _replace(preset, "--micro-batch-size", str(sizes.largest_divisor(share, limit)))


def _in_samples(preset: list[Flag], user: Sequence[Flag], notes: list[str]) -> list[Flag]:
    """Drop the preset's length and warm-up if the user gives a length in samples, which excludes iterations."""
    if "--train-samples" not in flag_names(user):
        return preset
    batch, samples = flag_number([*preset, *user], "--global-batch-size", 1), flag_number(user, "--train-samples", 1)
    warmup = min(batch * flag_number(preset, "--lr-warmup-iters", 1), samples // 10)
    preset = without(preset, {"--train-iters", "--lr-decay-iters", "--lr-warmup-iters"})
    if flag_names(user) & {"--lr-warmup-samples", "--lr-warmup-fraction", "--lr-warmup-iters"}:
        return preset
    notes.append(f"--train-samples: warming up for {warmup} of {samples} samples (set --lr-warmup-samples to choose)")
    return [*preset, ("--lr-warmup-samples", str(warmup))]


def _fit_warmup(preset: list[Flag], user: Sequence[Flag], notes: list[str]) -> list[Flag]:
    """Shorten the warm-up of a short run: Megatron refuses one as long as the decay."""
    name, both = "--lr-warmup-iters", [*preset, *user]
    end = flag_number(both, "--lr-decay-iters", flag_number(both, "--train-iters", 1))
    own = flag_value(user, name) or ""
    if own.isdecimal() and int(own) >= end and "--train-samples" not in flag_names(user):
        raise LaunchError(f"{name} {own} leaves none of {end} iterations for the decay: give a smaller number")
    if "--lr-warmup-fraction" in flag_names(user):  # Megatron takes one of the two
        return without(preset, {name})
    if flag_names(user) & {name, "--train-samples"} or flag_number(preset, name, 1) < end:
        return preset
    notes.append(f"{end} iterations are too few for the preset's warm-up: using {end // 10} (set {name} to choose)")
    return _replace(preset, name, str(end // 10))


def _replace(flags: list[Flag], name: str, value: str) -> list[Flag]:
    """Change one value in its place, or add the flag at the end."""
    if name not in flag_names(flags):
        return [*flags, (name, value)]
    return [(name, value) if flag_name(flag) == name else flag for flag in flags]
