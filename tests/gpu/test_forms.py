# SPDX-License-Identifier: Apache-2.0
"""The fast forms on a GPU: half precision through the tensor cores against float64, no wait, bounded memory."""

import importlib
import json
import math
import os
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from simreg_megatron.losses import simreg_loss
from simreg_megatron.losses.trial import error_of_sums
from tests.gpu.runs import IMPLS
from tests.gpu.tf32 import apart, tokens
from tests.helpers import jobs
from tests.helpers.ways import limit, small_regions
from tests.megatron.runs import ROOT

pytestmark = pytest.mark.parametrize("impl", IMPLS)


def exactly(rows: Tensor, labels: Tensor, **options: Any) -> tuple[Tensor, Tensor, float]:
    """Loss and gradient in float64, and the factor of both that brings the gradient's largest number near 1.

    At tau 0.01 gradients are some 1e-10, which float16 does not have: Megatron's loss scale is for that.
    """
    leaf = rows.detach().double().requires_grad_()
    loss = simreg_loss(leaf, labels, impl="reference", **options)
    loss.backward()
    factor = 2.0 ** -math.floor(math.log2(leaf.grad.abs().max().item()))
    return loss.detach() * factor, leaf.grad * factor, factor


def beyond_rounding(grad: Tensor, exact: Tensor) -> float:
    """How far a gradient was from the exact one before it was rounded to its type.

    That rounding is several times larger in half precision, and independent: its square adds to that of the error.
    """
    rounding = apart(exact.to(grad.dtype), exact)
    return max(0.0, apart(grad, exact) ** 2 - rounding**2) ** 0.5


def gradient_bound(rows: Tensor, impl: str) -> float:
    """Return the bound; for triton, that of one bfloat16 number per weight."""
    rounding = 2.5e-3 if impl == "triton" and rows.dtype == torch.bfloat16 else 3e-4
    return rounding + error_of_sums(rows.dtype, rows.shape[-1], 0.01)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("length", "width"), [(64, 1024), (511, 512), (1024, 1024), (1024, 4096), (2048, 4096), (2500, 512), (4096, 2048)]
)
def test_close_to_float64(impl: str, dtype: torch.dtype, length: int, width: int) -> None:
    if impl == "triton" and dtype == torch.float16:
        pytest.skip("impl triton computes bfloat16 and float32")
    rows, labels = tokens(length, width, dtype)
    expected, exact, factor = exactly(rows, labels)
    given = rows.requires_grad_()
    loss = simreg_loss(given, labels, impl=impl) * factor
    loss.backward()
    assert apart(loss, expected) < 1e-5 + error_of_sums(dtype, width, 0.01)
    assert beyond_rounding(given.grad, exact) < gradient_bound(rows, impl)


@pytest.mark.parametrize("has_documents", [False, True])
def test_any_strides_and_anything_where_masked(impl: str, has_documents: bool) -> None:
    """As Megatron has them: [S, B, D], a last chunk of one token, and padding that may be garbage."""
    rows, labels = tokens(1401, 1024, torch.bfloat16)
    valid = torch.rand(labels.shape, generator=torch.Generator().manual_seed(1)).cuda() < 0.8
    options: dict[str, Any] = {"valid": valid, "chunk_size": 700}
    if has_documents:
        options["documents"] = (torch.arange(1401, device="cuda") // 230).expand_as(labels)
    _, exact, factor = exactly(rows, labels, **options)
    garbage = 1e4 if impl == "triton" else torch.nan  # finite, as Megatron's own masked loss must be
    given = rows.masked_fill(~valid.unsqueeze(-1), garbage).transpose(0, 1).contiguous().requires_grad_()
    simreg_loss(given.transpose(0, 1), labels, impl=impl, **options).mul(factor).backward()
    grad = given.grad.transpose(0, 1)
    assert (grad[~valid] == 0).all()
    assert beyond_rounding(grad, exact) < gradient_bound(rows, impl)


@pytest.mark.parametrize("way", ["kept", "both sides", "panels"])
def test_every_way_back(impl: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if impl == "triton" and way != "kept":
        kernels = importlib.import_module("simreg_megatron.kernels.triton")
        monkeypatch.setattr(kernels, "LONGEST_KEPT", 0)
        monkeypatch.setattr(kernels, "PANEL", 4096 if way == "both sides" else 700)
    if way != "kept":
        limit(monkeypatch, "cuda", saved=0)
    if way == "panels":
        small_regions(monkeypatch)
    rows, labels = tokens(2500, 2048, torch.bfloat16)  # few enough that their exponentials can be kept
    _, exact, factor = exactly(rows, labels)
    rows.requires_grad_()
    simreg_loss(rows, labels, impl=impl).mul(factor).backward()
    assert beyond_rounding(rows.grad, exact) < gradient_bound(rows, impl)


def test_an_error_of_a_thousandth_is_told(impl: str) -> None:
    """Half precision rounds the result itself by more than that."""
    rows, labels = tokens(511, 512, torch.bfloat16)
    _, exact, _ = exactly(rows, labels)
    noise = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1), dtype=exact.dtype).to(exact.device)
    assert beyond_rounding((exact * (1 + 1e-3 * noise)).to(rows.dtype), exact) > 2 * 3e-4


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
    allowed = 256 * 2**20
    if impl == "triton":  # 16 KiB an anchor for the pairs, and four numbers a token
        allowed = length * (16384 + 64) + 32 * 2**20
    assert torch.cuda.max_memory_allocated() - before - gradient <= allowed


def test_the_same_bits_twice(impl: str) -> None:
    rows, labels = tokens(3000, 512, torch.bfloat16)
    grads = []
    for _ in range(2):
        given = rows.detach().clone().requires_grad_()
        simreg_loss(given, labels, impl=impl).backward()
        grads.append(given.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("allowed", ["setting", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE"])
def test_float32_stays_float32(impl: str, allowed: str) -> None:
    """With TensorFloat-32 allowed elsewhere in the process."""
    words = ("--setting",) if allowed == "setting" else ()
    environment = os.environ | ({} if words else {allowed: "1"})
    command = [sys.executable, "-m", "tests.gpu.tf32", impl, *words]
    done = jobs.run(command, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    errors = json.loads(done.stdout.splitlines()[-1])
    if errors["plain"] < 2e-5:
        pytest.skip(f"{allowed} allows nothing here: a plain product has an error of {errors['plain']:.0e}")
    bound = 2e-5 if impl == "triton" else 5e-6  # three products of TensorFloat-32 in place of one of float32
    assert max(errors["loss"], errors["gradient"]) < bound, errors
