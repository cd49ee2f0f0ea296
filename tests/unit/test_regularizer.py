# SPDX-License-Identifier: Apache-2.0
"""The term on one micro-batch of a model: value, gradient, log values, and what only the data knows."""

import math
from types import SimpleNamespace

import pytest
import torch

from simreg_megatron import SimRegConfig, notices
from simreg_megatron.losses import geometry, simreg_loss
from simreg_megatron.losses.geometry import pair_cosines
from simreg_megatron.objectives import Kind
from simreg_megatron.parallel import learnable, metrics, output_layer
from simreg_megatron.parallel.collectives import add_gradient
from simreg_megatron.parallel.learnable import Scalars
from simreg_megatron.parallel.sequence import objective_terms
from simreg_megatron.plugin import term
from simreg_megatron.plugin.term import Regularizer
from tests.helpers.fixtures import One

BATCH, LENGTH, WIDTH = 2, 12, 8


GROUPS = SimpleNamespace(tp=One(), cp=One(), dp_cp=One())
MODEL = SimpleNamespace(config=SimpleNamespace(sequence_parallel=False, hidden_size=256), pg_collection=GROUPS)


@pytest.fixture(autouse=True)
def _fresh_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "_said", set())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))


def micro_batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(LENGTH, BATCH, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 4, (BATCH, LENGTH), generator=generator)
    mask = (torch.rand(BATCH, LENGTH, generator=generator) < 0.8).float()
    loss = torch.rand(BATCH, LENGTH, generator=generator, dtype=torch.float64, requires_grad=True)
    return hidden, labels, mask, loss


def add(regularizer: Regularizer, hidden, labels, mask, loss) -> torch.Tensor:
    return regularizer.add_to(loss, regularizer.terms(MODEL, hidden, labels, mask))


def measuring(config: SimRegConfig) -> Regularizer:
    """In a step that is logged."""
    regularizer = Regularizer(config)
    regularizer.strength.set_iteration(0, 1)
    regularizer.metrics.wants_geometry = True
    return regularizer


