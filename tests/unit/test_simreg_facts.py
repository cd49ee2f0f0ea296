# SPDX-License-Identifier: Apache-2.0
"""simreg_loss against independently computed numbers on the fixture F1, to every printed digit."""

import math
from decimal import Decimal

import pytest
import torch
from torch import Tensor

from simreg_megatron.losses import simreg_loss
from tests.helpers.fixtures import fixture_f1

pytestmark = pytest.mark.usefixtures("every_impl")

MASKED = (3, 8, 9)


def assert_prints(value: Tensor | float, printed: str) -> None:
    """The value rounds to the printed digits: it lies within half a unit of the last one."""
    unit = 10.0 ** Decimal(printed).as_tuple().exponent
    assert abs(float(value) - float(printed)) <= 0.501 * unit, f"{float(value):.10g} is not {printed}"


def gradient(embeddings: Tensor, labels: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    embeddings = embeddings.clone().requires_grad_()
    loss = simreg_loss(embeddings, labels, **options)
    loss.backward()
    return loss.detach(), embeddings.grad


def log_ratio(terms: Tensor) -> Tensor:
    """L_i from the term softplus(L_i)."""
    return torch.expm1(terms).log()


def mask() -> Tensor:
    valid = torch.ones(12, dtype=torch.bool)
    valid[list(MASKED)] = False
    return valid


def test_fixture_matches_its_check_values() -> None:
    rows, labels = fixture_f1()
    assert_prints(rows.sum(), "32.392653")
    assert_prints(rows.square().sum(), "37.210621")
    last_row = ["0.824462", "1.357333", "0.879990", "0.877649", "1.646605", "1.054817"]
    for value, printed in zip(rows[11], last_row, strict=True):
        assert_prints(value, printed)
    assert labels.bincount().tolist() == [0, 1, 3, 1, 0, 4, 0, 2, 0, 1]


@pytest.mark.parametrize(
    ("temperature", "summed", "averaged"),
    [
        (1.0, "1.362537", "0.542993"),
        (0.1, "0.200631", "0.0475045"),
        (0.05, "0.0708230", "0.0132570"),
        (0.01, "2.758136e-4", "2.921417e-5"),
    ],
)
def test_sr1_sr2_whole_sequence(temperature: float, summed: str, averaged: str) -> None:
    rows, labels = fixture_f1()
    assert_prints(simreg_loss(rows, labels, temperature=temperature), summed)
    assert_prints(simreg_loss(rows, labels, temperature=temperature, group_reduce="mean"), averaged)


def test_sr1_every_token() -> None:
    printed = (
        "-5.716021 -5.079352 -2.735943 -2.818232 -3.154026 -1.881868 -0.565066 -1.996837 -0.419938 "
        "-2.523949 -0.768778 -0.302365"
    )
    ratios = log_ratio(simreg_loss(*fixture_f1(), temperature=0.1, reduction="none"))
    for value, text in zip(ratios, printed.split(), strict=True):
        assert_prints(value, text)


@pytest.mark.parametrize(("temperature", "printed"), [(0.1, "2.526129"), (0.01, "19.197807")])
def test_sr3_without_the_token_itself(temperature: float, printed: str) -> None:
    rows, labels = fixture_f1()
    options = {"temperature": temperature, "self_positive": "never"}
    assert_prints(simreg_loss(rows, labels, **options), printed)
    terms = simreg_loss(rows, labels, reduction="none", **options)
    assert (terms == 0).nonzero().flatten().tolist() == [6, 8, 11], "the three single labels have no term"


@pytest.mark.parametrize(
    ("chunk_size", "chunk_weight", "printed"),
    [
        (6, "token", "0.167760"),
        (6, "uniform", "0.167760"),
        (6, "pos-neg-ratio", "0.0864303"),
        (6, "neg-pos-ratio", "0.249089"),
        (6, "count-corrected", "0.245277"),
        (4, "token", "0.0845489"),
        (4, "pos-neg-ratio", "0.0668410"),
        (4, "neg-pos-ratio", "0.0991772"),
        (4, "count-corrected", "0.153449"),
    ],
)
def test_sr4_chunks(chunk_size: int, chunk_weight: str, printed: str) -> None:
    rows, labels = fixture_f1()
    options = {"temperature": 0.1, "chunk_size": chunk_size, "chunk_weight": chunk_weight}
    assert_prints(simreg_loss(rows, labels, **options), printed)
    terms = simreg_loss(rows, labels, reduction="none", **options)
    assert_prints(terms.sum() / 12, printed)
    assert_prints(simreg_loss(rows, labels, reduction="sum", **options) / 12, printed)


@pytest.mark.parametrize(
    ("chunk_size", "means", "at_low_temperature"),
    [
        (6, ["0.0118786", "0.323641"], "2.758135e-4"),
        (4, ["0.000436252", "0.0158285", "0.237382"], "2.016061e-5"),
    ],
)
def test_sr4_mean_of_each_chunk(chunk_size: int, means: list[str], at_low_temperature: str) -> None:
    rows, labels = fixture_f1()
    terms = simreg_loss(rows, labels, temperature=0.1, chunk_size=chunk_size, reduction="none")
    for chunk, printed in zip(terms.split(chunk_size), means, strict=True):
        assert_prints(chunk.mean(), printed)
    assert_prints(simreg_loss(rows, labels, temperature=0.01, chunk_size=chunk_size), at_low_temperature)


def test_sr4_one_token_alone_has_no_loss() -> None:
    rows, labels = fixture_f1()
    loss, grad = gradient(rows.unsqueeze(1), labels.unsqueeze(1), temperature=0.1)
    assert loss == 0.0
    assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        ({"temperature": 0.1}, "0.137284"),
        ({"temperature": 0.01}, "2.688101e-5"),
        ({"temperature": 0.1, "chunk_size": 6}, "0.104497"),
        ({"temperature": 0.1, "chunk_size": 6, "chunk_weight": "uniform"}, "0.115838"),
        ({"temperature": 0.1, "chunk_size": 6, "chunk_weight": "pos-neg-ratio"}, "0.0618048"),
        ({"temperature": 0.1, "chunk_size": 6, "chunk_weight": "neg-pos-ratio"}, "0.169870"),
    ],
)
def test_sr5_masked_tokens_have_no_role(options: dict, printed: str) -> None:
    rows, labels = fixture_f1()
    loss, grad = gradient(rows, labels, valid=mask(), **options)
    assert_prints(loss, printed)
    assert torch.equal(grad[list(MASKED)], torch.zeros(3, 6, dtype=torch.float64))

    other_rows, other_labels = rows.clone(), labels.clone()
    other_rows[list(MASKED)] = torch.tensor([math.nan, math.inf, -3.0], dtype=torch.float64).unsqueeze(1)
    other_labels[list(MASKED)] = torch.tensor([5, 2, -100])
    changed, changed_grad = gradient(other_rows, other_labels, valid=mask(), **options)
    assert torch.equal(changed, loss)
    assert torch.equal(changed_grad, grad)


