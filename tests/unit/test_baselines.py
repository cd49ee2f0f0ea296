# SPDX-License-Identifier: Apache-2.0
"""The baselines against independently computed numbers on the fixture F1, and against written-out loops."""

import functools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from simreg_megatron import SimRegConfig
from simreg_megatron.contrib.simcse import LARGEST_SCALE, Pooled, pooled, two_views, whole_sequences
from simreg_megatron.losses import cpretrain_loss, creg_loss, sce_loss, simcse_loss
from simreg_megatron.losses._anchored import anchored_terms
from simreg_megatron.parallel import learnable
from tests.helpers.fixtures import fixture_f1, without_pairs
from tests.unit.test_simreg_facts import assert_prints

CR1_SE1_AND_CP1 = [
    (creg_loss, {}, "4.790469"),
    (creg_loss, {"form": "per_pair"}, "2.506397"),
    (creg_loss, {"form": "supcon_out"}, "4.996844"),
    (creg_loss, {"self_positive": "always"}, "2.626919"),
    (creg_loss, {"temperature": 0.01}, "41.686364"),
    (creg_loss, {"temperature": 0.01, "form": "supcon_out"}, "42.616670"),
    (sce_loss, {}, "3.568870"),
    (sce_loss, {"target_temperature": 0.05}, "3.506406"),
    (sce_loss, {"coupling": 1}, "4.051758"),
    (sce_loss, {"coupling": 0}, "3.085982"),
    (sce_loss, {"target": "instance"}, "1.655349"),
    (sce_loss, {"target": "instance", "coupling": 1}, "0.224715"),
    (sce_loss, {"exclude_self": True}, "2.393741"),
    (cpretrain_loss, {"temperature": 0.1}, "3.608232"),
    (cpretrain_loss, {"temperature": 0.1, "same_label": "kept"}, "5.53525150634"),
    (cpretrain_loss, {"temperature": 0.05}, "6.486718"),
    (cpretrain_loss, {"temperature": 0.01}, "30.825301"),
]


@pytest.mark.parametrize(("loss", "options", "printed"), CR1_SE1_AND_CP1)
def test_cr1_se1_and_cp1(loss: Callable[..., Tensor], options: dict, printed: str) -> None:
    assert_prints(loss(*fixture_f1(), **options), printed)


def test_sc1() -> None:
    rows, _ = fixture_f1()
    assert_prints(simcse_loss(rows.view(3, 4, 6)), "5.132981")
    assert simcse_loss(rows.view(1, 12, 6)) == 0, "one sequence has none to be compared with"


LOSSES: dict[str, Callable[..., Tensor]] = {
    "creg": creg_loss,
    "creg per pair": lambda *given, **options: creg_loss(*given, form="per_pair", **options),
    "creg supcon": lambda *given, **options: creg_loss(*given, form="supcon_out", self_positive="always", **options),
    "sce": sce_loss,
    "sce exclude self": lambda *given, **options: sce_loss(*given, exclude_self=True, **options),
    "cpretrain": cpretrain_loss,
}
HALVES = (slice(5), slice(5, 9))  # of 9 tokens
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


def tokens(seed: int = 0, shape: tuple[int, int] = (2, 14)) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(*shape, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 4, shape, generator=generator)
    return rows, labels, torch.rand(shape, generator=generator) < 0.8


def test_targets_are_as_exact_as_the_states() -> None:
    """A third of a target in float32 would be wrong by 1e-8."""
    rows, labels = fixture_f1()
    unit = F.normalize(rows, dim=-1)
    same = (labels[:, None] == labels).double()
    expected = -((same / same.sum(-1, keepdim=True)) * (unit @ unit.T / 0.1).log_softmax(-1)).sum(-1).mean()
    assert sce_loss(rows, labels, coupling=1).item() == pytest.approx(expected.item(), rel=1e-13)


def test_the_gradient_of_sce_is_that_of_its_anchors() -> None:
    """Written out, with targets computed by hand and keys held fixed."""
    rows, labels, _ = tokens(1, (1, 8))
    unit = F.normalize(rows[0], dim=-1)
    same = (labels[0][:, None] == labels[0]).double()
    others = (unit @ unit.T / 0.07).masked_fill(torch.eye(8, dtype=torch.bool), -torch.inf).softmax(-1)
    target = 0.5 * same / same.sum(-1, keepdim=True) + 0.5 * others
    anchors = rows[0].clone().requires_grad_()
    logits = F.normalize(anchors, dim=-1) @ unit.T / 0.1
    expected = -(target * logits.log_softmax(-1)).sum(-1).mean()
    expected.backward()
    given = rows.clone().requires_grad_()
    loss = sce_loss(given, labels)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(given.grad[0], anchors.grad)


