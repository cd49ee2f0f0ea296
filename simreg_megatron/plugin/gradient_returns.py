# SPDX-License-Identifier: Apache-2.0
"""Whether the terms that leave with a loss train anything: a gradient comes back to them, and they are finite.

A loop whose own loss is not computed from the one that the model returns would train without SimReg, under a log that
shows nothing of it.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

_STOPPED = (
    "the SimReg term is not finite while the language-model loss is: the step is stopped "
    "(with tensor or context parallelism, see the other ranks' logs too: one of them may have failed first)"
)


class Returns:
    """Of one run; it looks until the first one."""

    def __init__(self) -> None:
        self._is_sent, self._is_back = False, False

    @property
    def are_missing(self) -> bool:
        """Whether terms left, and no gradient has come back yet."""
        return self._is_sent and not self._is_back

    def expect(self, term: Tensor, loss: Tensor) -> None:
        """Watch this term. A loss that trains nothing, such as a teacher's, gets no gradient, and need not.

        Raises:
            NotImplementedError: the loss trains, and the term has no graph to train through.
        """
        if self._is_back or not loss.requires_grad:
            return
        if not term.requires_grad:
            raise NotImplementedError(
                "SimReg cannot train here: the hidden states were computed without a graph (all parameters before the "
                "output layer are frozen). Train some of those, or set --simreg-lambda 0"
            )
        self._is_sent = True
        term.register_hook(self._note)

    def _note(self, _: Tensor) -> None:
        self._is_back = True


def _largest(numbers: Tensor) -> Tensor:
    """NaN if there is one."""
    return torch.linalg.vector_norm(numbers.detach(), ord=math.inf)


def stop_hidden_failure(beside: Tensor, terms: list[Tensor]) -> None:
    """Stop the step, without a host sync, if SimReg fails where the language-model loss alone looks sound.

    A loss (or, on an earlier stage, output) that is not finite itself is left to Megatron, which stops or reruns the
    step. Where terms are made of states of other ranks, these may be at fault: their own loss is not finite then.
    """
    largest = functools.reduce(torch.add, [_largest(part) for part in terms])
    sound = (largest < math.inf) >= (_largest(beside) < math.inf)
    torch._assert_async(sound, _STOPPED)
