# SPDX-License-Identifier: Apache-2.0
"""SimReg's own record (arXiv 2605.08809); controls, baselines and rivals are in `simreg_megatron.contrib`."""

from __future__ import annotations

import math

from simreg_megatron.objectives.record import ExampleSettings, Kind, Objective

GROUP_REDUCTIONS = ("sum", "mean")
FORMS = ("triton", "tiled")  # of SimReg: the fast ones
IMPLEMENTATIONS = ("auto", "reference", *reversed(FORMS))
SELF_POSITIVES = ("always", "only_if_alone", "never")
CHUNK_WEIGHTS = ("token", "uniform", "pos-neg-ratio", "neg-pos-ratio", "count-corrected")

_TEMPERATURE = 0.01
_TUNED_WIDTH = 1024  # of the authors, with lambda 10


def authors_lambda(hidden_size: int) -> float:
    """Return the authors' lambda for a model of this width: 10 * sqrt(hidden_size / 1024)."""
    return 10.0 * math.sqrt(hidden_size / _TUNED_WIDTH)


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


SIMREG = Objective(
    name="simreg", kind=Kind.SIMREG, temperature=_TEMPERATURE,
    asks="states of one label closer than all others, by a softmax",
    options={"prefixes": "whole"}, invariant=("scale", "rotation", "names", "order"),
)  # fmt: skip
NONE = Objective(
    name="none", kind=Kind.SIMREG, temperature=_TEMPERATURE, trains=False,
    asks="nothing: SimReg is measured in log steps, and not trained on",
    example=ExampleSettings(weight=0.0), invariant=("scale", "rotation", "names", "order"),
)  # fmt: skip
