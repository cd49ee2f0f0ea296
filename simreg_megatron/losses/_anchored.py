# SPDX-License-Identifier: Apache-2.0
"""The frame of the reference and of most other objectives: one term per anchor, with SimReg's masks and shards.

Similarities are shifted logits: s(a, k) = (sim(a, k) - sim(a, a)) / temperature. The shift cancels in losses that
compare log-sums of one anchor, and keeps float32 exact where it matters: an anchor's own logit is 0, so nothing of size
1 / temperature is added and taken away again. It is differentiable on purpose: callers set the own logit to 0.

Shapes: b sequences, n tokens, d features; chunks of k tokens, folded with the batch into m chunks; p anchors of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from simreg_megatron.kernels.precision import no_autocast, product
from simreg_megatron.losses._chunks import Block, Span, block_of, checked, is_number, joined, self_pairs, stretches
from simreg_megatron.notices import refuse

Similarity = Callable[[Tensor, Tensor, float], Tensor]  # (anchors [..., p, d], keys [..., q, d], tau) -> [..., p, q]


def unit_rows(rows: Tensor) -> Tensor:
    """Divide by the norm along the last dimension, for any scale that the dtype can hold.

    The largest entry is divided out first, so that squares neither overflow nor vanish. The result does not
    depend on that divisor, which is why it needs no gradient.
    """
    scaled = rows / rows.detach().abs().amax(dim=-1, keepdim=True)
    return scaled / torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)


def _cosine(anchors: Tensor, keys: Tensor, temperature: float) -> Tensor:
    """(cos(a, k) - 1) / temperature."""
    return (product(unit_rows(anchors), unit_rows(keys).mT) - 1.0) / temperature


def _dot(anchors: Tensor, keys: Tensor, temperature: float) -> Tensor:
    """(<a, k> - ||a||^2) / temperature."""
    return (product(anchors, keys.mT) - anchors.square().sum(dim=-1, keepdim=True)) / temperature


def _qnorm(anchors: Tensor, keys: Tensor, temperature: float) -> Tensor:
    """(<a / ||a||, k> - ||a||) / temperature: a long key counts for more."""
    return (product(unit_rows(anchors), keys.mT) - _norms(anchors)) / temperature


def _dnorm(anchors: Tensor, keys: Tensor, temperature: float) -> Tensor:
    """||a|| (cos(a, k) - 1) / temperature: a long anchor is judged at a lower temperature."""
    return _norms(anchors) * _cosine(anchors, keys, temperature)


def _norms(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=-1, keepdim=True)


def learnable_similarity(query: Tensor, key: Tensor) -> Similarity:
    """<a, k> / (||a||^gamma_q ||k||^gamma_d), each gamma the sigmoid of a trained scalar; 0 is halfway to the cosine.

    gamma (1, 1) is the cosine, (0, 0) dot, (1, 0) qnorm and (0, 1) dnorm. Source: arXiv 2602.09229.
    """
    gamma_q, gamma_d = torch.sigmoid(query), torch.sigmoid(key)

    def logits(anchors: Tensor, keys: Tensor, temperature: float) -> Tensor:
        anchor_norms, key_norms = _norms(anchors), _norms(keys).mT
        scales = anchor_norms ** (1.0 - gamma_q) * key_norms ** (1.0 - gamma_d)
        own = anchor_norms ** (2.0 - gamma_q - gamma_d)
        return (scales * product(unit_rows(anchors), unit_rows(keys).mT) - own) / temperature

    return logits


SIMILARITIES: dict[str, Similarity] = {"cosine": _cosine, "dot": _dot, "qnorm": _qnorm, "dnorm": _dnorm}


def get_similarity(name: str, exponents: tuple[Tensor, Tensor] | None = None) -> Similarity:
    """Return the similarity of that name; "learnable" takes its two scalars."""
    refuse(
        ((name == "learnable") != (exponents is not None),
         "similarity 'learnable' and the two scalars of exponents belong together: give both or none."),
        (exponents is not None and [getattr(each, "numel", lambda: 0)() for each in exponents] != [1, 1],
         "exponents must be two tensors of one number each: others would scale features or tokens."),
    )  # fmt: skip
    if exponents is not None:
        return learnable_similarity(*exponents)
    check_choice("similarity", name, (*SIMILARITIES, "learnable"))
    return SIMILARITIES[name]


BlockTerms = Callable[[Block], Tensor]  # [m, p]: the chunk's mean loss, spread over its tokens (see `spread`)
REDUCTIONS = ("mean", "sum", "none")


def anchored_terms(
    block_terms: BlockTerms,
    embeddings: Tensor,
    labels: Tensor,
    usable: Tensor,
    *,
    anchors: Span | None = None,
    documents: Tensor | None = None,
    chunk_size: int = 0,
) -> Tensor:
    """Compute the anchors' terms [b, number of anchors]; arguments as in `simreg_terms`."""
    anchors = (0, labels.shape[1]) if anchors is None else anchors
    parts = []
    with no_autocast(embeddings.device.type):
        for stretch in stretches(labels.shape[1], chunk_size, anchors):
            block = block_of(stretch, embeddings, labels, usable, documents)
            doubt = nan_if_not_finite(block.rows[:, slice(*block.anchors)])
            terms = block_terms(block)
            if terms.shape != doubt.shape:
                raise ValueError(
                    f"the terms of a block must be one for each anchor, {list(doubt.shape)}, not {list(terms.shape)}: "
                    "spread a chunk's loss over its tokens"
                )
            first, last = stretch.anchors
            parts.append((terms + doubt).reshape(len(labels), last - first))
    if not parts:
        return embeddings[:, :0, 0].to(torch.promote_types(embeddings.dtype, torch.float32))
    return joined(parts)


