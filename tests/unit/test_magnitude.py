# SPDX-License-Identifier: Apache-2.0
"""Lengths of hidden states, and what InfoNCE does with each similarity: the printed facts MG-3 and MG-4."""

from __future__ import annotations

import pytest
import torch

from simreg_megatron.magnitude import coefficient_of_variation, cohens_d
from tests.helpers.fixtures import fixture_f1
from tests.helpers.norms import norm_sums


def test_mg4_variation_and_difference_of_norms() -> None:
    rows, labels = fixture_f1()
    assert coefficient_of_variation(norm_sums(rows, torch.ones(12))).item() == pytest.approx(0.388330, abs=6e-7)
    of_label = torch.zeros(12, dtype=torch.bool)
    of_label[[0, 2, 5, 10]] = True
    assert labels[of_label].unique().numel() == 1
    found = cohens_d(norm_sums(rows, of_label), norm_sums(rows, ~of_label))
    assert found.item() == pytest.approx(0.00703023, abs=6e-9)


def test_parts_add_up_and_what_does_not_count_may_hold_anything() -> None:
    rows, _ = fixture_f1()
    counts = torch.arange(12) % 3
    parts = [norm_sums(rows[part], counts[part]) for part in (slice(5), slice(5, 12))]
    for one, other in zip(map(sum, zip(*parts, strict=True)), norm_sums(rows, counts), strict=True):
        torch.testing.assert_close(one, other)
    hidden = rows.clone()
    hidden[counts == 0] = torch.nan
    assert all(map(torch.equal, norm_sums(hidden, counts), norm_sums(rows, counts)))
