# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy through the truncated output layer, in plain torch; `parallel.truncated_head` is compared with it.

Shapes: b sequences, n tokens, d features, v ids of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from simreg_megatron.kernels.precision import no_autocast, product
from simreg_megatron.losses._chunks import as_batch, check_tokens


def prefixes_ce_loss(
    embeddings: Tensor,
    labels: Tensor,
    weight: Tensor,
    *,
    prefixes: tuple[int, ...] = (),
    bias: Tensor | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """L = mean_i mean_p -log softmax(W[:, :p] e_i[:p] + b)[y_i],  i the tokens that count, p the prefixes.

    What a model loses that keeps the first p features alone, of its states and of its output layer W.

    Args:
        embeddings: [b, n, d] or [n, d]. Logits are taken in the type of the weight, as a model takes them, outside any
            autocast; all else is float32 (float64 for float64).
        labels: integer [b, n], rows of the weight; a token with a label below 0 does not count.
        weight: floating point [v, d], of the output layer.
        prefixes: each from 1 to d; empty: powers of two from 16 to half the width.
        bias: [v].
        valid: bool [b, n].

    Raises:
        ValueError: an argument is out of range, or shapes, types or devices do not fit; torch's own error for a label
            beyond the rows of the weight, or another bias.

    Source: Matryoshka representation learning, arXiv 2205.13147; one layer for all prefixes is its "efficient" form.
    """
    check_tokens(embeddings, labels, valid, None, 0)
    embeddings, labels, valid = as_batch(embeddings, labels, valid)
    width = embeddings.shape[-1]
    if weight.shape[1:] != (width,):
        raise ValueError(f"weight must be [v, {width}], like the embeddings, got {list(weight.shape)}.")
    counts = (labels >= 0) if valid is None else valid & (labels >= 0)
    rows = embeddings.masked_fill(~counts.unsqueeze(-1), 0.0).flatten(0, 1).to(weight.dtype)
    targets = labels.long().masked_fill(~counts, -100).flatten()
    with no_autocast(rows.device.type):
        losses = [
            _sum(product(rows[:, :prefix], weight[:, :prefix].mT), bias, targets)
            for prefix in prefixes_within(prefixes, width, width)
        ]
    return torch.stack(losses).mean() / counts.sum().clamp(min=1)


def _sum(logits: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    logits = logits if bias is None else logits + bias
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return functional.cross_entropy(logits, targets, reduction="sum")


def prefixes_within(prefixes: tuple[int, ...], width: int, most: int) -> tuple[int, ...]:
    """Return the prefixes, or the default ones.

    Raises:
        ValueError: one of them has no feature, or more than `most`.
    """
    found = prefixes or default_prefixes(width)
    if outside := [prefix for prefix in found if not 1 <= prefix <= most]:
        raise ValueError(f"a prefix must be from 1 to {most} features of {width}, got {outside[0]}.")
    return found


def default_prefixes(width: int) -> tuple[int, ...]:
    """Powers of two from 16 to half the width, or half the width, at least 1, where it is below 32."""
    return tuple(2**k for k in range(4, 31) if 2**k <= width // 2) or (max(1, width // 2),)
