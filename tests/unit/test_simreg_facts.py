# SPDX-License-Identifier: Apache-2.0
"""simreg_loss against independently computed numbers on the fixture F1, to every printed digit."""

import math
from decimal import Decimal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from simreg_megatron.losses import simreg_loss
from simreg_megatron.losses.similarity import unit_rows
from tests.helpers.fixtures import fixture_f1

pytestmark = pytest.mark.usefixtures("every_impl")
WHOLE_TILES = pytest.mark.parametrize("every_impl", ["reference", "tiled"], indirect=True)  # tiles of 3 were 100,000
REFERENCE_ALONE = pytest.mark.parametrize("every_impl", ["reference"], indirect=True)  # nothing depends on the form

MASKED = (3, 8, 9)


Tokens = tuple[Tensor, Tensor]


@pytest.fixture(params=[torch.float64, torch.float32], ids=["float64", "float32"])
def f1(request: pytest.FixtureRequest) -> Tokens:
    return fixture_f1(request.param)


def assert_prints(value: Tensor | float, printed: str, *, size: float | None = None) -> None:
    """The value rounds to the printed digits: it lies within half a unit of the last one.

    A float32 may also be off by 2e-5 of itself, or of `size`: a cosine is good to some 1e-7, an exponent at
    tau 0.01 therefore to 1e-5.
    """
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


def log_ratio(terms: Tensor) -> Tensor:
    """L_i from the term softplus(L_i)."""
    return torch.expm1(terms).log()


def slack_of(f1: Tokens, float64: float, float32: float) -> float:
    return float64 if f1[0].dtype == torch.float64 else float32


def mask() -> Tensor:
    valid = torch.ones(12, dtype=torch.bool)
    valid[list(MASKED)] = False
    return valid


@REFERENCE_ALONE
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
def test_sr1_sr2_whole_sequence(temperature: float, summed: str, averaged: str, f1: Tokens) -> None:
    rows, labels = f1
    assert_prints(simreg_loss(rows, labels, temperature=temperature), summed)
    assert_prints(simreg_loss(rows, labels, temperature=temperature, group_reduce="mean"), averaged)


def test_sr1_every_token(f1: Tokens) -> None:
    printed = (
        "-5.716021 -5.079352 -2.735943 -2.818232 -3.154026 -1.881868 -0.565066 -1.996837 -0.419938 "
        "-2.523949 -0.768778 -0.302365"
    )
    ratios = log_ratio(simreg_loss(*f1, temperature=0.1, reduction="none"))
    for value, text in zip(ratios, printed.split(), strict=True):
        assert_prints(value, text)


@pytest.mark.parametrize(("temperature", "printed"), [(0.1, "2.526129"), (0.01, "19.197807")])
def test_sr3_without_the_token_itself(temperature: float, printed: str, f1: Tokens) -> None:
    rows, labels = f1
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
def test_sr4_chunks(chunk_size: int, chunk_weight: str, printed: str, f1: Tokens) -> None:
    rows, labels = f1
    options = {"temperature": 0.1, "chunk_size": chunk_size, "chunk_weight": chunk_weight}
    assert_prints(simreg_loss(rows, labels, **options), printed)
    terms = simreg_loss(rows, labels, reduction="none", **options)
    assert_prints(terms.sum() / 12, printed)
    assert_prints(simreg_loss(rows, labels, reduction="sum", **options) / 12, printed)


@pytest.mark.parametrize(
    ("chunk_size", "means", "at_low_temperature"),
    [(6, ["0.0118786", "0.323641"], "2.758135e-4"), (4, ["0.000436252", "0.0158285", "0.237382"], "2.016061e-5")],
)
def test_sr4_mean_of_each_chunk(chunk_size: int, means: list[str], at_low_temperature: str, f1: Tokens) -> None:
    rows, labels = f1
    terms = simreg_loss(rows, labels, temperature=0.1, chunk_size=chunk_size, reduction="none")
    for chunk, printed in zip(terms.split(chunk_size), means, strict=True):
        assert_prints(chunk.mean(), printed)
    assert_prints(simreg_loss(rows, labels, temperature=0.01, chunk_size=chunk_size), at_low_temperature)


def test_sr4_one_token_alone_has_no_loss(f1: Tokens) -> None:
    rows, labels = f1
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


def test_sr5_negative_labels_mask_too(f1: Tokens) -> None:
    rows, labels = f1
    ignored = labels.masked_fill(~mask(), -100)
    assert_prints(simreg_loss(rows, ignored, temperature=0.1), "0.137284")
    one_class = labels.masked_fill(~mask(), 100)
    assert abs(simreg_loss(rows, one_class, temperature=0.1) - 0.137284) > 1e-3


