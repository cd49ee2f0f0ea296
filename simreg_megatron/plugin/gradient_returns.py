# SPDX-License-Identifier: Apache-2.0
"""Whether a gradient ever comes back to the terms that leave with a loss.

A loop whose own loss is not computed from the one that the model returns would train without SimReg, under a log that
shows nothing of it.
"""

from __future__ import annotations

from torch import Tensor


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
