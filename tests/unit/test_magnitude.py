# SPDX-License-Identifier: Apache-2.0
"""Lengths of hidden states, and what InfoNCE does with each similarity: the printed facts MG-3 and MG-4."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from simreg_megatron.losses.similarity import get_similarity
from simreg_megatron.magnitude import NormSums, coefficient_of_variation, cohens_d, mean_norm, norm_sums
from tests.helpers.fixtures import fixture_f1


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
    one, other = norm_sums(rows, positives), norm_sums(rows, negatives)
    assert (one.number.item(), other.number.item()) == (20, 112)
    assert mean_norm(one).item() == pytest.approx(1.533008, abs=6e-7)
    assert mean_norm(other).item() == pytest.approx(1.660883, abs=6e-7)
    assert cohens_d(one, other).item() == pytest.approx(-0.199596, abs=6e-7)


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
