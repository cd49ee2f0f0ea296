# SPDX-License-Identifier: Apache-2.0
"""Objectives that send sums, and labels that ranks permute alike: ranks that share sequences equal one process, in
values and gradients."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from simreg_megatron import SimRegConfig
from simreg_megatron.losses import geometry
from simreg_megatron.parallel import metrics
from simreg_megatron.parallel.collectives import add_gradient
from simreg_megatron.parallel.layout import ShardLayout
from simreg_megatron.parallel.metrics import QUANTILES, RIGHT_QUANTILES
from simreg_megatron.parallel.pairs import View
from simreg_megatron.parallel.sequence import chunk_views, objective_terms, simreg_over_ranks
from simreg_megatron.parallel.shard import SequenceShard
from tests.distributed.test_shard import LENGTH, TIGHT, WIDTH, over, part_of, pick, run_layout, sample
from tests.helpers.processes import run_processes

pytestmark = pytest.mark.distributed


def check_isotropy(number: int, layout: ShardLayout, config: SimRegConfig) -> None:
    """The sums of all ranks add up to those of one process over the sampled positions."""
    metrics._SAMPLED_TOKENS = 30  # every fourth of the 96
    shard, _, states, _, valid = part_of(number, layout)
    kept, given = metrics.Metrics(config), sample()
    for _ in range(2):  # micro-batches
        kept._add_moments(states.detach().transpose(0, 1), valid, shard)
    assert kept._moments is not None
    for part in kept._moments:
        dist.all_reduce(part)
    places = torch.arange(0, LENGTH, 4)
    usable = given["valid"] & (given["embeddings"] != 0).any(dim=-1)
    expected = geometry.moments(given["embeddings"][:, places], usable[:, places])
    for found, once in zip(kept._moments, expected, strict=True):
        torch.testing.assert_close(found, 2 * once, **TIGHT)


ITERATION = 3
ALONE = ShardLayout(LENGTH)


def terms_of(config: SimRegConfig, shard: SequenceShard, rows: Tensor, views: list[View]) -> Tensor:
    if config.is_simreg:
        return simreg_over_ranks(config, shard, rows, views)
    return objective_terms(config, views, shard, {}, ITERATION, lambda: dist.group.WORLD)


def whole(config: SimRegConfig, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Terms and gradient of one process that sees everything."""
    rows = given["embeddings"].transpose(0, 1).clone().requires_grad_()
    shard = SequenceShard(ALONE)
    views = chunk_views(config, shard, rows, given["labels"], given["valid"])
    terms = terms_of(config, shard, rows, views)
    (terms * given["weights"]).sum().backward()
    assert terms.abs().sum() > 0
    return terms.detach(), rows.grad.transpose(0, 1)


def check_rank(number: int, layout: ShardLayout, config: SimRegConfig, *, pulls_others: bool = True) -> None:
    """`pulls_others`: whether an anchor's term has a gradient in the states that it meets, too."""
    shard, held, local, *others = part_of(number, layout)
    rank, given = shard.rank, sample()
    terms = terms_of(config, shard, local, chunk_views(config, shard, local, *others))
    context = layout.held(rank) if not layout.rows_split else replace(layout, rows_split=False).held(rank)
    base = torch.zeros(len(terms), layout.context_tokens, dtype=torch.float64, requires_grad=True)
    (add_gradient(base, terms, start=shard.start) * pick(given["weights"], context)).sum().backward()

    expected_terms, expected_grad = whole(config, given)
    torch.testing.assert_close(terms.detach(), pick(expected_terms, layout.anchors(rank)), **TIGHT)
    torch.testing.assert_close(local.grad.transpose(0, 1), pick(expected_grad, held), **TIGHT)

    # A sum whose backward keeps this rank's own terms would be far outside the bounds.
    own = torch.zeros_like(given["weights"])
    for first, last in layout.anchors(rank):
        own[:, first:last] = given["weights"][:, first:last]
    _, mistaken = whole(config, given | {"weights": own})
    gap = sum(pick(grad, layout.anchors(rank)) for grad in (mistaken, -expected_grad)).norm().reshape(1)
    dist.all_reduce(gap)
    assert (gap.item() > 1e-4) == pulls_others, gap


