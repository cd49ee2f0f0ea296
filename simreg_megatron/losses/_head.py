# SPDX-License-Identifier: Apache-2.0
"""Losses of single tokens through the output layer, from what its logits z give.

prefixes-ce: L_i = log sum_j exp z_ij - z_{i, y_i}        z-loss: L_i = (log sum_j exp z_ij)^2
"""

from __future__ import annotations

from torch import Tensor


def cross_entropies(losses: Tensor) -> Tensor:
    """They come as they are."""
    return losses


def squared_normalizers(normalizers: Tensor) -> Tensor:
    return normalizers.square()
