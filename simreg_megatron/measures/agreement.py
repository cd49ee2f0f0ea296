# SPDX-License-Identifier: Apache-2.0
"""Whether pipeline stages give the same labels the same weight: sums over tokens that must be equal.

Of the last stage it is the gradient that arrived at Megatron's per-token loss, of an earlier one the weight that it
made itself (stages.py). So a script that changes labels or masks after reading them, or weighs tokens in its own way,
is found out at the first line of the log.

Shapes: B micro-batch, S tokens of this context rank.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor


class Agreement:
    """Sums over the micro-batches of an interval, for each part of the model on this stage."""

    _SLOTS = 3  # sum of weights, sum of weight * (label + 1), micro-batches
    _TOLERANCE = 1e-3

    def __init__(self) -> None:
        self._of_parts: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()

    @torch.no_grad()
    def add(self, model: Any, labels: Tensor, weights: Tensor) -> None:
        """One micro-batch of a part of the model, both [B, S]."""
        weights = weights.double()
        found = torch.stack([weights.sum(), (weights * (labels + 1)).sum(), torch.ones_like(weights[0, 0])])
        if model in self._of_parts:
            found = self._of_parts[model] + found
        self._of_parts[model] = found

    def table(self, stage: int, num_stages: int, device: torch.device, *, reset: bool) -> Tensor:
        """[stages * 3], zeros but for this stage, whose row is the mean of its parts; to be summed over stages."""
        table = torch.zeros(num_stages, self._SLOTS, dtype=torch.float64, device=device)
        if self._of_parts:
            table[stage] = torch.stack(list(self._of_parts.values())).mean(dim=0)
        if reset:
            self._of_parts.clear()
        return table.flatten()

    def check(self, summed: Tensor) -> None:
        """Raise where an earlier stage differs from the last one.

        Raises:
            RuntimeError: the first that does.
        """
        *earlier, last = summed.view(-1, self._SLOTS).tolist()
        for stage, row in enumerate(earlier):
            differs = any(abs(a - b) > self._TOLERANCE * abs(b) for a, b in zip(row, last, strict=True))
            if row[-1] and last[-1] and differs:
                raise RuntimeError(
                    f"pipeline stage {stage} computed its --simreg-layers with other labels, masks or weights of "
                    f"tokens than the loss had (sums {row[:2]} against {last[:2]}): the script changes them after "
                    "reading its batch, or its loss function is not Megatron's; name layers of the last stage only"
                )
