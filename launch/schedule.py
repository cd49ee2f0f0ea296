# SPDX-License-Identifier: Apache-2.0
"""Compare the learning-rate schedule of a checkpoint with that of a run that would load it."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

from launch import checkpoints
from launch.flags import LaunchError

_FLAGS = (
    "train_iters", "train_samples", "global_batch_size", "lr", "min_lr", "lr_warmup_iters", "lr_warmup_samples",
    "lr_warmup_fraction", "lr_decay_iters", "lr_decay_samples", "lr_decay_style", "weight_decay",
)  # fmt: skip
_DECIDED = ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler")
_NEW_OPTIMIZER = ("finetune", "no_load_optim")


class ScheduleError(LaunchError):
    """A schedule that the checkpoint does not have."""


def check_schedule(args: argparse.Namespace) -> None:
    """Raise a ScheduleError if the schedule differs from the checkpoint's, which Megatron's load asserts."""
    folder = vars(args).get("load")
    if not folder or any(vars(args).get(name) for name in _NEW_OPTIMIZER):
        return
    iteration = args.ckpt_step or checkpoints.newest_whole(Path(folder))
    state = {} if iteration is None else _read(checkpoints.path_of(Path(folder), iteration))
    before, saved, now = state.get("opt_param_scheduler", {}), state.get("args"), _schedule(args)
    changed = [name for name in now if name in before and before[name] != now[name]]
    if not changed:
        return
    from megatron.core.optimizer import optimizer

    keys = getattr(optimizer, "param_group_identifier_keys", ())  # 0.19 finds a group's state by its rates
    is_other_rate = "max_lr" in keys and bool({"max_lr", "min_lr"} & set(changed))
    if any(vars(args).get(name) for name in _DECIDED) and not is_other_rate:
        return
    pairs = {f"--{name.replace('_', '-')}": (getattr(saved, name, None), getattr(args, name, None)) for name in _FLAGS}
    differing = {name: pair for name, pair in pairs.items() if None not in pair and pair[0] != pair[1]}
    differing = differing or {name: (before[name], now[name]) for name in changed}
    then, asked = (" and ".join(f"{name} {pair[side]}" for name, pair in differing.items()) for side in (0, 1))
    hint = (
        "which is another learning-rate schedule: add --override-opt_param-scheduler to take the new one, or "
        "--use-checkpoint-opt_param-scheduler to keep the checkpoint's"
    )
    if is_other_rate:
        hint = (
            "and this Megatron can only resume an optimizer with its own --lr and --min-lr: keep them, or begin with "
            f"these weights in another --output by --load {folder} --finetune"
        )
    raise ScheduleError(
        f"the checkpoint of iteration {iteration} in {folder} has {then}, and this run asks for {asked}, {hint}"
    )


def _schedule(args: argparse.Namespace) -> dict[str, Any]:
    """Compute what Megatron's OptimizerParamScheduler compares; its steps are sequences."""
    unit, per_unit = ("iters", args.global_batch_size) if args.train_iters else ("samples", 1)
    length, decay = getattr(args, f"train_{unit}"), getattr(args, f"lr_decay_{unit}")
    decay = (length if decay is None else decay) * per_unit
    fraction = args.lr_warmup_fraction
    warmup = getattr(args, f"lr_warmup_{unit}") * per_unit if fraction is None else fraction * decay
    return {
        "max_lr": args.lr, "min_lr": args.min_lr, "lr_warmup_steps": warmup, "lr_decay_steps": decay,
        "lr_decay_style": args.lr_decay_style, "start_wd": args.start_weight_decay, "end_wd": args.end_weight_decay,
        "wd_incr_steps": length * per_unit, "wd_incr_style": args.weight_decay_incr_style,
    }  # fmt: skip


def _read(checkpoint: Path) -> dict[str, Any]:
    """Read what is no tensor, without running code of the checkpoint; {} where that is not possible."""
    try:
        from megatron.core.dist_checkpointing.serialization import load_common_state_dict

        from simreg_megatron.tools.checkpoints import check_checkpoint

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process
            check_checkpoint(checkpoint)
            return dict(load_common_state_dict(str(checkpoint)))
    except BaseException as error:  # torch's CheckpointException is no Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        return {}  # Megatron itself says what is wrong
