# SPDX-License-Identifier: Apache-2.0
"""The dispersion loss against its formula in loops, angles of 0 and 180 degrees, and the draw of tokens."""

import math

import pytest
import torch
from torch import Tensor

from simreg_megatron import SimRegConfig
from simreg_megatron.losses import dispersion_loss
from tests.helpers.fixtures import random_tokens


def in_loops(rows: Tensor, temperature: float, *, diagonal: bool = False, scale: float = math.pi) -> Tensor:
    """L of the rows [n, d] of one sequence; with the diagonal, or with another scale, it is another loss."""
    found = []
    for i, one in enumerate(rows):
        for j, other in enumerate(rows):
            if i != j:
                found.append(torch.exp(-torch.acos(one @ other / one.norm() / other.norm()) / scale / temperature))
            elif diagonal:
                found.append(one.sum() * 0 + 1)
    return torch.log(sum(found) / len(found))


def sample(num_sequences: int = 3, num_tokens: int = 9) -> tuple[Tensor, Tensor]:
    rows, labels = random_tokens((num_sequences, num_tokens, 5), num_labels=5)
    return (rows + 0.5).requires_grad_(), labels > 0


@pytest.mark.parametrize("temperature", [1.0, 0.2])
def test_it_is_its_definition(temperature: float) -> None:
    rows, valid = sample()
    found = dispersion_loss(rows, temperature=temperature, valid=valid)
    numbers = valid.sum(dim=1)

    def expected(**wrong: object) -> Tensor:
        losses = [in_loops(own[kept], temperature, **wrong) for own, kept in zip(rows, valid, strict=True)]
        return (torch.stack(losses) * numbers).sum() / numbers.sum()

    torch.testing.assert_close(found, expected())
    gradients = [torch.autograd.grad(loss, rows, retain_graph=True)[0] for loss in (found, expected())]
    torch.testing.assert_close(*gradients)
    assert gradients[0].norm() > 0.01 and -1 / temperature < found < 0
    for wrong in ({"diagonal": True}, {"scale": 1.0}):
        assert (found - expected(**wrong)).abs() > 0.02, wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parallel_and_opposite_rows_do_not_move_each_other(dtype: torch.dtype) -> None:
    one, other = torch.randn(2, 64, generator=torch.Generator().manual_seed(1), dtype=dtype)
    for factor, expected in ((1.0, 0.0), (3.0, 0.0), (-3.0, -1.0)):
        rows = torch.stack([one, factor * one]).requires_grad_()
        found = dispersion_loss(rows)
        found.backward()
        assert found.item() == pytest.approx(expected, abs=1e-3 if dtype == torch.float32 else 1e-7)
        assert rows.grad.abs().max() < 1e-5
    rows = torch.stack([one, one, other]).requires_grad_()
    dispersion_loss(rows).backward()
    axis = torch.eye(1, 64, dtype=dtype).expand(2, 64).clone().requires_grad_()
    assert torch.autograd.grad(in_loops(axis, 1.0), axis)[0].isnan().any(), "arccos alone has no slope at 1"
    assert not torch.autograd.grad(dispersion_loss(axis), axis)[0].any()
    apart = rows.detach().clone().requires_grad_()
    distance = torch.acos(apart[:2] @ apart[2] / apart[:2].norm(dim=1) / apart[2].norm()) / math.pi
    torch.log((1 + torch.exp(-distance).sum()) / 3).backward()  # the two equal rows have a distance of 0
    torch.testing.assert_close(rows.grad, apart.grad, atol=1e-5, rtol=1e-3)


def test_a_clamp_bounds_the_angle_and_its_slope() -> None:
    rows = torch.tensor([[1.0, 0.0], [0.96, 0.28]], dtype=torch.float64, requires_grad=True)
    found = dispersion_loss(rows, clamp=0.25, temperature=0.5)
    found.backward()
    assert found.item() == pytest.approx(-math.acos(0.75) / math.pi / 0.5)
    slope = 0.28 / math.sqrt(1 - 0.75**2) / math.pi / 0.5
    torch.testing.assert_close(rows.grad[0], torch.tensor([0.0, slope], dtype=torch.float64))
    assert rows.grad[1].norm().item() == pytest.approx(slope)
    assert torch.autograd.gradgradcheck(lambda rows: dispersion_loss(rows, clamp=0.01), rows.detach().requires_grad_())


def test_the_draw_follows_from_iteration_and_positions(request: pytest.FixtureRequest) -> None:
    def drawn(**settings: int) -> tuple[Tensor, float]:
        rows, valid = sample(2, 40)
        found = dispersion_loss(rows, tokens=6, valid=valid, **settings)
        found.backward()
        members = rows.grad.norm(dim=-1) > 0
        assert not (members & ~valid).any() and members.sum(dim=1).tolist() == [6, 6]
        numbers = valid.sum(dim=1)
        losses = torch.stack([in_loops(own[kept], 1.0) for own, kept in zip(rows, members, strict=True)])
        torch.testing.assert_close(found, (losses * numbers).sum() / numbers.sum())
        return members, found.item()

    first, again, later, seeded = (drawn(**each) for each in ({}, {"iteration": 0}, {"iteration": 1}, {"seed": 1}))
    assert torch.equal(first[0], again[0]) and first[1] == again[1]
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    torch.set_default_dtype(torch.bfloat16)
    assert drawn()[1] == first[1], "for any default type of torch"
    assert not torch.equal(first[0], later[0]) and not torch.equal(first[0], seeded[0])


def test_what_cannot_be_compared() -> None:
    rows, valid = sample(1)
    for kept in (0, 1):
        found = dispersion_loss(rows, valid=torch.arange(9).expand_as(valid) < kept)
        assert found.item() == 0 and not torch.autograd.grad(found, rows)[0].any()
    for name, sentence in (("tokens", "at least 2, not 1"), ("clamp", "from 0 to 0.99, not 1")):
        with pytest.raises(ValueError, match=f"{name} must be {sentence}"):
            SimRegConfig(objective="dispersion", lambda_=1, objective_options=f"{name}=1")
        with pytest.raises(ValueError, match=f"{name} must be"):
            dispersion_loss(rows, **{name: 1})
