# SPDX-License-Identifier: Apache-2.0
"""Which document each token of a sequence belongs to, from what Megatron has at the loss: labels, or packing lengths.

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from simreg_megatron.parallel.layout import Run


@dataclass(frozen=True)
class EndTokens:
    """Documents end with a token of their own: document of position i = end tokens among the inputs before i.

    The inputs are the labels, one position later; so an end token itself still belongs to the document it ends, as in
    Megatron's masks. What stands before the first label of a stretch is not known: the first two positions of a
    stretch count as one document even if it begins with an end token.
    """

    token: int
    needs_domain = True  # counted from the first label on

    def of(self, labels: Tensor, stretch: Run) -> Tensor:
        """[B, tokens of the stretch] from the labels [B, tokens of the stretch]."""
        ends = (labels == self.token).long().cumsum(dim=1)
        return F.pad(ends, (2, 0))[:, : labels.shape[1]]


@dataclass(frozen=True)
class PackedLengths:
    """Documents lie one after the other in one row: document of position i = borders at or before i.

    Attributes:
        borders: int [documents + 1] on the device, cumulative lengths from 0 (Megatron's cu_seqlens).
    """

    borders: Tensor
    needs_domain = False

    def of(self, labels: Tensor, stretch: Run) -> Tensor:
        """[1, tokens of the stretch]."""
        positions = torch.arange(*stretch, device=self.borders.device, dtype=self.borders.dtype)
        return torch.searchsorted(self.borders, positions, right=True).expand_as(labels)


Documents = EndTokens | PackedLengths
