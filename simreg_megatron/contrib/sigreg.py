# SPDX-License-Identifier: Apache-2.0
"""SIGReg: hidden states are pushed towards an isotropic Gaussian, seen through random directions.

Everything is a sum over tokens until the last step, so that ranks which share a sample can add theirs up.

Shapes: b sequences, n tokens, d features; s samples in each sequence, K directions, t knots.
"""

from __future__ import annotations

import math
import warnings
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from simreg_megatron.config import SimRegConfig
from simreg_megatron.contrib.shared import Replicas, own_tokens, seeded_generator, sum_over, sum_over_sequence
from simreg_megatron.kernels.precision import no_autocast, product
from simreg_megatron.losses._anchored import REDUCTIONS, check_choice, unit_rows
from simreg_megatron.losses._chunks import at_least_float32, checked, chunk_length
from simreg_megatron.objectives import ExampleSettings, Kind, Objective, Options
from simreg_megatron.parallel.pairs import View
from simreg_megatron.parallel.shard import SequenceShard

ESTIMATORS = ("mean", "epps-pulley")
NORMALIZATIONS = ("sqrt-d", "unit", "none")
NUM_DIRECTIONS = {"mean": 16, "epps-pulley": 256}
_NUM_KNOTS = {"mean": 16, "epps-pulley": 17}
_FURTHEST = 3.0
_WORKSPACE = 32 << 20  # bytes of the projections of one tile
UNSCALED = (
    "normalize=unit leaves projections of variance 1/d, whose characteristic function is near 1 for all states "
    "do: the loss hardly separates an even spread from a collapse; use sqrt-d"
)


