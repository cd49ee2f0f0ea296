# SPDX-License-Identifier: Apache-2.0
"""The sigmoid loss: each pair of tokens is classified as alike or not, by a threshold. Shapes: as in `_anchored`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from simreg_megatron.contrib.shared import check_one_number
from simreg_megatron.kernels.precision import product
from simreg_megatron.losses._anchored import BlockTerms, check_choice, check_temperature, reduced, unit_rows, with_rows
from simreg_megatron.losses._chunks import Block, check_tokens, label_pairs, nonzero_rows, self_pairs, usable_tokens
from simreg_megatron.losses.roles import pair_counts
from simreg_megatron.objectives import ExampleSettings, Kind, Objective, Options, Scalar

PAIR_REDUCTIONS = ("anchor", "pair", "balanced")
PARAMETRIZATIONS = ("relative", "absolute")
_SLAB = {"cpu": 8 << 20, "cuda": 64 << 20}  # bytes of the cosines of some anchors with all tokens of their chunk
_SELF_POSITIVES = ("never", "always")


def sigmoid_loss(
    embeddings: Tensor,
    labels: Tensor,
    *,
    output_rows: Tensor | None = None,
    valid: Tensor | None = None,
    documents: Tensor | None = None,
    chunk_size: int = 0,
    reduction: str = "mean",
    **options: Any,
) -> Tensor:
    """L = sum_{i, j in P_i} softplus(-z_ij) + sum_{i, j in N_i} softplus(z_ij),  z_ij = t (cos(e_i, e_j) - b).

    P_i are the other tokens of the chunk with the label of token i, N_i those with another label. There is no softmax:
    no pair waits for another one.

    Args:
        embeddings, labels, valid, documents, chunk_size: as in `simreg_loss`.
        output_rows: shape of embeddings: e_i is compared with o_j instead of e_j, also for j = i. For the output
            layer's row of each label: a frozen second modality, as these rows get no gradient. A token whose row is
            exactly zero is left out, too.
        reduction: as in `creg_loss`.
        **options: temperature, 1 / t, above 0; 0.1 if not given.
            log_t: a trained scalar theta: t = exp(theta) replaces 1 / temperature.
            bias: b, 0 if not given; a scalar tensor is trained.
            param: "relative" (default): bias is b, the cosine at which a pair changes sides. "absolute": it is t b.
            pair_reduction: "anchor" (default): each token has the sum over its pairs. "pair": the mean over the pairs
            of a chunk. "balanced": half the mean over its positive pairs and half that over its negative ones, as
            positives are rare. The latter two are spread over the tokens: a chunk weighs as much as it has tokens.
            self_positive: "never" (default); "always": j = i is a positive pair, of cosine 1: it moves t and b alone.
            adapter: a trained scalar x: with delta = sigmoid(x) and r^2 = 1 - delta^2, unit vectors e_i become
            (delta e_i, -r) and o_j (delta o_j, r), so their cosine becomes delta^2 cos - r^2.

    Raises:
        ValueError: an argument is out of range, or shapes or types do not fit.

    Additional memory is O(n) for each slab of anchors; slabs are recomputed in the backward.

    Source: Bangachev, Bresler, Noman and Polyanskiy 2025, for pairs of two modalities; pairs from labels inside one,
    and both means, are our choices. The sign of b is theirs: that of SigLIP's code is minus t b.
    """
    block_terms = sigmoid_terms(has_output_rows=output_rows is not None, **options)
    if output_rows is not None:
        check_tokens(embeddings, labels, valid, documents, chunk_size)
        if output_rows.shape != embeddings.shape:
            shapes = f"{list(embeddings.shape)} of embeddings, got {list(output_rows.shape)}"
            raise ValueError(f"output_rows must have the shape {shapes}.")
        # Checked separately: in one tensor, one that is zero would hide behind the other.
        valid = nonzero_rows(output_rows.to(embeddings.dtype), usable_tokens(embeddings, labels, valid))
        embeddings = with_rows(embeddings, output_rows)
    return reduced(block_terms, embeddings, labels, valid, documents, chunk_size, reduction)


def sigmoid_terms(
    *,
    temperature: float = 0.1,
    log_t: Tensor | None = None,
    bias: float | Tensor = 0.0,
    param: str = "relative",
    pair_reduction: str = "anchor",
    self_positive: str = "never",
    has_output_rows: bool = False,
    adapter: Tensor | None = None,
) -> BlockTerms:
    """Compute the same for the anchors of one block of chunks, after a check of the options.

    Args:
        has_output_rows: the rows are those of `with_rows`.
    """
    check_temperature("temperature", temperature)
    check_choice("param", param, PARAMETRIZATIONS)
    check_choice("pair_reduction", pair_reduction, PAIR_REDUCTIONS)
    check_choice("self_positive", self_positive, _SELF_POSITIVES)
    for name, scalar in (("log_t", log_t), ("bias", bias), ("adapter", adapter)):
        check_one_number(name, scalar)
    if has_output_rows and self_positive == "always":
        raise ValueError("self_positive 'always' has no effect with output_rows: a token always meets its own.")
    if adapter is not None and not has_output_rows:
        raise ValueError("adapter turns embeddings away from output_rows: give output_rows, or drop it.")

    def terms(block: Block) -> Tensor:
        rows = block.rows.chunk(2, dim=-1) if has_output_rows else (block.rows,)
        units, others = unit_rows(rows[0]), unit_rows(rows[-1])
        t = units.new_full((), 1.0 / temperature) if log_t is None else log_t.to(units.dtype).exp().squeeze()
        shift = bias.to(units.dtype).squeeze() if isinstance(bias, Tensor) else units.new_full((), bias)
        shift = t * shift if param == "relative" else shift
        if adapter is not None:
            square = adapter.to(units.dtype).sigmoid().square().squeeze()
            t, shift = t * square, shift + t * (1 - square)
        keeps_self = has_output_rows or self_positive == "always"
        slabs = list(_slabs(block, units))
        parts = []
        for span in slabs:
            given = (block._replace(anchors=span), units, others, t, shift, keeps_self)
            if len(slabs) > 1:  # computed again in the backward, so that nothing of size p x k is kept
                parts.append(checkpoint(_pair_sums, *given, use_reentrant=False, preserve_rng_state=False))
            else:
                parts.append(_pair_sums(*given))
        positive, negative = torch.cat(parts, dim=-1).unbind()
        return _weighed(block, positive, negative, pair_reduction, keeps_self)

    return terms


def pair_losses(cosines: Tensor, positive: Tensor, t: Tensor, bias: Tensor) -> Tensor:
    """softplus(-z) of positive pairs and softplus(z) of all others, z = t cos - bias."""
    logits = t * cosines - bias
    return -F.logsigmoid(torch.where(positive, logits, -logits))


def _slabs(block: Block, units: Tensor) -> Iterator[tuple[int, int]]:
    num_chunks, length = block.labels.shape
    workspace = _SLAB.get(units.device.type, _SLAB["cuda"])
    step = max(1, workspace // max(1, num_chunks * length * units.element_size()))
    for first in range(block.anchors[0], block.anchors[1], step):
        yield first, min(first + step, block.anchors[1])


def _pair_sums(block: Block, units: Tensor, others: Tensor, t: Tensor, bias: Tensor, keeps_self: bool) -> Tensor:
    """Sums of pair losses of the block's anchors over their positives, and over their negatives, [2, m, p]."""
    same, different = label_pairs(block)
    if not keeps_self:
        same = same & ~self_pairs(block)
    losses = pair_losses(product(units[:, slice(*block.anchors)], others.mT), same, t, bias)
    return torch.stack([torch.where(members, losses, 0.0).sum(dim=-1) for members in (same, different)])


