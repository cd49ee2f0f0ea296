# SPDX-License-Identifier: Apache-2.0
"""SIGReg: states whose projections are those of an isotropic Gaussian."""

from __future__ import annotations

from simreg_megatron.objectives.record import Felt, Kind, Objective, Options

UNSCALED = (
    "normalize=unit leaves projections of variance 1/d, whose characteristic function is near 1 for all states "
    "do: the loss hardly separates an even spread from a collapse, and descends towards the latter; use sqrt-d"
)


def _by_chunk(options: Options) -> bool:
    return options["sample"] == "chunk"


SIGREG = Objective(
    name="sigreg",
    kind=Kind.SUMS,
    asks="an isotropic Gaussian, seen through random directions",
    labels="no",
    sent="2 x knots x directions numbers a sample",
    options={
        "estimator": ("mean", "epps-pulley"),
        "normalize": ("sqrt-d", "unit", "none"),
        "sample": ("chunk", "micro-batch", "replicas"),
        "directions": 0,  # the estimator's own number
        "seed": 0,
    },
    limits={"directions": (0, 65_536)},  # each is as wide as a state
    warning=lambda options: UNSCALED if options["normalize"] == "unit" else None,
    draws=True,
    has_chunks=_by_chunk,
    takes_rows=_by_chunk,
    felt=Felt(weight=0.3),
    invariant=("scale", "names", "order"),
)