def test_sr5_negative_labels_mask_too() -> None:
    rows, labels = fixture_f1()
    ignored = labels.masked_fill(~mask(), -100)
    assert_prints(simreg_loss(rows, ignored, temperature=0.1), "0.137284")
    one_class = labels.masked_fill(~mask(), 100)
    assert abs(simreg_loss(rows, one_class, temperature=0.1) - 0.137284) > 1e-3


@pytest.mark.parametrize(("temperature", "norm"), [(1.0, "0.136323"), (0.1, "0.215845"), (0.01, "7.968333e-3")])
def test_sr6_gradient_norm(temperature: float, norm: str) -> None:
    rows, labels = fixture_f1()
    _, grad = gradient(rows, labels, temperature=temperature)
    assert_prints(grad.norm(), norm)
    assert (grad * rows).sum(dim=1).abs().max() < 1e-15, "SimReg turns rows, it does not stretch them"


def test_sr6_gradient_rows() -> None:
    _, grad = gradient(*fixture_f1(), temperature=0.1)
    row0 = "6.571026e-4 2.415395e-4 -1.623999e-6 1.009601e-4 7.624571e-4 -3.439303e-4"
    row8 = "-7.578527e-4 2.326154e-2 4.473393e-2 -2.675549e-3 2.112916e-2 -7.705244e-2"
    for row, printed in ((0, row0), (8, row8)):
        for value, text in zip(grad[row], printed.split(), strict=True):
            assert_prints(value, text)