def reduced(
    block_terms: BlockTerms,
    embeddings: Tensor,
    labels: Tensor,
    valid: Tensor | None,
    documents: Tensor | None,
    chunk_size: int,
    reduction: str,
) -> Tensor:
    """Check the tokens of a public loss, compute its terms, and reduce them over the tokens that take part."""
    rows, names, usable, documents = checked(embeddings, labels, valid, documents, chunk_size)
    check_choice("reduction", reduction, REDUCTIONS)
    terms = anchored_terms(block_terms, rows, names, usable, documents=documents, chunk_size=chunk_size)
    if reduction == "none":
        return terms.reshape(labels.shape)
    return terms.sum() if reduction == "sum" else terms.sum() / usable.sum().clamp(min=1)


def spread(losses: Tensor, counted: Tensor, total: Tensor, usable: Tensor) -> Tensor:
    """Write the mean of a chunk's counted losses on its tokens: their sum is that mean times the usable tokens.

    So a chunk weighs as much as it has tokens, however few of them have a loss of their own.

    Args:
        losses: [m, p] of the anchors.
        counted: bool [m, p], which of them have a loss.
        total: [m], how many of the whole chunk have one.
        usable: bool [m, k] of the whole chunk.
    """
    factor = usable.sum(dim=-1).to(losses.dtype) / total.clamp(min=1)
    return torch.where(counted, losses, 0.0) * factor.unsqueeze(-1)


def nan_if_not_finite(rows: Tensor) -> Tensor:
    """Return 0, but NaN for a row [..., d] that is not finite, so that it shows even without partners."""
    return rows.detach().abs().amax(dim=-1) * 0.0


def cosine_logits(block: Block, temperature: float | Tensor, keys: Tensor | None = None) -> Tensor:
    """Compute (cos(e_i, k_j) - 1) / tau [m, p, k], where k are the rows if not given; exactly 0 with itself. The shift
    cancels in an anchor's softmax."""
    cosines = _cosine(block.rows[:, slice(*block.anchors)], block.rows if keys is None else keys, 1.0)
    return cosines.masked_fill(self_pairs(block), 0.0) / temperature


def log_sum(logits: Tensor, members: Tensor) -> Tensor:
    """Compute log sum exp over the members [m, p]; hugely negative, and without gradient, if there are none.

    The filling is finite, so that inf - inf never arises; a quarter of the range, so that a difference is finite, too.
    """
    return logits.masked_fill(~members, torch.finfo(logits.dtype).min / 4).logsumexp(dim=-1)


def mean_over(values: Tensor, members: Tensor) -> Tensor:
    """Average over the members of the last dimension; 0 if there are none."""
    return torch.where(members, values, 0.0).sum(dim=-1) / members.sum(dim=-1).clamp(min=1)


def with_rows(embeddings: Tensor, output_rows: Tensor) -> Tensor:
    """Concatenate each state and the row that others meet in its place: [..., 2 d]. The latter get no gradient."""
    return torch.cat([embeddings, output_rows.detach().to(embeddings.dtype)], dim=-1)


def check_temperature(name: str, value: float) -> None:
    if not is_number(value) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} must be a finite number above 0, got {value!r}.")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} {value!r} is not available; choose one of {', '.join(choices)}.")
