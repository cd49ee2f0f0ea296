# SPDX-License-Identifier: Apache-2.0
from simreg_megatron.tools.builtin_corpus import ensure_builtin_corpus

__all__ = ["ensure_builtin_corpus"]
