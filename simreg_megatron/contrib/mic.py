# SPDX-License-Identifier: Apache-2.0
"""MIC: make the first features of a hidden state (Matryoshka prefixes) not redundant with the others, and spread out.

Tokens enter only through sums, which `add` reduces over the ranks that share a micro-batch (one process: a no-op).

Shapes: b sequences, n tokens, d features of which p are the prefix; r pooled rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from simreg_megatron.config import SimRegConfig
from simreg_megatron.contrib.prefixes_ce import prefixes_within
from simreg_megatron.contrib.shared import Add, Replicas, own_tokens, sum_over_sequence
from simreg_megatron.contrib.sigreg import in_samples
from simreg_megatron.kernels.precision import no_autocast, product
from simreg_megatron.losses._anchored import check_choice, unit_rows
from simreg_megatron.losses._chunks import at_least_float32, checked, chunk_length
from simreg_megatron.notices import log_once
from simreg_megatron.objectives import ExampleSettings, Kind, Objective
from simreg_megatron.parallel.pairs import View
from simreg_megatron.parallel.shard import SequenceShard

POOLS = ("chunk", "sequence", "token")
NORM_SCOPES = ("sequence", "batch")
EPSILON = 1e-6
_LOST = 16  # units of rounding, of the mean: what deviation a feature that never changes seems to have, with some room
_SLAB = 16 << 20  # bytes of the similarities of some rows with all


@dataclass(frozen=True)
class MICOptions:
    """Settings of MIC.

    Attributes:
        prefixes: p, each at least 1 and below the width; empty: powers of two from 16 to half the width.
        pool: what L_cv and L_unif compare: "chunk" or "sequence" means, or every "token".
        norm_scope: normalize features over each "sequence", or over the whole micro-"batch".
        threshold: tau; correlations up to it cost nothing.
        t: the t of L_unif.
        correlation, variance, balance, uniformity: w_1 to w_4, the weights of the four parts.
    """

    prefixes: tuple[int, ...] = ()
    pool: str = "chunk"
    norm_scope: str = "sequence"
    threshold: float = 0.1
    t: float = 2.0
    correlation: float = 1.0
    variance: float = 1.0
    balance: float = 1.0
    uniformity: float = 1.0


def mic_loss(
    embeddings: Tensor,
    labels: Tensor | None = None,
    *,
    options: MICOptions | None = None,
    valid: Tensor | None = None,
    chunk_size: int = 0,
) -> Tensor:
    """L = mean_p [ w_1 L_corr + w_2 L_var + w_3 L_cv + w_4 L_unif ], p the prefixes.

        L_corr = mean_uv max(0, |C_uv| - tau)^2,  C the correlations of prefix features u with the others v
        L_var  = max(0, 1 - s_prefix) + 1/2 max(0, 1 - s_rest),  s the mean standard deviation of the features
        L_cv   = std_j(v_j) / mean_j(v_j),  v_j the variance of feature j of the pooled prefixes
        L_unif = log mean_{i != j} exp(-2t (1 - cos(z_i, z_j))),  z the pooled prefixes

    Args:
        embeddings: [b, n, d] or [n, d]; computed in float32 (float64 for float64).
        labels: integer [b, n]; used only to make tokens with a label below 0 invalid.
        options: see `MICOptions`. If there is only one chunk or sequence, pool is "token".
        valid: bool [b, n].
        chunk_size: tokens in a chunk, for the pool; 0 is the whole sequence.

    Raises:
        ValueError: an argument is out of range, or shapes or types do not fit.

    Source: arXiv 2605.29987, from secondary sources; tau, t, the weights and where L_var is taken are our choices.
    """
    options = options or MICOptions()
    embeddings, labels, usable, _ = checked(embeddings, labels, valid, chunk_size=chunk_size)
    length = labels.shape[1]
    return mic_value(
        embeddings, usable, torch.arange(length, device=labels.device), length, options=options, chunk_size=chunk_size
    )


def mic_value(
    embeddings: Tensor,
    usable: Tensor,
    positions: Tensor,
    length: int,
    *,
    options: MICOptions,
    chunk_size: int = 0,
    add: Add = lambda part: part,
) -> Tensor:
    """L of a micro-batch, the same on all ranks that share it.

    Args:
        embeddings: [b, n, d], this rank's tokens.
        usable: bool [b, n].
        positions: int64 [n], on the sequence.
        length: tokens of the whole sequence.
        add: the sum over the ranks that hold the other tokens, and of their gradients in the backward.
    """
    check_choice("pool", options.pool, POOLS)
    check_choice("norm_scope", options.norm_scope, NORM_SCOPES)
    for name, (least, most) in MIC.limits.items():
        if not least <= getattr(options, name) <= most:
            raise ValueError(f"{name} must be from {least:g} to {most:g}, got {getattr(options, name)!r}.")
    rows = at_least_float32(embeddings)
    rows = torch.where(usable.unsqueeze(-1), rows, 0.0)
    prefixes = prefixes_within(options.prefixes, rows.shape[-1], rows.shape[-1] - 1)
    with no_autocast(rows.device.type):
        correlations, deviations = _correlations(rows, usable, max(prefixes), options.norm_scope, add)
        own, pooled = _pooled(rows[..., : max(prefixes)], usable, positions, length, options, chunk_size, add)
        losses = [
            _redundancy(correlations, deviations, prefix, options) + _isotropy(own, pooled, prefix, options, add)
            for prefix in prefixes
        ]
    return torch.where(add(usable.sum()) > 0, torch.stack(losses).mean(), 0.0)


def pools_tokens(options: MICOptions, num_sequences: int, length: int, chunk_size: int) -> bool:
    """Return whether each token is its own sample: if asked for, or if there would be only one mean to compare."""
    means = num_sequences * (-(-length // chunk_length(length, chunk_size)) if options.pool == "chunk" else 1)
    return options.pool == "token" or means < 2


def _correlations(rows: Tensor, usable: Tensor, most: int, norm_scope: str, add: Add) -> tuple[Tensor, Tensor]:
    """C of the first `most` features with all, [most, d], and the mean deviation of each feature, [d]."""
    if norm_scope == "batch":
        rows, usable = rows.flatten(0, 1).unsqueeze(0), usable.reshape(1, -1)
    counts = add(usable.sum(dim=1)).to(rows.dtype).unsqueeze(-1)
    mean = add(rows.sum(dim=1)) / counts.clamp(min=1)
    centred = torch.where(usable.unsqueeze(-1), rows - mean.unsqueeze(1), 0.0)
    deviations = _root(add(centred.square().sum(dim=1)) / counts.clamp(min=1))
    is_constant = deviations <= _LOST * torch.finfo(rows.dtype).eps * mean.abs()
    normal = (centred / torch.where(is_constant, math.inf, deviations + EPSILON).unsqueeze(1)).flatten(0, 1)
    deviations = torch.where(is_constant, 0.0, deviations)
    products = add(product(normal[:, :most].mT, normal))
    weights = (counts > 0).to(rows.dtype)  # of sequences
    return products / counts.sum().clamp(min=1), (deviations * weights).sum(dim=0) / weights.sum().clamp(min=1)


def _redundancy(correlations: Tensor, deviations: Tensor, prefix: int, options: MICOptions) -> Tensor:
    """w_1 L_corr + w_2 L_var."""
    excess = (correlations[:prefix, prefix:].abs() - options.threshold).clamp(min=0).square().mean()
    missing = (1 - deviations[:prefix].mean()).clamp(min=0) + (1 - deviations[prefix:].mean()).clamp(min=0) / 2
    return options.correlation * excess + options.variance * missing


@dataclass(frozen=True)
class _Pooled:
    rows: Tensor  # [r, most]
    usable: Tensor  # bool [r]
    places: Tensor  # int64 [r], among all rows

    def units(self, prefix: int) -> _Pooled:
        """Return the first features [r, prefix], of length 1; a row without a direction is not usable."""
        rows = self.rows[:, :prefix]
        usable = self.usable & (rows.detach() != 0).any(dim=-1)
        return _Pooled(unit_rows(torch.where(usable.unsqueeze(-1), rows, 1.0)), usable, self.places)


def _pooled(
    rows: Tensor, usable: Tensor, positions: Tensor, length: int, options: MICOptions, chunk_size: int, add: Add
) -> tuple[_Pooled | None, _Pooled]:
    """Return the rows whose pairs this rank computes, or None if every rank computes all; and all rows."""
    if pools_tokens(options, len(rows), length, chunk_size):
        everywhere = rows.new_zeros(len(rows), length, rows.shape[-1]), usable.new_zeros(len(rows), length).long()
        all_rows = add(everywhere[0].index_copy(1, positions, rows))
        all_usable = add(everywhere[1].index_copy(1, positions, usable.long())) > 0
        places = torch.arange(all_usable.numel(), device=rows.device).view_as(all_usable)
        own = _Pooled(all_rows[:, positions].flatten(0, 1), usable.flatten(), places[:, positions].flatten())
        return own, _Pooled(all_rows.flatten(0, 1), all_usable.flatten(), places.flatten())
    size = chunk_length(length, chunk_size) if options.pool == "chunk" else length
    members = in_samples(usable, positions // size, -(-length // size))
    counts = add(members.sum(dim=-1))
    sums = add(product(members.to(rows.dtype), rows))
    means = sums / counts.clamp(min=1).unsqueeze(-1)
    return None, _Pooled(means.flatten(0, 1), counts.flatten() > 0, torch.arange(counts.numel(), device=counts.device))


def _isotropy(own: _Pooled | None, pooled: _Pooled, prefix: int, options: MICOptions, add: Add) -> Tensor:
    """w_3 L_cv + w_4 L_unif; 0 of fewer than two rows."""
    number = pooled.usable.sum()
    variances = _variances(pooled, prefix)
    mean = variances.mean()
    balance = _root((variances - mean).square().mean()) / (mean + EPSILON)
    units = pooled.units(prefix)
    if own is None:
        total = _kernel_sum(units, units, options.t)
    else:
        total = add(_kernel_sum(own.units(prefix), units, options.t))
    pairs = units.usable.sum() * (units.usable.sum() - 1)
    uniformity = (total / pairs.clamp(min=1) + EPSILON).log()
    uniformity = torch.where(pairs > 0, uniformity, 0.0)
    return torch.where(number > 1, options.balance * balance, 0.0) + options.uniformity * uniformity


def _variances(pooled: _Pooled, prefix: int) -> Tensor:
    """v_j over the usable rows, [prefix]."""
    weights = pooled.usable.to(pooled.rows.dtype).unsqueeze(-1)
    rows, number = pooled.rows[:, :prefix], weights.sum().clamp(min=1)
    mean = (weights * rows).sum(dim=0) / number
    return (weights * (rows - mean).square()).sum(dim=0) / number


def _kernel_sum(own: _Pooled, pooled: _Pooled, t: float) -> Tensor:
    """sum_i sum_{j != i} exp(-2t (1 - cos)) over own rows i and all rows j; slabs are recomputed in the backward."""
    step = max(1, _SLAB // max(1, len(pooled.rows) * own.rows.element_size()))
    total = own.rows.new_zeros(())
    for first in range(0, len(own.rows), step):
        some = slice(first, first + step)
        slab = (own.rows[some], own.usable[some], own.places[some], pooled.rows, pooled.usable, t)
        if len(own.rows) <= step:
            total = total + _slab_sum(*slab)
        else:
            total = total + checkpoint(_slab_sum, *slab, use_reentrant=False, preserve_rng_state=False)
    return total


def _slab_sum(rows: Tensor, usable: Tensor, places: Tensor, others: Tensor, usable_others: Tensor, t: float) -> Tensor:
    kernel = (2 * t * (product(rows, others.mT) - 1)).exp()
    pairs = usable.unsqueeze(-1) & usable_others
    pairs.scatter_(1, places.unsqueeze(-1), False)  # not taken away afterwards: what is left may be less than rounding
    return torch.where(pairs, kernel, 0.0).sum()


def _root(squares: Tensor) -> Tensor:
    """Take the square root, with derivative 0 at 0: a feature that never changes gets no gradient."""
    positive = squares > 0
    return torch.where(positive, torch.where(positive, squares, 1.0).sqrt(), 0.0)


def mic_terms(
    config: SimRegConfig, views: list[View], shard: SequenceShard, iteration: int, replicas: Replicas
) -> Tensor:
    """Compute L of the micro-batch for each anchor, [B, A]; 0 if a token does not count. A collective."""
    tokens = own_tokens(views, shard)
    options = MICOptions(**{**config.options, "prefixes": config.prefixes})  # type: ignore[arg-type]
    by_token = pools_tokens(options, len(tokens.usable), shard.layout.length, config.chunk_size)
    if by_token and options.pool != "token":
        log_once(f"SimReg objective mic: a micro-batch has one {options.pool} here, so tokens stand by themselves")
    value = mic_value(
        tokens.embeddings, tokens.usable, tokens.positions, shard.layout.length,
        options=options, chunk_size=config.chunk_size, add=lambda part: sum_over_sequence(part, shard),
    )  # fmt: skip
    return torch.where(tokens.usable, value, 0.0)


_PARTS = ("correlation", "variance", "balance", "uniformity")

MIC = Objective(
    name="mic", kind=Kind.SUMS, terms=mic_terms,
    asks="first features that do not repeat the others, and are spread", labels="no",
    sent="means, deviations, and a matrix of correlations; with `pool=token` the prefixes of all states",
    options={
        "prefixes": "auto", "pool": POOLS, "norm_scope": NORM_SCOPES,
        "threshold": 0.1, "t": 2.0, **dict.fromkeys(_PARTS, 1.0),
    },
    limits={"threshold": (0, 0.99), "t": (1e-4, math.inf), **dict.fromkeys(_PARTS, (0, math.inf))},
    idle_with={
        "threshold": {"correlation": 0}, "t": {"uniformity": 0},
        "norm_scope": {"correlation": 0, "variance": 0}, "pool": {"balance": 0, "uniformity": 0},
    },
    excludes={tuple(f"{part}=0.0" for part in _PARTS):
              "the weights of all four parts of SimReg objective mic are 0: leave one above 0"},
    has_chunks=lambda options: options["pool"] == "chunk" and bool(options["balance"] or options["uniformity"]),
    takes_rows=lambda options: True,
    prefixes_below_width=True,  # it compares with the rest
    example=ExampleSettings(weight=0.02), invariant=("names", "order"),
)  # fmt: skip
