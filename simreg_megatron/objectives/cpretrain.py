# SPDX-License-Identifier: Apache-2.0
"""CPretrain: each token with the next of its label, or halves of sequences, a baseline."""

from __future__ import annotations

import math

from simreg_megatron.objectives.record import Kind, Objective, Options, Scalar, Settings

LARGEST_SCALE = 100.0
"""Of the cosines, where the scale is learned."""


def _kind(options: Options) -> Kind:
    return Kind.SEQUENCES if options["level"] == "sequence" else Kind.PAIRS


def _check(config: Settings) -> None:
    if config.options["scale"] == "learned" and config.tau * LARGEST_SCALE <= 1:
        raise ValueError(
            f"scale=learned starts at 1 / temperature and grows up to {LARGEST_SCALE:g}: give a temperature above "
            f"{1 / LARGEST_SCALE:g}, not {config.tau:g}"
        )


def _scalars(config: Settings) -> dict[str, Scalar]:
    if config.options["scale"] != "learned":
        return {}
    return {"log_scale": Scalar(-math.log(config.tau), "simreg scale", "exp", most=LARGEST_SCALE)}


CPRETRAIN = Objective(
    name="cpretrain",
    ways={
        Kind.PAIRS: "simreg_megatron.losses.cpretrain:cpretrain_terms",
        Kind.SEQUENCES: "simreg_megatron.sharded.by_sequence:cpretrain_terms",
    },
    kind_of=_kind,
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
