# SPDX-License-Identifier: Apache-2.0
"""SimCSE: a baseline on whole sequences, which does not look at labels. Shapes: b sequences, n tokens, d features."""

from __future__ import annotations

from torch import Tensor

from simreg_megatron.losses._anchored import check_choice, check_temperature
from simreg_megatron.losses._chunks import checked
from simreg_megatron.losses._sequences import POOLINGS, VIEWS, sequence_losses, whole_sequences


def simcse_loss(
    embeddings: Tensor,
    labels: Tensor | None = None,
    *,
    temperature: float = 0.05,
    view: str = "halves",
    pooling: str = "mean",
    valid: Tensor | None = None,
) -> Tensor:
    """L = mean_i -log( exp(cos(h_i, g_i) / tau) / sum_j exp(cos(h_i, g_j) / tau) ).

    Args:
        embeddings: [b, n, d] or [n, d]; at least two sequences, else the loss is 0.
        labels: integer [b, n]; view "dropout" draws its masks from them, so that a sequence has the same ones
            wherever it is; without labels all sequences have the same masks. A label below 0 makes a token invalid.
        temperature: tau, above 0.
        view: what h_i and g_i are. "halves": the pooled states of the first and of the second half of sequence i.
            "dropout": those of the whole sequence under two masks that drop a tenth of the features; a sequence that
            comes again has the same masks again.
        pooling: "mean" of the valid tokens, or the "last" of them.
        valid: bool [b, n]; a sequence needs a valid token in each half, or at all, to take part.

    Raises:
        ValueError: an argument is out of range, or shapes, types or devices do not fit.

    Source: our adaptation of Gao et al. 2021 to pretraining. Theirs are two passes of the model with other dropout;
    pretraining has none and pays for one pass, so both views are our choice, as is masking the pooled state.
    """
    check_temperature("temperature", temperature)
    check_choice("view", view, VIEWS)
    check_choice("pooling", pooling, POOLINGS)
    embeddings, labels, usable, _ = checked(embeddings, labels, valid)
    first, second, takes_part = whole_sequences(embeddings, labels, usable, view=view, pooling=pooling)
    losses = sequence_losses(first, second, takes_part, takes_part, 0, temperature)
    return losses.sum() / takes_part.sum().clamp(min=1)