def check_replica(rank: int, config: SimRegConfig) -> None:
    """Each rank holds a sequence of its own; together they are one batch, which a mean of gradients then equals."""
    given = {name: values[:2] for name, values in sample().items()}
    shard, own = SequenceShard(ALONE), {name: values[rank : rank + 1] for name, values in given.items()}
    rows = own["embeddings"].transpose(0, 1).clone().requires_grad_()
    views = chunk_views(config, shard, rows, own["labels"], own["valid"])
    terms = terms_of(config, shard, rows, views)
    (terms * own["weights"]).sum().backward()
    expected_terms, expected_grad = whole(_alone(config), given)
    torch.testing.assert_close(terms.detach(), expected_terms[rank : rank + 1], **TIGHT)
    torch.testing.assert_close(rows.grad.transpose(0, 1), expected_grad[rank : rank + 1], **TIGHT)
    apart, _ = whole(_alone(config), own)
    assert (apart - terms).abs().max() > 1e-3, "the other replica must be seen"


def _alone(config: SimRegConfig) -> SimRegConfig:
    return replace(config, objective_options=tuple({**config.options, "sample": "micro-batch"}.items()))


def sigreg(options: str = "", **settings: Any) -> SimRegConfig:
    return SimRegConfig(lambda_=1, objective="sigreg", objective_options=options, **settings)


def mic(options: str = "", **settings: Any) -> SimRegConfig:
    return SimRegConfig(lambda_=1, objective="mic", objective_options=f"prefixes=2/4,{options}", **settings)


CONFIGS = {
    "mic sequences, normalized over the batch": mic("pool=sequence,norm_scope=batch"),
    "mic tokens": mic("pool=token,t=1"),
    "sigreg whole": sigreg("estimator=epps-pulley,directions=32", chunk_size=0),
    "sigreg micro-batch": sigreg("sample=micro-batch,normalize=none"),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@over("tp3", "cp2-sp2", "cp2-tp2", quickly=("tp3", "cp2-sp2"))
def test_shards_equal_the_whole(tmp_path: Path, layout: ShardLayout, config: SimRegConfig) -> None:
    run_layout(check_rank, tmp_path, layout, config)


def test_replicas_are_one_sample(tmp_path: Path) -> None:
    run_processes(check_replica, 2, tmp_path, sigreg("sample=replicas"))


def check_predictions(number: int, layout: ShardLayout) -> None:
    """Each rank holds a part of the vocabulary and of the tokens; the margins are those of one process."""
    metrics._PREDICTED_TOKENS = 48  # every second of the 96
    shard, _, states, own_labels, own_valid = part_of(number, layout)
    rank, given = shard.rank, sample()
    table = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    model = SimpleNamespace(output_layer=SimpleNamespace(weight=table.chunk(layout.tensor_size)[rank[1]]))
    kept = metrics.Metrics(sigreg())
    kept.wants_geometry = True
    kept._sums = torch.zeros(metrics.NUMBER, dtype=torch.float64)
    kept.observe_predictions(model, states.detach(), own_labels, own_valid, shard)
    quantiles = kept._margin_quantiles(dist.group.WORLD)
    dist.all_reduce(kept._sums)

    places = torch.arange(0, LENGTH, 2)
    embeddings, labels, valid = (given[name][:, places] for name in ("embeddings", "labels", "valid"))
    logits, index = embeddings @ table.T, labels.unsqueeze(-1)
    right = logits.amax(dim=-1) == logits.gather(-1, index).squeeze(-1)
    assert (valid & right).sum() > 1 and (valid & ~right).sum() > 1

    margins = (logits.gather(-1, index) - logits.scatter(-1, index, -torch.inf).amax(dim=-1, keepdim=True)).squeeze(-1)
    assert torch.equal(margins >= 0, right)
    for place, members in ((metrics.MARGIN, valid), (metrics.RIGHT_MARGIN, valid & right)):
        expected = torch.stack([margins[members].sum(), members.sum().double()])
        torch.testing.assert_close(kept._sums[place], expected, rtol=1e-6, atol=1e-6)  # they are float32
    ordered, own = margins[valid].sort().values, margins[:, rank[0] :: 2][valid[:, rank[0] :: 2]].sort().values
    for names, members in ((QUANTILES, ordered), (RIGHT_QUANTILES, ordered[ordered > 0])):
        for name, share in names.items():
            expected = members[math.ceil(share * len(members)) - 1]
            torch.testing.assert_close(quantiles[name].double(), expected, rtol=1e-6, atol=1e-6)
    assert (own[len(own) // 2] - ordered[len(ordered) // 2]).abs() > 1e-3, "a part of the tokens has other quantiles"


@over("tp3", "cp2-sp2", "cp2-tp2")
def test_predictions_are_those_of_the_whole(tmp_path: Path, layout: ShardLayout) -> None:
    run_layout(check_predictions, tmp_path, layout)


@over("tp3", "cp2-sp2", "cp2-tp2")
def test_isotropy_is_that_of_the_whole(tmp_path: Path, layout: ShardLayout) -> None:
    run_layout(check_isotropy, tmp_path, layout, sigreg())
