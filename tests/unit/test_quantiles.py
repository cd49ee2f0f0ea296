# SPDX-License-Identifier: Apache-2.0
"""Quantiles found digit by digit: of any floats, in order, with ties, with nothing."""

from __future__ import annotations

import math

import pytest
import torch

from simreg_megatron.parallel.quantiles import quantiles_over

SHARES = (0.0, 0.1, 0.5, 0.9, 1.0)


@pytest.mark.parametrize("number", [1, 2, 7, 10, 999])
def test_they_are_numbers_in_their_order(number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    values = torch.randn(number, generator=generator) * 10.0 ** torch.randint(-30, 30, (number,), generator=generator)
    values[::3] = values[0]
    ordered = values.sort().values
    expected = torch.stack([ordered[max(0, math.ceil(share * number) - 1)] for share in SHARES])
    mixed = torch.cat([values, torch.full((5,), math.nan)])[torch.randperm(number + 5, generator=generator)]
    assert torch.equal(quantiles_over(mixed, SHARES, []), expected)


def test_infinities_and_zeros_have_their_places() -> None:
    ordered = [-math.inf, -(2.0**-149), 0.0, 2.0**-149, math.inf]
    values = torch.tensor(ordered)[[4, 2, 0, 3, 1]]
    assert quantiles_over(values, (0.2, 0.4, 0.6, 0.8, 1.0), []).tolist() == ordered
