# SPDX-License-Identifier: Apache-2.0
"""Whether a run has reached its end: a file in its output folder, written by the process that got there."""

from __future__ import annotations

import json
from contextlib import suppress

from launch.flags import flag_value
from launch.plan import Plan

ENDED = "ended.json"
_LENGTHS = {"--train-samples": "sequences", "--train-iters": "iterations"}


def length(plan: Plan) -> str:
    """How long the run is asked to be, in words."""
    for name, unit in _LENGTHS.items():
        value = flag_value(plan.flags, name)
        if value is not None:
            return f"{value} {unit}"
    return "all iterations"


def has_ended(plan: Plan) -> bool:
    """Whether the run reached the length that is asked for now; a longer one goes on."""
    with suppress(OSError, ValueError, KeyError, TypeError):  # missing, or damaged
        return bool(json.loads((plan.output / ENDED).read_text())["length"] == length(plan))
    return False


def mark_ended(plan: Plan) -> None:
    plan.output.mkdir(parents=True, exist_ok=True)
    (plan.output / ENDED).write_text(json.dumps({"length": length(plan)}) + "\n")
