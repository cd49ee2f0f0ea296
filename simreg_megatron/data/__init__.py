# SPDX-License-Identifier: Apache-2.0
"""Text for training: from files or the Hub to Megatron's .bin/.idx, a corpus without a download, and checks of both."""

from simreg_megatron.data.builtin import BuiltinCorpus, ensure_builtin_corpus
from simreg_megatron.data.check import check_dataset
from simreg_megatron.data.indexed import DataError

__all__ = ["BuiltinCorpus", "DataError", "check_dataset", "ensure_builtin_corpus"]