@every_loss
@pytest.mark.parametrize("case", ["one token", "one label", "all masked", "zero row", "no tokens"])
def test_nothing_to_compare_is_zero_and_finite(loss: Callable[..., Tensor], case: str) -> None:
    rows, labels, valid = without_pairs(case, *tokens())
    rows.requires_grad_()
    terms = loss(rows, labels, valid=valid, reduction="none")
    terms.sum().backward()
    assert terms.isfinite().all() and rows.grad.isfinite().all()
    if case in ("one token", "all masked", "no tokens"):
        assert not terms.any() and not rows.grad.any()
    if case == "zero row":
        assert terms[0, 2] == 0 and not rows.grad[0, 2].any()


def test_simcse_is_the_written_out_sum() -> None:
    rows, _, valid = tokens(2, (3, 9))
    valid[2, 5:] = False  # no second half: it takes no part, not even as a negative
    first, second = (torch.stack([rows[b, part][valid[b, part]].mean(0) for b in range(2)]) for part in HALVES)
    logits = F.normalize(first, dim=-1) @ F.normalize(second, dim=-1).T / 0.05
    expected = -logits.log_softmax(-1).diagonal().mean()
    torch.testing.assert_close(simcse_loss(rows, valid=valid), expected)
    assert torch.autograd.gradcheck(lambda x: simcse_loss(x, valid=valid, temperature=0.5), rows.requires_grad_())


@pytest.mark.parametrize("view", ["halves", "dropout"])
def test_one_sequence_may_come_without_a_batch(view: str) -> None:
    rows, labels, valid = tokens(2, (1, 9))
    alone = simcse_loss(rows[0], labels[0], valid=valid[0], view=view)
    assert alone == simcse_loss(rows, labels, valid=valid, view=view) == 0
    assert cpretrain_loss(rows[0], labels[0], valid=valid[0], level="sequence") == 0