def test_sr7_gradient_shrinks_as_rows_grow() -> None:
    rows, labels = fixture_f1()
    loss, grad = gradient(rows, labels, temperature=0.1)
    scaled_loss, scaled_grad = gradient(rows * 3.0, labels, temperature=0.1)
    torch.testing.assert_close(scaled_loss, loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(scaled_grad, grad / 3.0, rtol=1e-9, atol=1e-16)


def test_sr8_sequences_of_a_batch_never_meet() -> None:
    rows, labels = fixture_f1()
    batch, batch_labels = torch.stack([rows, rows]), torch.stack([labels, labels.roll(1)])
    assert_prints(simreg_loss(rows, labels.roll(1), temperature=0.1), "0.206090")
    assert_prints(simreg_loss(batch, batch_labels, temperature=0.1), "0.203360")
    wrong = simreg_loss(batch.flatten(0, 1), batch_labels.flatten(), temperature=0.1)
    assert_prints(wrong, "0.848622")
    with pytest.raises(AssertionError):
        assert_prints(wrong, "0.203360")


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


@pytest.mark.parametrize(("num_tokens", "printed"), [(2048, "7.624619"), (1024, "6.931472")])
def test_sr10_identical_embeddings(num_tokens: int, printed: str, every_impl: str) -> None:
    if every_impl.endswith("of 3"):
        pytest.skip("a hundred thousand of them")
    rows = torch.ones(num_tokens, 2, dtype=torch.float64)
    assert_prints(simreg_loss(rows, torch.arange(num_tokens), temperature=0.01), printed)


def test_sr10_orthogonal_classes_reach_denormals(every_impl: str) -> None:
    if every_impl.endswith("of 3"):
        pytest.skip("a hundred thousand of them")
    rows, labels = torch.eye(2048), torch.arange(2048)
    assert_prints(simreg_loss(rows.double(), labels, temperature=0.01), "7.615e-41")
    assert_prints(simreg_loss(rows, labels, temperature=0.1), "0.0888655")


def test_sr10_denormal_loss_has_a_finite_gradient() -> None:
    rows, labels = torch.eye(256), torch.arange(256)
    loss, grad = gradient(rows, labels, temperature=0.01)
    assert 0 <= loss < 1e-40
    assert torch.isfinite(grad).all()
    assert grad.abs().max() < 1e-30


@pytest.mark.parametrize(("temperature", "printed"), [(1.0, "8.688466"), (0.1, "1.994170"), (0.01, "3.307397e-3")])
def test_sr11_gate(temperature: float, printed: str) -> None:
    """sigmoid(L_i) = 1 - exp(-R_i) is the share of a token's gradient that is still open."""
    terms = simreg_loss(*fixture_f1(), temperature=temperature, reduction="none")
    assert_prints(-torch.expm1(-terms).sum(), printed)


@pytest.mark.parametrize(
    ("similarity", "temperature", "printed", "norm"),
    [
        ("dot", 1.0, "1.088026", "0.409405"),
        ("dot", 0.1, "2.259387", "6.071989"),
        ("qnorm", 1.0, "1.255518", "0.256115"),
        ("qnorm", 0.1, "1.632009", "4.044924"),
        ("dnorm", 1.0, "1.208169", "0.200932"),
        ("dnorm", 0.1, "0.0802118", "0.238879"),
    ],
)
def test_sr12_other_similarities(similarity: str, temperature: float, printed: str, norm: str) -> None:
    loss, grad = gradient(*fixture_f1(), temperature=temperature, similarity=similarity)
    assert_prints(loss, printed)
    assert_prints(grad.norm(), norm)


def test_sr12_learnable() -> None:
    scalars = tuple(torch.zeros(1, dtype=torch.float64, requires_grad=True) for _ in range(2))
    loss = simreg_loss(*fixture_f1(), temperature=1.0, similarity="learnable", exponents=scalars)
    assert_prints(loss.detach(), "1.217480")
    for grad, printed in zip(torch.autograd.grad(loss, scalars), ("0.0524904", "0.0414949"), strict=True):
        assert_prints(grad[0], printed)


def test_sr12_dnorm_is_cosine_at_the_temperature_of_each_anchor() -> None:
    rows, labels = fixture_f1()
    terms = simreg_loss(rows, labels, temperature=0.1, similarity="dnorm", reduction="none")
    for i, row in enumerate(rows):
        temperature = 0.1 / row.norm().item()
        own = simreg_loss(rows, labels, temperature=temperature, reduction="none")[i]
        torch.testing.assert_close(own, terms[i], rtol=1e-10, atol=0)


@pytest.mark.parametrize(("prefix", "printed"), [(2, "1.047967"), (4, "0.466405"), (6, "0.200631")])
def test_sr15_prefixes(prefix: int, printed: str) -> None:
    rows, labels = fixture_f1()
    assert_prints(simreg_loss(rows[:, :prefix], labels, temperature=0.1), printed)


@pytest.mark.parametrize(("temperature", "printed", "rtol"), [(0.1, 0.20063061, 1e-6), (0.01, 2.758154e-4, 1e-5)])
def test_sr18_float32_is_close_to_float64(temperature: float, printed: float, rtol: float) -> None:
    exact, exact_grad = gradient(*fixture_f1(), temperature=temperature)
    loss, grad = gradient(*fixture_f1(torch.float32), temperature=temperature)
    assert grad.dtype == torch.float32
    torch.testing.assert_close(loss.double(), exact, rtol=rtol, atol=0)
    assert abs(loss.item() / printed - 1) < rtol
    assert (grad.double() - exact_grad).norm() < 10 * rtol * exact_grad.norm()
