# SPDX-License-Identifier: Apache-2.0
"""Note that a run has reached its end, in a file of its output folder, and find that note."""

from __future__ import annotations

import json
from pathlib import Path

from launch import checkpoints
from launch.flags import LaunchError, flag_name, flag_names, flag_number, flag_value
from launch.planned import Plan

ENDED = "ended.json"
_TRAINED_BY = ("--simreg-", "--adagc")
_AS_WELL = {
    "--seed", "--lr", "--min-lr", "--weight-decay", "--clip-grad", "--global-batch-size", "--seq-length",
    "--num-layers", "--hidden-size", "--data-path", "--train-data-path",
}  # fmt: skip
_OR_NOT = {"--simreg-log-interval", "--simreg-impl", "--simreg-cpu"}  # the same training
_LENGTHS = {"--train-samples": "sequences", "--train-iters": "iterations"}


def length(plan: Plan) -> str:
    """Name the length that is asked for."""
    for name, unit in _LENGTHS.items():
        value = flag_value(plan.flags, name)
        if value is not None:
            return f"{value} {unit}"
    return "all iterations"


def has_ended(plan: Plan) -> bool:
    """Return whether the run reached the length that is asked for now; a LaunchError if another run did, there."""
    if _only_evaluates(plan):
        return False
    now = _trained_by(plan)
    try:
        ended = json.loads((plan.output / ENDED).read_text())
        is_as_long, before = ended["length"] == length(plan), dict(ended.get("flags", now))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # missing, or damaged
        return False
    newest = checkpoints.newest_whole(plan.save or Path())
    if newest is not None and newest < flag_number(plan.flags, "--train-iters", 0):  # the last ones were deleted
        return False
    for name in sorted(before.keys() | now.keys()) if is_as_long else ():
        if before.get(name) != now.get(name):
            both = (f"{name} {each[name]}".strip() if name in each else f"no {name}" for each in (before, now))
            raise LaunchError(
                f"{plan.output} holds a run that has ended, and was another one ({' then, '.join(both)} now): give "
                "another --output"
            )
    return bool(is_as_long)


def _trained_by(plan: Plan) -> dict[str, str]:
    """Select the flags that decide what is trained on, and how."""
    named = {flag_name(flag): " ".join(filter(None, (flag[0].partition("=")[2], *flag[1:]))) for flag in plan.flags}
    trains = {name for name in named if name.startswith(_TRAINED_BY)} - _OR_NOT
    return {name: value for name, value in named.items() if name in trains | _AS_WELL}


def _only_evaluates(plan: Plan) -> bool:
    return "--skip-train" in flag_names(plan.flags)


def mark_ended(plan: Plan) -> None:
    if _only_evaluates(plan):
        return
    path = plan.output / ENDED
    try:
        path.write_text(json.dumps({"length": length(plan), "flags": _trained_by(plan)}) + "\n")
    except OSError as error:
        raise LaunchError(f"the run has ended, but {path} cannot be written ({error.strerror}): start again") from None
