# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy through the truncated output layer, in float64 against torch's own: values, gradients, memory."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from simreg_megatron import SimRegConfig
from simreg_megatron.contrib import prefixes_ce
from simreg_megatron.contrib.prefixes_ce import TruncatedHead, default_prefixes, truncated_head_losses
from simreg_megatron.losses import prefixes_ce_loss
from simreg_megatron.parallel import output_layer
from simreg_megatron.parallel.output_layer import Head
from simreg_megatron.plugin import refusals
from tests.unit.test_regularizer import BATCH, LENGTH, MODEL, WIDTH, One, measuring, micro_batch

TOKENS, VOCABULARY, PREFIXES = 7, 11, (2, 5)
TIGHT = {"rtol": 1e-12, "atol": 1e-13}


@pytest.fixture(params=[64 << 20, 2 * 4 * VOCABULARY], ids=["one tile", "tiles of 2 tokens"])
def _tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes_ce, "_SLAB", {"cpu": request.param, "cuda": request.param})


def given(bias: bool = False) -> dict[str, Any]:
    """Tokens of which one has no label here, a layer, and unequal weights from upstream: the second token's is 0."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    upstream = torch.rand(TOKENS, generator=generator, dtype=torch.float64)
    upstream[1] = 0
    return {
        "rows": drawn(TOKENS, WIDTH).requires_grad_(),
        "weight": nn.Parameter(drawn(VOCABULARY, WIDTH)),
        "bias": nn.Parameter(drawn(VOCABULARY)) if bias else None,
        "labels": torch.randint(0, VOCABULARY, (TOKENS,), generator=generator),
        "upstream": upstream,
    }


def oracle(rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, scale: float = 1.0) -> Tensor:
    logits = [functional.linear(rows[:, :p], weight[:, :p], bias) * scale for p in PREFIXES]
    return torch.stack([functional.cross_entropy(part, labels, reduction="none") for part in logits]).mean(dim=0)


def losses(made: dict[str, Any], **settings: Any) -> Tensor:
    head = TruncatedHead(Head(made["weight"], made["bias"], settings.pop("scale", 1.0)), PREFIXES, **settings)
    here = torch.ones(TOKENS, dtype=torch.bool)
    return truncated_head_losses(made["rows"][:, : PREFIXES[-1]], made["labels"], here, head)


def gradients(terms: Tensor, made: dict[str, Any]) -> list[Tensor]:
    wanted = [made[name] for name in ("rows", "weight", "bias") if made[name] is not None]
    return list(torch.autograd.grad((terms * made["upstream"]).sum(), wanted))


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_torchs_cross_entropy(bias: bool, scale: float) -> None:
    made = given(bias)
    found = losses(made, scale=scale)
    expected = oracle(*(made[name] for name in ("rows", "weight", "bias", "labels")), scale=scale)
    torch.testing.assert_close(found, expected, **TIGHT)
    ours, torchs = gradients(found, made), gradients(expected, made)
    torch.testing.assert_close(ours, torchs, **TIGHT)
    assert not ours[0][:, PREFIXES[-1] :].any() and not ours[0][1].any() and not ours[1][:, PREFIXES[-1] :].any()
    # Wrong answers are far outside: another scale, one prefix alone, a gradient that is halved.
    assert (losses(made, scale=2 * scale) - expected).abs().max() > 1e-2
    assert (functional.cross_entropy(made["rows"] @ made["weight"].T, made["labels"]) - expected.mean()).abs() > 1e-2
    assert (0.5 * ours[1] - torchs[1]).norm() > 1e-2 * torchs[1].norm()


def test_a_frozen_layer_gets_no_gradient() -> None:
    made = given()
    expected = gradients(losses(made), made)[0]
    made["weight"].requires_grad_(False)
    (losses(made) * made["upstream"]).sum().backward()
    assert made["weight"].grad is None
    torch.testing.assert_close(made["rows"].grad, expected, **TIGHT)


def test_no_logits_stay_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between forward and backward a token keeps a number for each prefix, and a tile has its few tokens alone."""
    monkeypatch.setattr(prefixes_ce, "_SLAB", {"cpu": 2 * 4 * VOCABULARY, "cuda": 0})
    shapes, logits = [], TruncatedHead.logits

    def watched(self: TruncatedHead, rows: Tensor, prefix: int) -> Tensor:
        shapes.append(tuple(rows.shape))
        return logits(self, rows, prefix)

    monkeypatch.setattr(TruncatedHead, "logits", watched)
    made, kept = given(), []
    keep = (lambda tensor: kept.append(tensor.shape) or tensor), (lambda held: held)
    with torch.autograd.graph.saved_tensors_hooks(*keep):
        found = losses(made)
    assert (len(PREFIXES), TOKENS) in kept and (TOKENS, VOCABULARY) not in kept
    found.sum().backward()
    assert {number for number, _ in shapes} == {2, 1} and len(shapes) == 2 * len(PREFIXES) * 4