@pytest.mark.parametrize(("temperature", "norm"), [(1.0, "0.136323"), (0.1, "0.215845"), (0.01, "7.968333e-3")])
def test_sr6_gradient_norm(temperature: float, norm: str, f1: Tokens) -> None:
    rows, labels = f1
    _, grad = gradient(rows, labels, temperature=temperature)
    assert_prints(grad.norm(), norm)
    radial = (grad * rows).sum(dim=1).abs().max()
    assert radial < slack_of(f1, 1e-15, 3e-7), "SimReg turns rows, it does not stretch them"


def test_sr6_gradient_rows(f1: Tokens) -> None:
    _, grad = gradient(*f1, temperature=0.1)
    row0 = "6.571026e-4 2.415395e-4 -1.623999e-6 1.009601e-4 7.624571e-4 -3.439303e-4"
    row8 = "-7.578527e-4 2.326154e-2 4.473393e-2 -2.675549e-3 2.112916e-2 -7.705244e-2"
    for row, printed in ((0, row0), (8, row8)):
        for value, text in zip(grad[row], printed.split(), strict=True):
            assert_prints(value, text, size=grad[row].norm().item())


@pytest.mark.parametrize(("temperature", "norm"), [(1.0, "0.0765548"), (0.1, "0.112563"), (0.01, "3.984167e-3")])
def test_sr6_the_gradient_reaches_keys_too(temperature: float, norm: str, f1: Tokens) -> None:
    """With keys held fixed, which is not offered, it would be half as long."""
    rows, labels = f1
    anchors = rows.clone().requires_grad_()
    logits = F.normalize(anchors, dim=1) @ F.normalize(rows, dim=1).T / temperature
    same = labels[:, None] == labels
    sums = [logits.masked_fill(~members, -math.inf).logsumexp(1) for members in (~same, same)]
    F.softplus(sums[0] - sums[1]).mean().backward()
    assert_prints(anchors.grad.norm(), norm, size=30 * float(norm))  # two sums of 100 are subtracted at tau 0.01
    _, grad = gradient(rows, labels, temperature=temperature)
    assert grad.norm() > 1.7 * anchors.grad.norm()


def test_sr7_gradient_shrinks_as_rows_grow(f1: Tokens) -> None:
    rows, labels = f1
    loss, grad = gradient(rows, labels, temperature=0.1)
    scaled_loss, scaled_grad = gradient(rows * 3.0, labels, temperature=0.1)
    torch.testing.assert_close(scaled_loss, loss, rtol=slack_of(f1, 1e-12, 1e-5), atol=0)
    torch.testing.assert_close(scaled_grad, grad / 3.0, rtol=slack_of(f1, 1e-9, 1e-4), atol=slack_of(f1, 1e-16, 1e-6))


def test_sr8_sequences_of_a_batch_never_meet(f1: Tokens) -> None:
    rows, labels = f1
    batch, batch_labels = torch.stack([rows, rows]), torch.stack([labels, labels.roll(1)])
    assert_prints(simreg_loss(rows, labels.roll(1), temperature=0.1), "0.206090")
    assert_prints(simreg_loss(batch, batch_labels, temperature=0.1), "0.203360")
    wrong = simreg_loss(batch.flatten(0, 1), batch_labels.flatten(), temperature=0.1)
    assert_prints(wrong, "0.848622")
    with pytest.raises(AssertionError, match=r"is not 0\.203360"):
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("num_tokens", "printed"),
    [pytest.param(4096, "8.317766", marks=pytest.mark.slow), (2048, "7.624619"), (1024, "6.931472")],
)
@WHOLE_TILES
def test_sr10_identical_embeddings(num_tokens: int, printed: str, dtype: torch.dtype) -> None:
    rows = torch.ones(num_tokens, 2, dtype=dtype)
    assert_prints(simreg_loss(rows, torch.arange(num_tokens), temperature=0.01), printed)


@WHOLE_TILES
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


@pytest.mark.parametrize(("temperature", "printed"), [(1.0, "8.688466"), (0.1, "1.994170"), (0.01, "3.307397e-3")])
def test_sr11_gate(temperature: float, printed: str, f1: Tokens) -> None:
    """sigmoid(L_i) = 1 - exp(-R_i) is the share of a token's gradient that is still open."""
    terms = simreg_loss(*f1, temperature=temperature, reduction="none")
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
@REFERENCE_ALONE
def test_sr12_other_similarities(similarity: str, temperature: float, printed: str, norm: str, f1: Tokens) -> None:
    loss, grad = gradient(*f1, temperature=temperature, similarity=similarity)
    assert_prints(loss, printed)
    assert_prints(grad.norm(), norm)


@REFERENCE_ALONE
def test_sr12_learnable(f1: Tokens) -> None:
    scalars = tuple(torch.zeros(1, dtype=f1[0].dtype, requires_grad=True) for _ in range(2))
    loss = simreg_loss(*f1, temperature=1.0, similarity="learnable", exponents=scalars)
    assert_prints(loss.detach(), "1.217480")
    for grad, printed in zip(torch.autograd.grad(loss, scalars), ("0.0524904", "0.0414949"), strict=True):
        assert_prints(grad[0], printed)


