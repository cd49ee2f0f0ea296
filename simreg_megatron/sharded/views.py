# SPDX-License-Identifier: Apache-2.0
"""The tokens that some anchors of a rank are compared with.

Shapes: B micro-batch, D hidden, K tokens in a view, A anchors.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from simreg_megatron.losses.roles import TokenRoles
from simreg_megatron.parallel.layout import Run


class View(NamedTuple):
    """Some anchors of this rank and all tokens that they meet: whole chunks from their first token on."""

    run: Run  # of the tokens, on the sequence
    embeddings: Tensor  # [B, K, D]; without a gradient where a fast form of SimReg computes it
    labels: Tensor  # [B, K]
    usable: Tensor  # [B, K] bool
    documents: Tensor | None  # [B, K]
    anchors: Run  # positions inside K
    roles: TokenRoles  # of the anchors, [B, A]
    heads: Tensor | None = None  # [B, K, D], the output layer's row for each label, where states meet these
