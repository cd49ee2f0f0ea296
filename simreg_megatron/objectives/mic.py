# SPDX-License-Identifier: Apache-2.0
"""MIC: first features that do not repeat the others, and are spread."""

from __future__ import annotations

import math

from simreg_megatron.objectives.record import Felt, Kind, Objective, Options

_PARTS = ("correlation", "variance", "balance", "uniformity")


def _check(options: Options, *_: float) -> None:
    if not any(options[name] for name in _PARTS):
        raise ValueError("the weights of all four parts of SimReg objective mic are 0: leave one above 0")
    for name, default, parts in (("norm_scope", "sequence", _PARTS[:2]), ("pool", "chunk", _PARTS[2:])):
        if options[name] != default and not any(options[part] for part in parts):
            raise ValueError(f"SimReg objective option {name} has no effect while {' and '.join(parts)} are 0: drop it")


MIC = Objective(
    name="mic",
    kind=Kind.SUMS,
    asks="first features that do not repeat the others, and are spread",
    labels="no",
    sent="means, deviations, and a matrix of correlations",
    options={
        "prefixes": "auto",
        "pool": ("chunk", "sequence", "token"),
        "norm_scope": ("sequence", "batch"),
        "threshold": 0.1,
        "t": 2.0,
        **dict.fromkeys(_PARTS, 1.0),
    },
    limits=dict.fromkeys(("threshold", "t", *_PARTS), (0, math.inf)),
    idle_with={"threshold": ("correlation", 0), "t": ("uniformity", 0)},
    check=_check,
    has_chunks=lambda options: options["pool"] == "chunk",
    takes_rows=lambda options: True,
    prefixes_below_width=True,  # it compares with the rest
    felt=Felt(weight=0.02),
    invariant=("names", "order"),
)
