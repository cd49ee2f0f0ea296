# SPDX-License-Identifier: Apache-2.0
"""What the user reads where an evaluation cannot be made."""

from simreg_megatron.sentences import SentenceError


class EvaluationError(SentenceError):
    """An evaluation that cannot be made as asked; the message says why and what to do."""
