# SPDX-License-Identifier: Apache-2.0
"""CPretrain: each token with the next of its label, or halves of sequences, a baseline."""

from __future__ import annotations

import math

from simreg_megatron.objectives.record import Kind, Objective, Options, Scalar

LARGEST_SCALE = 100.0
"""Of the cosines, where the scale is learned."""


def _check(options: Options, temperature: float, _: int) -> None:
    if options["scale"] == "learned" and temperature * LARGEST_SCALE <= 1:
        raise ValueError(
            f"scale=learned starts at 1 / temperature and grows up to {LARGEST_SCALE:g}: give a temperature above "
            f"{1 / LARGEST_SCALE:g}, not {temperature:g}"
        )


def _scalars(options: Options, temperature: float) -> dict[str, Scalar]:
    if options["scale"] != "learned":
        return {}
    return {"log_scale": Scalar(-math.log(temperature), "simreg scale", "exp", most=LARGEST_SCALE)}


CPRETRAIN = Objective(
    name="cpretrain",
    kind=Kind.PAIRS,
    kind_of=lambda options: Kind.SEQUENCES if options["level"] == "sequence" else Kind.PAIRS,
    asks="each token closer to the next of its label than to those of other pairs",
    temperature=0.1,
    options={"same_label": ("masked", "kept"), "level": ("token", "sequence"), "scale": ("fixed", "learned")},
    idle_with={"same_label": ("level", "sequence")},
    other_options=("level", "scale"),
    check=_check,
    scalars=_scalars,
    takes_rows=lambda options: options["level"] == "sequence",
    invariant=("scale", "rotation", "names"),
)