def sigreg_loss(
    embeddings: Tensor,
    labels: Tensor | None = None,
    *,
    directions: Tensor,
    estimator: str = "mean",
    normalize: str = "sqrt-d",
    valid: Tensor | None = None,
    chunk_size: int = 0,
    reduction: str = "mean",
) -> Tensor:
    """T = mean_k sum_t w_t [ (mean_n cos(t <a_k, z_n>) - exp(-t^2/2))^2 + (mean_n sin(t <a_k, z_n>))^2 ].

    z_n = sqrt(d) e_n / |e_n|; a_k are directions, the tokens n are those of a chunk. The bracket is the distance
    between the characteristic function of the projections and that of a standard normal variable.

    Args:
        embeddings: [b, n, d] or [n, d]; computed in float32 (float64 for float64).
        labels: integer [b, n]; only looked at for labels below 0, which make a token invalid.
        directions: [K, d] of length 1, from `random_directions`; new ones in every step. No gradient.
        estimator: "mean": 16 knots evenly from 0 to 3, w_t = 1/16. "epps-pulley": 17 knots, w_t the trapezoid's weights
            of the integral from -3 to 3 times exp(-t^2/2), and T times the number of tokens.
        normalize: "sqrt-d" as above; "unit": z = e / |e|, which warns; "none": z = e, norms are regularized too.
        valid: bool [b, n]; other tokens are not in the sample.
        chunk_size: tokens in a sample; 0 is the whole sequence. The last may be smaller.
        reduction: "mean" over the tokens, each with the T of its chunk; "sum" of these; "none".

    Raises:
        ValueError: an argument is out of range, or shapes or types do not fit.

    Source: arXiv 2511.08544 (Epps-Pulley form); a post of 2026 on contrastive embeddings (plain mean, and the factor
    sqrt(d) without which unit vectors project to variance 1/d). Tokens of a chunk as the sample are our choice.
    """
    check_choice("reduction", reduction, REDUCTIONS)
    batch = checked(embeddings, labels, valid, chunk_size=chunk_size)
    shape = embeddings.shape[:-1]  # of the terms; in the batch one sequence is a batch of one
    embeddings, labels, usable, _ = batch
    if directions.dim() != 2 or directions.shape[1] != embeddings.shape[-1] or not len(directions):
        raise ValueError(f"directions must be [K > 0, {embeddings.shape[-1]}], got {list(directions.shape)}.")
    if normalize == "unit":
        warnings.warn(UNSCALED, stacklevel=2)
    chunks = torch.arange(labels.shape[1], device=labels.device) // chunk_length(labels.shape[1], chunk_size)
    members = in_samples(usable, chunks, -(-labels.shape[1] // chunk_length(labels.shape[1], chunk_size)))
    sums = wave_sums(normalized(embeddings, usable, normalize), members, directions, estimator)
    terms = spread(statistic(sums, members.sum(dim=-1), estimator), members).to(sums.dtype)
    if reduction == "none":
        return terms.reshape(shape)
    return terms.sum() if reduction == "sum" else terms.sum() / usable.sum().clamp(min=1)


@torch.inference_mode(False)  # the next to ask may train
def random_directions(number: int, width: int, *, seed: int, iteration: int, device: torch.device) -> Tensor:
    """Draw `number` uniform directions [number, width], float32: the same for equal seeds on all devices of one kind.

    They follow from the seed and the iteration alone, so no state is kept, all ranks agree, and a run that is resumed
    goes on as if it had never stopped. No other generator is touched.
    """
    directions = _drawn(number, width, seed, iteration, device)
    if type(directions) is not Tensor:  # drawn in a mode without numbers: not for those who ask next
        _drawn.cache_clear()
    return directions.clone()


@lru_cache(maxsize=2)
def _drawn(number: int, width: int, seed: int, iteration: int, device: torch.device) -> Tensor:
    generator = seeded_generator(f"{seed} {iteration}", device)
    return unit_rows(torch.randn(number, width, generator=generator, device=device, dtype=torch.float32))


def in_samples(usable: Tensor, numbers: Tensor, num_samples: int) -> Tensor:
    """Bool [b, s, n]: which tokens are in which sample; `numbers` [n] or [b, n] names the sample of each."""
    every = torch.arange(num_samples, device=usable.device)
    return usable.unsqueeze(1) & (numbers.expand_as(usable).unsqueeze(1) == every.unsqueeze(-1))


def normalized(embeddings: Tensor, usable: Tensor, normalize: str) -> Tensor:
    """z [b, n, d], at least float32; tokens that are not usable get rows without a gradient."""
    check_choice("normalize", normalize, NORMALIZATIONS)
    rows = at_least_float32(embeddings)
    rows = torch.where(usable.unsqueeze(-1), rows, 1.0)
    if normalize == "none":
        return rows
    return unit_rows(rows) * (math.sqrt(rows.shape[-1]) if normalize == "sqrt-d" else 1.0)


def wave_sums(rows: Tensor, members: Tensor, directions: Tensor, estimator: str) -> Tensor:
    """sum_n cos(t <a_k, z_n>) and sum_n sin(t <a_k, z_n>) over each sample, [b, s, 2, t, K].

    Token tile by token tile, forward and backward: apart from the rows, only `members` grows with the tokens.

    Args:
        rows: z [b, n, d], float32 or float64.
        members: bool [b, s, n].
    """
    check_choice("estimator", estimator, ESTIMATORS)
    with no_autocast(rows.device.type):
        return _WaveSums.apply(rows, members, directions.to(rows.dtype), knots(estimator))


def statistic(sums: Tensor, counts: Tensor, estimator: str) -> Tensor:
    """T of each sample [b, s] from its sums [b, s, 2, t, K] and its number of tokens [b, s]; 0 of an empty one."""
    # Made on the device: a copy from the host would wait for it.
    at = torch.arange(sums.shape[-2], dtype=sums.dtype, device=sums.device) * knots(estimator)[1]
    waves = sums / counts.to(sums.dtype).clamp(min=1)[..., None, None, None]
    cosines, sines = waves.unbind(dim=-3)
    gaps = ((cosines - (-0.5 * at.square()).exp().unsqueeze(-1)).square() + sines.square()).mean(dim=-1)
    distance = (gaps * _weights(at, estimator)).sum(dim=-1)
    return torch.where(counts > 0, distance * counts if estimator == "epps-pulley" else distance, 0.0)


def spread(of_samples: Tensor, members: Tensor) -> Tensor:
    """Write the T [b, s] of each sample on its tokens, [b, n]; 0 on tokens of none."""
    return torch.where(members, of_samples.unsqueeze(-1), 0.0).sum(dim=1)


def knots(estimator: str) -> tuple[float, ...]:
    """t, evenly from 0 to 3."""
    last = _NUM_KNOTS[estimator] - 1
    return tuple(_FURTHEST * i / last for i in range(last + 1))


def _weights(at: Tensor, estimator: str) -> Tensor:
    if estimator == "mean":
        return torch.full_like(at, 1.0 / len(at))
    weights = torch.full_like(at, 2.0 * _FURTHEST / (len(at) - 1))
    weights[0] = weights[-1] = _FURTHEST / (len(at) - 1)
    return weights * (-0.5 * at.square()).exp()


class _WaveSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, members: Tensor, directions: Tensor, at: tuple[float, ...]) -> Tensor:
        ctx.save_for_backward(rows, members, directions)
        ctx.at = at
        sums = rows.new_zeros(*members.shape[:2], 2, len(at), len(directions))
        for tile in _tiles(rows, directions):
            projected, owned = product(rows[:, tile], directions.mT), members[:, :, tile].to(rows.dtype)
            for i, t in enumerate(at):
                sums[:, :, 0, i] += product(owned, (t * projected).cos())
                sums[:, :, 1, i] += product(owned, (t * projected).sin())
        return sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        rows, members, directions = ctx.saved_tensors
        of_cosines, of_sines = grads[0].unbind(dim=2)
        grad = torch.empty_like(rows)
        for tile in _tiles(rows, directions):
            projected, owners = product(rows[:, tile], directions.mT), members[:, :, tile].mT.to(rows.dtype)
            slope = torch.zeros_like(projected)
            for i, t in enumerate(ctx.at):
                slope += t * product(owners, of_sines[:, :, i]) * (t * projected).cos()
                slope -= t * product(owners, of_cosines[:, :, i]) * (t * projected).sin()
            grad[:, tile] = product(slope, directions)
        return grad, None, None, None


def _tiles(rows: Tensor, directions: Tensor) -> list[slice]:
    step = max(1, _WORKSPACE // max(1, rows.shape[0] * len(directions) * rows.element_size()))
    return [slice(first, first + step) for first in range(0, rows.shape[1], step)]


def sigreg_terms(
    config: SimRegConfig, views: list[View], shard: SequenceShard, iteration: int, replicas: Replicas
) -> Tensor:
    """Compute T of each anchor's sample, [B, A]; 0 if a token is in none. A collective if a sample spans ranks.

    Directions follow from the iteration: all micro-batches of a step share them.
    """
    options, tokens = config.options, own_tokens(views, shard)
    estimator, sample = str(options["estimator"]), str(options["sample"])
    number, drawn_by = int(options["directions"]) or NUM_DIRECTIONS[estimator], int(options["seed"])
    width, device = tokens.embeddings.shape[-1], tokens.embeddings.device
    directions = random_directions(number, width, seed=drawn_by, iteration=iteration, device=device)
    rows = normalized(tokens.embeddings, tokens.usable, str(options["normalize"]))
    if sample == "chunk":
        size = chunk_length(shard.layout.length, config.chunk_size)
        members = in_samples(tokens.usable, tokens.positions // size, -(-shard.layout.length // size))
    else:  # one sample, of one long sequence
        rows, members = rows.flatten(0, 1).unsqueeze(0), tokens.usable.reshape(1, 1, -1)
    sums = sum_over_sequence(wave_sums(rows, members, directions, estimator), shard)
    counts = sum_over_sequence(members.sum(dim=-1), shard)
    if sample == "replicas":
        sums, counts = (sum_over(part, replicas()) for part in (sums, counts))
    return spread(statistic(sums, counts, estimator), members).reshape(tokens.usable.shape)


def _by_chunk(options: Options) -> bool:
    return options["sample"] == "chunk"


SIGREG = Objective(
    name="sigreg", kind=Kind.SUMS, terms=sigreg_terms,
    asks="an isotropic Gaussian, seen through random directions", labels="no",
    sent="2 x knots x directions numbers a sample",
    options={
        "estimator": ESTIMATORS, "normalize": NORMALIZATIONS,
        "sample": ("chunk", "micro-batch", "replicas"), "directions": 0, "seed": 0,  # directions: 0 is the estimator's
    },
    limits={"directions": (0, 65_536)},  # each is as wide as a state
    warning=lambda options: UNSCALED if options["normalize"] == "unit" else None,
    draws=True, has_chunks=_by_chunk, takes_rows=_by_chunk,
    example=ExampleSettings(weight=0.3), invariant=("scale", "names", "order"),
)  # fmt: skip
