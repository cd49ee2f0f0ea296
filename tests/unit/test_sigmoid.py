# SPDX-License-Identifier: Apache-2.0
"""The sigmoid loss against independently computed numbers (facts SL-1 to SL-8), and against written-out loops."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from simreg_megatron import SimRegConfig
from simreg_megatron.contrib import sigmoid
from simreg_megatron.losses import sigmoid_loss
from simreg_megatron.objectives import Scalar
from simreg_megatron.parallel import learnable
from simreg_megatron.parallel.layout import ShardLayout
from simreg_megatron.parallel.sequence import chunk_views, objective_terms
from simreg_megatron.parallel.shard import SequenceShard
from tests.helpers.fixtures import fixture_f1, random_tokens, without_pairs
from tests.helpers.ways import kept_bytes
from tests.unit.test_simreg_facts import assert_prints

SL7 = [
    (10, 0.0, "424.120949", "35.343412", "3.213037", "2.423376"),
    (10, 0.5, "145.389619", "12.115802", "1.101437", "2.061117"),
    (20, 0.3, "404.948965", "33.745747", "3.067795", "3.692499"),
]


@pytest.mark.parametrize(("t", "bias", "total", "anchor", "pair", "balanced"), SL7)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_sl7(t: float, bias: float, total: str, anchor: str, pair: str, balanced: str, dtype: torch.dtype) -> None:
    tokens = fixture_f1(dtype)
    options = {"temperature": 1 / t, "bias": bias}
    found = [sigmoid_loss(*tokens, reduction="sum", **options)]
    found += [sigmoid_loss(*tokens, pair_reduction=name, **options) for name in sigmoid.PAIR_REDUCTIONS]
    for value, printed in zip(found, (total, anchor, pair, balanced), strict=True):
        if dtype == torch.float64:
            assert_prints(value, printed)
        assert value.dtype == dtype and value.item() == pytest.approx(float(printed), rel=2e-6)
    absolute = sigmoid_loss(*tokens, temperature=1 / t, bias=t * bias, param="absolute")
    torch.testing.assert_close(absolute, found[1])


def test_sl8_gradients_of_the_scalars() -> None:
    scalars = [torch.tensor([value], dtype=torch.float64, requires_grad=True) for value in (math.log(10.0), 0.2)]

    def loss(log_t: Tensor, bias: Tensor) -> Tensor:
        return sigmoid_loss(*fixture_f1(), log_t=log_t, bias=bias)

    torch.testing.assert_close(loss(*scalars), sigmoid_loss(*fixture_f1(), temperature=0.1, bias=0.2))
    assert torch.autograd.gradcheck(loss, scalars)


def written_out(rows: Tensor, labels: Tensor, documents: Tensor, self_positive: str) -> tuple[Tensor, Tensor]:
    """Losses of the positive and of the negative pairs of one chunk, all of whose tokens count."""
    positive, negative = [], []
    for i, j in itertools.product(range(len(rows)), repeat=2):
        z = 5 * (F.cosine_similarity(rows[i], rows[j], dim=0) - 0.3)
        if documents[i] != documents[j] or (i == j and self_positive == "never"):
            continue
        if labels[i] == labels[j]:
            positive.append(torch.log1p((-z).exp()))
        else:
            negative.append(torch.log1p(z.exp()))
    return tuple(torch.stack(part) if part else torch.zeros(0, dtype=rows.dtype) for part in (positive, negative))


@pytest.mark.parametrize("pair_reduction", sigmoid.PAIR_REDUCTIONS)
@pytest.mark.parametrize("self_positive", ["never", "always"])
@pytest.mark.parametrize("slab", [8 << 20, 1], ids=["one slab", "anchor by anchor"])
def test_chunks_masks_documents_and_slabs(pair_reduction: str, self_positive: str, slab: int, monkeypatch) -> None:
    monkeypatch.setitem(sigmoid._SLAB, "cpu", slab)
    rows, labels = random_tokens((2, 14, 6), num_labels=4)
    valid = torch.rand(2, 14, generator=torch.Generator().manual_seed(2)) < 0.8
    documents = (torch.arange(14) // 4).expand(2, 14)
    rows = rows.masked_fill(~valid.unsqueeze(-1), torch.nan)
    one, other = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    options = {"temperature": 0.2, "bias": 0.3, "pair_reduction": pair_reduction, "self_positive": self_positive}
    terms = sigmoid_loss(one, labels, valid=valid, documents=documents, chunk_size=6, reduction="none", **options)
    total = torch.zeros((), dtype=torch.float64)
    for b in range(2):
        for part in (slice(0, 6), slice(6, 12), slice(12, 14)):
            own = valid[b, part]
            given = (other[b, part][own], labels[b, part][own], documents[b, part][own])
            positive, negative = written_out(*given, self_positive)
            if pair_reduction == "anchor":
                expected = positive.sum() + negative.sum()
            elif pair_reduction == "pair":
                expected = own.sum() * torch.cat([positive, negative]).sum() / max(1, len(positive) + len(negative))
            else:
                expected = own.sum() * sum(half.sum() / max(1, len(half)) for half in (positive, negative)) / 2
            torch.testing.assert_close(terms[b, part].sum(), expected)
            total = total + expected
    terms.sum().backward()
    total.backward()
    torch.testing.assert_close(one.grad, other.grad.nan_to_num(0.0))
    assert not one.grad[~valid].any() and not terms[~valid].any()


def test_no_matrix_of_all_pairs_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd's memory grows with the tokens, not with their square."""

    def kept(tokens: int) -> int:
        rows, labels = random_tokens((1, tokens, 8), num_labels=50, dtype=torch.float32)
        return kept_bytes(lambda: sigmoid_loss(rows.requires_grad_(), labels))

    monkeypatch.setitem(sigmoid._SLAB, "cpu", 64 << 10)
    assert kept(2048) < 6 * kept(512)
    monkeypatch.setattr(sigmoid, "checkpoint", lambda pair_sums, *given, **_: pair_sums(*given))
    assert kept(2048) > 12 * kept(512), "without it they would be"


