# SPDX-License-Identifier: Apache-2.0
"""Dispersion: turn the hidden states of a sequence away from each other.

Shapes: b sequences, n tokens of this rank, N of the sequence, k of them in the sample, d features.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from simreg_megatron.config import SimRegConfig
from simreg_megatron.contrib.shared import Add, Replicas, own_tokens, random_numbers, sum_over_sequence
from simreg_megatron.kernels.precision import product
from simreg_megatron.losses._anchored import check_temperature, log_sum, nan_if_not_finite, unit_rows
from simreg_megatron.losses._chunks import at_least_float32, checked, is_number
from simreg_megatron.objectives import ExampleSettings, Kind, Objective
from simreg_megatron.parallel.pairs import View
from simreg_megatron.parallel.shard import SequenceShard

_PARALLEL = 32  # units of rounding: below this sin^2 of an angle, its direction is lost


def dispersion_loss(
    embeddings: Tensor,
    labels: Tensor | None = None,
    *,
    temperature: float = 1.0,
    tokens: int = 256,
    clamp: float = 0.0,
    seed: int = 0,
    iteration: int = 0,
    valid: Tensor | None = None,
) -> Tensor:
    """L = log mean_{i != j} exp(-D_ij / tau),  D_ij = arccos(cos(e_i, e_j)) / pi, i and j of a sample of a sequence.

    L is from -1 / tau (all pairs opposite, which only two rows can be) to 0 (all parallel). Rows that are parallel up
    to rounding do not move each other: the angle has no derivative there, and 0 is the mean of its sides.

    Args:
        embeddings: [b, n, d] or [n, d]; computed in float32 (float64 for float64).
        labels: integer [b, n]; only looked at for labels below 0, which make a token invalid.
        temperature: tau, above 0.
        tokens: k, at least 2; drawn from the valid tokens of each sequence, all of them where there are fewer.
        clamp: arccos and its derivative are taken at a cosine of at most 1 - clamp (at least -1 + clamp).
        seed, iteration: of the draw, which follows from these and the positions alone.
        valid: bool [b, n]; a sequence with fewer than two valid tokens has loss 0.

    Returns:
        The mean over the valid tokens, each with the L of its sequence.

    Raises:
        ValueError: an argument is out of range, or shapes or types do not fit.

    Source: arXiv 2602.00217 ("angular spread", the one of its losses that it trains with). Its code has 256 tokens,
    tau = 1, a clamp of 0.1 or 0.25, and the mean over layers. Leaving out invalid tokens and clamp 0 are our choices.
    """
    check_temperature("temperature", temperature)
    if not is_number(tokens, int) or tokens < 2:
        raise ValueError(f"tokens must be an integer of at least 2, which make a pair, got {tokens!r}.")
    if not is_number(clamp) or not 0 <= clamp < 1:
        raise ValueError(f"clamp must be from 0 to below 1, got {clamp!r}.")
    embeddings, labels, usable, _ = checked(embeddings, labels, valid)
    order = random_numbers(labels.shape[1], seed=seed, iteration=iteration, device=labels.device)
    positions = torch.arange(len(order), device=order.device)
    losses = dispersion_value(embeddings, usable, positions, order, temperature, tokens, clamp, lambda part: part)
    return (losses * usable.sum(dim=1)).sum() / usable.sum().clamp(min=1)


def dispersion_value(
    embeddings: Tensor,
    usable: Tensor,
    positions: Tensor,
    order: Tensor,
    tau: float,
    tokens: int,
    clamp: float,
    add: Add,
) -> Tensor:
    """L of each sequence, [b], the same on all ranks that share it.

    Args:
        embeddings: [b, n, d], this rank's tokens.
        usable: bool [b, n].
        positions: int64 [n], on the sequence.
        order: random numbers [N], of which the smallest choose the sample.
        add: the sum over the ranks that hold the other tokens, and of their gradients in the backward.
    """
    all_usable = add(positions.new_zeros(len(usable), len(order)).index_copy(1, positions, usable.long())) > 0
    drawn = torch.where(all_usable, order, math.inf).argsort(dim=-1, stable=True)[:, :tokens]
    taken = all_usable.gather(1, drawn).unsqueeze(-1)  # False behind the last token of a sequence with fewer
    local = torch.arange(len(positions), device=order.device)
    local = torch.full_like(order, -1, dtype=torch.long).index_copy(0, positions, local)
    local = local[drawn].unsqueeze(-1)  # place of each drawn token among this rank's, or -1
    rows = at_least_float32(embeddings)
    rows = rows.gather(1, local.clamp(min=0).expand(-1, -1, rows.shape[-1]))
    rows = torch.where(taken, add(torch.where(taken & (local >= 0), rows, 0.0)), 1.0)
    pairs = (taken & taken.mT & ~torch.eye(taken.shape[1], dtype=torch.bool, device=taken.device)).flatten(1)
    number = pairs.sum(dim=-1)
    total = log_sum(-_distances(rows, clamp).flatten(1) / tau, pairs)
    return torch.where(number > 0, total - number.clamp(min=1).to(total.dtype).log(), 0.0)


def _distances(rows: Tensor, clamp: float) -> Tensor:
    """Compute arccos(cos) / pi of all pairs, [b, k, k], value and slope at the clamped cosine; slope 0 if parallel."""
    units = unit_rows(rows)
    cosines = product(units, units.mT)
    at = cosines.detach().clamp(clamp - 1, 1 - clamp) + (cosines - cosines.detach())
    is_parallel = (1 - at) * (1 + at) < _PARALLEL * torch.finfo(at.dtype).eps
    return torch.where(is_parallel, at.detach(), at).acos() / math.pi


def dispersion_terms(
    config: SimRegConfig, views: list[View], shard: SequenceShard, iteration: int, replicas: Replicas
) -> Tensor:
    """Compute L of each anchor's sequence, [B, A]; 0 if a token does not count. A collective of the sampled states.

    All micro-batches of a step draw the same positions.
    """
    options, (rows, _, usable, positions) = config.options, own_tokens(views, shard)
    order = random_numbers(shard.layout.length, seed=int(options["seed"]), iteration=iteration, device=rows.device)
    values = dispersion_value(
        rows, usable, positions, order, config.tau, int(options["tokens"]), float(options["clamp"]),
        lambda part: sum_over_sequence(part, shard),
    )  # fmt: skip
    return torch.where(usable, values.unsqueeze(-1) + nan_if_not_finite(rows), 0.0)


DISPERSION = Objective(
    name="dispersion", kind=Kind.SUMS, temperature=1.0, terms=dispersion_terms,
    asks="pairs of tokens at wide angles", labels="no", sent="states of the sampled tokens",
    options={"tokens": 256, "clamp": 0.0, "seed": 0},
    limits={"tokens": (2, math.inf), "clamp": (0, 0.99)},
    draws=True, has_chunks=lambda options: False, takes_rows=lambda options: True,
    example=ExampleSettings(options="tokens=8", chunk_size=None), invariant=("scale", "rotation", "names"),
)  # fmt: skip
