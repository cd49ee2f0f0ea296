# SPDX-License-Identifier: Apache-2.0
"""At most 256 MiB without the inputs and the gradient, up to 131,072 tokens: tensors are counted, not computed."""

from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.cases import hidden_states
from benchmarks.fake_autograd import backward
from benchmarks.fake_ranks import LiveBytes
from benchmarks.measure import peak_bytes
from simreg_megatron.losses import geometry, simreg_loss
from simreg_megatron.losses.geometry import norm_table, pair_cosines
from tests.helpers.fixtures import random_tokens

MIB = 1 << 20
slow = pytest.mark.slow


def predicted_bytes(
    batch: int, length: int, width: int, *, chunk_size: int, dtype: torch.dtype, device: str, impl: str = "tiled"
) -> int:
    """Return the peak memory, without inputs and gradient, of a forward and backward of the loss, without computing it.

    Every tile is gone through with tensors that have no memory, so this counts what the code asks for.
    """
    with FakeTensorMode():
        rows = torch.empty(batch, length, width, dtype=dtype, device=device, requires_grad=True)
        labels = torch.empty(batch, length, dtype=torch.int64, device=device)
        with LiveBytes() as live:
            loss = simreg_loss(rows, labels, chunk_size=chunk_size, impl=impl)
            backward(loss, torch.ones_like(loss))
    return live.most - rows.nbytes


SIZES = [
    ((2, 2048, 4096, 1024), "cuda", torch.bfloat16),  # the default of a 7B model
    pytest.param((1, 8192, 4096, 0), "cuda", torch.bfloat16, marks=slow),
    pytest.param((1, 8192, 8192, 0), "cuda", torch.float32, marks=slow),
    pytest.param((16, 2048, 1024, 1024), "cuda", torch.float16, marks=slow),
    pytest.param((1, 131072, 4096, 1024), "cuda", torch.bfloat16, marks=slow),
    pytest.param((1, 131072, 4096, 0), "cuda", torch.bfloat16, marks=slow),
    pytest.param((1, 131072, 512, 1024), "cpu", torch.float32, marks=slow),
    pytest.param((1, 32768, 512, 0), "cpu", torch.bfloat16, marks=slow),
]


@pytest.mark.parametrize(("size", "device", "dtype"), SIZES)
def test_at_most_256_mib(size: tuple[int, int, int, int], device: str, dtype: torch.dtype) -> None:
    batch, length, width, chunk = size
    counted = predicted_bytes(batch, length, width, chunk_size=chunk, dtype=dtype, device=device)
    assert counted <= (256 if device == "cuda" else 64) * MIB


@pytest.mark.parametrize("chunk", [pytest.param(0, marks=slow), 300])
def test_what_is_counted_is_what_a_cpu_takes(chunk: int) -> None:
    """But for what operators take for themselves, and what the engine of autograd gives back earlier."""
    counted = predicted_bytes(1, 2400, 256, chunk_size=chunk, dtype=torch.float32, device="cpu")
    rows, labels = hidden_states(1, 2400, 256, torch.float32, "cpu")
    rows.requires_grad_()
    measured = peak_bytes(lambda: torch.autograd.grad(simreg_loss(rows, labels, chunk_size=chunk, impl="tiled"), rows))
    assert abs(measured - rows.nbytes - counted) < 2 * MIB


@pytest.mark.parametrize("shape", [(1, 2048, 1024), (2048, 1, 1024), (64, 32, 1024)], ids=str)
@pytest.mark.parametrize("measure", ["norms", "cosines"])
def test_a_log_step_takes_little_memory_next_to_the_states(measure: str, shape: tuple[int, ...], monkeypatch) -> None:
    """Copies in float32 and float64 of all hidden states of a micro-batch would be six times as large as they are."""
    monkeypatch.setitem(geometry.AT_ONCE, "cpu", MIB)
    monkeypatch.setitem(geometry._WORKSPACE, "cpu", MIB)
    rows, labels = random_tokens(shape, num_labels=9, dtype=torch.bfloat16)
    counts = torch.ones(shape[:-1], dtype=torch.bool)
    cosines = measure == "cosines"

    def measured() -> torch.Tensor:
        return torch.stack(pair_cosines(rows, labels, chunk_size=32)) if cosines else norm_table(rows, counts)

    assert peak_bytes(measured) < 1.2 * rows.nbytes  # 4 MiB
    found = measured()
    monkeypatch.undo()
    assert torch.allclose(found, measured(), rtol=1e-12, atol=0)


TRITON_SIZES = [
    ((16, 2048, 1024, 1024), 1024 * 2),  # bytes: the pairs of a chunk in bfloat16
    ((2, 2048, 4096, 1024), 1024 * 2),
    ((1, 8192, 4096, 0), 8192 * 2),
    pytest.param((1, 131072, 512, 0), 8192 * 2, marks=slow),  # 8192 rows at a time
]


@pytest.mark.parametrize(("size", "per_token"), TRITON_SIZES, ids=str)
def test_triton_takes_a_share_of_the_logits(size: tuple[int, ...], per_token: int) -> None:
    triton = pytest.importorskip("simreg_megatron.kernels.triton", reason="Triton is not installed")
    batch, length, width, chunk = size
    options = {"chunk_size": chunk, "dtype": torch.bfloat16, "device": "cuda", "impl": "triton"}
    fakes = {"run": lambda *given, **constants: None, "_gpu": lambda _: (132, 9)}
    with mock.patch.multiple(triton, **fakes):
        counted = predicted_bytes(batch, length, width, **options)
    logits = batch * length * 32000 * (2 + 4)
    assert batch * length * per_token < counted < batch * length * (per_token + 512) + 80 * MIB
    assert counted < logits / 8
