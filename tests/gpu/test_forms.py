# SPDX-License-Identifier: Apache-2.0
"""The fast forms on a GPU: half precision through the tensor cores against float64, no wait, bounded memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from simreg_megatron.losses import simreg_loss
from tests.helpers.ways import budget, one_side_only

pytestmark = pytest.mark.parametrize("impl", ["tiled", "triton"])


def tokens(length: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Losses of some 1e-7 at tau 0.01, as late in training."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 200, (2, length), generator=generator)
    centres = torch.randn(200, width, generator=generator) + 1.5
    rows = centres[labels] + 0.6 * torch.randn(2, length, width, generator=generator)
    return rows.to("cuda", dtype), labels.cuda()


def apart(one: Tensor, other: Tensor) -> float:
    return ((one.double() - other.double()).norm() / other.double().norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("length", "width"), [(64, 1024), (511, 512), (1024, 1024), (2500, 512), (4096, 2048)])
def test_close_to_float64(impl: str, dtype: torch.dtype, length: int, width: int) -> None:
    rows, labels = tokens(length, width, dtype)
    exact = rows.double().requires_grad_()
    expected = simreg_loss(exact, labels, impl="reference")
    (expected * 2.0**20).backward()
    given = rows.requires_grad_()
    loss = simreg_loss(given, labels, impl=impl)
    (loss * 2.0**20).backward()
    assert apart(loss, expected) < 1e-5
    assert apart(given.grad, exact.grad) < 3e-4 + torch.finfo(dtype).eps / 2


def test_any_strides_and_anything_where_masked(impl: str) -> None:
    """As Megatron has them: [S, B, D], and padding that may be garbage."""
    rows, labels = tokens(1500, 1024, torch.bfloat16)
    valid = torch.rand(labels.shape, generator=torch.Generator().manual_seed(1)).cuda() < 0.8
    exact = rows.double().requires_grad_()
    simreg_loss(exact, labels, valid=valid, chunk_size=700, impl="reference").mul(2.0**20).backward()
    given = rows.masked_fill(~valid.unsqueeze(-1), torch.nan).transpose(0, 1).contiguous().requires_grad_()
    simreg_loss(given.transpose(0, 1), labels, valid=valid, chunk_size=700, impl=impl).mul(2.0**20).backward()
    grad = given.grad.transpose(0, 1)
    assert (grad[~valid] == 0).all()
    assert apart(grad, exact.grad) < 3e-4 + torch.finfo(torch.bfloat16).eps / 2


@pytest.mark.parametrize("way", ["kept", "both sides", "panels"])
def test_every_way_back(impl: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way != "kept":
        budget(monkeypatch, "cuda", kept=0)
    if way == "panels":
        one_side_only(monkeypatch)
    rows, labels = tokens(2500, 2048, torch.bfloat16)  # few enough that their exponentials can be kept
    grads = []
    for given, form in ((rows.double(), "reference"), (rows, impl)):
        leaf = given.detach().requires_grad_()
        simreg_loss(leaf, labels, impl=form).mul(2.0**20).backward()
        grads.append(leaf.grad)
    assert apart(*reversed(grads)) < 3e-4 + torch.finfo(torch.bfloat16).eps / 2


def test_nothing_waits_for_the_device(impl: str) -> None:
    rows, labels = tokens(1500, 512, torch.bfloat16)
    rows.requires_grad_()
    simreg_loss(rows, labels, chunk_size=512, impl=impl).backward()  # libraries loaded
    torch.cuda.set_sync_debug_mode("error")
    try:
        simreg_loss(rows, labels, chunk_size=512, impl=impl).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("length", "width", "chunk_size"), [(16384, 512, 0), (8192, 4096, 0), (131072, 512, 1024)])
def test_memory_is_bounded(impl: str, length: int, width: int, chunk_size: int) -> None:
    rows = torch.randn(1, length, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, 200, (1, length), device="cuda")
    simreg_loss(rows, labels, chunk_size=chunk_size, impl=impl).backward()
    rows.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    simreg_loss(rows, labels, chunk_size=chunk_size, impl=impl).backward()
    gradient = rows.numel() * rows.element_size()
    assert torch.cuda.max_memory_allocated() - before - gradient <= 256 * 2**20


def test_the_same_bits_twice(impl: str) -> None:
    rows, labels = tokens(3000, 512, torch.bfloat16)
    grads = []
    for _ in range(2):
        given = rows.detach().clone().requires_grad_()
        simreg_loss(given, labels, impl=impl).backward()
        grads.append(given.grad)
    assert torch.equal(*grads)
