# SPDX-License-Identifier: Apache-2.0
"""SimReg over ranks that share a sequence equals SimReg on the whole sequence, in float64: terms and gradients."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from simreg_megatron import SimRegConfig
from simreg_megatron.kernels import torch as tiles
from simreg_megatron.kernels.contrast import Tokens
from simreg_megatron.losses import simreg_loss
from simreg_megatron.losses.simreg import load_kernels
from simreg_megatron.parallel.collectives import add_gradient
from simreg_megatron.parallel.layout import Rank, Run, ShardLayout
from simreg_megatron.parallel.sequence import EndTokens, chunk_views, simreg_over_ranks
from simreg_megatron.parallel.shard import SequenceShard
from tests.helpers.processes import run_processes
from tests.helpers.quick import quick, quick_rows

pytestmark = pytest.mark.distributed


def check_bits(rank: int, layout: ShardLayout, config: SimRegConfig) -> None:
    """Ranks that hold the same rows get the same bits; in float32, where the order of a sum shows."""
    shard, _, local, *others = part_of(rank, layout, torch.float32)
    terms = simreg_over_ranks(config, shard, local, chunk_views(config, shard, local, *others))
    (terms * pick(sample()["weights"], layout.anchors(shard.rank)).float()).sum().backward()
    copies = [torch.empty_like(local.grad) for _ in range(layout.tensor_size)]
    dist.all_gather(copies, local.grad, group=shard.tensor_group)
    assert local.grad.norm() > 0 and all(torch.equal(copies[0], copy) for copy in copies)


LENGTH, BATCH, WIDTH = 32, 3, 8
TIGHT = {"rtol": 1e-10, "atol": 1e-12}
END = 5


def sample() -> dict[str, Tensor]:
    """Tokens with a mask that leaves very unequal counts, and the weight that each token's loss gets upstream."""
    generator = torch.Generator().manual_seed(5)
    embeddings = torch.randn(BATCH, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 6, (BATCH, LENGTH), generator=generator)
    valid = torch.rand(BATCH, LENGTH, generator=generator) < 0.7
    valid[0, : LENGTH // 2] = False  # a rank without a single valid token in this sequence
    labels[1, 8:16] = 2  # chunks of one label
    embeddings[2, 3] = 0.0
    weights = torch.rand(BATCH, LENGTH, generator=generator, dtype=torch.float64) * valid
    return {"embeddings": embeddings, "labels": labels, "valid": valid, "weights": weights}


def documents_of(labels: Tensor) -> Tensor:
    """Written out token by token: a document ends with the input END, which is the label before it."""
    numbers = torch.zeros_like(labels)
    for b in range(labels.shape[0]):
        for i in range(2, labels.shape[1]):
            numbers[b, i] = numbers[b, i - 1] + (labels[b, i - 2] == END)
    return numbers


def options_of(config: SimRegConfig) -> dict[str, Any]:
    names = ("temperature", "chunk_size", "similarity", "group_reduce", "self_positive", "chunk_weight")
    return {name: getattr(config, name) for name in names}


def whole(config: SimRegConfig, *, sample_length: int | None = None) -> tuple[Tensor, Tensor]:
    """Terms and gradient of one process that sees everything; packed samples are sequences of their own."""
    given = sample()
    embeddings = given["embeddings"].clone().requires_grad_()
    shape = (-1, sample_length or LENGTH)
    documents = documents_of(given["labels"]).reshape(shape) if config.document_mask else None
    options = options_of(config) | {"valid": given["valid"].reshape(shape), "documents": documents}
    rows, labels = embeddings.reshape(*shape, WIDTH), given["labels"].reshape(shape)
    terms = simreg_loss(rows, labels, reduction="none", **options).reshape(BATCH, LENGTH)
    (terms * given["weights"]).sum().backward()
    return terms.detach(), embeddings.grad


def groups(rank: Rank, layout: ShardLayout) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """(row group, tensor group); ranks are numbered as Megatron does: tensor parallelism fastest."""
    members = {
        layout.exchange_members((c, t)) for c in range(layout.context_size) for t in range(layout.tensor_size)
    } | {tuple((c, t) for t in range(layout.tensor_size)) for c in range(layout.context_size)}
    made = {group: dist.new_group([c * layout.tensor_size + t for c, t in group]) for group in sorted(members)}
    row = made[layout.exchange_members(rank)]
    tensor = made[tuple((rank[0], t) for t in range(layout.tensor_size))]
    return row if row.size() > 1 else None, tensor if tensor.size() > 1 else None


def pick(values: Tensor, runs: tuple[tuple[int, int], ...]) -> Tensor:
    return torch.cat([values[:, first:last] for first, last in runs], dim=1)


class Part(NamedTuple):
    """One rank's shard, the runs that it holds, and its states [S, B, D], labels and mask [B, S]."""

    shard: SequenceShard
    held: tuple[Run, ...]
    states: Tensor
    labels: Tensor
    valid: Tensor


def part_of(number: int, layout: ShardLayout, dtype: torch.dtype = torch.float64) -> Part:
    rank, given = divmod(number, layout.tensor_size), sample()
    held = layout.held(rank)
    rows, labels, valid = (pick(given[name], held) for name in ("embeddings", "labels", "valid"))
    states = rows.to(dtype).transpose(0, 1).contiguous().requires_grad_()
    return Part(SequenceShard(layout, rank, *groups(rank, layout)), held, states, labels, valid)


def run_layout(check: Callable[..., None], tmp_path: Path, layout: ShardLayout, *arguments: Any) -> None:
    run_processes(check, layout.context_size * layout.tensor_size, tmp_path, layout, *arguments)


def check_rank(number: int, layout: ShardLayout, config: SimRegConfig, sample_length: int | None) -> None:
    shard, held, local, labels, valid = part_of(number, layout)
    rank, given = shard.rank, sample()
    documents = EndTokens(END) if config.document_mask else None
    options = {"documents": documents, "sample_length": sample_length}
    views = chunk_views(config, shard, local, labels, valid, **options)
    terms = simreg_over_ranks(config, shard, local, views, sample_length=sample_length)

    # The per-token loss covers the context rank's tokens on every tensor rank, as Megatron's does.
    context = layout.held(rank) if not layout.rows_split else replace(layout, rows_split=False).held(rank)
    base = torch.zeros(BATCH, layout.context_tokens, dtype=torch.float64, requires_grad=True)
    summed = add_gradient(base, terms, start=shard.start)
    assert torch.equal(summed, base), "the forward value must be the loss alone"
    (summed * pick(given["weights"], context)).sum().backward()

    expected_terms, expected_grad = whole(config, sample_length=sample_length)
    torch.testing.assert_close(terms.detach(), pick(expected_terms, layout.anchors(rank)), **TIGHT)
    torch.testing.assert_close(local.grad.transpose(0, 1), pick(expected_grad, held), **TIGHT)
    torch.testing.assert_close(base.grad, pick(given["weights"], context), rtol=0, atol=0)


BASE = SimRegConfig(lambda_=1, temperature=0.1, chunk_size=8)
SP2, SP4 = ShardLayout(LENGTH, 1, 2), ShardLayout(LENGTH, 1, 4)
TP2, TP3 = ShardLayout(LENGTH, 1, 2, False), ShardLayout(LENGTH, 1, 3, False)
CP2, CP2_SP2, CP2_TP2 = ShardLayout(LENGTH, 2, 1), ShardLayout(LENGTH, 2, 2), ShardLayout(LENGTH, 2, 2, False)
LAYOUTS = {"sp2": SP2, "tp2": TP2, "tp3": TP3, "cp2": CP2, "cp2-sp2": CP2_SP2, "cp2-tp2": CP2_TP2}


def over(*names: str, quickly: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """A test over layouts; of those, only the ones that are named `quickly` are not slow, if any are."""
    slow = [name for name in names if quickly and name not in quickly]
    layouts = [pytest.param(LAYOUTS[name], id=name, marks=[pytest.mark.slow] * (name in slow)) for name in names]
    return pytest.mark.parametrize("layout", layouts)


@over(*LAYOUTS)
@pytest.mark.parametrize("chunk_size", quick([0, 4, 7, 8, 12, 100], lambda size: size == 7))
def test_shards_equal_the_whole(tmp_path: Path, layout: ShardLayout, chunk_size: int) -> None:
    """Chunks inside blocks, across ranks, ragged, and the whole sequence."""
    run_layout(check_rank, tmp_path, layout, replace(BASE, chunk_size=chunk_size), None)


def check_sharing_rank(number: int, layout: ShardLayout, config: SimRegConfig) -> None:
    """As `check_rank`, with too many pairs to keep: each is computed on one rank, for both of its tokens."""
    tiles.LIMITS["cpu"] = tiles.LIMITS["cpu"]._replace(saved=0, side=5)

    counts = []
    form = load_kernels("tiled")
    pair_sums = form.pair_sums

    def counted(tokens: Tokens, anchors: Run, temperature: float, rectangles: Any = None, **options: Any) -> Any:
        if rectangles is not None:  # else on one rank alone, whose pairs are the measure here
            (p, q), chunks = anchors, tokens.labels.shape[0] * tokens.labels.shape[1]
            counts.append(chunks * (q - p) ** 2 / 2)
            counts.extend(chunks * (j - i) * (m - k) for (i, j), (k, m) in rectangles)
        return pair_sums(tokens, anchors, temperature, rectangles, **options)

    form.pair_sums = counted
    check_rank(number, layout, config, None)
    total = torch.tensor([sum(counts)])
    dist.all_reduce(total)
    size = config.chunk_size or LENGTH
    lengths = [min(size, LENGTH - start) for start in range(0, LENGTH, size)]
    assert total == BATCH * sum(length**2 for length in lengths) / 2, "every pair once"


@over(*LAYOUTS, quickly=("tp3", "cp2-sp2", "cp2-tp2"))
@pytest.mark.parametrize("chunk_size", quick([0, 12], lambda size: size == 0))
def test_pairs_are_shared(tmp_path: Path, layout: ShardLayout, chunk_size: int) -> None:
    run_layout(check_sharing_rank, tmp_path, layout, replace(BASE, chunk_size=chunk_size))


OF_WHOLE_SEQUENCES = [
    {"chunk_weight": "uniform"},
    {"chunk_weight": "pos-neg-ratio"},
    {"chunk_weight": "neg-pos-ratio"},
    {"chunk_weight": "count-corrected"},
    {"document_mask": True},
    {"document_mask": True, "chunk_weight": "neg-pos-ratio"},
    {"self_positive": "never", "chunk_weight": "uniform"},
    {"group_reduce": "mean", "similarity": "dot", "temperature": 2.0},
]


@over("sp2", "tp3", "cp2-sp2", quickly=("cp2-sp2",))
@pytest.mark.parametrize("size", quick([8, 12], lambda size: size == 12))
@pytest.mark.parametrize("options", OF_WHOLE_SEQUENCES, ids=lambda options: "-".join(map(str, options.values())))
def test_weights_and_documents_are_those_of_the_whole(tmp_path: Path, layout: ShardLayout, size: int, options) -> None:
    run_layout(check_rank, tmp_path, layout, replace(BASE, chunk_size=size, **options), None)


@over("sp2", "tp3")
@pytest.mark.parametrize("chunk_weight", quick(["token", "uniform"], lambda weight: weight == "uniform"))
def test_packed_samples_never_meet(tmp_path: Path, layout: ShardLayout, chunk_weight: str) -> None:
    """Two samples of 16 tokens in one row; chunks of 6 start again in each."""
    config = replace(BASE, chunk_size=6, chunk_weight=chunk_weight)
    run_layout(check_rank, tmp_path, layout, config, 16)


def check_local_rank(number: int, layout: ShardLayout, config: SimRegConfig) -> None:
    """Scope local: each run that a rank holds is its own sequence; nothing travels."""
    shard, held, local, *others = part_of(number, layout)
    given, anchors = sample(), layout.anchors(shard.rank)
    dist.all_to_all_single = dist.all_gather_into_tensor = None  # would fail if called
    terms = simreg_over_ranks(config, shard, local, chunk_views(config, shard, local, *others))
    (terms * pick(given["weights"], anchors)).sum().backward()

    embeddings = given["embeddings"].clone().requires_grad_()
    expected = torch.zeros(BATCH, LENGTH, dtype=torch.float64)
    for first, last in held:
        rows, labels, valid = (part[:, first:last] for part in (embeddings, given["labels"], given["valid"]))
        expected[:, first:last] = simreg_loss(rows, labels, valid=valid, reduction="none", **options_of(config))
    (expected * given["weights"]).sum().backward()
    torch.testing.assert_close(terms, pick(expected, anchors), **TIGHT)
    torch.testing.assert_close(local.grad.transpose(0, 1), pick(embeddings.grad, held), **TIGHT)
    exact, _ = whole(replace(config, scope="exact"))
    apart = torch.tensor([(pick(exact, held) - pick(expected.detach(), held)).abs().max()])
    dist.all_reduce(apart)
    assert apart.item() > 1e-2, "the scopes must differ in this sample"


LOCAL_CHUNKS = [(0, "token"), (7, "uniform"), (7, "token"), (7, "count-corrected")]


@over("sp2", "cp2", "cp2-sp2", "cp2-tp2", quickly=("sp2", "cp2-tp2"))
@pytest.mark.parametrize(("size", "weight"), quick_rows(LOCAL_CHUNKS, lambda case: case in LOCAL_CHUNKS[:2]))
def test_local_scope_ends_chunks_at_blocks(tmp_path: Path, layout: ShardLayout, size: int, weight: str) -> None:
    """A block that is one chunk has no weight to take."""
    config = replace(BASE, scope="local", chunk_size=size, chunk_weight=weight)
    run_layout(check_local_rank, tmp_path, layout, config)


def check_half_precision(rank: int, layout: ShardLayout, config: SimRegConfig, dtype: torch.dtype) -> None:
    """Rows travel in their own type, gradients are summed in float32: as if one process had seen everything."""
    shard, held, local, *others = part_of(rank, layout, dtype)
    given = sample()
    terms = simreg_over_ranks(config, shard, local, chunk_views(config, shard, local, *others))
    (terms * pick(given["weights"], layout.anchors(shard.rank)).float()).sum().backward()
    assert local.grad.dtype == dtype
    embeddings = given["embeddings"].to(dtype).float().requires_grad_()
    terms = simreg_loss(embeddings, given["labels"], valid=given["valid"], reduction="none", **options_of(config))
    (terms * given["weights"].float()).sum().backward()
    expected = pick(embeddings.grad, held).to(dtype)
    off = (local.grad.transpose(0, 1).float() - expected.float()).norm() / expected.float().norm()
    assert off < torch.finfo(dtype).eps / 4, "one rounding at the end, and hardly ever another one"


HALVES = {"sp4-fp16": (SP4, torch.float16), "cp2-tp2-bf16": (CP2_TP2, torch.bfloat16)}


@pytest.mark.parametrize(("layout", "dtype"), HALVES.values(), ids=HALVES)
def test_half_precision_rounds_once(tmp_path: Path, layout: ShardLayout, dtype: torch.dtype) -> None:
    run_layout(check_half_precision, tmp_path, layout, replace(BASE, chunk_size=0), dtype)


@over("tp3", "cp2-tp2")
def test_replicas_get_the_same_bits(tmp_path: Path, layout: ShardLayout) -> None:
    run_layout(check_bits, tmp_path, layout, replace(BASE, chunk_size=0))
