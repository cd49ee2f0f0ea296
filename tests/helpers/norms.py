# SPDX-License-Identifier: Apache-2.0
"""Sums over the norms of tokens, by their names."""

from __future__ import annotations

from torch import Tensor

from simreg_megatron.magnitude import NormSums, norm_table


def norm_sums(embeddings: Tensor, weights: Tensor) -> NormSums:
    """Compute the sums of embeddings [n..., d] with weights [..., n...], as `norm_table`."""
    return NormSums._make(norm_table(embeddings, weights).unbind(dim=-1))
