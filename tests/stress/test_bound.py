# SPDX-License-Identifier: Apache-2.0
"""The bound of `judge` holds for every form, can be missed, and the definition behind it is the package's own."""

import pytest
import torch

from simreg_megatron.losses import simreg, simreg_loss
from tests.helpers.fixtures import random_tokens
from tests.helpers.oracle import naive_simreg
from tests.stress import campaign, exact
from tests.stress.cases import Case
from tests.stress.judge import judge


def everyone(case: Case) -> torch.Tensor:
    return torch.arange(case.rows.shape[1]).expand(len(case.rows), -1)


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


def test_a_difference_of_two_logarithms_would_miss_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small terms lose all their digits then."""

    def mistaken(terms: torch.Tensor, roles: object) -> torch.Tensor:
        return torch.log(1 + torch.expm1(terms))

    case = Case(torch.eye(6).repeat(4, 1, 1), torch.tensor([[0, 0, 0, 1, 1, 2]]).expand(4, -1),
                torch.ones(4, 6, dtype=torch.bool), 0.05, "")  # fmt: skip
    assert judge(case, "tiled", everyone(case)).value <= 1
    monkeypatch.setattr(simreg, "with_roles", mistaken)
    assert judge(case, "tiled", everyone(case)).value > 1


def test_cosines_in_bfloat16_would_miss_it() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4, 12, 16, generator=generator)
    labels, valid = torch.randint(0, 3, (4, 12), generator=generator), torch.ones(4, 12, dtype=torch.bool)
    rounded = torch.nn.functional.normalize(rows, dim=-1).bfloat16().float()
    case = Case(rows, labels, valid, 0.1, "")
    found = simreg_loss(rounded, labels, temperature=0.1, reduction="none")
    wanted = exact.simreg(rows, labels, valid, everyone(case), torch.ones(4, 12), 0.1).terms
    assert ((found - wanted).abs() / -torch.expm1(-wanted)).max() > 1e-3
