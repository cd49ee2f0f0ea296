# SPDX-License-Identifier: Apache-2.0
"""A packed row that Megatron cuts over real context ranks equals the row in one process."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from simreg_megatron import SimRegConfig
from simreg_megatron.losses import simreg_loss
from simreg_megatron.plugin.term import Regularizer
from tests.helpers.fixtures import One
from tests.helpers.processes import run_processes
from tests.helpers.quick import quick

ENDS, BORDERS = (0, 13, 21, 56, 80, 82), (0, 16, 24, 64, 88, 96)  # documents without and with their padding
LENGTH, WIDTH = BORDERS[-1], 8


def thd_get_partitioned_indices(cu_seqlens: Tensor, total_tokens: int, world_size: int, rank: int) -> Tensor:
    """Transformer Engine's kernel of this name, which runs on GPUs only."""
    own, token = cu_seqlens // world_size, torch.arange(total_tokens // world_size)
    document = torch.searchsorted(own, token, right=True) - 1
    half, index = own.diff()[document] // 2, token - own[document]
    offset = torch.where(index < half, rank, (world_size - 1) * 2 - rank)
    return index + own[document] * world_size + half * offset


def check_rank(number: int, context_size: int, tensor_size: int, rows_split: bool) -> None:
    from megatron.core import utils

    numbers = torch.arange(context_size * tensor_size).view(context_size, tensor_size)
    cp, tp = (dist.new_subgroups_by_enumeration(lines.tolist())[0] for lines in (numbers.T, numbers))
    groups = SimpleNamespace(tp=tp, cp=cp, tp_cp=dist.group.WORLD, dp_cp=One())
    model = SimpleNamespace(config=SimpleNamespace(sequence_parallel=rows_split, hidden_size=256), pg_collection=groups)

    generator, positions = torch.Generator().manual_seed(7), torch.arange(LENGTH)
    rows, weights = torch.randn(LENGTH, 1, WIDTH, generator=generator), torch.rand(1, LENGTH, generator=generator)
    labels, kept = torch.randint(0, 6, (1, LENGTH), generator=generator), torch.rand(LENGTH, generator=generator) < 0.8
    borders = torch.tensor([ENDS, BORDERS], dtype=torch.int32)
    document = torch.bucketize(positions, borders[1, 1:], right=True)
    mask = (kept & (positions < (borders[1, :-1] + borders[0].diff())[document])).float()
    utils.tex = SimpleNamespace(thd_get_partitioned_indices=thd_get_partitioned_indices)

    for chunk_size, contiguous, mistaken in itertools.product((0, 16, 48), (False, True), (False, True)):
        regularizer = Regularizer(SimRegConfig(1, temperature=0.1, chunk_size=chunk_size))
        for num_documents in (5, 3):  # the second row is shorter
            ends, padded = borders[:, : num_documents + 1]
            here = slice(0, int(padded[-1]))
            row = {"labels": labels[:, here], "loss_mask": mask[None, here], "position_ids": positions[None, here]}
            row |= {"tokens": None, "cu_seqlens": ends.unsqueeze(0), "cu_seqlens_padded": padded.unsqueeze(0)}
            if contiguous:  # the slice that Megatron's dev branch takes, for attention that asks for it
                part = {name: row[name].chunk(context_size, dim=1)[cp.rank()] for name in list(row)[:3]}
            else:
                part = utils.get_batch_on_this_cp_rank(dict(row), is_hybrid_cp=False, cp_group=cp)
            own = part["position_ids"][0]
            anchors = own.view(tensor_size, -1)[tp.rank()]
            held = anchors if rows_split else own
            given = padded[[0, -1]] if mistaken else padded
            packing = SimpleNamespace(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_q_padded=given)
            packing.cp_partition_mode = "contiguous" if contiguous and not mistaken else "zigzag"
            hidden, loss = rows[held].requires_grad_(), torch.zeros(1, len(own), requires_grad=True)
            found = regularizer.terms(model, hidden, part["labels"], part["loss_mask"], packing)
            (regularizer.add_to(loss, found) * weights[:, own]).sum().backward()

            expected = rows[here].clone().requires_grad_()
            options = {"temperature": 0.1, "chunk_size": chunk_size, "documents": document[None, here]}
            valid = row["loss_mask"] > 0
            terms = simreg_loss(expected.transpose(0, 1), row["labels"], valid=valid, reduction="none", **options)
            (terms * weights[:, here]).sum().backward()
            own_terms = found.weighted[0][0].detach()
            pairs = (own_terms, terms.detach()[:, anchors]), (hidden.grad, expected.grad[held])
            off = torch.stack([(mine - whole).norm() / whole.norm() for mine, whole in pairs])
            dist.all_reduce(off, op=dist.ReduceOp.MAX)
            if not mistaken:
                assert off.max() < 2e-6, (chunk_size, contiguous)
            else:
                assert off.min() > 1e-2, "taking the row to be cut zigzag as a whole must fail"


