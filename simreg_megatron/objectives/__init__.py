# SPDX-License-Identifier: Apache-2.0
"""The objectives by name: those of this package, and those that installed packages bring.

A package brings one by an entry point, whose name is the objective's and whose value is its `Objective`:

    [project.entry-points."simreg_megatron.objectives"]
    toy = "toy_objective:TOY"

Nothing of such a package is imported before its objective is asked for.
"""

from __future__ import annotations

import functools
import importlib.metadata

from simreg_megatron.objectives.record import ExampleSettings, Kind, Objective, Options, Scalar
from simreg_megatron.objectives.rivals import RIVALS
from simreg_megatron.objectives.simreg import NONE, PLACEBO, SIMREG

__all__ = ["BUILT_IN", "GROUP", "ExampleSettings", "Kind", "Objective", "Options", "Scalar", "find", "names"]

GROUP = "simreg_megatron.objectives"
BUILT_IN = {each.name: each for each in (SIMREG, *RIVALS, PLACEBO, NONE)}


@functools.cache
def names() -> tuple[str, ...]:
    """Return the names of all objectives; "none" comes last."""
    brought = {point.name for point in importlib.metadata.entry_points(group=GROUP)}
    return (*(name for name in BUILT_IN if name != "none"), *sorted(brought - BUILT_IN.keys()), "none")


@functools.cache
def find(name: str) -> Objective:
    """Return the record of an objective.

    Raises:
        ValueError: there is none of this name, or a package's own is not what it should be.
    """
    points = [*importlib.metadata.entry_points(group=GROUP, name=name)]  # of several packages, or a name of this one
    if len({point.value for point in points}) + (name in BUILT_IN) > 1:  # the import path would decide between them
        packages = " and ".join(point.dist.name if point.dist else point.value for point in points)
        raise ValueError(
            f"SimReg objective {name} is brought by {packages}{', and is one of its own' if name in BUILT_IN else ''}: "
            "uninstall one of these packages, or rename its objective"
        )
    if name in BUILT_IN:
        return BUILT_IN[name]
    if not points:
        raise ValueError(f"unknown SimReg objective {name!r}: choose from {', '.join(names())}")
    point = points[0]
    try:
        record = point.load()
    except Exception as error:
        raise ValueError(
            f"SimReg objective {name} comes from {point.value}, which cannot be imported: {type(error).__name__}: "
            f"{error}"
        ) from error
    if not isinstance(record, Objective) or record.name != name:
        raise ValueError(
            f"SimReg objective {name} comes from {point.value}, which is not an Objective of that name but "
            f"{getattr(record, 'name', type(record).__name__)!r}"
        )
    try:
        record.refuse_faults()
    except Exception as error:
        raise ValueError(f"SimReg objective {name} comes from {point.value}, which is wrong: {error}") from error
    return record
