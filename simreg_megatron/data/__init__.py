# SPDX-License-Identifier: Apache-2.0
"""Text for training: a corpus that needs no download, and checks of a user's own data before Megatron reads it."""

from simreg_megatron.data.builtin import BuiltinCorpus, ensure_builtin_corpus
from simreg_megatron.data.indexed import DataError, check_dataset

__all__ = ["BuiltinCorpus", "DataError", "check_dataset", "ensure_builtin_corpus"]
