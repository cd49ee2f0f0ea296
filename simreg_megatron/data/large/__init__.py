# SPDX-License-Identifier: Apache-2.0
"""A larger corpus for experiments, made from Debian's documentation packages by one recipe, the same everywhere."""

from simreg_megatron.data.large.corpus import LargeCorpus, ensure_large_corpus, update_lock

__all__ = ["LargeCorpus", "ensure_large_corpus", "update_lock"]
