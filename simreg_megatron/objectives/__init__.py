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

from simreg_megatron.objectives.built_in import OBJECTIVES
from simreg_megatron.objectives.record import ExampleSettings, Kind, Objective, Options, Scalar

__all__ = ["BUILT_IN", "GROUP", "ExampleSettings", "Kind", "Objective", "Options", "Scalar", "find", "names"]

GROUP = "simreg_megatron.objectives"
BUILT_IN = {each.name: each for each in OBJECTIVES}


@functools.cache
def names() -> tuple[str, ...]:
    """Return the names of all objectives; "none" comes last."""
    brought = {point.name for point in importlib.metadata.entry_points(group=GROUP)}
    return (*(name for name in BUILT_IN if name != "none"), *sorted(brought - BUILT_IN.keys()), "none")


@functools.cache
def find(name: str) -> Objective:
    """Return the record of an objective; a ValueError if there is none of this name, or a package's own is wrong."""
    points = [*importlib.metadata.entry_points(group=GROUP, name=name)]  # of several packages, or a name of this one
    if len({point.value for point in points}) + (name in BUILT_IN) > 1:  # the import path would decide between them
        packages = " and ".join(point.dist.name if point.dist else point.value for point in points)
        also = ", and is one of its own" if name in BUILT_IN else ""
        how = "uninstall one of these packages, or rename its objective"
        raise ValueError(f"SimReg objective {name} is brought by {packages}{also}: {how}")
    if name in BUILT_IN:
        return BUILT_IN[name]
    if not points:
        raise ValueError(f"unknown SimReg objective {name!r}: choose from {', '.join(names())}")
    source = f"SimReg objective {name} comes from {points[0].value}, which"
    try:
        record: Objective = points[0].load()
        fault = f"it is not an Objective of that name but {getattr(record, 'name', type(record).__name__)!r}"
        fault = record.fault() if isinstance(record, Objective) and record.name == name else fault
    except Exception as error:
        raise ValueError(f"{source} cannot be imported: {type(error).__name__}: {error}") from error
    if fault:
        raise ValueError(f"{source} is wrong: {fault}")
    return record
