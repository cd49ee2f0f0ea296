# SPDX-License-Identifier: Apache-2.0
"""Dispersion: pairs of tokens at wide angles, without labels (arXiv 2602.00217)."""

from __future__ import annotations

from simreg_megatron.objectives.record import Felt, Kind, Objective, Settings


def _check(config: Settings) -> None:
    tokens, clamp = float(config.options["tokens"]), float(config.options["clamp"])
    if tokens < 2:
        raise ValueError(f"SimReg objective option tokens must be at least 2, which make a pair, not {tokens:g}")
    if not 0 <= clamp < 1:
        raise ValueError(f"SimReg objective option clamp must be from 0 to below 1, not {clamp:g}")


DISPERSION = Objective(
    name="dispersion",
    ways={Kind.SUMS: "simreg_megatron.sharded.samples:dispersion_terms"},
    asks="pairs of tokens at wide angles",
    labels="no",
    sent="states of the sampled tokens",
    temperature=1.0,
    options={"tokens": 256, "clamp": 0.0, "seed": 0},
    check=_check,
    draws=True,
    has_chunks=lambda options: False,
    takes_rows=lambda options: True,
    felt=Felt(options="tokens=8", chunk_size=None),
    invariant=("scale", "rotation", "names"),
)
