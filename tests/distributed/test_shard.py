# SPDX-License-Identifier: Apache-2.0
"""SimReg over ranks that split a sequence equals SimReg on the whole sequence, in float64."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from simreg_megatron.losses import simreg_loss
from simreg_megatron.parallel.autograd import add_gradient
from simreg_megatron.parallel.shard import SequenceShard, ShardLayout
from tests.helpers.processes import run_processes

LENGTH, BATCH, WIDTH = 32, 3, 8
TEMPERATURE = 0.1


def sample() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Embeddings, labels, a mask with very unequal counts per rank, and the weight each token's loss gets upstream."""
    generator = torch.Generator().manual_seed(5)
    embeddings = torch.randn(BATCH, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 6, (BATCH, LENGTH), generator=generator)
    valid = torch.rand(BATCH, LENGTH, generator=generator) < 0.7
    valid[0, : LENGTH // 2] = False  # a rank without a single valid token in this sequence
    weights = torch.rand(BATCH, LENGTH, generator=generator, dtype=torch.float64) * valid
    return embeddings, labels, valid, weights


def token_loss(chunk_size: int, embeddings: torch.Tensor, labels: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    return simreg_loss(
        embeddings, labels, valid=valid, temperature=TEMPERATURE, chunk_size=chunk_size, reduction="none"
    )


def whole_gradient(chunk_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    embeddings, labels, valid, weights = sample()
    embeddings.requires_grad_()
    terms = token_loss(chunk_size, embeddings, labels, valid)
    (terms * weights).sum().backward()
    return terms.detach(), embeddings.grad


def groups(rank: int, context: int, sequence: int) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Ranks are numbered as Megatron does: tensor parallelism fastest."""
    mine: dict[str, dist.ProcessGroup | None] = {"sequence": None, "context": None}
    for c in range(context):
        members = [c * sequence + s for s in range(sequence)]
        group = dist.new_group(members)
        if sequence > 1 and rank in members:
            mine["sequence"] = group
    for s in range(sequence):
        members = [c * sequence + s for c in range(context)]
        group = dist.new_group(members)
        if context > 1 and rank in members:
            mine["context"] = group
    return mine["sequence"], mine["context"]


def check_rank(rank: int, context: int, sequence: int, chunk_size: int) -> None:
    embeddings, labels, valid, weights = sample()
    sequence_group, context_group = groups(rank, context, sequence)
    shard = SequenceShard(LENGTH, sequence_group, context_group)
    local = shard.own_part(embeddings).contiguous().requires_grad_()
    own_labels, own_valid = shard.own_part(labels), shard.own_part(valid)

    loss = partial(token_loss, chunk_size)
    if shard.layout.chunks_stay_on_ranks(chunk_size):
        terms = shard.terms_in_place(loss, local, own_labels, own_valid)
    else:
        terms = shard.own_part(loss(*shard.whole_sequence(local, own_labels, own_valid)))

    # The per-token loss covers the context rank's tokens on every sequence rank, as Megatron's does.
    context_shard = SequenceShard(LENGTH, None, context_group)
    base = torch.zeros(BATCH, LENGTH // context, dtype=torch.float64, requires_grad=True)
    summed = add_gradient(base, terms, start=shard.start)
    assert torch.equal(summed, base), "the forward value must be the loss alone"
    (summed * context_shard.own_part(weights)).sum().backward()

    expected_terms, expected_grad = whole_gradient(chunk_size)
    torch.testing.assert_close(terms.detach(), shard.own_part(expected_terms), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(local.grad, shard.own_part(expected_grad), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(base.grad, context_shard.own_part(weights), rtol=0, atol=0)

    wrong = torch.zeros_like(local.grad)  # what a gather whose backward only slices would give
    full = embeddings.clone().requires_grad_()
    own_rows = shard.own_part(torch.arange(LENGTH).expand(BATCH, LENGTH))
    mask = torch.zeros(BATCH, LENGTH, dtype=torch.float64).scatter_(1, own_rows, 1.0)
    (token_loss(chunk_size, full, labels, valid) * weights * mask).sum().backward()
    wrong = shard.own_part(full.grad)
    spans = not shard.layout.chunks_stay_on_ranks(chunk_size)
    if spans and expected_grad.norm() > 0:
        gap = (wrong - shard.own_part(expected_grad)).norm()
        everywhere = torch.tensor([gap])
        dist.all_reduce(everywhere)
        assert everywhere.item() > 1e-3, "the test must tell a missing reduce-scatter"


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("context", "sequence", "chunk_size"),
    [
        (1, 2, 8),  # chunks inside a rank's block: nothing travels
        (1, 2, 0),  # the whole sequence
        (1, 2, 12),  # chunks across the border, ragged last one
        (2, 1, 8),  # zigzag, chunks inside blocks
        (2, 1, 0),
        (2, 2, 4),
        (2, 2, 7),
    ],
)
def test_shards_equal_the_whole(tmp_path: Path, context: int, sequence: int, chunk_size: int) -> None:
    run_processes(check_rank, context * sequence, tmp_path, context, sequence, chunk_size)


@pytest.mark.parametrize("context", [1, 2, 4])
@pytest.mark.parametrize("sequence", [1, 2, 4])
def test_every_token_is_on_one_rank(context: int, sequence: int) -> None:
    layout = ShardLayout(64, context, sequence)
    held = [
        position
        for c in range(context)
        for s in range(sequence)
        for first, stop in layout.runs(c, s)
        for position in range(first, stop)
    ]
    assert sorted(held) == list(range(64))
    gathered = torch.tensor(held)
    restored = torch.cat([gathered[first:stop] for first, stop in layout.gathered_order])
    assert restored.tolist() == list(range(64))


def test_zigzag_order() -> None:
    assert ShardLayout(16, 2, 1).runs(0, 0) == ((0, 4), (12, 16))
    assert ShardLayout(16, 2, 1).runs(1, 0) == ((4, 8), (8, 12))
    assert ShardLayout(16, 2, 2).runs(0, 1) == ((12, 16),)


@pytest.mark.parametrize(
    ("layout", "chunk_size", "stays"),
    [
        (ShardLayout(64, 1, 1), 0, True),
        (ShardLayout(64, 1, 2), 0, False),
        (ShardLayout(64, 1, 2), 32, True),
        (ShardLayout(64, 1, 2), 24, False),
        (ShardLayout(64, 2, 1), 16, True),
        (ShardLayout(64, 2, 1), 32, False),
    ],
)
def test_when_chunks_stay_on_their_rank(layout: ShardLayout, chunk_size: int, stays: bool) -> None:
    assert layout.chunks_stay_on_ranks(chunk_size) is stays
