# SPDX-License-Identifier: Apache-2.0
"""The one error of this package."""

from simreg_megatron.sentences import SentenceError


class ReproduceError(SentenceError):
    """An experiment cannot run, or go on, as asked; the message is the one sentence the user reads."""