def test_half_precision_is_that_of_the_models_logits() -> None:
    made = given()
    low = {name: made[name].detach().bfloat16() for name in ("rows", "weight")}
    rows = low["rows"].float().requires_grad_()
    low["weight"] = nn.Parameter(low["weight"])
    found = losses(made | low | {"rows": rows})
    logits = [(low["rows"][:, :p] @ low["weight"][:, :p].T).float() for p in PREFIXES]
    assert logits[0].dtype == found.dtype == torch.float32
    expected = torch.stack([functional.cross_entropy(part, made["labels"], reduction="none") for part in logits])
    torch.testing.assert_close(found, expected.mean(dim=0))
    (found * made["upstream"]).sum().backward()
    assert low["weight"].grad.dtype == torch.bfloat16
    exact = gradients(losses(made), made)[1]
    assert (low["weight"].grad - exact).norm() < 0.02 * exact.norm()


def test_it_equals_the_plain_form() -> None:
    made = given(bias=True)
    valid = made["upstream"] > 0.2
    labels = made["labels"].clone()
    labels[6] = -100
    counts = valid & (labels >= 0)
    assert 0 < counts.sum() < valid.sum()
    per_token = oracle(made["rows"], made["weight"], made["bias"], made["labels"])
    options = {"prefixes": PREFIXES, "bias": made["bias"]}
    found = prefixes_ce_loss(made["rows"], labels, made["weight"], valid=valid, **options)
    torch.testing.assert_close(found, per_token[counts].mean(), **TIGHT)
    with pytest.raises(ValueError, match="from 1 to 8 features of 8, got 9"):
        prefixes_ce_loss(made["rows"], labels, made["weight"], prefixes=(9,))
    with pytest.raises(ValueError, match=r"weight must be floating point \[v, 8\], got torch.float64 \[.*, 3\]"):
        prefixes_ce_loss(made["rows"], labels, made["weight"][:, :3])
    with pytest.raises(ValueError, match="one for each row of the weight"):
        prefixes_ce_loss(made["rows"], labels, made["weight"], bias=made["bias"][:1])
    assert default_prefixes(192) == (16, 32, 64) and default_prefixes(WIDTH) == (4,) and default_prefixes(1) == (1,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_the_plain_form_sums_in_float32(dtype: torch.dtype, autocast: bool) -> None:
    """20,000 tokens, whose sum float16 cannot hold; as the plugin's own form, of logits in the type of the weight."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(20_000, WIDTH, generator=generator).to(dtype)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator)
    labels = torch.randint(0, VOCABULARY, (20_000,), generator=generator)
    everywhere = torch.ones_like(labels, dtype=torch.bool)
    for layer in (weight.to(dtype), weight):  # states of bfloat16 meet a layer of float32, too
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            found = prefixes_ce_loss(rows, labels, layer, prefixes=PREFIXES)
        terms = truncated_head_losses(rows.float(), labels, everywhere, TruncatedHead(Head(layer), PREFIXES))
        assert found.dtype == torch.float32 and found.item() == pytest.approx(terms.double().mean().item(), rel=2e-6)


def test_a_masked_label_may_be_beyond_the_layer() -> None:
    given = torch.ones(2, WIDTH), torch.tensor([0, 3]), torch.ones(3, WIDTH)
    with pytest.raises(IndexError):
        prefixes_ce_loss(*given)
    assert prefixes_ce_loss(*given, valid=torch.tensor([True, False])).isfinite()


def model(weight: Tensor, **settings: Any) -> SimpleNamespace:
    config = SimpleNamespace(**vars(MODEL.config), **settings)
    layer = SimpleNamespace(weight=weight, bias=None, gradient_accumulation_fusion=False)
    return SimpleNamespace(config=config, pg_collection=MODEL.pg_collection, output_layer=layer)


def squared_normalizer(rows: Tensor, weight: Tensor, _bias: None, _labels: Tensor, scale: float) -> Tensor:
    """z-loss: (log sum exp)^2 of Megatron's own logits, for any labels."""
    return (scale * rows @ weight.T).logsumexp(dim=-1).square()


OBJECTIVES = [("prefixes-ce", oracle, False), ("prefixes-ce", oracle, True), ("z-loss", squared_normalizer, True)]


@pytest.mark.parametrize(("objective", "terms_of", "mup"), OBJECTIVES)
def test_it_joins_the_loss_like_any_other_objective(objective: str, terms_of: Callable[..., Tensor], mup: bool) -> None:
    options = "prefixes=2/5" if objective == "prefixes-ce" else ""
    config = SimRegConfig(lambda_=0.5, objective=objective, objective_options=options)
    hidden, labels, mask, loss = micro_batch()
    labels[0, 2] = -100
    layer = nn.Parameter(given()["weight"].detach().clone())
    built = model(layer, use_mup=mup, mup_output_mult=0.25)
    upstream = torch.rand(BATCH, LENGTH, dtype=torch.float64)
    regularizer = measuring(config)
    result = regularizer.add_to(loss, regularizer.terms(built, hidden, labels, mask))
    assert torch.equal(result, loss)
    (result * upstream).sum().backward()

    counts = (mask > 0) & (labels >= 0)
    rows, weight = hidden.detach().clone().requires_grad_(), layer.detach().clone().requires_grad_()
    flat = rows.transpose(0, 1).flatten(0, 1)
    terms = terms_of(flat, weight, None, labels.clamp(min=0).flatten(), 0.25 if mup else 1.0).view(BATCH, LENGTH)
    (0.5 * terms * upstream * counts).sum().backward()
    torch.testing.assert_close(hidden.grad, rows.grad, **TIGHT)
    torch.testing.assert_close(layer.grad, weight.grad, **TIGHT)
    assert layer.grad.norm() > 1e-2 and hidden.grad[2, 0].abs().max() == 0
    logged = regularizer.metrics.reduce(One())
    assert logged[f"{objective} loss"].item() == pytest.approx(terms[counts].mean().item(), rel=1e-6)
    assert logged["simreg positive cosine"].isfinite() and "simreg loss" not in logged


def test_what_megatron_holds_in_its_own_way_is_refused() -> None:
    config = SimRegConfig(lambda_=1, objective="prefixes-ce", objective_options="prefixes=2/5")
    with pytest.raises(NotImplementedError, match=r"prefixes-ce needs .* --use-torch-fsdp2 scatters them"):
        refusals.refuse_arguments(SimpleNamespace(log_interval=1, hidden_size=8, use_torch_fsdp2=True), config)
    layer = nn.Parameter(torch.zeros(VOCABULARY, WIDTH))
    output_layer.refuse_second_use(model(layer), "prefixes-ce")
    defers = ("defer_embedding_wgrad_compute", "--defer-embedding-wgrad-compute")
    for setting, sentence in (defers, ("fp8_output_proj", "another type")):
        with pytest.raises(NotImplementedError, match=f"prefixes-ce does not work here, as .*{sentence}"):
            output_layer.refuse_second_use(model(layer, **{setting: True}), "prefixes-ce")
    layer.is_gtp_weight_remat = True
    for scattered in (layer, nn.Parameter(torch.zeros(0, WIDTH))):
        with pytest.raises(NotImplementedError, match="weight is not whole on its rank"):
            output_layer.refuse_second_use(model(scattered), "z-loss")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_labels_of_any_integer_type(dtype: torch.dtype) -> None:
    """-100 in the place of a masked label would be 156 in a byte."""
    made = given()
    labels, valid = made["labels"][None], torch.arange(TOKENS)[None] > 2
    wanted = prefixes_ce_loss(made["rows"][None], labels, made["weight"], prefixes=PREFIXES, valid=valid)
    found = prefixes_ce_loss(made["rows"][None], labels.to(dtype), made["weight"], prefixes=PREFIXES, valid=valid)
    assert torch.equal(found, wanted)


def test_a_masked_row_may_hold_anything() -> None:
    made = given()
    labels = made["labels"].masked_fill(torch.arange(TOKENS) == 3, -100)
    rows = made["rows"].detach().clone()
    rows[3] = torch.nan
    rows.requires_grad_()
    prefixes_ce_loss(rows, labels, made["weight"], prefixes=PREFIXES).backward()
    assert rows.grad.isfinite().all() and made["weight"].grad.isfinite().all() and rows.grad[3].eq(0).all()


def test_a_label_elsewhere_leaves_the_normalizer() -> None:
    """On a rank of a vocabulary that is split, no row here is the label's."""
    made = given()
    head = TruncatedHead(Head(made["weight"]), PREFIXES)
    nowhere = torch.zeros(TOKENS, dtype=torch.bool)
    found = truncated_head_losses(made["rows"][:, : PREFIXES[-1]], made["labels"] - 40, nowhere, head)
    logits = [made["rows"][:, :p] @ made["weight"][:, :p].T for p in PREFIXES]
    expected = torch.stack([part.logsumexp(dim=-1) for part in logits]).mean(dim=0)
    torch.testing.assert_close(found, expected, **TIGHT)
    torch.testing.assert_close(gradients(found, made), gradients(expected, made), **TIGHT)


def test_the_weights_gradient_joins_what_megatron_has_added_already() -> None:
    """With gradient accumulation fusion Megatron ignores what autograd brings."""
    made = given()
    expected = gradients(losses(made), made)[1]
    before = torch.full_like(made["weight"], 0.125)
    made["weight"].main_grad = before.clone()
    (losses(made, fuses=True) * made["upstream"]).sum().backward()
    assert made["weight"].grad is None
    torch.testing.assert_close(made["weight"].main_grad - before, expected, **TIGHT)


def test_a_backward_inside_autocast_is_as_exact() -> None:
    def gradient(inside: bool) -> Tensor:
        made = given()
        rows = made["rows"].detach().float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = prefixes_ce_loss(rows, made["labels"], made["weight"].detach().float(), prefixes=PREFIXES)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return rows.grad

    torch.testing.assert_close(gradient(True), gradient(False), rtol=1e-6, atol=1e-8)
