# SPDX-License-Identifier: Apache-2.0
"""What every step of the conversion raises."""

from simreg_megatron.sentences import SentenceError


class CheckpointError(SentenceError):
    """A checkpoint or model that cannot be converted; the message says why and what to do. Nothing was written."""