@pytest.mark.parametrize("weight", [3.0, "auto"])
def test_value_of_the_loss_gradient_of_both(weight) -> None:
    config = SimRegConfig(lambda_=weight, temperature=0.1, chunk_size=5)
    hidden, labels, mask, loss = micro_batch()
    upstream = torch.rand(BATCH, LENGTH, dtype=torch.float64) * mask
    result = add(Regularizer(config), hidden, labels, mask, loss)
    assert torch.equal(result, loss)
    (result * upstream).sum().backward()
    assert torch.equal(loss.grad, upstream)

    expected = hidden.detach().clone().requires_grad_()
    options = {"temperature": 0.1, "valid": mask > 0, "chunk_size": 5, "reduction": "none"}
    terms = simreg_loss(expected.transpose(0, 1), labels, **options)
    number = 5.0 if weight == "auto" else weight  # 10 * sqrt(256 / 1024)
    (number * terms * upstream).sum().backward()
    torch.testing.assert_close(hidden.grad, expected.grad, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(hidden.grad, 2 * expected.grad, rtol=1e-3)
    assert hidden.grad[mask.T == 0].abs().max() == 0, "masked tokens are out of all three roles"


def test_a_loop_that_names_no_steps_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be in every micro-batch, for a log that may never be read; the term itself is in the log."""
    found: list[object] = []
    monkeypatch.setattr(metrics.Metrics, "_add_pairs", lambda self, view: found.append(view))
    said: list[str] = []
    monkeypatch.setattr(metrics, "log_once", said.append)
    regularizer = Regularizer(SimRegConfig(lambda_=1, temperature=0.1, chunk_size=6))
    for _ in range(2):
        add(regularizer, *micro_batch()).sum().backward()
    means = regularizer.metrics.reduce(One())
    assert set(means) == {"simreg loss"} and means["simreg loss"] > 0 and not found
    assert any("only its loss is logged" in line and "begin_step(step, measures=True)" in line for line in said)
    regularizer.metrics.wants_geometry = True
    add(regularizer, *micro_batch())
    regularizer.metrics.wants_geometry = False
    add(regularizer, *micro_batch())
    assert "simreg positive cosine" in regularizer.metrics.reduce(One()) and len(found) == 1
    add(regularizer, *micro_batch())
    assert "simreg positive cosine" not in regularizer.metrics.reduce(One()), "of the interval before"


def test_measuring_alone_needs_a_loop_that_names_steps() -> None:
    regularizer = Regularizer(SimRegConfig(objective="none"))
    with pytest.raises(RuntimeError, match=r"only measures here.*loop\.begin_step\(step, measures=True\)"):
        add(regularizer, *micro_batch())


@pytest.mark.megatron
def test_a_loop_that_drops_the_models_loss_is_found_out() -> None:
    """Its own loss, of logits or of a teacher, would train without SimReg, under a log that shows nothing of it."""
    regularizer = Regularizer(SimRegConfig(lambda_=1, temperature=0.1, chunk_size=6))
    hidden, labels, mask, loss = micro_batch()
    for _ in range(2):
        add(regularizer, hidden, labels, mask, loss)
        hidden.square().sum().backward()
    last = [SimpleNamespace(post_process=True)]
    with pytest.raises(NotImplementedError, match=r"trained nothing.*no gradient came back to the per-token loss"):
        regularizer.check_gradient_arrived(last)
    add(regularizer, hidden, labels, mask, loss)[:, :4].mean().backward()
    regularizer.check_gradient_arrived(last)
    add(regularizer, hidden, labels, mask, loss)  # a step that is skipped later, for a loss of NaN
    regularizer.check_gradient_arrived(last)


def test_frozen_states_are_refused_where_the_loss_trains() -> None:
    """The loss of a teacher, which trains nothing, passes."""
    hidden, labels, mask, loss = micro_batch()
    regularizer = Regularizer(SimRegConfig(lambda_=1, temperature=0.1, chunk_size=6))
    with pytest.raises(NotImplementedError, match=r"cannot train here.*before the output layer are frozen"):
        add(regularizer, hidden.detach(), labels, mask, loss)
    add(regularizer, hidden.detach(), labels, mask, loss.detach())
    regularizer.check_gradient_arrived([])
    add(regularizer, hidden, labels, mask, loss).sum().backward()
    with pytest.raises(NotImplementedError, match="are frozen"):  # also where they were frozen later
        add(regularizer, hidden.detach(), labels, mask, loss)


def test_micro_batches_of_a_loop_that_counts_no_steps_draw_each_their_own() -> None:
    regularizer = Regularizer(SimRegConfig(lambda_=1, objective="sigreg"))
    totals = [regularizer.terms(MODEL, *micro_batch()[:3]).weighted[0][1] for _ in range(2)]
    assert not torch.equal(*totals)


def test_the_log_describes_whole_states_where_prefixes_are_trained() -> None:
    found = []
    for options in ("prefixes=whole", "prefixes=2/4"):
        regularizer = measuring(SimRegConfig(lambda_=1, objective_options=options, chunk_size=6))
        hidden, labels, mask, loss = micro_batch()
        add(regularizer, hidden, labels, mask, loss)
        found.append(regularizer.metrics.reduce(One()))
    rows = hidden.detach().transpose(0, 1)
    wanted = [simreg_loss(rows[..., :prefix], labels, chunk_size=6, valid=mask > 0) for prefix in (2, 4)]
    assert found[1]["simreg loss"].item() == pytest.approx(sum(wanted).item() / 2, rel=1e-6)
    assert found[0].keys() == found[1].keys()
    different = {name for name in found[0] if not torch.equal(found[0][name], found[1][name])}
    assert different == {"simreg loss"}


def test_log_values_are_means_over_the_interval() -> None:
    regularizer = measuring(SimRegConfig(lambda_=1, temperature=0.1, chunk_size=0))
    hidden, labels, mask, loss = micro_batch()
    few = mask.clone()
    few[:, 4:] = 0  # a second micro-batch with far fewer tokens
    add(regularizer, hidden, labels, mask, loss)
    add(regularizer, hidden, labels, few, loss)
    means = regularizer.metrics.reduce(One())

    embeddings = hidden.detach().transpose(0, 1)
    sums = [simreg_loss(embeddings, labels, temperature=0.1, valid=m > 0, reduction="none").sum() for m in (mask, few)]
    assert means["simreg loss"].item() == pytest.approx((sum(sums) / (mask.sum() + few.sum())).item(), rel=1e-6)
    pairs = [pair_cosines(embeddings, labels, valid=m > 0) for m in (mask, few)]
    negative = sum(p.different_sum for p in pairs) / sum(p.different_count for p in pairs)
    assert means["simreg negative cosine"].item() == pytest.approx(negative.item(), rel=1e-6)
    assert means["simreg mean angle"].item() == pytest.approx(math.degrees(math.acos(negative)), rel=1e-6)
    hardest = sum(p.hardest_sum for p in pairs) / sum(p.hardest_count for p in pairs)
    assert means["simreg largest negative cosine"].item() == pytest.approx(hardest.item(), rel=1e-6)
    norms = torch.cat([embeddings[m > 0].norm(dim=-1) for m in (mask, few)])
    assert means["simreg norm"].item() == pytest.approx(norms.mean().item(), rel=1e-6)
    variation = norms.std(correction=0) / norms.mean()
    assert means["simreg norm variation"].item() == pytest.approx(variation.item(), rel=1e-5)
    tokens = torch.cat([embeddings[m > 0] for m in (mask, few)])
    even = geometry.isotropy(geometry.moments(tokens, torch.ones(len(tokens), dtype=torch.bool)))
    assert means["simreg isotropy"].item() == pytest.approx(even.score.item(), rel=1e-6)
    assert means["simreg effective rank"].item() == pytest.approx(even.effective_rank.item(), rel=1e-6)
    assert means["simreg mean cosine"].item() == pytest.approx(even.mean_cosine.item(), rel=1e-6)
    again = regularizer.metrics.reduce(One())
    assert "simreg isotropy" not in again
    assert again["simreg loss"].item() == 0, "an interval starts at zero"


def test_facts_of_the_data_are_logged_once(capsys: pytest.CaptureFixture[str]) -> None:
    regularizer = measuring(SimRegConfig(lambda_=1, temperature=0.1, chunk_size=6))
    hidden, labels, mask, loss = micro_batch()
    with torch.no_grad():
        hidden[2, 1] = 0
    mask[0] = 0  # nothing counts in the first sequence
    mask[1] = 1
    labels[1, 6:] = 3  # one label in the second chunk of the second
    add(regularizer, hidden, labels, mask, loss).sum().backward()
    assert torch.isfinite(hidden.grad).all()
    assert hidden.grad[:, 0].abs().max() == 0 and hidden.grad[6:, 1].abs().max() == 0
    assert hidden.grad[2, 1].abs().max() == 0 and hidden.grad[3, 1].abs().max() > 0
    regularizer.metrics.reduce(One())
    said = capsys.readouterr().out
    assert "left out 1 sequences (or a rank's parts of them) whose tokens are all masked" in said
    assert "left out 6 tokens in chunks with one label only" in said
    assert "left out 1 hidden states of norm zero (" in said
    add(regularizer, hidden, labels, mask, loss)
    regularizer.metrics.reduce(One())
    assert "left out" not in capsys.readouterr().out


def test_chunks_of_one_label_are_no_fact_where_they_have_a_term(capsys: pytest.CaptureFixture[str]) -> None:
    hidden, labels, mask, loss = micro_batch()
    regularizer = measuring(SimRegConfig(lambda_=1, objective="sce", chunk_size=6))
    add(regularizer, hidden, torch.zeros_like(labels), mask, loss).sum().backward()
    regularizer.metrics.reduce(One())
    assert "left out" not in capsys.readouterr().out and hidden.grad.norm() > 0


def test_every_third_step_is_three_times_as_strong_and_the_others_are_plain() -> None:
    hidden, labels, mask, loss = micro_batch()
    settings = {"lambda_": 3, "temperature": 0.1, "chunk_size": 6}
    regularizer = Regularizer(SimRegConfig(**settings, every=3))
    with pytest.raises(RuntimeError, match="--simreg-every\\) needs Megatron's training loop"):
        add(regularizer, hidden, labels, mask, loss)

    def gradient(regularizer: Regularizer, iteration: int, *, logs: bool = False) -> torch.Tensor:
        regularizer.strength.set_iteration(iteration)
        regularizer.metrics.wants_geometry = logs
        hidden.grad = None
        result = add(regularizer, hidden, labels, mask, loss)
        assert (result is loss) == (iteration % 3 > 0 and regularizer.config.every == 3)
        result.sum().backward()
        return torch.zeros_like(hidden) if hidden.grad is None else hidden.grad.clone()

    whole = gradient(Regularizer(SimRegConfig(**settings)), 0)
    found = [gradient(regularizer, iteration, logs=iteration == 4) for iteration in range(6)]
    torch.testing.assert_close(found[0], 3 * whole)
    assert torch.equal(found[0], found[3]) and not any(found[number].any() for number in (1, 2, 4, 5))
    means = regularizer.metrics.reduce(One())
    alone = Regularizer(SimRegConfig(**settings))
    add(alone, hidden, labels, mask, loss)
    assert means["simreg loss"] == alone.metrics.reduce(One())["simreg loss"], "of the steps that were computed"


def test_trained_scalars_created_without_values() -> None:
    """As Megatron's FSDP makes them after --init-model-with-meta-device."""
    with torch.device("meta"):
        scalars = Scalars({"query": 0.25, "key": -1.0})
    scalars.to_empty(device="cpu").reset_parameters()
    assert {name: value.item() for name, value in scalars().items()} == {"query": 0.25, "key": -1.0}


def test_scalars_get_a_gradient_of_zero_when_the_term_is_off() -> None:
    """Megatron's overlapped reduce waits for the gradient of every parameter."""
    hidden, labels, mask, loss = micro_batch()
    config = SimRegConfig(lambda_=3, temperature=0.1, similarity="learnable", off_after=0.5)
    scalars = Scalars({"query": 0.0, "key": 0.0})
    model = SimpleNamespace(**vars(MODEL), simreg_similarity=scalars)
    regularizer = Regularizer(config)
    for iteration in (0, 7):
        regularizer.strength.set_iteration(iteration, 10)
        scalars.query.grad = None
        result = regularizer.add_to(loss, regularizer.terms(model, hidden, labels, mask))
        result.sum().backward()
        assert (scalars.query.grad.abs().item() > 0) == (iteration == 0)


def test_a_chunk_beyond_the_sequence_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    hidden, labels, mask, loss = micro_batch()
    add(Regularizer(SimRegConfig(lambda_=1)), hidden, labels, mask, loss)
    assert "chunk size 1024 is beyond the sequence: chunks are whole sequences" in capsys.readouterr().out


def test_a_document_mask_needs_known_borders() -> None:
    config = SimRegConfig(lambda_=1, temperature=0.1, document_mask=True)
    hidden, labels, mask, loss = micro_batch()
    with pytest.raises(RuntimeError, match="needs the tokenizer's end-of-document token"):
        add(Regularizer(config), hidden, labels, mask, loss)
    regularizer = Regularizer(config)
    regularizer.reader.end_of_document = 3
    add(regularizer, hidden, labels, mask, loss).sum().backward()
    masked = hidden.grad.clone()
    hidden.grad = None
    add(Regularizer(SimRegConfig(lambda_=1, temperature=0.1)), hidden, labels, mask, loss).sum().backward()
    assert not torch.allclose(masked, hidden.grad, rtol=1e-2), "borders must matter in this sample"


def test_a_combination_is_the_weighted_sum_of_its_parts() -> None:
    hidden, labels, mask, loss = micro_batch()

    def gradient(**settings) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        regularizer = measuring(SimRegConfig(chunk_size=6, **settings))
        regularizer.strength.set_iteration(4)
        hidden.grad = None
        result = add(regularizer, hidden, labels, mask, loss)
        assert torch.equal(result, loss)
        result.sum().backward()
        return hidden.grad.clone(), regularizer.metrics.reduce(One())

    several, options = "sigreg:2,simreg:auto,sigmoid:0.01", "sigmoid.trains=none,sigreg.seed=1"
    together, logged = gradient(objective=several, objective_options=options, temperature=0.1)
    alone = {
        "simreg loss": gradient(lambda_="auto", temperature=0.1),
        "sigreg loss": gradient(lambda_=2, objective="sigreg", objective_options="seed=1"),
        "sigmoid loss": gradient(lambda_=0.01, objective="sigmoid", objective_options="trains=none"),
    }
    torch.testing.assert_close(together, sum(grad for grad, _ in alone.values()), rtol=1e-10, atol=1e-12)
    for name, (grad, means) in alone.items():
        assert grad.norm() > 1e-3 * together.norm(), "each is felt"
        torch.testing.assert_close(logged[name], means[name])
    assert logged["simreg negative cosine"] == alone["simreg loss"][1]["simreg negative cosine"]
    assert torch.equal(gradient(objective="simreg:3", temperature=0.1)[0], gradient(lambda_=3, temperature=0.1)[0])


def test_norms_of_labels_that_come_once() -> None:
    hidden, labels, mask, loss = micro_batch()
    labels[:, ::3] = torch.arange(100, 104)
    regularizer = measuring(SimRegConfig(lambda_=1, temperature=0.1, chunk_size=0))
    add(regularizer, hidden, labels, mask, loss)
    found = regularizer.metrics.reduce(One())["simreg norm difference of rare labels"].item()
    norms: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for b in range(BATCH):
        own = labels[b][mask[b] > 0].tolist()
        for i in (mask[b] > 0).nonzero().flatten():
            norms[own.count(labels[b, i].item()) == 1].append(hidden[i, b].detach().norm())
    once, often = (torch.stack(norms[key]) for key in (True, False))
    freedom = len(once) + len(often) - 2
    pooled = (((len(once) - 1) * once.var() + (len(often) - 1) * often.var()) / freedom).sqrt()
    assert found == pytest.approx(((once.mean() - often.mean()) / pooled).item(), rel=1e-5)


def test_margins_of_predictions(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Margins are of the states that enter the output layer; for a model whose rows are elsewhere the log says so."""
    hidden, labels, mask, loss = micro_batch()
    table = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model = SimpleNamespace(**vars(MODEL), output_layer=SimpleNamespace(weight=table))

    def logged(model: SimpleNamespace) -> dict[str, torch.Tensor]:
        regularizer = measuring(SimRegConfig(lambda_=1, temperature=0.1))
        for _ in range(2):  # micro-batches
            regularizer.add_to(loss, regularizer.terms(model, hidden, labels, mask))
        return regularizer.metrics.reduce(One())

    counted, found = mask.T > 0, logged(model)
    assert "output layer" not in capsys.readouterr().out
    biased = SimpleNamespace(weight=table, bias=torch.tensor([0.0, 3.0, -2.0, 0.5], dtype=torch.float64))
    with_bias = logged(SimpleNamespace(**vars(MODEL), output_layer=biased))["simreg share of right predictions"]
    right = ((hidden @ table.T + biased.bias).argmax(dim=-1) == labels.T)[counted]
    assert with_bias.item() == pytest.approx(right.double().mean().item())
    assert with_bias != found["simreg share of right predictions"], "a layer's own bias is part of its logits"

    logits, index = hidden.detach() @ table.T, labels.T.unsqueeze(-1)
    others = logits.scatter(-1, index, -torch.inf).amax(dim=-1)
    margins = (logits.gather(-1, index).squeeze(-1) - others)[counted].float()
    assert found["simreg margin"].item() == pytest.approx(margins.mean().item(), rel=1e-5)
    assert found["simreg margin of right predictions"].item() == pytest.approx(margins[margins > 0].mean().item())
    assert abs(margins.mean() - margins[margins > 0].mean()) > 1e-2
    assert found["simreg margin 50%"].item() == pytest.approx(margins.median().item(), rel=1e-6)
    assert not len(output_layer.margins(model, hidden[:0, 0], labels[0, :0], None)), "a rank may hold none"
    monkeypatch.setattr(metrics, "_KEPT_MICRO_BATCHES", 3)
    unread = measuring(SimRegConfig(lambda_=1, temperature=0.1))
    for _ in range(5):
        unread.add_to(loss, unread.terms(model, hidden, labels, mask))
    assert len(unread.metrics._margins) == 3, "in a loop that never asks they must not pile up"

    nowhere = logged(MODEL)
    assert not any("margin" in value for value in nowhere) and "output layer" in capsys.readouterr().out


def test_trained_scalars_are_read_by_a_call_that_data_parallelism_can_wait_in() -> None:
    """Megatron's DDP hangs the wait for gathered parameters on the module's forward."""
    config, model, waited = SimRegConfig(lambda_=1, similarity="learnable"), torch.nn.Linear(2, 2), []
    learnable.add_to(model, learnable.wanted(config))
    model.simreg_similarity.register_forward_pre_hook(lambda module, given: waited.append(module))
    found = learnable.learned_scalars(config, model, None)
    assert waited == [model.simreg_similarity] and set(found) == {"query", "key"}
    sum(found.values()).backward()
    assert model.simreg_similarity.query.grad.item() == 1


@pytest.mark.parametrize("objective", ["simreg:3", "sigreg:2,simreg:3"])
def test_lambda_follows_its_schedule_in_gradient_and_log(objective: str) -> None:
    """A quarter on the way of a cosine from lambda to a tenth of it: 0.1 + 0.9 (1 + cos(pi / 4)) / 2, ..."""
    hidden, labels, mask, loss = micro_batch()
    settings = {"objective": objective, "temperature": 0.1, "chunk_size": 6}

    def gradient(regularizer: Regularizer, iteration: int) -> torch.Tensor:
        regularizer.strength.set_iteration(iteration, 40)
        hidden.grad = None
        result = add(regularizer, hidden, labels, mask, loss)
        assert torch.equal(result, loss)
        result.sum().backward()
        return hidden.grad.clone()

    scheduled = Regularizer(SimRegConfig(**settings, lambda_schedule="cosine:0.1"))
    last = 0.1 + 0.9 * math.sin(math.pi / 80) ** 2
    for iteration, share in ((0, 1.0), (10, 0.8681980515339464), (20, 0.55), (39, last)):
        whole = gradient(Regularizer(SimRegConfig(**settings)), iteration)
        torch.testing.assert_close(gradient(scheduled, iteration), share * whole, rtol=1e-6, atol=1e-9)
        assert scheduled.lambdas()["simreg lambda"].item() == pytest.approx(3 * share, rel=1e-6)
        assert set(scheduled.lambdas()) == {f"{part.objective} lambda" for part in scheduled.config.parts}
    assert not Regularizer(SimRegConfig(**settings)).lambdas(), "one that is constant needs no line"


def test_a_loop_may_change_the_loss_in_place() -> None:
    given_BS = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
    term_BS = torch.tensor([[5.0, 7.0]], requires_grad=True)
    mask_BS = torch.tensor([[1.0, 0.0, 0.5]])
    base_BS = given_BS * 1.0
    loss_BS = add_gradient(base_BS, term_BS, 2.0, start=1)
    loss_BS *= mask_BS
    loss_BS.sum().backward()
    assert loss_BS.tolist() == [[1.0, 0.0, 1.5]]
    assert given_BS.grad is not None and torch.equal(given_BS.grad, mask_BS)
    assert term_BS.grad is not None and torch.equal(term_BS.grad, 2.0 * mask_BS[:, 1:])


def test_a_change_in_place_of_what_a_backward_needs_is_found() -> None:
    """As without SimReg: the loss shares the count of changes with the one that Megatron computed."""
    given_BS = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
    base_BS = given_BS.exp()  # whose backward needs its own value
    loss_BS = add_gradient(base_BS, torch.zeros(1, 3, requires_grad=True))
    loss_BS *= 2.0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss_BS.sum().backward()


@pytest.mark.parametrize("document_mask", [False, True])
def test_a_packed_row_equals_its_samples_one_by_one(document_mask: bool) -> None:
    """Two samples of 12 tokens packed into one row, the second of two documents: chunks start again in each sample."""
    config = SimRegConfig(lambda_=1, temperature=0.1, chunk_size=5, document_mask=document_mask)
    hidden, labels, mask, loss = micro_batch()
    flat = hidden.detach().transpose(0, 1).reshape(BATCH * LENGTH, 1, WIDTH).requires_grad_()
    ends = torch.tensor([0, 12, 15, 24], dtype=torch.int32)
    packing = SimpleNamespace(cu_seqlens_q=ends, cu_seqlens_q_padded=None, tokens_per_sample=LENGTH)
    row = [part.reshape(1, -1) for part in (labels, mask, loss)]
    regularizer = Regularizer(config)
    result = regularizer.add_to(row[2], regularizer.terms(MODEL, flat, row[0], row[1], packing))
    result.sum().backward()

    expected = hidden.detach().transpose(0, 1).clone().requires_grad_()
    documents = torch.tensor([[0] * 12, [0] * 3 + [1] * 9]) if document_mask else None
    options = {"temperature": 0.1, "valid": mask > 0, "chunk_size": 5, "documents": documents}
    terms = simreg_loss(expected, labels, reduction="none", **options)
    terms.sum().backward()
    torch.testing.assert_close(flat.grad.reshape(BATCH, LENGTH, WIDTH), expected.grad, rtol=1e-12, atol=1e-14)


def test_failure_behind_a_sound_loss_stops_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, labels, mask, loss = micro_batch()
    sound = term.simreg_over_ranks
    monkeypatch.setattr(term, "simreg_over_ranks", lambda *a, **k: sound(*a, **k) * float("inf"))
    regularizer = Regularizer(SimRegConfig(lambda_=1))
    with pytest.raises(RuntimeError, match="the SimReg term is not finite while the language-model loss is"):
        add(regularizer, hidden, labels, mask, loss)
    with torch.no_grad():
        loss[0, 0] = float("nan")  # Megatron's own checks see this one
    add(regularizer, hidden, labels, mask, loss)


def test_terms_of_another_shape_are_refused() -> None:
    """Their gradient would be added to some tokens' loss only."""
    record = SimpleNamespace(kind_with=lambda _: Kind.SUMS, terms=lambda *_: torch.ones(2, 1))
    config = SimpleNamespace(record=record, options={}, objective="mine")
    view = SimpleNamespace(labels=torch.zeros(2, 4), roles=SimpleNamespace(anchor=torch.ones(2, 4)))
    with pytest.raises(ValueError, match=r"terms of objective mine must be \[2, 8\], not \[2, 1\]"):
        objective_terms(config, [view, view], None, {}, 0, lambda: None)
