# SPDX-License-Identifier: Apache-2.0
"""Context parallelism and packed sequences for Megatron's local attention, on the CPU only.

On a GPU, Transformer Engine does both; Megatron's own `DotProductAttention` refuses them. `adapt` changes that class,
from which every local layer is built, so that any script runs without a `--spec` flag of ours.

It is right, not fast: keys and values of the whole sequence are gathered on every rank. The order of blocks is not
taken from `simreg_megatron.parallel`: a mistake in the one cannot hide behind the same mistake in the other.

Shapes: S tokens of this context rank, T tokens of the whole sequence, B micro-batch, H heads, D of a head.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from simreg_megatron.cpu import CpuBackendError


def adapt(attention: Any) -> None:
    """Let `DotProductAttention` be built under context parallelism, and take packed sequences."""
    build, attend = attention.__init__, attention.forward

    @functools.wraps(build)
    def built(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        unsplit = copy.copy(config)
        unsplit.context_parallel_size = 1  # upstream refuses more, for want of the exchange below
        build(self, unsplit, *args, **kwargs)

    @functools.wraps(attend)
    def attended(self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any) -> Tensor:
        packed_seq_params = options.pop("packed_seq_params", None)
        group = _context_group(self, packed_seq_params)
        if packed_seq_params is None and group is None:
            return attend(self, query, key, value, attention_mask, **options)
        if self.scale_mask_softmax.window_size is not None:
            raise CpuBackendError(
                "on the CPU, sliding-window attention works on whole, unpacked sequences only: "
                "leave out --window-size, or both --context-parallel-size and packed sequences"
            )
        cu_seqlens = None
        if packed_seq_params is not None:
            query, key, value = (packed.unsqueeze(1) for packed in (query, key, value))  # THD -> T1HD
            padded = packed_seq_params.cu_seqlens_q_padded  # where documents are padded, the rows follow these
            cu_seqlens = packed_seq_params.cu_seqlens_q if padded is None else padded
        own = torch.arange(len(query))
        if group is not None:
            positions = zigzag_positions(len(key) * group.size(), group.size(), cu_seqlens)
            # Backward: the gradients of all ranks' copies are summed, and each rank keeps its own rows.
            gathered = (gather_from_sequence_parallel_region(part.contiguous(), group=group) for part in (key, value))
            key, value = (part[positions.flatten().argsort()] for part in gathered)
            own = positions[group.rank()]
        if cu_seqlens is not None:
            attention_mask = packed_mask(cu_seqlens, len(key))[:, :, own]
        elif attention_mask is None and self.attn_mask_type == AttnMaskType.causal:
            attention_mask = causal_mask(own, len(key))
        return attend(self, query, key, value, attention_mask, **options)

    attention.__init__, attention.forward = built, attended


def _context_group(attention: Any, packed_seq_params: Any) -> Any:
    """Return the group of ranks that share these tokens, which may be the micro-batch's own; None for one rank."""
    own = getattr(getattr(attention, "pg_collection", None), "cp", None)  # from 0.15 on
    group = getattr(packed_seq_params, "cp_group", None) or own or parallel_state.get_context_parallel_group()
    return group if group.size() > 1 else None


def zigzag_positions(length: int, ranks: int, cu_seqlens: Tensor | None = None) -> Tensor:
    """Positions on the sequence of the rows of each context rank, [ranks, length / ranks].

    The sequence is cut into 2 * ranks blocks; rank r holds block r and, after it, block 2 * ranks - 1 - r. A packed row
    is cut in the same way inside each document, at whose `cu_seqlens` see `packed_mask`.
    """
    documents = torch.arange(length).tensor_split([] if cu_seqlens is None else cu_seqlens[1:-1].tolist())
    blocks = [document.view(2 * ranks, len(document) // (2 * ranks)) for document in documents]
    return torch.cat([half for cut in blocks for half in (cut[:ranks], cut[ranks:].flip(0))], dim=1)


def causal_mask(positions: Tensor, length: int) -> Tensor:
    """True where a key lies after the query: [1, 1, len(positions), length]."""
    return (torch.arange(length) > positions[:, None])[None, None]


def packed_mask(cu_seqlens: Tensor, length: int) -> Tensor:
    """True where a key lies after the query or in another document: [1, 1, length, length].

    `cu_seqlens` are the first token of every document, and one past the last token, ascending from 0.
    """
    positions = torch.arange(length)
    document = torch.bucketize(positions, cu_seqlens[1:].to(positions.dtype), right=True)
    return causal_mask(positions, length) | (document != document[:, None])[None, None]
