# SPDX-License-Identifier: Apache-2.0
"""Expected results of a run, by formula, from its recorded inputs: nothing of the plugin is used.

Norms are of the whole model's gradients, by parameter name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tests.helpers.oracle import naive_simreg

_EPS = 1e-6  # of AdaGC, as its authors' public patch has it


def simreg_of(micro_batches: Sequence[dict[str, Any]], *, temperature: float, chunk_size: int) -> float:
    """Mean SimReg of one step in float64, pair by pair, over tokens that count; hidden [S, B, D], labels [B, S]."""
    total, count = 0.0, 0
    for given in micro_batches:
        terms, anchors = naive_simreg(
            given["hidden"].transpose(0, 1),
            given["labels"],
            temperature=temperature,
            valid=given["mask"].view_as(given["labels"]) > 0,
            chunk_size=chunk_size,
        )
        total, count = total + float(terms.sum()), count + anchors
    return total / count


def adagc_of(
    steps: Sequence[dict[str, float]], *, lambda_rel: float, beta: float, warmup: int, lambda_abs: float = 1.0
) -> list[dict[str, float]]:
    """AdaGC's coefficient of every parameter in every step (arXiv 2502.11034), from the norms before clipping."""
    averages: dict[str, float] = {}
    found = []
    for number, norms in enumerate(steps, start=1):
        if number <= warmup:
            coefficient = min(1.0, lambda_abs / (math.hypot(*norms.values()) + _EPS))
            coefficients = dict.fromkeys(norms, coefficient)
            averages = {name: min(averages.get(name, math.inf), coefficient * norm) for name, norm in norms.items()}
        else:
            limits = {name: lambda_rel * average for name, average in averages.items()}
            coefficients = {
                name: limits[name] / (norm + _EPS) if norm > limits[name] else 1.0 for name, norm in norms.items()
            }
            averages = {
                name: beta * averages[name] + (1 - beta) * min(norm, limits[name]) for name, norm in norms.items()
            }
        found.append(coefficients)
    return found
