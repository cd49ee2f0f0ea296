# SPDX-License-Identifier: Apache-2.0
"""The tiled form on a GPU: half precision through the tensor cores against float64, no wait, bounded memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from simreg_megatron.kernels import tiled
from simreg_megatron.kernels.tiled import Tokens, contrast_ratio
from simreg_megatron.losses import simreg_loss


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
@pytest.mark.parametrize(("length", "width"), [(1024, 1024), (2500, 512), (4096, 2048)])
def test_close_to_float64(dtype: torch.dtype, length: int, width: int) -> None:
    rows, labels = tokens(length, width, dtype)
    exact = rows.double().requires_grad_()
    expected = simreg_loss(exact, labels, impl="reference")
    (expected * 2.0**20).backward()
    given = rows.requires_grad_()
    loss = simreg_loss(given, labels, impl="tiled")
    (loss * 2.0**20).backward()
    assert apart(loss, expected) < 1e-4
    assert apart(given.grad, exact.grad) < 3e-4 + torch.finfo(dtype).eps / 2


def test_float32_rows_of_half_precision_values_use_the_tensor_cores() -> None:
    rows, labels = tokens(2048, 1024, torch.bfloat16)
    usable = torch.ones_like(labels, dtype=torch.bool)
    ratios, grads = [], []
    for stored in (None, torch.bfloat16):
        wide = rows.float().requires_grad_()
        ratio = contrast_ratio(
            Tokens(wide, labels, usable, None), anchors=(0, 2048), temperature=0.01, stored_dtype=stored
        )
        torch.log1p(ratio).mul(2.0**20).sum().backward()
        ratios.append(ratio.detach())
        grads.append(wide.grad)
    assert apart(ratios[1], ratios[0]) < 1e-4
    assert apart(grads[1], grads[0]) < 1e-3


def test_nothing_waits_for_the_device() -> None:
    rows, labels = tokens(1500, 512, torch.bfloat16)
    rows.requires_grad_()
    simreg_loss(rows, labels, chunk_size=512).backward()  # libraries loaded
    torch.cuda.set_sync_debug_mode("error")
    try:
        simreg_loss(rows, labels, chunk_size=512).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_memory_is_bounded() -> None:
    rows, labels = tokens(16384, 512, torch.bfloat16)
    rows.requires_grad_()
    simreg_loss(rows, labels).backward()
    rows.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    simreg_loss(rows, labels).backward()
    gradient = rows.numel() * (2 + 4)  # as it is returned, and while it is summed
    assert torch.cuda.max_memory_allocated() - before < gradient + 4 * tiled.WORKSPACE


def test_the_same_bits_twice() -> None:
    rows, labels = tokens(3000, 512, torch.bfloat16)
    grads = []
    for _ in range(2):
        given = rows.detach().clone().requires_grad_()
        simreg_loss(given, labels).backward()
        grads.append(given.grad)
    assert torch.equal(*grads)
