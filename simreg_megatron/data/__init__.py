# SPDX-License-Identifier: Apache-2.0
"""Old names for checkpoint, evaluation and reproduce, until they are rewritten: nothing new imports this package."""

from simreg_megatron.tools.indexed import DataError

__all__ = ["DataError"]
