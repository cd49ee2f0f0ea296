# SPDX-License-Identifier: Apache-2.0
"""The gradient's weights on tensor cores: rounded to bfloat16, and yet within 3e-4 of the exact gradient.

A CPU goes through the same code with `benchmarks.emulation`. The numbers are the requirement's, not the code's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.bf16_weights import errors
from benchmarks.emulation import weights_as_on_a_gpu
from simreg_megatron.kernels import halves, tiled
from simreg_megatron.losses import simreg_loss
from tests.helpers.fixtures import random_tokens
from tests.helpers.ways import budget, one_side_only

SHORT = [(64, 256), (64, 8192), (128, 1024), (256, 512), (256, 4096), (511, 512), (512, 1024), (1023, 1024)]
LONG = [(512, 8192), (1024, 2048), (1024, 4096), (2048, 2048)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("length", "width"), [*SHORT, *(pytest.param(*size, marks=pytest.mark.slow) for size in LONG)])
def test_within_the_bound(length: int, width: int, dtype: torch.dtype) -> None:
    assert errors(length, width, dtype)["error"] < 3e-4


@pytest.mark.parametrize(("length", "width"), [(64, 256), (511, 512), (256, 1024), (64, 4096)])
def test_one_number_a_weight_is_outside_where_two_are_chosen(length: int, width: int) -> None:
    found = errors(length, width, torch.bfloat16)
    assert found["one number"] > 3e-4 and found["two numbers"] < 1e-5 and found["chosen"] == 2


def test_one_number_a_weight_is_enough_for_the_default_chunks_of_a_7b_model() -> None:
    assert halves.numbers_per_weight(1024, 4096, by_document=False) == 1
    assert halves.kept_dtype(1024, 4096, by_document=False) == torch.bfloat16
    for length, width in ((1023, 4096), (1024, 2048), (1 << 20, 512)):
        assert halves.numbers_per_weight(length, width, by_document=False) == 2
        assert halves.kept_dtype(length, width, by_document=False) in (None, torch.float32)


@pytest.mark.slow
def test_documents_are_as_short_as_they_may_be() -> None:
    found = errors(1024, 4096, torch.bfloat16, by_document=True)
    assert found["one number"] > 3e-4 > found["error"]


WAYS = ["kept", "both sides", "panels"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("chunk_size", [0, 7])
def test_every_way_through_the_code_for_tensor_cores(
    way: str, dtype: torch.dtype, chunk_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged tiles, masked tokens that hold anything, documents; float64 shows that nothing else is rounded."""
    monkeypatch.setitem(tiled.TILE, "cpu", 5)
    monkeypatch.setattr(halves, "kept_dtype", lambda *_: torch.float64 if dtype == torch.float64 else torch.float32)
    if way != "kept":
        budget(monkeypatch, kept=0)
    if way == "panels":
        one_side_only(monkeypatch)
    rows, labels = random_tokens((3, 29, 6), num_labels=5, seed=4, dtype=dtype)
    valid = torch.rand(labels.shape, generator=torch.Generator().manual_seed(1)) < 0.7
    options = {"valid": valid, "documents": torch.arange(29).div(9, rounding_mode="floor").expand(3, 29)}
    options |= {"temperature": 0.05, "chunk_size": chunk_size}
    exact = gradient(rows.double(), labels, impl="reference", **options)
    with weights_as_on_a_gpu():
        found = gradient(rows.masked_fill(~valid.unsqueeze(-1), torch.nan), labels, impl="tiled", **options)
    assert not found[~valid].any()
    rounding = 0 if dtype == torch.float64 else torch.finfo(dtype).eps / 2
    distance = float((found.double() - exact).norm() / exact.norm())
    assert distance < 2e-5 + rounding
    if dtype == torch.float64:
        assert distance > 1e-8, "the weights were rounded"


def gradient(rows: Tensor, labels: Tensor, **options: Any) -> Tensor:
    rows = rows.detach().clone().requires_grad_()
    return torch.autograd.grad(simreg_loss(rows, labels, **options), rows)[0]
