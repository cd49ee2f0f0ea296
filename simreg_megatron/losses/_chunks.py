# SPDX-License-Identifier: Apache-2.0
"""Which tokens meet: input checks, the mask, the cut into chunks, and the pairs inside each chunk.

Shapes: b sequences, n tokens, d features; c chunks of k tokens in each sequence, folded into m = b * c.
Nothing here reads a value on the host, so nothing here waits for the device.
"""

import contextlib
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_NO_LABEL = -1  # of filling; no valid token has it


class ChunkedTokens(NamedTuple):
    """Tokens of all sequences, folded so that one batch entry is one chunk."""

    rows: Tensor  # [m, k, d] float32 or float64; all ones where `valid` is False
    labels: Tensor  # [m, k] int64
    valid: Tensor  # [m, k] bool: takes part as anchor, positive and negative
    zero_rows: Tensor  # [m, k] bool: would be valid, but the hidden state is exactly zero


def check_tokens(embeddings: Tensor, labels: Tensor, valid: Tensor | None, chunk_size: int) -> None:
    """Raise ValueError, in one sentence, for anything that shapes and types alone can show to be wrong."""
    if not embeddings.is_floating_point():
        raise ValueError(f"embeddings must be floating point, got {embeddings.dtype}.")
    if embeddings.dim() not in (2, 3) or embeddings.shape[-1] == 0:
        raise ValueError(f"embeddings must be [n, d] or [b, n, d] with d of at least 1, got {list(embeddings.shape)}.")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"labels must be integers (token ids), got {labels.dtype}.")
    if labels.shape != embeddings.shape[:-1]:
        raise ValueError(
            f"labels must have the shape {list(embeddings.shape[:-1])} of the embeddings without the last "
            f"dimension, got {list(labels.shape)}."
        )
    if labels.device != embeddings.device:
        raise ValueError(f"labels are on {labels.device} but embeddings on {embeddings.device}; move one of them.")
    if valid is not None:
        _check_valid(valid, labels)
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 0 or chunk_size == 1:
        raise ValueError(f"chunk_size must be 0 (whole sequence) or an integer of at least 2, got {chunk_size!r}.")


def _check_valid(valid: Tensor, labels: Tensor) -> None:
    if valid.dtype != torch.bool:
        raise ValueError(f"valid must be a bool mask, got {valid.dtype}; for a 0/1 loss mask pass mask > 0.")
    if valid.shape != labels.shape:
        raise ValueError(f"valid must have the shape of labels, {list(labels.shape)}, got {list(valid.shape)}.")
    if valid.device != labels.device:
        raise ValueError(f"valid is on {valid.device} but labels on {labels.device}; move one of them.")


def as_batch(embeddings: Tensor, labels: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """One sequence [n, d], [n], [n] becomes a batch of one; a batch stays as it is."""
    if embeddings.dim() == 3:
        return embeddings, labels, valid
    return embeddings.unsqueeze(0), labels.unsqueeze(0), None if valid is None else valid.unsqueeze(0)


def no_autocast(device_type: str) -> contextlib.AbstractContextManager:
    """Autocast would take the cosines to bfloat16: an error of 2e-3 is a factor of 1.2 at tau 0.01."""
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def cut(embeddings: Tensor, labels: Tensor, valid: Tensor | None, chunk_size: int) -> ChunkedTokens:
    """Mask [b, n, d] tokens and fold contiguous chunks of `chunk_size` into the batch; the last may be short.

    Out are tokens with valid False, with a label below 0 (the -100 convention), and with an exactly zero row,
    which has no direction. Their rows are replaced before any arithmetic, so that even a NaN there can reach
    neither a value nor a gradient. A NaN row of a valid token is kept: hiding it would hide a broken model.
    """
    wanted = labels >= 0 if valid is None else valid & (labels >= 0)
    rows = embeddings if embeddings.dtype == torch.float64 else embeddings.float()
    zero_rows = wanted & (rows.detach() == 0).all(dim=-1)
    kept = wanted & ~zero_rows
    # Ones and not zeros: the norm's derivative is finite there, and where() cuts the gradient anyway.
    rows = torch.where(kept.unsqueeze(-1), rows, 1.0)
    length = chunk_length(labels.shape[1], chunk_size)
    return ChunkedTokens(
        rows=_fold(rows, length, 1.0),
        labels=_fold(labels.long(), length, _NO_LABEL),  # wide enough for _NO_LABEL
        valid=_fold(kept, length, False),
        zero_rows=_fold(zero_rows, length, False),
    )


def chunk_length(num_tokens: int, chunk_size: int) -> int:
    """Tokens in a full chunk: chunk_size, or the whole sequence for 0 and for sizes beyond it."""
    return max(num_tokens, 1) if chunk_size == 0 else min(chunk_size, max(num_tokens, 1))


def _fold(tokens: Tensor, length: int, fill: float) -> Tensor:
    """[b, n, ...] -> [b * ceil(n / length), length, ...]; the last chunk of a sequence is filled up."""
    missing = -tokens.shape[1] % length
    if missing:
        tokens = F.pad(tokens, [0, 0] * (tokens.dim() - 2) + [0, missing], value=fill)
    num_chunks = tokens.shape[0] * (tokens.shape[1] // length)
    return tokens.reshape(num_chunks, length, *tokens.shape[2:])


def unfold(tokens: Tensor, num_sequences: int, num_tokens: int) -> Tensor:
    """[m, k] -> [b, n]: undo the folding of `cut` and drop the filling."""
    return by_sequence(tokens, num_sequences)[:, :num_tokens]


def by_sequence(values: Tensor, num_sequences: int) -> Tensor:
    """[m] -> [b, c], or [m, k] -> [b, c * k]."""
    # The length is spelled out because -1 is ambiguous without elements.
    return values.reshape(num_sequences, values.numel() // max(num_sequences, 1))


def label_pairs(tokens: ChunkedTokens) -> tuple[Tensor, Tensor]:
    """Two bool [m, k, k]: both tokens valid and labels equal (diagonal included), or labels different."""
    both = tokens.valid.unsqueeze(-1) & tokens.valid.unsqueeze(-2)
    equal = tokens.labels.unsqueeze(-1) == tokens.labels.unsqueeze(-2)
    return both & equal, both & ~equal


def without_self(pairs: Tensor) -> Tensor:
    """The pairs [m, k, k] except those of a token with itself."""
    return pairs & ~self_pairs(pairs)


def self_pairs(pairs: Tensor) -> Tensor:
    """The bool diagonal [k, k] that belongs to square pairs [m, k, k]."""
    return torch.eye(pairs.shape[-1], dtype=torch.bool, device=pairs.device)
