# SPDX-License-Identifier: Apache-2.0
"""Megatron's local attention on the CPU: over context ranks and packed it is the attention of the whole sequence.

The oracle is torch's own attention in float64 on the whole sequence (or document by document), values and gradients.
Each case runs in processes of its own, which put Megatron on the CPU backend before they import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from simreg_megatron.cpu import backend as cpu_backend
from tests.helpers.processes import run_processes
from tests.helpers.quick import quick_rows

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]

TOKENS, BATCH, HEADS, GROUPS, WIDTH = 24, 2, 4, 2, 8  # grouped queries: two heads share a key
DOCUMENTS = (5, 1, 10, 8)
MULTIPLES = (8, 4, 12)  # of twice two context ranks
TOLERANCE = 1e-12
CLEARLY_WRONG = 1e-2


class Inputs(NamedTuple):
    """Query [T, B, H, D], key and value [T, B, G, D], and weights [T, B, H * D] that make a scalar of the output."""

    query: Tensor
    key: Tensor
    value: Tensor
    weights: Tensor

    def of_rows(self, rows: Any) -> Inputs:
        return Inputs(*(part[rows].detach().clone().requires_grad_(part is not self.weights) for part in self))


def inputs(batch: int = BATCH) -> Inputs:
    generator = torch.Generator().manual_seed(5)
    shapes = [(HEADS, WIDTH), (GROUPS, WIDTH), (GROUPS, WIDTH), (HEADS * WIDTH,)]
    parts = (torch.randn(TOKENS, batch, *shape, dtype=torch.float64, generator=generator) for shape in shapes)
    return Inputs(*parts).of_rows(slice(None))


def same_document(documents: Sequence[int] = DOCUMENTS) -> Tensor:
    """[T, T]: whether two tokens lie in one document."""
    number = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))
    return number == number[:, None]


def oracle(whole: Inputs, allowed: Tensor | None = None) -> list[Tensor]:
    """Output of causal attention, and the gradients of query, key and value."""
    heads_first = (part.permute(1, 2, 0, 3) for part in whole[:3])
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    mask = causal if allowed is None else causal & allowed
    output = scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True)
    return with_gradients(output.permute(2, 0, 1, 3).flatten(2), whole)


def with_gradients(output: Tensor, given: Inputs) -> list[Tensor]:
    (output * given.weights).sum().backward()
    return [output.detach(), *(part.grad for part in given[:3])]


def rows_of(rank: int, ranks: int) -> Tensor:
    blocks = torch.arange(TOKENS).chunk(2 * ranks)
    return torch.cat([blocks[rank], blocks[-1 - rank]]) if ranks > 1 else torch.arange(TOKENS)


def local_attention(ranks: int) -> Any:
    config = megatron_config(ranks, params_dtype=torch.float64)
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    return DotProductAttention(config, 1, AttnMaskType.causal, "self")


def local_model() -> Any:
    config = megatron_config(1, normalization="RMSNorm", persist_layer_norm=False)
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    return GPTModel(config, spec, vocab_size=64, max_sequence_length=TOKENS, position_embedding_type="rope")


def megatron_config(ranks: int, **settings: Any) -> Any:
    """Describe a small model, in a process whose Megatron is on the CPU backend: see `fork_server`."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    model_parallel_cuda_manual_seed(1)  # dropout asks for its state even where nothing is dropped
    return TransformerConfig(
        num_layers=2, hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, num_query_groups=GROUPS,
        context_parallel_size=ranks, hidden_dropout=0.0, attention_dropout=0.0, masked_softmax_fusion=False,
        apply_rope_fusion=False, **settings,
    )  # fmt: skip


