# SPDX-License-Identifier: Apache-2.0
"""simreg_loss against a naive double loop, its closed-form gradient, and the inputs that break losses."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from simreg_megatron import SimRegConfig
from simreg_megatron.kernels.torch import label_ids_of
from simreg_megatron.losses import simreg_loss
from simreg_megatron.losses._anchored import SIMILARITIES, get_similarity, log_sum, unit_rows
from simreg_megatron.losses._chunks import Block, self_pairs
from simreg_megatron.losses.simreg import _contrast
from simreg_megatron.objectives import CHUNK_WEIGHTS, GROUP_REDUCTIONS, SELF_POSITIVES
from simreg_megatron.parallel import sequence
from simreg_megatron.parallel.layout import ShardLayout
from simreg_megatron.parallel.shard import SequenceShard
from tests.helpers.fixtures import fixture_f1, random_tokens
from tests.helpers.oracle import naive_simreg
from tests.helpers.quick import quick

pytestmark = pytest.mark.usefixtures("every_impl")
REFERENCE_ALONE = pytest.mark.parametrize("every_impl", ["reference"], indirect=True)  # nothing depends on the form

OPTIONS = [
    {"group_reduce": group, "self_positive": own, "chunk_weight": weight}
    for group, own, weight in itertools.product(GROUP_REDUCTIONS, SELF_POSITIVES, CHUNK_WEIGHTS)
    if (group, weight) != ("mean", "count-corrected")
]

# Each value of each option.
SOME_OPTIONS = quick(OPTIONS, lambda options: OPTIONS.index(options) % 4 == 0)


def awkward_tokens() -> tuple[Tensor, Tensor, Tensor]:
    """Two sequences of 11 tokens: masked, negatively labelled and zero ones, and a chunk of one class."""
    rows, labels = random_tokens((2, 11, 3), num_labels=3, seed=1)
    labels[1, 4:8] = 2
    labels[0, 6] = -100
    rows[0, 1] = 0.0
    valid = torch.ones(2, 11, dtype=torch.bool)
    valid[0, 9] = valid[1, 0] = valid[1, 10] = False
    return rows, labels, valid


@pytest.mark.parametrize("options", SOME_OPTIONS, ids=lambda options: "/".join(options.values()))
@pytest.mark.parametrize("chunk_size", [0, 4])
def test_equals_the_double_loop(options: dict, chunk_size: int) -> None:
    rows, labels, valid = awkward_tokens()
    options = {"temperature": 0.2, "valid": valid, "chunk_size": chunk_size, **options}
    ours = rows.masked_fill(~valid.unsqueeze(-1), math.nan).requires_grad_()  # masked rows may hold anything
    naive = rows.clone().requires_grad_()
    expected, num_anchors = naive_simreg(naive, labels, **options)
    terms = simreg_loss(ours, labels, reduction="none", **options)
    torch.testing.assert_close(terms, expected, rtol=1e-10, atol=1e-14)
    assert expected.max() > 0.1

    weights = torch.linspace(0.5, 2.0, 22, dtype=torch.float64).reshape(2, 11)
    (grad,) = torch.autograd.grad((terms * weights).sum(), ours)
    (expected_grad,) = torch.autograd.grad((expected * weights).sum(), naive)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-9, atol=1e-13)
    assert not torch.allclose(2 * grad, expected_grad, rtol=1e-2)

    total = simreg_loss(rows, labels, reduction="sum", **options)
    torch.testing.assert_close(total, expected.detach().sum(), rtol=1e-10, atol=0)
    mean = simreg_loss(rows, labels, **options)
    torch.testing.assert_close(mean, expected.detach().sum() / num_anchors, rtol=1e-10, atol=0)


@pytest.mark.parametrize("similarity", SIMILARITIES)
@REFERENCE_ALONE
def test_every_similarity_equals_the_double_loop(similarity: str) -> None:
    rows, labels, valid = awkward_tokens()
    options = {"temperature": 0.5, "valid": valid, "chunk_size": 4, "similarity": similarity}
    ours, naive = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    expected, num_anchors = naive_simreg(naive, labels, **options)
    loss = simreg_loss(ours, labels, **options)
    torch.testing.assert_close(loss, expected.sum() / num_anchors, rtol=1e-10, atol=0)
    loss.backward()
    (expected.sum() / num_anchors).backward()
    torch.testing.assert_close(ours.grad, naive.grad, rtol=1e-9, atol=1e-13)


def test_a_second_derivative_is_the_references_or_an_error() -> None:
    """The fast forms once passed for a constant."""
    rows, labels, valid = awkward_tokens()
    rows.requires_grad_()
    loss = {impl: simreg_loss(rows, labels, temperature=0.5, valid=valid, impl=impl) for impl in ("reference", "tiled")}
    (grad,) = torch.autograd.grad(loss["reference"], rows, create_graph=True)
    assert torch.autograd.grad(grad.square().sum(), rows)[0].norm() > 0
    with pytest.raises(RuntimeError, match="no second derivative: use impl 'reference'"):
        torch.autograd.grad(loss["tiled"], rows, create_graph=True)


def test_a_chunk_beyond_the_sequence_is_the_whole_sequence() -> None:
    rows, labels = fixture_f1()
    whole = simreg_loss(rows, labels, temperature=0.1)
    for chunk_size in (12, 13, 10**6):
        assert torch.equal(simreg_loss(rows, labels, temperature=0.1, chunk_size=chunk_size), whole)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_any_integer_type_of_labels_and_documents(dtype: torch.dtype) -> None:
    rows, labels = fixture_f1()
    labels = labels.masked_fill(labels == 5, 255 if dtype == torch.uint8 else 5)
    options = {"temperature": 0.1, "valid": labels != 7, "chunk_size": 5, "chunk_weight": "count-corrected"}
    documents = (torch.arange(labels.shape[-1]) // 4 % 2 * 255).expand_as(labels)
    types = (dtype, torch.long)
    losses = [simreg_loss(rows, labels.to(kind), documents=documents.to(kind), **options) for kind in types]
    assert torch.equal(*losses)


NOTHING_TO_COMPARE = {  # labels and valid of a sequence
    "one label": ([0, 0, 0, 0, 0], [True] * 5),
    "all masked": ([0, 1, 2, 3, 4], [False] * 5),
    "all ignored": ([-100] * 5, [True] * 5),
    "one valid token": ([0, 1, 2, 3, 4], [False, True, False, False, False]),
}


@pytest.mark.parametrize("chunk_size", [0, 2])
@pytest.mark.parametrize("options", SOME_OPTIONS, ids=lambda options: "/".join(options.values()))
def test_nothing_to_compare_is_exactly_zero(chunk_size: int, options: dict) -> None:
    labels, valid = (torch.tensor(part) for part in zip(*NOTHING_TO_COMPARE.values(), strict=True))
    rows = random_tokens((*labels.shape, 3), num_labels=2, dtype=torch.float32)[0].requires_grad_()
    for reduction in ("mean", "sum", "none"):
        # Anomaly mode: no NaN on the way either, for those who look for their own.
        with torch.autograd.set_detect_anomaly(True):
            loss = simreg_loss(rows, labels, valid=valid, chunk_size=chunk_size, reduction=reduction, **options)
            (grad,) = torch.autograd.grad(loss.sum(), rows)
        assert torch.equal(loss, torch.zeros_like(loss))
        assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("shape", [(1, 4), (0, 4), (2, 1, 4), (2, 0, 4), (0, 3, 4)])
def test_tiny_and_empty_input(shape: tuple[int, ...]) -> None:
    rows = torch.ones(shape, requires_grad=True)
    labels = torch.zeros(shape[:-1], dtype=torch.long)
    for chunk_weight in CHUNK_WEIGHTS:
        loss = simreg_loss(rows, labels, chunk_size=2, chunk_weight=chunk_weight)
        loss.backward()
        assert loss == 0.0
    assert simreg_loss(rows, labels, reduction="none").shape == shape[:-1]
    assert torch.equal(rows.grad, torch.zeros(shape))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_a_non_finite_row_is_not_hidden(bad: float, similarity: str) -> None:
    rows, labels = random_tokens((2, 6, 3), num_labels=3, seed=3)
    rows[0, 2, 1] = bad
    rows.requires_grad_()
    terms = simreg_loss(rows, labels, similarity=similarity, temperature=1.0, reduction="none")
    assert terms[0, 2].isnan()
    assert torch.isfinite(terms[1]).all(), "the other sequence has nothing to do with it"
    loss = simreg_loss(rows, labels, similarity=similarity, temperature=1.0)
    loss.backward()
    assert loss.isnan()
    assert rows.grad.isnan().any()
    alone = simreg_loss(rows, torch.zeros_like(labels), similarity=similarity)
    assert alone.isnan(), "not even where the row meets no negative"
    assert simreg_loss(rows[:1, 2:3], labels[:1, 2:3], similarity=similarity).isnan(), "nor any other token"


@pytest.mark.parametrize("impl", ["reference", "tiled"])
@REFERENCE_ALONE
def test_numpy_s_numbers_are_numbers(impl: str) -> None:
    rows, labels = fixture_f1()
    found = simreg_loss(rows, labels, temperature=np.float64(0.1), chunk_size=np.int64(4), impl=impl)
    assert torch.equal(found, simreg_loss(rows, labels, temperature=0.1, chunk_size=4, impl=impl))
    coarse = simreg_loss(rows, labels, temperature=np.float32(0.1), impl=impl)
    torch.testing.assert_close(coarse, simreg_loss(rows, labels, temperature=0.1, impl=impl), rtol=1e-6, atol=0)


SCALAR = torch.zeros(1)
GOOD = {"embeddings": torch.ones(2, 4, 3), "labels": torch.zeros(2, 4, dtype=torch.long)}


BAD_ARGUMENTS = [
    ({"temperature": 0.0}, "temperature"),
    ({"chunk_size": 1}, "chunk_size"),
    ({"similarity": "euclid"}, "cosine, dot, qnorm, dnorm"),
    ({"group_reduce": "mean", "chunk_weight": "count-corrected"}, "no effect"),
    ({"impl": "cuda"}, "auto, reference, tiled, triton"),
    ({"impl": "tiled", "similarity": "dot"}, "use impl 'reference'"),
    ({"embeddings": torch.ones(1, 2, 4, 3)}, r"\[n, d\]"),
    ({"labels": torch.zeros(2, 4)}, "labels must be integers"),
    ({"labels": torch.zeros(2, 4, dtype=torch.uint16)}, "labels must be integers.*got torch.uint16"),
    ({"temperature": True}, "temperature"),
    ({"exponents": (SCALAR, SCALAR)}, "'learnable' and the two scalars of exponents belong together"),
    ({"similarity": "learnable"}, "belong together: give both or none"),
    ({"similarity": "learnable", "exponents": (torch.zeros(3), SCALAR)}, "two tensors of one number each"),
    ({"valid": torch.ones(2, 4)}, "bool mask"),
]


@pytest.mark.parametrize(("change", "message"), BAD_ARGUMENTS)
@REFERENCE_ALONE
def test_a_bad_argument_gets_one_sentence(change: dict, message: str) -> None:
    arguments = GOOD | change
    with pytest.raises(ValueError, match=message) as error:
        simreg_loss(arguments.pop("embeddings"), arguments.pop("labels"), **arguments)
    text = str(error.value)
    assert text.endswith(".")
    assert "\n" not in text


@pytest.mark.parametrize("similarity", SIMILARITIES)
@REFERENCE_ALONE
def test_a_token_s_logit_with_itself_is_exactly_zero(similarity: str) -> None:
    rows = random_tokens((2, 9, 33), num_labels=2, dtype=torch.float32)[0]
    raw = get_similarity(similarity)(rows, rows, 0.01).diagonal(dim1=1, dim2=2)
    assert raw.abs().max() > 0, "rounding alone would leave something"
    everyone, alone = torch.ones(2, 9, dtype=torch.bool), torch.arange(9).expand(2, 9)  # its own only positive
    block = Block(rows, alone, everyone, None, anchors=(2, 7))
    expected = log_sum(get_similarity(similarity)(rows[:, 2:7], rows, 0.01), ~self_pairs(block))
    assert torch.equal(_contrast(block, get_similarity(similarity), 0.01, "always"), expected)


EXPONENTS = [((30.0, 30.0), "cosine"), ((-30.0, -30.0), "dot"), ((30.0, -30.0), "qnorm"), ((-30.0, 30.0), "dnorm")]


@pytest.mark.parametrize(("exponents", "name"), EXPONENTS)
@REFERENCE_ALONE
def test_learnable_reaches_the_others(exponents: tuple[float, float], name: str) -> None:
    rows, labels = fixture_f1()
    scalars = tuple(torch.tensor([value], dtype=torch.float64) for value in exponents)
    learned = simreg_loss(rows, labels, temperature=0.5, similarity="learnable", exponents=scalars)
    torch.testing.assert_close(learned, simreg_loss(rows, labels, temperature=0.5, similarity=name))


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
    gradients = (gradient_of(terms, embeddings, upstream) for terms in (got, expected))
    torch.testing.assert_close(*gradients, **TIGHT)
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


WITHOUT_EFFECT = [(8, "exact", "each 8 tokens"), (4, "exact", ""), (4, "local", "each 4 tokens"), (3, "local", "")]


@pytest.mark.parametrize(("chunk_size", "scope", "said"), WITHOUT_EFFECT)
def test_a_chunk_weight_without_effect_is_logged(chunk_size: int, scope: str, said: str, monkeypatch) -> None:
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
        names = label_ids_of(labels.to(dtype), usable)
        assert names.tolist() == [[2, 3, -1, -1]], dtype


@pytest.mark.parametrize("impl", ["reference", "tiled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@REFERENCE_ALONE
def test_an_infinite_row_without_pairs_is_not_hidden(impl: str, dtype: torch.dtype) -> None:
    """Its norm is infinite in some forms, and 1 / inf would pass for a number."""
    rows, labels = torch.full((2, 8), math.inf, dtype=dtype), torch.tensor([0, 1])
    assert simreg_loss(rows[:1], labels[:1], impl=impl).isnan()
    documents = torch.tensor([0, 1])
    rows[1] = 1.0
    terms = simreg_loss(rows, labels, documents=documents, impl=impl, reduction="none")
    assert terms[0].isnan() and (impl == "tiled" or terms[1] == 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype, autocast: bool) -> None:
    rows, labels = random_tokens((2, 40, 16), num_labels=6, seed=2, dtype=dtype)
    rows.requires_grad_()
    exact = rows.detach().double().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = simreg_loss(rows, labels, temperature=0.05)
    expected = simreg_loss(exact, labels, temperature=0.05)
    loss.backward()
    expected.backward()
    assert loss.dtype == torch.float32 and rows.grad.dtype == dtype
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
    # The gradient is rounded once, on the way out.
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(rows.grad.double(), exact.grad, rtol=rounding, atol=1e-7)

    units = unit_rows(rows.detach().float()).bfloat16()
    logits = ((units @ units.mT).double() - 1) / 0.05
    same = labels.unsqueeze(1) == labels.unsqueeze(2)
    low = -torch.nn.functional.logsigmoid(
        logits.masked_fill(~same, -math.inf).logsumexp(2) - logits.masked_fill(same, -math.inf).logsumexp(2)
    ).mean()
    assert abs(low / expected - 1) > 1e-4, "cosines in bfloat16 would be seen by this tolerance"
