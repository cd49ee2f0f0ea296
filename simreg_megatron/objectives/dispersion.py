# SPDX-License-Identifier: Apache-2.0
"""Dispersion: pairs of tokens at wide angles, without labels (arXiv 2602.00217)."""

from __future__ import annotations

import math

from simreg_megatron.objectives.record import Felt, Kind, Objective

DISPERSION = Objective(
    name="dispersion",
    kind=Kind.SUMS,
    asks="pairs of tokens at wide angles",
    labels="no",
    sent="states of the sampled tokens",
    temperature=1.0,
    options={"tokens": 256, "clamp": 0.0, "seed": 0},
    limits={"tokens": (2, math.inf), "clamp": (0, 0.99)},
    draws=True,
    has_chunks=lambda options: False,
    takes_rows=lambda options: True,
    felt=Felt(options="tokens=8", chunk_size=None),
    invariant=("scale", "rotation", "names"),
)
