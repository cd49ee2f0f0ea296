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
import math

from simreg_megatron.objectives.record import ExampleSettings, Kind, Objective, Options, Scalar

__all__ = ["BUILT_IN", "GROUP", "ExampleSettings", "Kind", "Objective", "Options", "Scalar", "find", "names"]

GROUP_REDUCTIONS = ("sum", "mean")
FAST_IMPLS = ("triton", "tiled")  # of SimReg: the fast ones
IMPLEMENTATIONS = ("auto", "reference", *reversed(FAST_IMPLS))
SELF_POSITIVES = ("always", "only_if_alone", "never")
CHUNK_WEIGHTS = ("token", "uniform", "pos-neg-ratio", "neg-pos-ratio", "count-corrected")

SIMREG = Objective(
    name="simreg", kind=Kind.SIMREG, temperature=0.01,
    asks="states of one label closer than all others, by a softmax",
    options={"prefixes": "whole"}, invariant=("scale", "rotation", "names", "order"),
)  # fmt: skip
NONE = Objective(
    name="none", kind=Kind.SIMREG, temperature=0.01, trains=False,
    asks="nothing: SimReg is measured in log steps, and not trained on",
    example=ExampleSettings(weight=0.0), invariant=("scale", "rotation", "names", "order"),
)  # fmt: skip

GROUP = "simreg_megatron.objectives"
_CORE = {each.name: each for each in (SIMREG, NONE)}
_CONTRIB = {  # entry points, too, but not in the package's metadata: a clone on PYTHONPATH has none
    "simcse": "simcse:SIMCSE", "cpretrain": "cpretrain:CPRETRAIN", "creg": "baselines:CREG", "sce": "baselines:SCE",
    "sigreg": "sigreg:SIGREG", "sigmoid": "sigmoid:SIGMOID", "mic": "mic:MIC", "dispersion": "dispersion:DISPERSION",
    "prefixes-ce": "prefixes_ce:PREFIXES_CE", "z-loss": "prefixes_ce:Z_LOSS", "placebo": "placebo:PLACEBO",
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
        also = " and simreg-megatron" if name in BUILT_IN else ""
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
    except Exception as error:
        raise ValueError(f"{source} cannot be imported: {type(error).__name__}: {error}") from error
    if not isinstance(record, Objective) or record.name != name:
        own = getattr(record, "name", type(record).__name__)
        raise ValueError(f"{source} is wrong: it is not an Objective of that name but {own!r}")
    if fault := record.fault():
        raise ValueError(f"{source} is wrong: {fault}")
    return record


def authors_lambda(hidden_size: int) -> float:
    """Return the authors' lambda for a model of this width: 10 * sqrt(hidden_size / 1024)."""
    return 10.0 * math.sqrt(hidden_size / 1024)


def note_on_lambda(objective: str, given: float | str, hidden_size: int) -> str:
    """Warn of `auto` for an objective that it is not made for, and of a lambda above twice the authors' for this width:
    10, theirs at 1024, harms a tiny model."""
    if given == "auto":
        fits = objective in ("simreg", "placebo")
        return "" if fits else f"lambda auto is the rule for simreg and says nothing about {objective}: give a number"
    usual = authors_lambda(hidden_size)
    if objective != "simreg" or float(given) <= 2 * usual:
        return ""
    return f"lambda {given:g} is large for width {hidden_size}, where the authors' rule (auto) gives {usual:.1f}"
