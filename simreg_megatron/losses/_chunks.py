# SPDX-License-Identifier: Apache-2.0
"""Which tokens meet: input checks, the mask, the cut into chunks, and the pairs inside each chunk.

Shapes: b sequences, n tokens, d features; chunks of k tokens, folded with the batch into m chunks; p anchors of each.
Nothing here reads a value on the host, so nothing here waits for the device.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from simreg_megatron.kernels.contrast import Span
from simreg_megatron.notices import refuse

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)  # torch compares and sorts no others
NO_LABEL = -1  # of filling and of tokens left out; no usable token has it


class Block(NamedTuple):
    """Chunks of equal length, folded so that one batch entry is one chunk, and which of their tokens are anchors."""

    rows: Tensor  # [m, k, d] float32 or float64, all ones where not usable
    labels: Tensor  # [m, k] int64
    usable: Tensor  # [m, k] bool: takes part as anchor, positive and negative
    documents: Tensor | None  # [m, k]; tokens of different documents never meet
    anchors: Span  # positions inside each chunk that have a term; the others are only compared with


def check_tokens(
    embeddings: Tensor, labels: Tensor, valid: Tensor | None, documents: Tensor | None, chunk_size: int
) -> None:
    """Raise ValueError, in one sentence, for anything that shapes and types alone can show to be wrong."""
    shape = embeddings.shape
    refuse(
        (not embeddings.is_floating_point(), f"embeddings must be floating point, got {embeddings.dtype}."),
        (len(shape) not in (2, 3) or shape[-1] == 0,
         f"embeddings must be [n, d] or [b, n, d] with d of at least 1, got {list(shape)}."),
        (not is_number(chunk_size, numbers.Integral) or chunk_size < 0 or chunk_size == 1,
         f"chunk_size must be 0 (whole sequence) or an integer of at least 2, got {chunk_size!r}."),
    )  # fmt: skip
    for name, values, (kinds, needs) in (
        ("labels", labels, (_INTEGERS, "integers (token ids)")),
        ("valid", valid, ((torch.bool,), "a bool mask, such as mask > 0 of a 0/1 loss mask")),
        ("documents", documents, (_INTEGERS, "integers (document numbers)")),
    ):
        if values is not None:
            refuse(
                (values.dtype not in kinds, f"{name} must be {needs}, got {values.dtype}."),
                (values.shape != shape[:-1],
                 f"{name} must have the shape {list(shape[:-1])} of the embeddings without the last dimension, got "
                 f"{list(values.shape)}."),
            )  # fmt: skip


def at_least_float32(rows: Tensor) -> Tensor:
    """Convert half precision to float32, for sums, and so that the gradients of several readers are added in it."""
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


def is_number(value: object, kind: type = numbers.Real) -> bool:
    """Return whether it is a number of Python or NumPy, and no bool."""
    return isinstance(value, kind) and not isinstance(value, bool)


def as_batch(embeddings: Tensor, *per_token: Tensor | None) -> tuple[Any, ...]:
    """Make one sequence [n, d], [n], ... a batch of one; return a batch as it is."""
    if embeddings.dim() == 3:
        return (embeddings, *per_token)
    return tuple(None if part is None else part.unsqueeze(0) for part in (embeddings, *per_token))


def usable_tokens(embeddings: Tensor, labels: Tensor, valid: Tensor | None) -> Tensor:
    """Return bool [b, n]: not usable are tokens with valid False, a label below 0 (-100), or an exactly zero row."""
    wanted = labels >= 0 if valid is None else valid & (labels >= 0)
    return nonzero_rows(embeddings, wanted)


def nonzero_rows(embeddings: Tensor, valid: Tensor) -> Tensor:
    """Return which of the valid tokens [b, n] have a row that is not exactly zero."""
    # Not a comparison of each number with 0, which would be a copy of all of them. A NaN counts, as any number but 0.
    return torch.logical_and(valid, torch.linalg.vector_norm(embeddings.detach(), ord=math.inf, dim=-1))


def checked(
    embeddings: Tensor,
    labels: Tensor | None,
    valid: Tensor | None,
    documents: Tensor | None = None,
    chunk_size: int = 0,
) -> tuple[Any, ...]:
    """Check the tokens of a public loss; return its embeddings, labels (None: zeros), usable and documents, batched."""
    if labels is None:
        labels = torch.zeros(embeddings.shape[:-1], dtype=torch.long, device=embeddings.device)
    check_tokens(embeddings, labels, valid, documents, chunk_size)
    embeddings, labels, valid, documents = as_batch(embeddings, labels, valid, documents)
    documents = None if documents is None else documents.long()  # bytes have no number for tokens left out
    return embeddings, labels, usable_tokens(embeddings, labels, valid), documents


def chunk_length(num_tokens: int, chunk_size: int) -> int:
    """Return the tokens in a full chunk: chunk_size, or the whole sequence for 0 and for sizes beyond it."""
    return max(num_tokens, 1) if chunk_size == 0 else min(chunk_size, max(num_tokens, 1))


class Stretch(NamedTuple):
    """Whole chunks of one length, one after the other."""

    tokens: Span
    length: int  # of each chunk
    inside: Span  # the anchors' positions in each chunk

    @property
    def anchors(self) -> Span:
        """Positions on the sequence."""
        return self.tokens[0] + self.inside[0], self.tokens[1] - self.length + self.inside[1]

    def chunks(self, per_token: Any) -> Any:
        """View [b, n, ...] as chunks [b, c, k, ...]; None stays None."""
        if per_token is None:
            return None
        first, last = self.tokens
        part = per_token if (first, last) == (0, per_token.shape[1]) else per_token[:, first:last]
        return part.view(len(part), (last - first) // self.length, self.length, *part.shape[2:])  # unflatten is slower


@functools.lru_cache(maxsize=256)
def stretches(num_tokens: int, chunk_size: int, anchors: Span) -> tuple[Stretch, ...]:
    """Cut into at most three: all full chunks that hold only anchors in one, and a partial chunk on either side."""
    length = chunk_length(num_tokens, chunk_size)
    position, last = anchors
    parts = []
    while position < last:
        start = position // length * length
        stop = min(start + length, num_tokens)
        if position == start and start + length <= last:
            stop = last // length * length
            parts.append(Stretch((start, stop), length, (0, length)))
        else:
            parts.append(Stretch((start, stop), stop - start, (position - start, min(last, stop) - start)))
        position = min(last, stop)
    return tuple(parts)


def block_of(stretch: Stretch, embeddings: Tensor, labels: Tensor, usable: Tensor, documents: Tensor | None) -> Block:
    """Cut one stretch out of whole sequences.

    Rows that are not usable are replaced before any arithmetic, so that even a NaN there can reach neither a value
    nor a gradient. A NaN row of a usable token is kept: hiding it would hide a broken model.
    """
    rows, usable = stretch.chunks(embeddings).flatten(0, 1), stretch.chunks(usable).flatten(0, 1)
    return Block(
        # Ones and not zeros: the norm's derivative is finite there, and where() cuts the gradient anyway.
        rows=torch.where(usable.unsqueeze(-1), at_least_float32(rows), 1.0),
        labels=stretch.chunks(labels.long()).flatten(0, 1),
        usable=usable,
        documents=None if documents is None else stretch.chunks(documents).flatten(0, 1),
        anchors=stretch.inside,
    )


def fold(tokens: Tensor, length: int, fill: float) -> Tensor:
    """Fold [b, n, ...] to [b * ceil(n / length), length, ...]; the last chunk of a sequence is filled up."""
    missing = -tokens.shape[1] % length
    if missing:
        tokens = F.pad(tokens, [0, 0] * (tokens.dim() - 2) + [0, missing], value=fill)
    num_chunks = tokens.shape[0] * (tokens.shape[1] // length)
    return tokens.reshape(num_chunks, length, *tokens.shape[2:])


def unfold(tokens: Tensor, num_sequences: int, num_tokens: int) -> Tensor:
    """Undo `fold`, [m, p] to [b, n], and drop the filling."""
    length = max(tokens.shape[1], 1)
    return tokens.reshape(num_sequences, -(-num_tokens // length) * length)[:, :num_tokens]


def joined(parts: Sequence[Tensor], dim: int = 1) -> Tensor:
    """Join [b, n] of several stretches, one after the other; one alone is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=dim)


def by_sequence(values: Tensor, num_sequences: int) -> Tensor:
    """Reshape [m] to [b, c], and [m, k] or [b, c, k] to [b, c * k]."""
    # The length is spelled out because -1 is ambiguous without elements.
    return values.reshape(num_sequences, values.numel() // max(num_sequences, 1))


def label_pairs(block: Block) -> tuple[Tensor, Tensor]:
    """Return two bool [m, p, k], anchor and key both usable: labels equal (also anchor and itself), or different."""
    anchors = slice(*block.anchors)
    meet = block.usable[:, anchors].unsqueeze(-1) & block.usable.unsqueeze(-2)
    if block.documents is not None:
        meet = meet & (block.documents[:, anchors].unsqueeze(-1) == block.documents.unsqueeze(-2))
    equal = block.labels[:, anchors].unsqueeze(-1) == block.labels.unsqueeze(-2)
    return meet & equal, meet & ~equal


def self_pairs(block: Block) -> Tensor:
    """Return bool [p, k]: where an anchor meets itself."""
    first, last = block.anchors
    keys = torch.arange(block.labels.shape[-1], device=block.labels.device)
    return torch.arange(first, last, device=keys.device).unsqueeze(-1) == keys