@pytest.mark.parametrize("case", ["one token", "one label", "no twin", "all masked", "no tokens"])
@pytest.mark.parametrize("pair_reduction", sigmoid.PAIR_REDUCTIONS)
def test_nothing_to_compare_is_zero_and_finite(case: str, pair_reduction: str) -> None:
    rows, labels = random_tokens((2, 6, 5), num_labels=3)
    rows, labels, valid = without_pairs(case, rows, labels, torch.ones_like(labels, dtype=torch.bool))
    loss = sigmoid_loss(rows.requires_grad_(), labels, valid=valid, pair_reduction=pair_reduction)
    loss.backward()
    assert loss.isfinite() and rows.grad.isfinite().all()
    assert (loss == 0) == (case not in ("one label", "no twin"))


def test_what_is_trained() -> None:
    def wanted(options: str = "", **settings: float) -> dict[str, dict[str, float]]:
        return learnable.wanted(SimRegConfig(lambda_=1, objective="sigmoid", objective_options=options, **settings))

    assert wanted("bias=0.5") == {"sigmoid": {"log_t": pytest.approx(math.log(10)), "bias": 0.5}}
    assert wanted("trains=t", temperature=0.02)["sigmoid"] == {"log_t": pytest.approx(math.log(50))}
    assert wanted("trains=bias") == {"sigmoid": {"bias": 0.0}} and wanted("trains=none") == {}
    assert wanted("pairs=hidden-head,adapter=yes,trains=none") == {"sigmoid": {"adapter": 0.5}}
    assert wanted("pairs=hidden-head,adapter=yes")["sigmoid"].keys() == {"log_t", "bias", "adapter"}
    parts = SimRegConfig(lambda_=1, objective="sigmoid", objective_options="pairs=hidden-head,adapter=yes").parts
    assert learnable.as_logged(parts, [{"adapter": torch.tensor([0.0])}]) == {"sigmoid delta": torch.tensor(0.5)}
    scalars = {"log_t": torch.tensor([math.log(7.0)]), "bias": torch.tensor([0.25])}
    other = SimpleNamespace(scalars={"bias": Scalar(0.5, "other bias")})
    both = learnable.as_logged((*parts, other), [scalars, {"bias": torch.tensor([0.5])}])
    assert both.pop("other bias") == 0.5, "scalars of one name, of two objectives"
    logged = {name: round(value.item(), 5) for name, value in both.items()}
    assert logged == {"sigmoid t": 7.0, "sigmoid bias": 0.25}


