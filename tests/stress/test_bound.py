# SPDX-License-Identifier: Apache-2.0
"""The bound of `judge` holds for every form, can be missed, and the definition behind it is the package's own."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.fixtures import random_tokens
from tests.helpers.oracle import naive_simreg
from tests.stress import campaign, exact


def test_the_definition_is_that_of_the_naive_loop() -> None:
    rows, labels = random_tokens((2, 9, 4), num_labels=3)
    valid = torch.ones(2, 9, dtype=torch.bool)
    valid[0, 2:4] = False
    given = rows.clone().requires_grad_()
    expected, _ = naive_simreg(given, labels, temperature=0.2, valid=valid)
    weights = torch.arange(1.0, 10).expand(2, -1)
    (expected * weights).sum().backward()
    found = exact.simreg(rows, labels, valid, torch.arange(9).expand(2, -1), weights, 0.2)
    torch.testing.assert_close(found.terms, expected.detach())
    torch.testing.assert_close(found.pull / rows.norm(dim=-1, keepdim=True), given.grad)
    assert (found.pull.norm(dim=-1) <= found.reach).all()


@pytest.mark.parametrize("number", [*range(6), pytest.param(range(6, 60), marks=pytest.mark.slow, id="more")])
def test_small_cases(number: int | range) -> None:
    for batch in number if isinstance(number, range) else (number,):
        for row in campaign.small(batch):
            assert max(row.value, row.gradient) <= 1 and not row.not_finite, row


@pytest.mark.slow
def test_a_large_case() -> None:
    (row,) = campaign.large(3)
    assert max(row.value, row.gradient) <= 1 and not row.not_finite, row
