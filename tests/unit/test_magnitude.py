# SPDX-License-Identifier: Apache-2.0
"""Lengths of hidden states, and what InfoNCE does with each similarity: the printed facts MG-3 and MG-4."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from simreg_megatron.losses.roles import pair_counts
from simreg_megatron.losses.similarity import get_similarity, unit_rows
from simreg_megatron.magnitude import NormSums, coefficient_of_variation, cohens_d, mean_norm
from tests.helpers.fixtures import fixture_f1
from tests.helpers.norms import norm_sums


def added(*parts: NormSums) -> NormSums:
    return NormSums(*(sum(values) for values in zip(*parts, strict=True)))


def test_mg4_variation_and_difference_of_norms() -> None:
    rows, labels = fixture_f1()
    assert coefficient_of_variation(norm_sums(rows, torch.ones(12))).item() == pytest.approx(0.388330, abs=6e-7)
    of_label = torch.zeros(12, dtype=torch.bool)
    of_label[[0, 2, 5, 10]] = True
    assert labels[of_label].unique().numel() == 1
    found = cohens_d(norm_sums(rows, of_label), norm_sums(rows, ~of_label))
    assert found.item() == pytest.approx(0.00703023, abs=6e-9)


def test_mg4_pair_by_pair() -> None:
    """Every anchor sees the norms of the tokens that share its label, and of those that do not."""
    rows, labels = fixture_f1()
    same = (labels[:, None] == labels).fill_diagonal_(False)
    positives, negatives = same.sum(0), (labels[:, None] != labels).sum(0)
    counts = pair_counts(labels[None], torch.ones(1, 12, dtype=torch.bool))
    assert torch.equal(counts[0][0], positives.double()) and torch.equal(counts[1][0], negatives.double())
    one, other = norm_sums(rows, positives), norm_sums(rows, negatives)
    assert (one.number.item(), other.number.item()) == (20, 112)
    assert mean_norm(one).item() == pytest.approx(1.533008, abs=6e-7)
    assert mean_norm(other).item() == pytest.approx(1.660883, abs=6e-7)
    assert cohens_d(one, other).item() == pytest.approx(-0.199596, abs=6e-7)


@pytest.mark.parametrize("chunk_size", [0, 4])
@pytest.mark.parametrize("by_document", [False, True])
def test_pairs_are_counted_in_chunks_and_documents(chunk_size: int, by_document: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(0, 3, (2, 10), generator=generator)
    usable = torch.rand(2, 10, generator=generator) < 0.8
    documents = (torch.arange(10) // 3).expand(2, 10) if by_document else None
    same, different = pair_counts(labels, usable, documents=documents, chunk_size=chunk_size)
    size = chunk_size or 10
    for b in range(2):
        for i in range(10):
            meets = [
                j
                for j in range(10)
                if j != i
                and i // size == j // size
                and usable[b, i]
                and usable[b, j]
                and (documents is None or documents[b, i] == documents[b, j])
            ]
            assert same[b, i] == sum(bool(labels[b, j] == labels[b, i]) for j in meets)
            assert different[b, i] == sum(bool(labels[b, j] != labels[b, i]) for j in meets)


def test_parts_add_up_and_what_does_not_count_may_hold_anything() -> None:
    rows, _ = fixture_f1()
    counts = torch.arange(12) % 3
    parts = [norm_sums(rows[part], counts[part]) for part in (slice(5), slice(5, 12))]
    for one, other in zip(added(*parts), norm_sums(rows, counts), strict=True):
        torch.testing.assert_close(one, other)
    hidden = rows.clone()
    hidden[counts == 0] = torch.nan
    assert all(map(torch.equal, norm_sums(hidden, counts), norm_sums(rows, counts)))


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("cosine", (1.494983, 0.224252, 1.709994, 2.674301, 0.0, 0.0)),
        ("dot", (2.000796, 0.135228, 2.032349, 1.568189, 0.743549, -0.418753)),
        ("qnorm", (2.073037, 0.125803, 2.145624, 1.748394, 0.0, -0.466874)),
        ("dnorm", (1.496232, 0.223973, 1.561269, 2.425679, -0.022860, 0.0)),
    ],
)
def test_mg3_info_nce(name: str, printed: tuple[float, ...]) -> None:
    """Row 0 against row 1, its positive, and rows 2 to 5: loss, p+, gradients of both and their radial parts."""
    rows, _ = fixture_f1()
    anchor = rows[:1].clone().requires_grad_()
    positive = rows[1:2].clone().requires_grad_()
    # The logits are shifted by the anchor's own, which no softmax sees.
    logits = get_similarity(name)(anchor, torch.cat([positive, rows[2:6]]), 0.5)
    probability = logits.softmax(-1)[0, 0]
    loss = -probability.log()
    grads = torch.autograd.grad(loss, (anchor, positive))

    def radial(grad: Tensor, row: Tensor) -> Tensor:
        return (grad * row).sum() / row.norm()

    found = [loss, probability, *(grad.norm() for grad in grads)]
    found += [radial(grad, row) for grad, row in zip(grads, (anchor, positive), strict=True)]
    assert [value.item() for value in found] == pytest.approx(printed, abs=6e-7)


def test_mg3_a_long_anchor_lowers_its_temperature() -> None:
    """With respect to the positive's direction alone the gradient of dnorm is (1 - p+) |q| / tau."""
    rows, _ = fixture_f1()
    directions = unit_rows(rows[1:6]).requires_grad_()
    loss = -get_similarity("dot")(rows[:1], directions, 0.5).log_softmax(-1)[0, 0]
    assert loss.item() == pytest.approx(1.496232, abs=6e-7), "the same loss as dnorm's"
    assert torch.autograd.grad(loss, directions)[0][0].norm().item() == pytest.approx(1.407257, abs=6e-7)


@pytest.mark.parametrize(
    ("name", "printed", "order"),
    [
        ("cosine", [0.267030, -0.276450, 0.077130, 0.174518, 0.504194], [4, 0, 3, 2, 1]),
        ("dot", [0.135364, -0.290907, 0.092541, 0.220413, 0.811380], [4, 3, 0, 2, 1]),
        ("qnorm", [0.149292, -0.320839, 0.102063, 0.243092, 0.894865], [4, 3, 0, 2, 1]),
        ("dnorm", [0.242118, -0.250659, 0.069934, 0.158237, 0.457156], [4, 0, 3, 2, 1]),
    ],
)
def test_mg1_values_and_ranking(name: str, printed: list[float], order: list[int]) -> None:
    rows, _ = fixture_f1()
    shifted = get_similarity(name)(rows[:1], rows[:6], 1.0)[0]
    norm = rows[0].norm()
    own = {"cosine": norm / norm, "dot": norm.square(), "qnorm": norm, "dnorm": norm}[name]
    found = shifted[1:] + own
    assert found.tolist() == pytest.approx(printed, abs=6e-7)
    assert found.argsort(descending=True).tolist() == order


def test_mg1_uneven_exponents() -> None:
    rows, _ = fixture_f1()
    gammas = torch.tensor([0.3, 0.7], dtype=torch.float64)
    logits = get_similarity("learnable", tuple(gammas.logit()))(rows[:1], rows[1:6], 1.0)[0]
    printed = [0.209425, -0.269926, 0.078333, 0.179989, 0.559207]
    assert (logits + rows[0].norm() ** (2 - gammas.sum())).tolist() == pytest.approx(printed, abs=6e-7)
