# SPDX-License-Identifier: Apache-2.0
"""Whether a run has reached its end: a file in its output folder, written by the process that got there."""

from __future__ import annotations

import json
from collections.abc import Mapping

from launch.flags import LaunchError, flag_name, flag_value
from launch.plan import Plan

ENDED = "ended.json"
_TRAINED_BY = ("--simreg-", "--adagc")
_AS_WELL = {"--seed", "--lr", "--min-lr", "--weight-decay", "--clip-grad", "--global-batch-size", "--seq-length"}
_OR_NOT = {"--simreg-log-interval", "--simreg-impl", "--simreg-cpu"}  # the same training
_LENGTHS = {"--train-samples": "sequences", "--train-iters": "iterations"}


def length(plan: Plan) -> str:
    """How long the run is asked to be, in words."""
    for name, unit in _LENGTHS.items():
        value = flag_value(plan.flags, name)
        if value is not None:
            return f"{value} {unit}"
    return "all iterations"


def has_ended(plan: Plan) -> bool:
    """Whether the run reached the length that is asked for now; a longer one goes on.

    Raises:
        LaunchError: another run did, there.
    """
    trained_by = _trained_by(plan)
    try:
        ended = json.loads((plan.output / ENDED).read_text())
        is_as_long, before = ended["length"] == length(plan), dict(ended.get("trained_by", trained_by))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # missing, or damaged
        return False
    if is_as_long:
        _refuse_another(plan, before, trained_by)
    return bool(is_as_long)


def _refuse_another(plan: Plan, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            told = (f"{name} {each[name]}".strip() if name in each else f"no {name}" for each in (before, now))
            raise LaunchError(
                f"{plan.output} holds a run that has ended, and was another one ({' then, '.join(told)} now): give "
                "another --output"
            )


def _trained_by(plan: Plan) -> dict[str, str]:
    """The flags that say what is trained on, and how."""
    found = {}
    for flag in plan.flags:
        name = flag_name(flag)
        if (name.startswith(_TRAINED_BY) or name in _AS_WELL) and name not in _OR_NOT:
            found[name] = " ".join(flag[1:])
    return found


def mark_ended(plan: Plan) -> None:
    plan.output.mkdir(parents=True, exist_ok=True)
    (plan.output / ENDED).write_text(json.dumps({"length": length(plan), "trained_by": _trained_by(plan)}) + "\n")