def largest_differences(got: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    return [(left - right).abs().max().item() for left, right in zip(got, expected, strict=True)]


def check_split(rank: int, ranks: int, masked: bool) -> None:
    """Compare output and gradients of this rank's rows with the oracle's."""
    attention = local_attention(ranks)
    whole, rows = inputs(), rows_of(rank, ranks)
    allowed = same_document() if masked else None
    expected = [part[rows] for part in oracle(whole, allowed)]
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    mask = ~(causal & allowed)[rows].expand(BATCH, 1, -1, -1) if allowed is not None else None  # as the data set's
    own = whole.of_rows(rows)
    assert max(largest_differences(with_gradients(attention(*own[:3], mask), own), expected)) < TOLERANCE


CASES = quick_rows(product((1, 2, 3), (False, True)), lambda case: case in ((2, False), (3, True)))


@pytest.mark.parametrize(("ranks", "masked"), CASES)
def test_split_over_context_ranks(ranks: int, masked: bool, tmp_path: Path) -> None:
    run_processes(check_split, ranks, tmp_path, ranks, masked)


def packed(documents: Sequence[int] = DOCUMENTS, padded: Sequence[int] | None = None) -> Any:
    """Megatron's parameters of packed documents of these lengths; `padded` are their lengths with padding."""
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = torch.tensor([0, *documents]).cumsum(0).int()
    padded_ends = None if padded is None else torch.tensor([0, *padded]).cumsum(0).int()
    longest = max(padded or documents)
    return PackedSeqParams("thd", ends, ends, padded_ends, padded_ends, max_seqlen_q=longest, max_seqlen_kv=longest)


def check_packed(rank: int, ranks: int, documents: Sequence[int]) -> None:
    """Each document is split over the ranks separately."""
    attention, whole = local_attention(ranks), inputs(batch=1)
    rows = torch.arange(TOKENS)
    if ranks > 1:
        blocks = [document.chunk(2 * ranks) for document in rows.split(documents)]
        rows = torch.cat([half for cut in blocks for half in (cut[rank], cut[-1 - rank])])
    expected = [part[rows] for part in oracle(whole, same_document(documents))]

    def attended(params: Any) -> list[Tensor]:
        flat = whole.of_rows(rows)
        output = attention(*(part.squeeze(1) for part in flat[:3]), None, packed_seq_params=params)
        return with_gradients(output, flat)

    assert max(largest_differences(attended(packed(documents)), expected)) < TOLERANCE
    assert min(largest_differences(attended(packed([TOKENS])), expected)) > CLEARLY_WRONG
    if ranks == 1:  # where documents are padded, these borders count
        assert max(largest_differences(attended(packed([4, 1, 9, 8], padded=documents)), expected)) < TOLERANCE


@pytest.mark.parametrize(("ranks", "documents"), [(1, DOCUMENTS), (2, MULTIPLES)])
def test_packed_documents_do_not_meet(ranks: int, documents: Sequence[int], tmp_path: Path) -> None:
    run_processes(check_packed, ranks, tmp_path, ranks, documents)


def check_model(rank: int) -> None:
    """Rows of two sequences in one pack, against the same two under the data set's masks."""
    model = local_model()
    generator = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(0, 64, (2, BATCH, TOKENS), generator=generator)
    mask = ~(same_document().tril())[None, None].expand(BATCH, 1, -1, -1)
    order = torch.arange(TOKENS).expand(BATCH, -1)  # of no use to rotary embeddings

    def computed(rows: tuple[Tensor, Tensor], **given: Any) -> list[Tensor]:
        model.zero_grad()
        loss = model(rows[0], order, labels=rows[1], **given)
        loss.mean().backward()
        return [loss.detach().flatten(), *(parameter.grad.clone() for parameter in model.parameters())]

    pack = (tokens.view(1, -1), labels.view(1, -1))
    expected = computed((tokens, labels), attention_mask=mask)
    together = computed(pack, attention_mask=None, packed_seq_params=packed(DOCUMENTS * BATCH))
    assert max(largest_differences(together, expected)) < 1e-6  # float32
    joined = computed(pack, attention_mask=None, packed_seq_params=packed([TOKENS] * BATCH))
    assert largest_differences(joined, expected)[0] > 1e-3


def test_a_packed_model_is_the_masked_model(tmp_path: Path) -> None:
    run_processes(check_model, 1, tmp_path)


def check_refusals(rank: int) -> None:
    own = inputs(batch=1).of_rows(rows_of(rank, 2))
    attention = local_attention(2)
    attention.scale_mask_softmax.window_size = (4, 0)
    with pytest.raises(cpu_backend.CpuBackendError, match="leave out --window-size"):
        attention(*own[:3], None)


def test_attention_that_it_cannot_compute_is_refused(tmp_path: Path) -> None:
    run_processes(check_refusals, 2, tmp_path)
