# SPDX-License-Identifier: Apache-2.0
"""SimReg: a supervised contrastive term on the hidden states that predict the next token (arXiv 2605.08809).

Shapes: b sequences, n tokens, d features; chunks of k tokens, folded with the batch into m chunks; p anchors of each.
The reference that faster implementations are judged by is here: one p x k matrix per chunk, plain torch, autograd.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from simreg_megatron.kernels.contrast import Kernels, Tokens, contrast_terms
from simreg_megatron.kernels.precision import no_autocast
from simreg_megatron.kernels.torch import TorchKernels
from simreg_megatron.losses._anchored import (
    REDUCTIONS,
    anchored_terms,
    check_choice,
    check_temperature,
    get_similarity,
    log_sum,
)
from simreg_megatron.losses._chunks import Block, Span, checked, joined, label_pairs, self_pairs, stretches
from simreg_megatron.losses.roles import TokenRoles, token_roles
from simreg_megatron.notices import refuse
from simreg_megatron.objectives import CHUNK_WEIGHTS, FAST_IMPLS, GROUP_REDUCTIONS, IMPLEMENTATIONS, SELF_POSITIVES

AUTO: dict[tuple[str, torch.dtype], str] = {}
"""The implementation behind "auto" by kind of device and type of the rows, if one was tried; else tiled."""


def simreg_loss(
    embeddings: Tensor,
    labels: Tensor,
    *,
    temperature: float = 0.01,
    valid: Tensor | None = None,
    documents: Tensor | None = None,
    chunk_size: int = 0,
    similarity: str = "cosine",
    exponents: tuple[Tensor, Tensor] | None = None,
    group_reduce: str = "sum",
    self_positive: str = "always",
    chunk_weight: str = "token",
    reduction: str = "mean",
    impl: str = "auto",
) -> Tensor:
    """R_i = softplus( log sum_{j in N_i} exp(s_ij) - log sum_{j in P_i} exp(s_ij) ), s = cos(e_i, e_j) / tau.

    P_i are the tokens of the same chunk with the label of token i (itself included), N_i those with another
    label. Labels are the ids of the tokens to predict: the targets of the cross-entropy at these positions. The
    gradient flows through both e_i and e_j; there is no option to detach the keys e_j.

    Args:
        embeddings: [b, n, d] or [n, d], float16, bfloat16, float32 or float64; sequences never meet. Computed
            in float32 (float64 for float64), outside any autocast; the gradient has the input's dtype.
        labels: integer [b, n] or [n]; a label below 0 (-100) makes the token invalid. For impl "triton" below 2^31.
        temperature: tau, above 0.
        valid: bool, shape of labels. Invalid tokens, and tokens whose embedding is exactly zero, are neither anchor,
            positive nor negative. Their gradient is exactly 0, and they may hold anything, except with impl "triton",
            where they must be finite.
        documents: integer of at least 0, shape of labels: tokens of different documents never meet. None: all do. With
            documents labels must be below 2^32, and documents below 2^31.
        chunk_size: tokens in a chunk, at least 2, cut from the start of the sequence; the last may be short.
            0, or n and more: the whole sequence.
        similarity: "cosine", "dot", "qnorm" (anchor normalised), "dnorm" (keys normalised) or "learnable".
        exponents: for "learnable": two trained scalars x, y; the similarity is the dot product of e_i and e_j divided
            by |e_i|^sigmoid(x) |e_j|^sigmoid(y).
        group_reduce: "sum", or "mean" over P_i and over N_i in place of the sums.
        self_positive: whether i belongs to P_i: "always", "only_if_alone" (no other positive), or "never"
            (tokens without another positive have no term, but remain negatives of others).
        chunk_weight: how the chunks of a sequence are weighted. "token": all tokens equally. "uniform": all
            chunks equally. "pos-neg-ratio", "neg-pos-ratio": by the number of positive over negative pairs, or
            its inverse; chunks without either have weight 0. These three are normalised within each sequence
            to its number of anchors. "count-corrected": all tokens equally, but the sums over P_i and N_i are
            scaled up to the number of positives and negatives in the whole sequence.
        reduction: "none": [b, n] or [n], 0 at tokens without a term; "sum"; "mean": the sum divided by the
            number of anchors of all sequences, 0 where there are none.
        impl: "reference": a matrix of all pairs of a chunk, every option; "tiled": tile by tile, memory O(n), only
            for similarity "cosine" and self_positive "always"; "triton": the same on a GPU, with Triton;
            "auto": the one that `simreg_megatron.losses.trial` chose, else tiled; reference for all other options.

    Returns:
        A tensor of float32 (float64 for float64). A token without negatives has term 0 and gradient 0.
        NaN or infinite rows of valid tokens give NaN, as do float32 rows shorter than 4e-38 except by impl "reference".

    Raises:
        ValueError: an argument is out of range, or shapes or types do not fit.

    Source: arXiv 2605.08809, Eq 3; chunks: its section on chunk-wise SimReg.
    """
    batch = checked(embeddings, labels, valid, documents, chunk_size)
    shape = labels.shape  # of the terms; in the batch one sequence is a batch of one
    embeddings, labels, usable, documents = batch
    check_temperature("temperature", temperature)
    for name, value, choices in (
        ("group_reduce", group_reduce, GROUP_REDUCTIONS), ("self_positive", self_positive, SELF_POSITIVES),
        ("chunk_weight", chunk_weight, CHUNK_WEIGHTS), ("reduction", reduction, REDUCTIONS),
        ("impl", impl, IMPLEMENTATIONS),
    ):  # fmt: skip
        check_choice(name, value, choices)
    sentence = "chunk_weight 'count-corrected' has no effect with group_reduce 'mean', which has no counts: use token."
    refuse((group_reduce == "mean" and chunk_weight == "count-corrected", sentence))
    get_similarity(similarity, exponents)  # checks them, as the kernels do not look at them
    roles = token_roles(
        labels, usable, documents=documents, chunk_size=chunk_size, group_reduce=group_reduce,
        self_positive=self_positive, chunk_weight=chunk_weight,
        dtype=torch.promote_types(embeddings.dtype, torch.float32),
    )  # fmt: skip
    impl = chosen_impl(impl, similarity, self_positive, embeddings)
    if impl == "reference" or not labels.shape[1]:  # without tokens there is nothing to join
        terms = simreg_terms(
            embeddings, labels, usable, roles, documents=documents, chunk_size=chunk_size,
            temperature=float(temperature), similarity=similarity, exponents=exponents, self_positive=self_positive,
        )  # fmt: skip
    else:
        kernels, parts = load_kernels(impl), []
        with no_autocast(embeddings.device.type):
            for stretch in stretches(labels.shape[1], chunk_size, (0, labels.shape[1])):
                tokens = Tokens(*map(stretch.chunks, (embeddings, labels, usable, documents)))
                parts.append(contrast_terms(tokens, float(temperature), kernels).flatten(1))
        terms = with_roles(joined(parts), roles)
    if reduction == "none":
        return terms.reshape(shape)
    total = terms.sum()
    return total if reduction == "sum" else total / roles.anchor.sum().clamp(min=1)


def simreg_terms(
    embeddings: Tensor,
    labels: Tensor,
    usable: Tensor,
    roles: TokenRoles,
    *,
    anchors: Span | None = None,
    documents: Tensor | None = None,
    chunk_size: int = 0,
    temperature: float = 0.01,
    similarity: str = "cosine",
    exponents: tuple[Tensor, Tensor] | None = None,
    self_positive: str = "always",
) -> Tensor:
    """term_i = weight_i * softplus( LSE_{N_i}(s) - LSE_{P_i}(s) + offset_i ) of the anchors, [b, number of anchors].

    The reference, also for a rank that holds a part of a sequence: it computes the terms of its own tokens against
    all tokens that they meet, and the gradient reaches all of them.

    Args:
        embeddings: [b, n, d]; n covers the chunks of the anchors from their first token on.
        labels: integer [b, n].
        usable: bool [b, n], from `usable_tokens`.
        roles: of the anchors, [b, number of anchors], from `token_roles`.
        anchors: (first, last) positions with a term, last not included; None is all.
        documents, chunk_size, temperature, similarity, exponents, self_positive: as in `simreg_loss`.
    """
    logits_of = get_similarity(similarity, exponents)
    contrast = anchored_terms(
        lambda block: _contrast(block, logits_of, temperature, self_positive),
        embeddings, labels, usable, anchors=anchors, documents=documents, chunk_size=chunk_size,
    )  # fmt: skip
    if roles.offset is not None:
        contrast = contrast + roles.offset
    # Not F.softplus, which returns x itself above 20: 2e-9 off in float64.
    terms = torch.where(roles.anchor, -F.logsigmoid(-contrast), 0.0)
    return terms if roles.weight is None else terms * roles.weight


def chosen_impl(
    impl: str, similarity: str = "cosine", self_positive: str = "always", rows: Tensor | None = None
) -> str:
    """Return the implementation for these rows; ValueError for one that lacks an option."""
    fits = similarity == "cosine" and self_positive == "always"
    if impl in FAST_IMPLS and not fits:
        raise ValueError(
            f"impl {impl!r} supports only similarity 'cosine' with self_positive 'always', not {similarity!r} with "
            f"{self_positive!r}: use impl 'reference'."
        )
    if impl != "auto":
        return impl
    if not fits:
        return "reference"
    if rows is None or rows.shape[-1] * rows.itemsize % 16:  # Triton reads whole units of 16 bytes
        return "tiled"
    return AUTO.get((rows.device.type, rows.dtype), "tiled")


@functools.cache
def load_kernels(impl: str) -> Kernels:
    """Return the kernels of a fast implementation; ValueError if they need a Triton that is not here."""
    if impl == "tiled":
        return TorchKernels()
    try:
        from simreg_megatron.kernels.triton import TritonKernels
    except ModuleNotFoundError as error:
        raise ValueError(f"impl {impl} needs {error.name}, which is not installed: use tiled") from error
    return TritonKernels()


def _contrast(block: Block, logits_of: Callable[..., Tensor], temperature: float, self_positive: str) -> Tensor:
    """L_i = LSE_{N_i}(s) - LSE_{P_i}(s), [m, p]; hugely negative where N_i is empty."""
    (positive, negative), itself = label_pairs(block), self_pairs(block)
    logits = logits_of(block.rows[:, slice(*block.anchors)], block.rows, temperature).masked_fill(itself, 0.0)
    if self_positive != "always":
        others = positive & ~itself
        alone = ~others.any(dim=-1, keepdim=True)
        positive = others if self_positive == "never" else torch.where(alone, positive, others)
    return log_sum(logits, negative) - log_sum(logits, positive)


def with_roles(terms: Tensor, roles: TokenRoles) -> Tensor:
    """weight * softplus(contrast + offset) from terms = softplus(contrast) [b, p], which are 0 where no anchor is."""
    if roles.offset is not None:
        terms = torch.log1p(torch.expm1(terms) * roles.offset.exp())
    return terms if roles.weight is None else terms * roles.weight