def test_a_small_loss_of_sequences_is_not_lost() -> None:
    """float32 as float64, where the loss is below the rounding of 1 / tau; one sequence alone still shows a NaN."""
    rows = 20 * torch.eye(3, 8, dtype=torch.float64).unsqueeze(1).repeat(1, 6, 1)
    rows = rows + torch.randn(rows.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    exact = simcse_loss(rows)
    assert 0 < exact < 1e-7
    given = rows.float().requires_grad_()
    found = simcse_loss(given)
    found.backward()
    assert found.item() == pytest.approx(exact.item(), rel=1e-3) and given.grad.any()
    assert simcse_loss(torch.full((1, 6, 8), torch.nan)).isnan()


def test_dropout_that_leaves_nothing_leaves_the_sequence_out() -> None:
    """Sometimes both of two features are dropped: such a sequence is no partner either."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 100, (200, 3), generator=generator)
    rows = torch.randn(200, 3, 2, generator=generator, dtype=torch.float64)
    usable = torch.ones_like(labels, dtype=torch.bool)
    _, _, takes_part = whole_sequences(rows, labels, usable, view="dropout", pooling="mean")
    assert 0 < (~takes_part).sum() < 20
    rows.requires_grad_()
    loss = simcse_loss(rows, labels, view="dropout")
    loss.backward()
    assert loss.isfinite() and rows.grad.isfinite().all() and not rows.grad[~takes_part].any()
    others = simcse_loss(rows[takes_part], labels[takes_part], view="dropout")
    torch.testing.assert_close(loss, others)


def test_the_last_token_stands_for_its_sequence() -> None:
    rows, _, valid = tokens(2, (3, 9))
    last = [[max(i for i in part if valid[b, i]) for part in (range(5), range(5, 9))] for b in range(3)]
    first, second = (F.normalize(rows[torch.arange(3), [pair[n] for pair in last]], dim=-1) for n in (0, 1))
    expected = F.cross_entropy(first @ second.T / 0.05, torch.arange(3))
    torch.testing.assert_close(simcse_loss(rows, valid=valid, pooling="last"), expected)
    assert abs(simcse_loss(rows, valid=valid) - expected) > 1e-3


def test_dropout_views_drop_a_tenth_and_belong_to_the_sequence() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 100, (4, 7), generator=generator)
    rows = torch.ones(4, 7, 5000, dtype=torch.float64)
    usable = torch.ones_like(labels, dtype=torch.bool)
    first, second, _ = whole_sequences(rows, labels, usable, view="dropout", pooling="mean")
    for view in (first, second):
        torch.testing.assert_close(view.unique(), torch.tensor([0, 1 / 0.9], dtype=torch.float64))
        assert (view == 0).double().mean() == pytest.approx(0.1, abs=0.01)
    both = ((first == 0) & (second == 0)).double().mean()
    assert both == pytest.approx(0.01, abs=0.004), "the two are independent"
    assert ((first[0] == 0) & (first[1] == 0)).double().mean() == pytest.approx(0.01, abs=0.01), "and so are sequences"
    again, _, _ = whole_sequences(rows[2:], labels[2:], usable[2:], view="dropout", pooling="mean")
    assert torch.equal(again, first[2:]), "wherever the sequence is"
    cuts, of_second = (slice(3), slice(3, 7)), torch.zeros(7, dtype=torch.bool)
    given = [[part[:, cut] for part in (rows, labels, usable)] + [torch.arange(7)[cut], of_second[cut]] for cut in cuts]
    parts = [pooled(*each, None) for each in given]
    summed = Pooled(*(one + other for one, other in zip(*parts, strict=True)))
    assert torch.equal(two_views(summed, "dropout")[1], second), "and however it is cut"


def test_dropout_is_differentiable_and_leaves_the_generator_alone() -> None:
    rows, labels, valid = tokens(2, (3, 9))
    state = torch.get_rng_state()
    loss = functools.partial(simcse_loss, labels=labels, valid=valid, temperature=0.5, view="dropout")
    assert torch.autograd.gradcheck(loss, rows.requires_grad_())
    assert torch.equal(torch.get_rng_state(), state)


def test_cpretrain_on_sequences_is_symmetric() -> None:
    rows, labels, valid = tokens(2, (3, 9))
    first, second = (torch.stack([rows[b, part][valid[b, part]].mean(0) for b in range(3)]) for part in HALVES)
    logits, targets = F.normalize(first, dim=-1) @ F.normalize(second, dim=-1).T / 0.1, torch.arange(3)
    expected = (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2
    torch.testing.assert_close(cpretrain_loss(rows, labels, valid=valid, level="sequence"), expected)
    assert abs(F.cross_entropy(logits, targets) - expected) > 1e-3


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_learned_scale(level: str) -> None:
    rows, labels, valid = tokens(2, (3, 9))
    loss = functools.partial(cpretrain_loss, rows, labels, valid=valid, level=level)
    scales = ([value] for value in (math.log(5.0), 9.0, math.log(LARGEST_SCALE)))
    theta, most, limit = (torch.tensor(scale, dtype=torch.float64, requires_grad=True) for scale in scales)
    torch.testing.assert_close(loss(log_scale=theta), loss(temperature=0.2))
    assert torch.autograd.gradcheck(lambda given: loss(log_scale=given), theta)
    capped, at_limit = loss(log_scale=most), loss(log_scale=limit)
    torch.testing.assert_close(capped, loss(temperature=0.01))
    pull, pull_at_limit = (torch.autograd.grad(value, scale)[0] for value, scale in ((capped, most), (at_limit, limit)))
    torch.testing.assert_close(pull, pull_at_limit)
    assert pull > 0, "without it the scale would stay at the limit for ever"


BAD_OPTIONS = [
    (lambda rows, labels: creg_loss(rows, labels, temperature=0), "temperature must be a finite number above 0"),
    (lambda rows, labels: sce_loss(rows, labels, target="instance", exclude_self=True), "its only entry"),
    (
        lambda rows, labels: cpretrain_loss(rows, labels, level="sequence", reduction="none"),
        "reduction 'none' is not available; choose one of mean",
    ),
    (lambda rows, labels: sce_loss(rows, labels, coupling="a"), "coupling must be from 0 to 1, got 'a'"),
    (lambda rows, labels: sce_loss(rows, labels, exclude_self="no"), "exclude_self must be True or False, got 'no'"),
    (lambda rows, labels: cpretrain_loss(rows, labels, log_scale=torch.ones(2)), "log_scale must be one number"),
    (
        lambda rows, labels: creg_loss(rows.repeat(1, 20, 1), labels.repeat(1, 20), form="per_pair"),
        "chunks of at most 256 tokens, got 280",
    ),
]


@pytest.mark.parametrize(("call", "sentence"), BAD_OPTIONS)
def test_bad_options_are_refused(call: Callable[..., Tensor], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call(*tokens()[:2])


def test_a_learned_scale_starts_at_the_temperature() -> None:
    def start(**settings: float) -> dict[str, dict[str, float]]:
        learned = {"objective": "cpretrain", "objective_options": "scale=learned"}
        return learnable.wanted(SimRegConfig(lambda_=1, **learned, **settings))

    assert start()["cpretrain"]["log_scale"] == pytest.approx(math.log(10.0))
    assert start(temperature=0.02)["cpretrain"]["log_scale"] == pytest.approx(math.log(50.0))
    with pytest.raises(ValueError, match=r"1 / temperature and grows up to 100: give a temperature above 0\.01"):
        start(temperature=0.01)


def test_settings_of_an_objective() -> None:
    config = SimRegConfig(lambda_=1, objective="creg", objective_options="form=per_pair", chunk_size=256)
    assert config.options == {"form": "per_pair", "self_positive": "never"} and config.tau == 0.1
    options = "coupling=1,exclude_self=yes,target_temperature=0.03"  # of tokens that have no other positive
    assert SimRegConfig(lambda_=1, objective="sce", objective_options=options).options["target_temperature"] == 0.03
    assert SimRegConfig(lambda_=1).tau == 0.01 and SimRegConfig(lambda_=1, objective="simcse").tau == 0.05


def test_terms_must_be_one_for_each_anchor() -> None:
    """A single number would be added to every anchor, masked ones included."""
    rows, labels = torch.randn(1, 6, 4), torch.arange(6)[None]
    with pytest.raises(ValueError, match=r"one for each anchor, \[1, 6\], not \[\]"):
        anchored_terms(lambda block: block.rows.sum(), rows, labels, labels >= 0)
