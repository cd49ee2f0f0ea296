# SPDX-License-Identifier: Apache-2.0
from simreg_megatron.tools.indexed import read_lengths as document_lengths
from simreg_megatron.tools.indexed import read_tokens as open_tokens

__all__ = ["document_lengths", "open_tokens"]
