# SPDX-License-Identifier: Apache-2.0
"""CReg: each positive separately against all negatives, a baseline."""

from __future__ import annotations

from simreg_megatron.objectives.record import Kind, Objective, Options
from simreg_megatron.objectives.simcse import TWICE

PER_PAIR_TOKENS = 256
"""Longest chunk of form "per_pair", which holds chunk^3 numbers."""


def _check(options: Options, _: float, chunk_size: int) -> None:
    if options["form"] == "per_pair" and not 0 < chunk_size <= PER_PAIR_TOKENS:
        raise ValueError(
            f"SimReg objective option form=per_pair holds chunk^3 numbers: give a chunk size of at most "
            f"{PER_PAIR_TOKENS}, not {chunk_size or '0, the whole sequence'}"
        )


CREG = Objective(
    name="creg",
    kind=Kind.PAIRS,
    asks="each state of a label closer than all of other labels",
    temperature=0.1,
    options={"form": ("per_positive", "per_pair", "supcon_out"), "self_positive": ("never", "always")},
    check=_check,
    not_offered={("prediction_consistency", "yes"): TWICE},
    invariant=("scale", "rotation", "names", "order"),
)
