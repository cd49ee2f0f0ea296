# SPDX-License-Identifier: Apache-2.0
"""The bench that drives many releases: what it calls equal, which tree it takes, and how its table speaks."""

from __future__ import annotations

import torch

from simreg_megatron.adagc import AdaGC
from tests.versions import compare, expected
from tests.versions.compare import Outcome
from tests.versions.driver import MODES, RUNS

NAMES = RUNS


def outcome(**changed: float) -> Outcome:
    """Two micro-batches, one parameter; `changed` scales the gradient of some variants, in the last mode alone."""
    factors = {f"{MODES[-1]} {variant}": factor for variant, factor in changed.items()}
    weight = torch.arange(1.0, 7.0).view(2, 3)
    return Outcome(
        {name: torch.tensor([6.0, 5.5], dtype=torch.float64) for name in NAMES},
        {name: {"weight": weight * factors.get(name, 1.0)} for name in NAMES},
    )


def test_equal_is_equal_up_to_rounding_and_no_further() -> None:
    assert compare.difference(outcome(), outcome()) == compare.Difference(0.0, 0.0)
    assert compare.difference(outcome(), outcome(on=1 + 1e-6)).equals
    assert not compare.difference(outcome(), outcome(on=1 + 1e-4)).equals
    assert not compare.difference(outcome(), outcome(on=float("nan"))).equals


def test_lambda_0_is_compared_bit_for_bit() -> None:
    assert compare.same_bits(outcome(), "absent", "zero")
    assert not compare.same_bits(outcome(zero=1 + 2e-7), "absent", "zero")


# Training loops -------------------------------------------------------------------------------------------------------


def test_the_coefficients_by_formula_are_those_of_adagc() -> None:
    """Of the package's own, whose norms here leave the average in both directions."""
    generator = torch.Generator().manual_seed(0)
    steps = torch.rand(6, 3, generator=generator, dtype=torch.float64) * torch.tensor([0.01, 1.0, 5.0]) + 1e-3
    package = AdaGC(3, lambda_rel=1.04, beta=0.8, warmup_iters=2)
    by_formula = expected.adagc_of(
        [dict(zip("abc", step.tolist(), strict=True)) for step in steps], lambda_rel=1.04, beta=0.8, warmup=2
    )
    wrong = expected.adagc_of(
        [dict(zip("abc", step.tolist(), strict=True)) for step in steps], lambda_rel=1.04, beta=0.7, warmup=2
    )
    found = torch.stack([package.step(step.square()).coefficients for step in steps]).double()
    assert (found[2:] < 0.99).any() and (found[2:] == 1).any()
    as_tensor = [torch.tensor([list(step.values()) for step in of], dtype=torch.float64) for of in (by_formula, wrong)]
    torch.testing.assert_close(as_tensor[0], found, rtol=1e-6, atol=0)
    assert ((as_tensor[1] - found).abs() / found).max() > 1e-3