def check_hybrid_rank(number: int) -> None:
    """Four ranks: one sample over all, then one over ranks 0 and 1 while ranks 2 and 3 have one each."""
    from megatron.core import utils

    half = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])[0]
    groups, alone = {2: half, 4: dist.group.WORLD}, One()
    of_model = SimpleNamespace(tp=alone, cp=alone, tp_cp=alone, dp_cp=dist.group.WORLD)
    model = SimpleNamespace(config=SimpleNamespace(sequence_parallel=False, hidden_size=256), pg_collection=of_model)
    regularizer = Regularizer(SimRegConfig(1, temperature=0.1, chunk_size=24))
    cuts = ((4, 64), (2, 40)) if number < 2 else ((4, 64), (1, 28 + number), (1, 24))
    for micro_batch, (ranks, length) in enumerate(cuts):
        generator = torch.Generator().manual_seed(100 * length + micro_batch)
        rows, weights = (torch.randn(length, 1, WIDTH, generator=generator) for _ in range(2))
        labels = torch.randint(0, 6, (1, length), generator=generator)
        mask = (torch.rand(1, length, generator=generator) < 0.8).float()
        cu_seqlens = torch.tensor([[0, length]], dtype=torch.int32)
        row = {"labels": labels, "loss_mask": mask, "position_ids": torch.arange(length)[None], "tokens": None}
        row |= {"cu_seqlens": cu_seqlens, "local_cp_size": torch.tensor([ranks]), "hybrid_cp_group": None}
        group_of = {"hybrid_cp_group_func": lambda group_size: groups[group_size]}
        part = utils.get_batch_on_this_cp_rank(row, is_hybrid_cp=True, **group_of)
        packing = SimpleNamespace(
            qkv_format="thd", cu_seqlens_q=cu_seqlens[0], local_cp_size=ranks, cp_group=part["hybrid_cp_group"],
            tokens_per_sample=64,
        )  # fmt: skip
        own = part["position_ids"][0]
        hidden, loss = rows[own].requires_grad_(), torch.zeros(1, len(own), requires_grad=True)
        found = regularizer.terms(model, hidden, part["labels"], part["loss_mask"], packing)
        (regularizer.add_to(loss, found) * weights[own, :, 0].T).sum().backward()

        expected, options = rows.clone().requires_grad_(), {"temperature": 0.1, "chunk_size": 24}
        terms = simreg_loss(expected.transpose(0, 1), labels, valid=mask > 0, reduction="none", **options)
        (terms * weights[..., 0].T).sum().backward()
        torch.testing.assert_close(found.weighted[0][0], terms[:, own], rtol=1e-5, atol=1e-6)
        off = (hidden.grad - expected.grad[own]).norm() / expected.grad[own].norm()
        assert off < 2e-6, (ranks, length)
        if ranks > 1:
            packing.local_cp_size, packing.cp_group = 1, None
            as_whole = regularizer.terms(model, hidden, part["labels"], part["loss_mask"], packing).weighted[0][0]
            assert (as_whole - terms[:, own]).norm() > 1e-2 * terms.norm(), "taking a part for the sample must fail"


@pytest.mark.distributed
@pytest.mark.megatron
def test_samples_with_context_ranks_of_their_own(tmp_path: Path) -> None:
    """Hybrid context parallelism: ranks have different numbers of micro-batches, each over its own ranks."""
    run_processes(check_hybrid_rank, 4, tmp_path)


@pytest.mark.distributed
@pytest.mark.megatron
@pytest.mark.parametrize("ranks", quick([(2, 1, 0), (2, 2, 1), (2, 2, 0), (4, 1, 0)], lambda ranks: ranks[2] == 1))
def test_documents_cut_over_ranks(tmp_path: Path, ranks: tuple[int, int, int]) -> None:
    """CP, TP, and whether sequence parallelism splits the rows."""
    run_processes(check_rank, ranks[0] * ranks[1], tmp_path, *ranks)
