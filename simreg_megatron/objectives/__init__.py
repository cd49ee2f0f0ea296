# SPDX-License-Identifier: Apache-2.0
"""The objectives by name: SimReg, those of `simreg_megatron.contrib`, and what other packages bring.

A package brings one by an entry point, whose name is the objective's and whose value is its `Objective`:

    [project.entry-points."simreg_megatron.objectives"]
    toy = "toy_objective:TOY"

Nothing of such a package, or of `contrib`, is imported before its objective is asked for.
"""

from __future__ import annotations

import functools
import importlib.metadata

from simreg_megatron.objectives.built_in import NONE, SIMREG
from simreg_megatron.objectives.record import TWICE, ExampleSettings, Kind, Objective, Options, Scalar

__all__ = ["BUILT_IN", "GROUP", "TWICE", "ExampleSettings", "Kind", "Objective", "Options", "Scalar", "find", "names"]

GROUP = "simreg_megatron.objectives"
_CORE = {each.name: each for each in (SIMREG, NONE)}
_CONTRIB = {  # entry points, too, but not in the package's metadata: a clone on PYTHONPATH has none
    "simcse": "simcse:SIMCSE", "cpretrain": "cpretrain:CPRETRAIN", "creg": "creg:CREG", "sce": "sce:SCE",
    "sigreg": "sigreg:SIGREG", "sigmoid": "sigmoid:SIGMOID", "mic": "mic:MIC", "dispersion": "dispersion:DISPERSION",
    "prefixes-ce": "heads:PREFIXES_CE", "z-loss": "heads:Z_LOSS",
    "placebo": "placebo:PLACEBO",
}  # fmt: skip
BUILT_IN = ("simreg", *_CONTRIB, "none")
"""Names of the objectives of this package."""


@functools.cache
def names() -> tuple[str, ...]:
    """Return the names of all objectives; "none" comes last."""
    brought = {point.name for point in importlib.metadata.entry_points(group=GROUP)}
    return (*BUILT_IN[:-1], *sorted(brought - {*BUILT_IN}), "none")


@functools.cache
def find(name: str) -> Objective:
    """Return the record of an objective; a ValueError if there is none of this name, or a package's own is wrong."""
    points = [*importlib.metadata.entry_points(group=GROUP, name=name)]  # of several packages, or a name of this one
    if len({point.value for point in points}) + (name in BUILT_IN) > 1:  # the import path would decide between them
        packages = " and ".join(point.dist.name if point.dist else point.value for point in points)
        also = ", and is one of its own" if name in BUILT_IN else ""
        how = "uninstall one of these packages, or rename its objective"
        raise ValueError(f"SimReg objective {name} is brought by {packages}{also}: {how}")
    if name in _CORE:
        return _CORE[name]
    if name in _CONTRIB:
        points = [importlib.metadata.EntryPoint(name, f"simreg_megatron.contrib.{_CONTRIB[name]}", GROUP)]
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