@REFERENCE_ALONE
def test_sr12_dnorm_is_cosine_at_the_temperature_of_each_anchor(f1: Tokens) -> None:
    rows, labels = f1
    terms = simreg_loss(rows, labels, temperature=0.1, similarity="dnorm", reduction="none")
    for i, row in enumerate(rows):
        temperature = 0.1 / row.norm().item()
        own = simreg_loss(rows, labels, temperature=temperature, reduction="none")[i]
        torch.testing.assert_close(own, terms[i], rtol=slack_of(f1, 1e-10, 2e-5), atol=0)


@pytest.mark.parametrize(("width", "printed"), [(1024, "12.756800"), (4096, "25.527631")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@REFERENCE_ALONE
def test_sr13_cosines_of_an_even_spread(width: int, printed: str, dtype: torch.dtype) -> None:
    """Their density at 0 and their mean square 1 / d, by which lambda grows (test_config): by formula and by draw."""
    at_0 = math.exp(math.lgamma(width / 2) - math.lgamma((width - 1) / 2)) / math.sqrt(math.pi)
    assert_prints(at_0, printed)
    generator = torch.Generator().manual_seed(0)
    rows = unit_rows(torch.randn(1000, width, generator=generator, dtype=dtype))
    cosines = (rows @ rows.T)[~torch.eye(1000, dtype=torch.bool)]
    assert cosines.square().mean().item() == pytest.approx(1 / width, rel=0.02)
    reach = 0.2 / math.sqrt(width)
    density = (cosines.abs() < reach).double().mean().item() / (2 * reach)
    assert density == pytest.approx(at_0, rel=0.03)


@REFERENCE_ALONE
def test_sr14_lemma_1(f1: Tokens) -> None:
    """The margin of each token lies between those of its two centres, but for sqrt(2) L times its distance from them.

    Centres are means over P_k and over N_k, weighted by exp(e_k . e_i); the head is linear, L its largest stretch.
    """
    rows, labels = f1
    head = torch.randn(10, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(rows.dtype)
    stretch = torch.linalg.matrix_norm(head, ord=2)

    def margin(states: Tensor) -> Tensor:
        logits = states @ head.T
        right = logits.gather(1, labels[:, None])
        return (right - logits.scatter(1, labels[:, None], -math.inf)).amin(dim=1)

    same, scores = labels[:, None] == labels, rows @ rows.T
    below, above = (scores.masked_fill(~members, -math.inf).softmax(dim=1) @ rows for members in (same, ~same))
    found = margin(rows)
    slack = slack_of(f1, 1e-12, 1e-5)  # a token alone in P_k is its own centre
    for share, holds in ((1.0, True), (0.1, False)):
        low = margin(below) - share * math.sqrt(2) * stretch * (rows - below).norm(dim=1)
        high = margin(above) + share * math.sqrt(2) * stretch * (rows - above).norm(dim=1)
        assert ((low <= found + slack) & (found <= high + slack)).all() == holds


def test_sr14_a_margin_lowers_the_bound_of_the_loss_and_not_the_loss_by_its_exponential() -> None:
    before, after = (math.log1p(math.exp(-margin)) for margin in (0.0, 1.0))
    assert_prints(before, "0.693147")
    assert_prints(after, "0.313262")
    assert_prints(before * math.exp(-1), "0.254995")
    assert after > before * math.exp(-1), "the source says at most"
    assert after <= (2 - 1) * math.exp(-1.0), "the bound (C - 1) exp(-margin)"


@pytest.mark.parametrize(("prefix", "printed"), [(2, "1.047967"), (4, "0.466405"), (6, "0.200631")])
def test_sr15_prefixes(prefix: int, printed: str, f1: Tokens) -> None:
    rows, labels = f1
    assert_prints(simreg_loss(rows[:, :prefix], labels, temperature=0.1), printed)


@pytest.mark.parametrize(("temperature", "printed", "rtol"), [(0.1, 0.20063061, 1e-6), (0.01, 2.758154e-4, 1e-5)])
def test_sr18_float32_is_close_to_float64(temperature: float, printed: float, rtol: float) -> None:
    exact, exact_grad = gradient(*fixture_f1(), temperature=temperature)
    loss, grad = gradient(*fixture_f1(torch.float32), temperature=temperature)
    assert grad.dtype == torch.float32
    torch.testing.assert_close(loss.double(), exact, rtol=rtol, atol=0)
    assert abs(loss.item() / printed - 1) < rtol
    assert (grad.double() - exact_grad).norm() < 10 * rtol * exact_grad.norm()
