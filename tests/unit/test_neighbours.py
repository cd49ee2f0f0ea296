# SPDX-License-Identifier: Apache-2.0
"""What SIGReg, the sigmoid loss and MIC have in common: types, autocast, generators, and a host that never waits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from simreg_megatron.losses import mic_loss, sigmoid_loss, sigreg_loss
from simreg_megatron.losses.mic import MICOptions
from simreg_megatron.losses.sigreg import random_directions
from tests.helpers.fixtures import random_tokens
from tests.helpers.quick import quick

DIRECTIONS = random_directions(16, 8, seed=0, iteration=0, device=torch.device("cpu"))


def sigreg(estimator: str) -> Callable[..., Tensor]:
    def loss(rows: Tensor, labels: Tensor, valid: Tensor) -> Tensor:
        directions = torch.ones(16, 8) if type(rows).__name__ == "FakeTensor" else DIRECTIONS
        return sigreg_loss(rows, labels, directions=directions, estimator=estimator, valid=valid, chunk_size=4)

    return loss


def sigmoid(pair_reduction: str) -> Callable[..., Tensor]:
    return lambda rows, labels, valid: sigmoid_loss(
        rows, labels, valid=valid, chunk_size=4, bias=0.2, pair_reduction=pair_reduction
    )


def mic(pool: str) -> Callable[..., Tensor]:
    options = MICOptions(prefixes=(2, 4), pool=pool)
    return lambda rows, labels, valid: mic_loss(rows, labels, options=options, valid=valid, chunk_size=4)


LOSSES = {
    "sigreg mean": sigreg("mean"),
    "sigreg epps-pulley": sigreg("epps-pulley"),
    "sigmoid anchor": sigmoid("anchor"),
    "sigmoid balanced": sigmoid("balanced"),
    "mic chunk": mic("chunk"),
    "mic token": mic("token"),
}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


def tokens(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    rows, labels = random_tokens((2, 13, 8), num_labels=3, dtype=dtype)
    return rows, labels, torch.rand(2, 13, generator=torch.Generator().manual_seed(1)) < 0.8


@every_loss
def test_the_host_never_waits_for_values(loss: Callable[..., Tensor]) -> None:
    with FakeTensorMode():
        rows = torch.empty(2, 13, 8, requires_grad=True)
        loss(rows, torch.zeros(2, 13, dtype=torch.long), torch.ones(2, 13, dtype=torch.bool)).backward()
        assert rows.grad is not None and rows.grad.shape == rows.shape


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_computed_in_float32_and_returned_in_the_type_of_the_states(
    loss: Callable[..., Tensor], dtype: torch.dtype
) -> None:
    rows, labels, valid = tokens(dtype)
    exact = rows.double().requires_grad_()
    expected = loss(exact, labels, valid)
    expected.backward()
    rows.requires_grad_()
    state = torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = loss(rows, labels, valid)
    found.backward()
    assert torch.equal(torch.get_rng_state(), state), "no generator is touched"
    assert found.dtype == torch.float32 and rows.grad.dtype == dtype
    assert found.item() == pytest.approx(expected.item(), rel=2e-5)
    off = (rows.grad.double() - exact.grad).norm() / exact.grad.norm()
    assert off < (1e-4 if dtype == torch.float32 else torch.finfo(dtype).eps), "one rounding at the end"


@every_loss
@pytest.mark.parametrize("fast", quick([True, False], bool), ids=["one direction", "all"])
def test_gradient_is_the_derivative(loss: Callable[..., Tensor], fast: bool) -> None:
    rows, labels, valid = tokens()
    rows.requires_grad_()
    assert torch.autograd.gradcheck(lambda given: loss(given, labels, valid), rows, atol=1e-7, fast_mode=fast)
