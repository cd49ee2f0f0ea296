# SPDX-License-Identifier: Apache-2.0
"""simreg_loss against independently computed numbers on the fixture F1, to every printed digit."""

import math
from decimal import Decimal

import pytest
import torch
from torch import Tensor

from simreg_megatron.losses import simreg_loss
from tests.helpers.fixtures import fixture_f1
from tests.helpers.quick import quick

MASKED = (3, 8, 9)


def mask() -> Tensor:
    valid = torch.ones(12, dtype=torch.bool)
    valid[list(MASKED)] = False
    return valid


pytestmark = pytest.mark.usefixtures("every_impl")
WHOLE_TILES = pytest.mark.parametrize("every_impl", ["reference", "tiled"], indirect=True)  # tiles of 3 were 100,000
REFERENCE_ALONE = pytest.mark.parametrize("every_impl", ["reference"], indirect=True)  # nothing depends on the form


Tokens = tuple[Tensor, Tensor]


@pytest.fixture(params=[torch.float64, torch.float32], ids=["float64", "float32"])
def f1(request: pytest.FixtureRequest) -> Tokens:
    return fixture_f1(request.param)


def assert_prints(value: Tensor | float, printed: str, *, size: float | None = None) -> None:
    """The value rounds to the printed digits; a float32 may be off by 2e-5 of itself, or of `size`: exp(cos / 0.01)."""
    unit = 10.0 ** Decimal(printed).as_tuple().exponent
    slack = 0.501 * unit
    if isinstance(value, Tensor) and value.dtype == torch.float32:
        slack += 2e-5 * (size or abs(float(printed)))
    assert abs(float(value) - float(printed)) <= slack, f"{float(value):.10g} is not {printed}"


def gradient(embeddings: Tensor, labels: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    embeddings = embeddings.clone().requires_grad_()
    loss = simreg_loss(embeddings, labels, **options)
    loss.backward()
    return loss.detach(), embeddings.grad


SR1_AND_SR2 = [
    (1.0, "1.362537", "0.542993"),
    (0.1, "0.200631", "0.0475045"),
    (0.05, "0.0708230", "0.0132570"),
    (0.01, "2.758136e-4", "2.921417e-5"),
]


@pytest.mark.parametrize(("temperature", "summed", "averaged"), SR1_AND_SR2)
def test_sr1_sr2_whole_sequence(temperature: float, summed: str, averaged: str, f1: Tokens) -> None:
    rows, labels = f1
    assert_prints(simreg_loss(rows, labels, temperature=temperature), summed)
    assert_prints(simreg_loss(rows, labels, temperature=temperature, group_reduce="mean"), averaged)


SR4 = [
    (6, "token", "0.167760"),
    (6, "pos-neg-ratio", "0.0864303"),
    (6, "neg-pos-ratio", "0.249089"),
    (6, "count-corrected", "0.245277"),
    (4, "token", "0.0845489"),
    (4, "count-corrected", "0.153449"),
]


@pytest.mark.parametrize(("chunk_size", "chunk_weight", "printed"), SR4)
def test_sr4_chunks(chunk_size: int, chunk_weight: str, printed: str, f1: Tokens) -> None:
    rows, labels = f1
    options = {"temperature": 0.1, "chunk_size": chunk_size, "chunk_weight": chunk_weight}
    assert_prints(simreg_loss(rows, labels, **options), printed)
    terms = simreg_loss(rows, labels, reduction="none", **options)
    assert_prints(terms.sum() / 12, printed)
    assert_prints(simreg_loss(rows, labels, reduction="sum", **options) / 12, printed)


@pytest.mark.parametrize("target", [1e-5, 1e-2])
def test_sr9_float32_keeps_small_losses(target: float) -> None:
    """Two tokens at the angle whose loss is the target; two log-sums of size 100, subtracted, miss it."""
    temperature = 0.01
    cosine = 1.0 + temperature * math.log(math.expm1(target))
    rows = torch.tensor([[1.0, 0.0], [cosine, math.sqrt(1.0 - cosine**2)]])
    loss = simreg_loss(rows, torch.tensor([0, 1]), temperature=temperature)
    assert loss.dtype == torch.float32
    assert abs(loss.item() / target - 1) < 1e-5

    unshifted = torch.tensor([1.0, cosine]) / temperature
    naive = unshifted.logsumexp(0) - unshifted[0]
    assert abs(naive.item() / target - 1) > 1e-4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("num_tokens", "printed"),
    [pytest.param(4096, "8.317766", marks=pytest.mark.slow), (2048, "7.624619"), (1024, "6.931472")],
)
@WHOLE_TILES
def test_sr10_identical_embeddings(num_tokens: int, printed: str, dtype: torch.dtype) -> None:
    rows = torch.ones(num_tokens, 2, dtype=dtype)
    assert_prints(simreg_loss(rows, torch.arange(num_tokens), temperature=0.01), printed)