def _weighed(block: Block, positive: Tensor, negative: Tensor, pair_reduction: str, keeps_self: bool) -> Tensor:
    if pair_reduction == "anchor":
        return positive + negative
    counts = pair_counts(block.labels, block.usable, documents=block.documents)
    num_positive, num_negative = (count.sum(dim=-1, keepdim=True).to(positive.dtype) for count in counts)
    tokens = block.usable.sum(dim=-1, keepdim=True)
    if keeps_self:
        num_positive = num_positive + tokens
    if pair_reduction == "pair":
        return (positive + negative) * tokens / (num_positive + num_negative).clamp(min=1)
    return (positive / num_positive.clamp(min=1) + negative / num_negative.clamp(min=1)) * tokens / 2


_TRAINED = {"both": ("log_t", "bias"), "t": ("log_t",), "bias": ("bias",), "none": ()}
_DELTA = 0.5  # delta = sigmoid(0.5), where the source begins


def _scalars(options: Options, temperature: float) -> dict[str, Scalar]:
    known = {
        "log_t": Scalar(-math.log(temperature), "sigmoid t", "exp"),
        "bias": Scalar(float(options["bias"]), "sigmoid bias"),
        "adapter": Scalar(_DELTA, "sigmoid delta", "sigmoid"),
    }
    names = _TRAINED[str(options["trains"])] + (("adapter",) if options["adapter"] == "yes" else ())
    return {name: known[name] for name in names}


SIGMOID = Objective(
    name="sigmoid", kind=Kind.PAIRS, temperature=0.1, terms=sigmoid_terms,
    asks="each pair on its side of one threshold",
    options={
        "param": PARAMETRIZATIONS, "pair_reduction": PAIR_REDUCTIONS,
        "trains": ("both", "t", "bias", "none"), "bias": 0.0, "self_positive": _SELF_POSITIVES,
        "pairs": ("labels", "hidden-head"), "adapter": ("no", "yes"),
    },
    idle_with={"self_positive": {"pairs": "hidden-head"}},  # where a token meets its own row in any case
    excludes={("adapter=yes", "pairs=labels"):
              "adapter=yes turns states away from a locked modality, so it needs pairs=hidden-head"},
    other_options=("trains", "pairs", "adapter"), scalars=_scalars,
    meets_output_rows=lambda options: options["pairs"] == "hidden-head",
    example=ExampleSettings(weight=0.1, options="pair_reduction=balanced,trains=none"),
    invariant=("scale", "rotation", "names", "order"),
)  # fmt: skip
