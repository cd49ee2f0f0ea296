# SPDX-License-Identifier: Apache-2.0
"""The placebo: SimReg on labels that say nothing, a control.

Shapes: b sequences, n tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from simreg_megatron.config import SimRegConfig
from simreg_megatron.contrib.shared import random_numbers
from simreg_megatron.losses._chunks import NO_LABEL, chunk_length, fold, unfold
from simreg_megatron.objectives import Kind, Objective, Options


def uninformative_labels(
    config: SimRegConfig, labels: Tensor, usable: Tensor, documents: Tensor | None, length: int, iteration: int
) -> Tensor:
    """Make labels [b, n] of whole chunks of sequences of `length` tokens: "permuted" inside each chunk, or "none",
    which are all different."""
    if config.options["labels"] == "none":
        return torch.where(usable, torch.arange(labels.shape[1], device=labels.device), labels.long())
    longest, seed = chunk_length(length, config.chunk_size), int(config.options["seed"])
    given = {"chunk_size": config.chunk_size, "longest": longest, "seed": seed, "iteration": iteration}
    return permuted_labels(labels, usable, documents, **given)


@torch.no_grad()
def permuted_labels(
    labels: Tensor, usable: Tensor, documents: Tensor | None = None, *,
    chunk_size: int, longest: int, seed: int, iteration: int,
) -> Tensor:  # fmt: skip
    """Permute the labels [b, n] of the usable tokens inside each chunk, so that no token keeps its own.

    They go round in one cycle through all usable tokens of the chunk, or of each document in it, so each has the same
    labels as before, equally often. The cycle is drawn again in each iteration, and depends on positions in the chunk
    and documents alone: all ranks that see a chunk move its labels alike, and a run that is resumed goes on as if it
    had never stopped. Nothing is read on the host.

    Args:
        usable: bool [b, n]; other tokens keep their labels.
        documents: integer of at least 0 [b, n]; None if tokens of all documents meet.
        longest: tokens in a chunk at most, the same number on all ranks.
    """
    num_sequences, num_tokens = labels.shape
    length = chunk_length(num_tokens, chunk_size)
    own = fold(labels, length, NO_LABEL)
    takes_part = fold(usable.long(), length, 0) > 0
    draw = random_numbers(longest, seed=seed, iteration=iteration, device=labels.device)[:length]
    groups = fold(torch.zeros_like(labels) if documents is None else documents, length, 0)
    groups = torch.where(takes_part, groups, torch.iinfo(groups.dtype).max)  # the others, behind all cycles
    order = draw.argsort(stable=True).expand_as(groups)
    order = order.gather(1, groups.gather(1, order).argsort(dim=-1, stable=True))
    groups, place = groups.gather(1, order), torch.arange(length, device=labels.device)
    first, end = torch.searchsorted(groups, groups), torch.searchsorted(groups, groups, right=True)
    following = torch.where(place + 1 < end, place + 1, first)
    following = torch.where(takes_part.gather(1, order), following, place)
    moved = own.scatter(1, order, own.gather(1, order.gather(1, following)))
    return unfold(moved, num_sequences, num_tokens)


def _warning(options: Options) -> str:
    if options["labels"] == "none":
        return "no labels are used; this is a control"
    return "labels are moved around inside each chunk; this is a control and should not help"


PLACEBO = Objective(
    name="placebo", kind=Kind.SIMREG, temperature=0.01, relabels=uninformative_labels,
    asks="SimReg with labels moved around inside each chunk: a control",
    options={"prefixes": "whole", "labels": ("permuted", "none"), "seed": 0}, idle_with={"seed": {"labels": "none"}},
    warning=_warning, draws=True, invariant=("scale", "rotation", "names"),
)  # fmt: skip