@pytest.mark.parametrize("every_impl", quick(["reference", "tiled"], lambda impl: impl == "tiled"), indirect=True)
def test_sr10_orthogonal_classes_reach_denormals() -> None:
    rows, labels = torch.eye(2048), torch.arange(2048)
    assert_prints(simreg_loss(rows.double(), labels, temperature=0.01), "7.615e-41")
    assert_prints(simreg_loss(rows, labels, temperature=0.1), "0.0888655")


def test_sr10_denormal_loss_has_a_finite_gradient() -> None:
    rows, labels = torch.eye(64), torch.arange(64)  # processors are slow with such numbers
    loss, grad = gradient(rows, labels, temperature=0.01)
    assert 0 <= loss < 1e-40
    assert torch.isfinite(grad).all()
    assert grad.abs().max() < 1e-30


@REFERENCE_ALONE
def test_sr12_learnable(f1: Tokens) -> None:
    scalars = tuple(torch.zeros(1, dtype=f1[0].dtype, requires_grad=True) for _ in range(2))
    loss = simreg_loss(*f1, temperature=1.0, similarity="learnable", exponents=scalars)
    assert_prints(loss.detach(), "1.217480")
    for grad, printed in zip(torch.autograd.grad(loss, scalars), ("0.0524904", "0.0414949"), strict=True):
        assert_prints(grad[0], printed)


SR5 = [
    ({"temperature": 0.1}, "0.137284"),
    ({"temperature": 0.01}, "2.688101e-5"),
    ({"temperature": 0.1, "chunk_size": 6}, "0.104497"),
    ({"temperature": 0.1, "chunk_size": 6, "chunk_weight": "uniform"}, "0.115838"),
    ({"temperature": 0.1, "chunk_size": 6, "chunk_weight": "pos-neg-ratio"}, "0.0618048"),
    ({"temperature": 0.1, "chunk_size": 6, "chunk_weight": "neg-pos-ratio"}, "0.169870"),
]


@pytest.mark.parametrize(("options", "printed"), SR5)
def test_sr5_masked_tokens_have_no_role(options: dict, printed: str, f1: Tokens) -> None:
    rows, labels = f1
    loss, grad = gradient(rows, labels, valid=mask(), **options)
    assert_prints(loss, printed)
    assert torch.equal(grad[list(MASKED)], torch.zeros(3, 6, dtype=rows.dtype))

    other_rows, other_labels = rows.clone(), labels.clone()
    other_rows[list(MASKED)] = torch.tensor([math.nan, math.inf, -3.0], dtype=rows.dtype).unsqueeze(1)
    other_labels[list(MASKED)] = torch.tensor([5, 2, -100])
    changed, changed_grad = gradient(other_rows, other_labels, valid=mask(), **options)
    assert torch.equal(changed, loss)
    assert torch.equal(changed_grad, grad)


@pytest.mark.parametrize(("temperature", "norm"), [(1.0, "0.136323"), (0.1, "0.215845"), (0.01, "7.968333e-3")])
def test_sr6_gradient_norm(temperature: float, norm: str, f1: Tokens) -> None:
    rows, labels = f1
    _, grad = gradient(rows, labels, temperature=temperature)
    assert_prints(grad.norm(), norm)


@pytest.mark.parametrize(("prefix", "printed"), [(2, "1.047967"), (4, "0.466405"), (6, "0.200631")])
def test_sr15_prefixes(prefix: int, printed: str, f1: Tokens) -> None:
    rows, labels = f1
    assert_prints(simreg_loss(rows[:, :prefix], labels, temperature=0.1), printed)
