# SPDX-License-Identifier: Apache-2.0
"""Promises of the tiled form beyond the reference's values, which the tests of SimReg hold: memory, half precision."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import peak_bytes
from simreg_megatron.kernels import torch as tiles
from simreg_megatron.kernels.contrast import Tokens
from simreg_megatron.losses import simreg_loss
from simreg_megatron.losses.simreg import load_kernels
from tests.gpu.tf32 import apart
from tests.helpers.fixtures import random_tokens
from tests.helpers.ways import kept_bytes, limit, small_regions

WIDTH = 64


def clustered(num_tokens: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Unequal norms, and a loss of some 1e-7 at tau 0.01: hidden states late in training."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 40, (num_tokens,), generator=generator)
    centres = torch.randn(40, WIDTH, generator=generator) + 1.5
    rows = centres[labels] + 0.6 * torch.randn(num_tokens, WIDTH, generator=generator)
    return (scale * rows * torch.rand(num_tokens, 1, generator=generator).add(0.5)).to(dtype), labels


def value_and_gradient(rows: Tensor, labels: Tensor, loss_scale: float = 1.0, **options: Any) -> tuple[Tensor, Tensor]:
    rows = rows.detach().clone().requires_grad_()
    loss = simreg_loss(rows, labels, **options)
    (loss * loss_scale).backward()
    return loss.detach(), rows.grad


def saved_bytes(num_tokens: int, impl: str) -> int:
    """Kept between forward and backward, without what is there anyway: embeddings and labels."""
    rows, labels = clustered(num_tokens)
    rows.requires_grad_()
    return kept_bytes(lambda: simreg_loss(rows, labels, impl=impl), rows, labels)


def test_what_is_kept_grows_with_the_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert saved_bytes(4000, "tiled") / 4000 < 32, "more pairs than may be kept"
    limit(monkeypatch, saved=0)
    per_token = {n: saved_bytes(n, "tiled") / n for n in (500, 2000)}
    assert per_token[500] == pytest.approx(per_token[2000], rel=0.05)
    assert per_token[2000] < 32
    assert saved_bytes(2000, "reference") / 2000 > 100 * per_token[2000]


@pytest.mark.slow
def test_inside_a_compiled_model() -> None:
    rows, labels = clustered(60)
    layer = torch.nn.Linear(WIDTH, WIDTH)

    def model(given: Tensor) -> Tensor:
        return simreg_loss(layer(given), labels, temperature=0.1, chunk_size=25, impl="tiled")

    losses, grads = [], []
    for run in (model, torch.compile(model, backend="aot_eager")):
        layer.zero_grad()
        loss = run(rows)
        loss.backward()
        losses.append(loss.detach())
        grads.append(layer.weight.grad.clone())
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-9)


WAYS = ["kept", "both sides", "regions"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("chunk_size", [0, 7])
def test_every_way_back(way: str, dtype: torch.dtype, chunk_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged tiles, masked tokens that hold anything, documents."""
    limit(monkeypatch, side=5)
    if way != "kept":
        limit(monkeypatch, saved=0)
    if way == "regions":
        small_regions(monkeypatch)
    rows, labels = random_tokens((3, 29, 6), num_labels=5, seed=4, dtype=dtype)
    valid = torch.rand(labels.shape, generator=torch.Generator().manual_seed(1)) < 0.7
    options = {"valid": valid, "documents": torch.arange(29).div(9, rounding_mode="floor").expand(3, 29)}
    options |= {"temperature": 0.05, "chunk_size": chunk_size}
    exact_loss, exact = value_and_gradient(rows.double(), labels, impl="reference", **options)
    given = rows.masked_fill(~valid.unsqueeze(-1), torch.nan)
    loss, found = value_and_gradient(given, labels, impl="tiled", **options)
    assert not found[~valid].any()
    assert apart(found, exact) < (1e-12 if dtype == torch.float64 else 2e-5 + torch.finfo(dtype).eps / 2)
    assert apart(loss, exact_loss) < (1e-12 if dtype == torch.float64 else 2e-5)


@pytest.mark.parametrize("together", [2, 3])
def test_what_is_kept_is_found_again(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank with a part of a chunk: its own tile and the rest, of some of the sequences at a time."""
    rows, labels = random_tokens((4, 16, 64), num_labels=5, seed=4)
    tokens = Tokens(*(part.unsqueeze(1) for part in (rows.bfloat16(), labels, labels >= 0)), None)
    work = next(size for size in range(1, 1 << 20, 256) if _together(tokens.rows, size, monkeypatch) == together)
    limit(monkeypatch, work=work)
    grads = []
    form = load_kernels("tiled")
    for keep in (True, False):
        _, slopes, saved = form.forward(tokens, (0, 8), 0.1, save=keep)
        assert saved.pairs.numel() == (4 * 8 * 16 if keep else 0)
        grads.append(torch.empty_like(tokens.rows[:, :, :8]))
        form.backward(tokens.rows, saved, torch.nn.functional.pad(slopes, (0, 8)), (0, 8), 0.1, grads[-1])
    torch.testing.assert_close(*grads)


def _together(rows: Tensor, work: int, monkeypatch: pytest.MonkeyPatch) -> int:
    limit(monkeypatch, work=work)
    return tiles.plan_for(rows, (0, 8), by_document=False).chunks_at_once


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [300, 1000])
def test_close_to_float64(dtype: torch.dtype, num_tokens: int) -> None:
    rows, labels = clustered(num_tokens, dtype)
    loss_scale = 2.0**24  # in float16 the gradient of so small a loss would be 0
    expected_loss, expected_grad = value_and_gradient(rows.double(), labels, loss_scale, impl="reference")
    loss, grad = value_and_gradient(rows, labels, loss_scale, impl="tiled")
    assert 1e-9 < expected_loss < 1e-4, "the regime that SimReg reaches"
    assert apart(loss, expected_loss) < 2e-5
    rounding = torch.finfo(dtype).eps / 2
    assert apart(grad, expected_grad) < 2e-5 + rounding, "its own error, and one rounding to the type of the input"


def test_the_known_wrong_ways_fall_outside() -> None:
    """In float32 the log-sum of all less that of the positives loses the loss; bfloat16 unit rows lose the gradient."""
    rows, labels = clustered(1000)
    exact = simreg_loss(rows.double(), labels, impl="reference")
    unit = F.normalize(rows, dim=-1)
    logits = unit @ unit.T / 0.01
    positives = logits.masked_fill(labels[:, None] != labels, -torch.inf).logsumexp(-1)
    assert apart((logits.logsumexp(-1) - positives).mean(), exact) > 0.5
    _, grad = value_and_gradient(F.normalize(rows.bfloat16(), dim=-1), labels, impl="tiled")
    _, of_unit = value_and_gradient(unit.double(), labels, impl="reference")
    assert apart(grad, of_unit) > 1e-2


@pytest.mark.parametrize("chunk_size", [0, 64])
def test_the_workspace_is_bounded(chunk_size: int) -> None:
    """At the peak: the gradient, what is kept of each token, and tiles."""
    rows, labels = clustered(4096)
    bound = rows.nbytes + (64 << 20)
    assert peak_bytes(lambda: value_and_gradient(rows, labels, impl="tiled", chunk_size=chunk_size)) < bound
    if chunk_size == 0:
        assert peak_bytes(lambda: value_and_gradient(rows, labels, impl="reference")) > 5 * bound
