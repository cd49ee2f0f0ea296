# SPDX-License-Identifier: Apache-2.0
"""The tokens of one micro-batch on this rank: which part of their sequences they are, which count, what they belong to.

Shapes: S tokens of this rank, T of its context rank, B micro-batch, D hidden.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from simreg_megatron.config import SimRegConfig
from simreg_megatron.notices import log_once
from simreg_megatron.parallel.layout import ShardLayout
from simreg_megatron.parallel.shard import SequenceShard
from simreg_megatron.plugin import compat
from simreg_megatron.sharded.documents import Documents, EndTokens, PackedLengths


class Given(NamedTuple):
    """What the output layer and the loss were given: all tokens of the context rank, T."""

    hidden_states: Tensor | None  # [S, B, D]; None on stages before the last
    labels: Tensor  # [B, T]
    valid: Tensor  # bool [B, T]


class Tokens(NamedTuple):
    """This rank's tokens of a micro-batch, whatever an objective does with them."""

    shard: SequenceShard
    whole: Given
    labels: Tensor  # [B, S]
    valid: Tensor  # bool [B, S]
    heads: Tensor | None  # [S, B, D]
    packed_seq_params: Any

    @property
    def sample_length(self) -> int | None:
        return getattr(self.packed_seq_params, "tokens_per_sample", None)


def shard_of(model: Any, labels: Tensor) -> SequenceShard:
    """This rank's part of the sequences whose labels [B, tokens of the context rank] the model was given."""
    tp, cp = compat.tensor_group(model), compat.context_group(model)
    rows_split = bool(model.config.sequence_parallel) and tp.size() > 1
    rank = (cp.rank(), tp.rank())
    layout = ShardLayout(labels.shape[1] * cp.size(), cp.size(), tp.size(), rows_split)
    row_group = None
    if len(layout.exchange_members(rank)) > 1:
        row_group = cp if not rows_split else tp if cp.size() == 1 else compat.tensor_and_context_group(model)
        if layout.exchange_members(rank)[row_group.rank()] != rank:
            raise NotImplementedError(
                "SimReg expects tensor-parallel ranks to be numbered before context-parallel ones, and this run "
                "orders them otherwise: leave the rank order to Megatron, or set --simreg-lambda 0"
            )
    return SequenceShard(layout, rank, row_group, tp if tp.size() > 1 else None)


def open_row_group(model: Any) -> None:
    """Let NCCL make the communicator among which rows travel now, and not inside the first forward pass.

    Groups of one kind of parallelism are in use by then; the one of two kinds is SimReg's alone.
    """
    tp, cp = compat.tensor_group(model), compat.context_group(model)
    if model.config.sequence_parallel and tp.size() > 1 and cp.size() > 1:
        nothing = torch.zeros(1, device=next(model.parameters()).device)
        dist.all_reduce(nothing, group=compat.tensor_and_context_group(model))


def main_hidden_states(hidden_states: Tensor, shard: SequenceShard) -> Tensor:
    """Drop the states of multi-token-prediction depths, which some stages append after the main ones."""
    rows, main = hidden_states.shape[0], shard.num_rows
    if rows % main:
        raise RuntimeError(
            f"SimReg expected {main} hidden states a rank (or a multiple, with MTP), Megatron gave {rows}"
        )
    return hidden_states if rows == main else hidden_states[:main]


def valid_tokens(labels: Tensor, loss_mask: Tensor | None) -> Tensor:
    valid = labels >= 0
    if loss_mask is None:
        log_once("SimReg: no loss mask reaches the model, so every token with a label counts (pass loss_mask=)")
        return valid
    return valid & (loss_mask.view_as(labels) > 0)


def documents_of(packed_seq_params: Any, end_of_document: int | None) -> Documents:
    """Who tells the borders of documents: what the row packs, or the token that ends one."""
    if packed_seq_params is not None:
        padded = packed_seq_params.cu_seqlens_q_padded
        return PackedLengths(packed_seq_params.cu_seqlens_q if padded is None else padded)
    if end_of_document is None:
        raise RuntimeError(
            "--simreg-document-mask needs the tokenizer's end-of-document token, and this script has no "
            "Megatron tokenizer: pass packed_seq_params to the model, or drop it"
        )
    return EndTokens(end_of_document)


def describe_chunks(config: SimRegConfig, shard: SequenceShard, sample_length: int | None) -> None:
    """Say once where chunks are not what the settings name."""
    if not any(part.has_chunks for part in config.parts):
        return
    size, sequence = config.chunk_size, sample_length or shard.layout.length
    if size > sequence:
        log_once(f"SimReg chunk size {size} is beyond the sequence: chunks are whole sequences of {sequence}")
    longest = max(last - first for first, last in shard.layout.held(shard.rank))
    if config.scope == "local" and longest < sequence:
        log_once(
            f"SimReg scope local: chunks of {min(size or longest, longest)} tokens end where a rank's block of "
            f"{longest} ends, so the objective depends on the parallel layout"
        )