@pytest.mark.parametrize("slab", [8 << 20, 1], ids=["one slab", "anchor by anchor"])
def test_states_meet_the_rows_of_their_labels(slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written out; a locked modality: rows get no gradient, and a token meets its own row as any other pair."""
    monkeypatch.setitem(sigmoid._SLAB, "cpu", slab)
    rows, labels = random_tokens((2, 7, 6), num_labels=3)
    table = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    one, other = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    options = {"temperature": 0.2, "bias": 0.1, "pair_reduction": "balanced", "chunk_size": 4}
    loss = sigmoid_loss(one, labels, output_rows=table[labels], reduction="sum", **options)
    loss.backward()
    total = torch.zeros((), dtype=torch.float64)
    for b, part in itertools.product(range(2), (slice(0, 4), slice(4, 7))):
        own = labels[b, part]
        cosines = F.cosine_similarity(other[b, part][:, None], table.detach()[own][None], dim=-1)
        z, same = 5 * (cosines - 0.1), own[:, None] == own
        halves = [F.softplus(-z[same]), F.softplus(z[~same])]
        total = total + len(own) * sum(half.mean() for half in halves if len(half)) / 2
    total.backward()
    torch.testing.assert_close(loss, total)
    torch.testing.assert_close(one.grad, other.grad)
    assert table.grad is None
    with pytest.raises(ValueError, match="output_rows must have the shape"):
        sigmoid_loss(rows, labels, output_rows=table)


@pytest.mark.parametrize("param", ["relative", "absolute"])
def test_an_adapter_turns_states_and_rows_apart(param: str) -> None:
    """The vectors written out, one feature longer; values and every gradient."""
    rows, labels = random_tokens((2, 7, 6), num_labels=3)
    output_rows = torch.randn(rows.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    settings = {"temperature": 0.2, "param": param, "pair_reduction": "balanced"}

    def trained() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        start = (rows.clone(), torch.tensor([0.5], dtype=torch.float64), torch.tensor([0.3], dtype=torch.float64))
        return tuple(part.requires_grad_() for part in start)

    ours = trained()
    found = sigmoid_loss(ours[0], labels, output_rows=output_rows, adapter=ours[1], bias=ours[2], **settings)
    theirs = trained()
    delta = theirs[1].sigmoid()
    rest = (1 - delta**2).sqrt().expand(*labels.shape, 1)
    states, others = (delta * F.normalize(part, dim=-1) for part in (theirs[0], output_rows))
    longer = torch.cat([states, -rest], dim=-1), torch.cat([others, rest], dim=-1)
    cosines = longer[0] @ longer[1].transpose(1, 2)  # `sigmoid_loss` gives output_rows no gradient, delta is in them
    z = 5 * cosines - (5 * theirs[2] if param == "relative" else theirs[2])
    same = labels[:, :, None] == labels[:, None]
    expected = sum((F.softplus(-z[b][same[b]]).mean() + F.softplus(z[b][~same[b]]).mean()) / 2 for b in range(2)) / 2
    torch.testing.assert_close(found, expected)
    found.backward()
    expected.backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad)
        assert one.grad.abs().max() > 1e-4
    plain = sigmoid_loss(rows, labels, output_rows=output_rows, bias=0.3, **settings)
    assert abs(plain - found) > 1e-2
    with pytest.raises(ValueError, match="give output_rows, or drop it"):
        sigmoid_loss(rows, labels, adapter=ours[1])
    with pytest.raises(ValueError, match=r"log_t must be one number, got \[2\]"):
        sigmoid_loss(rows, labels, log_t=torch.ones(2))


@pytest.mark.parametrize("which", ["state", "head", "cast head"])
def test_a_zero_row_is_as_if_masked_however_its_partner_is(which: str) -> None:
    """A state and its head: neither hides that the other has no direction."""
    rows, labels = random_tokens((2, 7, 6), num_labels=3)
    output_rows = torch.randn(rows.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    (rows if which == "state" else output_rows)[0, 2] = 1e-60 if which == "cast head" else 0.0
    if which == "cast head":
        rows = rows.float()
    rows.requires_grad_()
    others = torch.ones_like(labels, dtype=torch.bool)
    others[0, 2] = False
    terms = sigmoid_loss(rows, labels, output_rows=output_rows, chunk_size=4, reduction="none")
    terms.sum().backward()
    assert terms.isfinite().all() and rows.grad.isfinite().all()
    assert terms[0, 2] == 0 and not rows.grad[0, 2].any() and rows.grad[0, 1].any()
    masked = sigmoid_loss(rows, labels, output_rows=output_rows, valid=others, chunk_size=4)
    assert torch.equal(sigmoid_loss(rows, labels, output_rows=output_rows, chunk_size=4), masked)
    output_rows[1, 3] = torch.nan
    assert sigmoid_loss(rows, labels, output_rows=output_rows).isnan(), "a broken head is shown"


def test_an_output_layer_of_zeros_has_no_term_yet() -> None:
    """As some begin: what the plugin computes is 0 and finite, and it becomes a term with the first rows."""
    rows, labels = random_tokens((2, 8, 6), num_labels=3)
    options = "pairs=hidden-head,trains=none"
    config = SimRegConfig(lambda_=1, objective="sigmoid", objective_options=options, chunk_size=4)
    shard, hidden = SequenceShard(ShardLayout(8)), rows.transpose(0, 1).clone().requires_grad_()
    everyone = torch.ones_like(labels, dtype=torch.bool)

    def terms(output_rows: Tensor) -> Tensor:
        views = chunk_views(config, shard, hidden, labels, everyone, output_rows=output_rows)
        return objective_terms(config, views, shard, {}, 0, lambda: None)

    found = terms(torch.zeros_like(hidden))
    found.sum().backward()
    assert not found.any() and not hidden.grad.any()
    output_rows = torch.zeros_like(hidden)
    output_rows[4:] = 1.0
    found = terms(output_rows)
    assert found.isfinite().all() and not found[:, :4].any() and (found[:, 4:] > 0).all()
