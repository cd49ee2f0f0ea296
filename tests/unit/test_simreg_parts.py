# SPDX-License-Identifier: Apache-2.0
"""A part of the anchors against all tokens they meet, and tokens that meet inside their document only."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from simreg_megatron import SimRegConfig
from simreg_megatron.kernels.torch import token_names
from simreg_megatron.losses import simreg_loss
from simreg_megatron.objectives.simreg import SELF_POSITIVES
from simreg_megatron.parallel.layout import ShardLayout
from simreg_megatron.parallel.shard import SequenceShard
from simreg_megatron.sharded import sequence
from tests.helpers.fixtures import random_tokens

pytestmark = pytest.mark.usefixtures("every_impl")

LENGTH = 23
TIGHT = {"rtol": 1e-11, "atol": 1e-13}


def sample() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Embeddings, labels, a mask, and documents of 1 to 9 tokens; one row is zero."""
    embeddings, labels = random_tokens((2, LENGTH, 6), num_labels=4)
    embeddings[0, 5] = 0.0
    valid = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.8
    documents = torch.tensor([[0] * 7 + [1] * 9 + [2] + [3] * 6, [0] * 2 + [1] * 8 + [2] * 13])
    return embeddings, labels, valid, documents


def gradient_of(terms: Tensor, embeddings: Tensor, upstream: Tensor) -> Tensor:
    return torch.autograd.grad((terms * upstream).sum(), embeddings, retain_graph=True)[0]


@pytest.mark.parametrize("self_positive", SELF_POSITIVES)
@pytest.mark.parametrize("chunk_size", [0, 6])
def test_documents_are_sequences_of_their_own(self_positive: str, chunk_size: int) -> None:
    """Inside each chunk the result is that of the documents cut out and computed one by one."""
    embeddings, labels, valid, documents = sample()
    embeddings.requires_grad_()
    options = {"temperature": 0.2, "self_positive": self_positive, "reduction": "none"}
    got = simreg_loss(embeddings, labels, valid=valid, documents=documents, chunk_size=chunk_size, **options)
    expected = torch.zeros_like(got)
    size = chunk_size or LENGTH
    for b in range(2):
        for start in range(0, LENGTH, size):
            for document in range(4):
                at = [i for i in range(start, min(start + size, LENGTH)) if documents[b, i] == document]
                if at:
                    alone = simreg_loss(embeddings[b, at], labels[b, at], valid=valid[b, at], **options)
                    expected[b, at] = alone.to(expected.dtype)
    torch.testing.assert_close(got, expected, **TIGHT)
    upstream = torch.rand(2, LENGTH, dtype=torch.float64)
    torch.testing.assert_close(
        gradient_of(got, embeddings, upstream), gradient_of(expected, embeddings, upstream), **TIGHT
    )
    unlimited = simreg_loss(embeddings, labels, valid=valid, chunk_size=chunk_size, **options)
    assert not torch.allclose(got, unlimited, rtol=1e-2), "borders must matter in this sample"


def test_count_correction_stays_inside_the_document() -> None:
    """With equal states in each class, the corrected chunk gives exactly the value of the whole document."""
    labels = torch.tensor([[0, 1, 0, 1, 2, 1, 0, 1, 1, 1, 0, 2]])
    documents = torch.tensor([[0] * 6 + [1] * 6])
    embeddings = torch.eye(3, dtype=torch.float64)[labels]
    options = {"temperature": 0.5, "documents": documents, "reduction": "none"}
    corrected = simreg_loss(embeddings, labels, chunk_size=4, chunk_weight="count-corrected", **options)
    whole = simreg_loss(embeddings, labels, **options)
    torch.testing.assert_close(corrected, whole, **TIGHT)


@pytest.mark.parametrize(
    ("chunk_size", "scope", "said"),
    [(8, "exact", "each 8 tokens"), (4, "exact", ""), (4, "local", "each 4 tokens"), (3, "local", "")],
)
def test_a_chunk_weight_without_effect_is_logged(
    chunk_size: int, scope: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a sequence, or in scope local a rank's block of it, is one chunk."""
    heard: list[str] = []
    monkeypatch.setattr(sequence, "log_once", heard.append)
    config = SimRegConfig(lambda_=1, chunk_weight="uniform", chunk_size=chunk_size, scope=scope)
    # In scope local one of two ranks, with two blocks of 4 tokens.
    shard = SequenceShard(ShardLayout(16, context_size=2) if scope == "local" else ShardLayout(8))
    rows, labels = random_tokens((1, 8, 6), num_labels=2)
    sequence.chunk_views(config, shard, rows.transpose(0, 1), labels, labels >= 0)
    assert [said in line for line in heard] == [True] * bool(said)
    sequence.chunk_views(replace(config, chunk_weight="token"), shard, rows.transpose(0, 1), labels, labels >= 0)
    assert len(heard) == bool(said), "all tokens equally is no weight"


def test_tokens_without_a_name_are_minus_one_in_every_type() -> None:
    """In bytes, -1 was 255, which is a label."""
    labels, usable = torch.tensor([[3, 255, 3, 0]]), torch.tensor([[True, True, False, False]])
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        names = token_names(labels.to(dtype), usable)
        assert names.tolist() == [[2, 3, -1, -1]], dtype
