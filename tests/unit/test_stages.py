# SPDX-License-Identifier: Apache-2.0
"""Terms on pipeline stages before the last: labels that the stage reads itself, and the weight of each token."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from simreg_megatron import SimRegConfig
from simreg_megatron.measures.agreement import Agreement
from simreg_megatron.plugin import compat, installation, layers, refusals
from simreg_megatron.plugin.model import add_terms_of_stage
from simreg_megatron.plugin.term import Regularizer

BATCH, LENGTH, WIDTH = 2, 12, 8
MASK = torch.tensor([[1.0] * 7 + [0.0] * 5, [1.0] * 12])


class Group:
    """A process group whose ranks are asked for, never spoken to."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


class Stage(torch.nn.Module):
    """As much of a GPTModel as the stage with layers 3 and 4 shows."""

    post_process = False

    def __init__(self, cp: Group | None = None) -> None:
        super().__init__()
        self.config = SimpleNamespace(sequence_parallel=False, hidden_size=256)
        self.pg_collection = SimpleNamespace(tp=Group(), cp=cp or Group())
        self.decoder = torch.nn.Module()
        self.decoder.layers = [SimpleNamespace(layer_number=3), SimpleNamespace(layer_number=4)]


def megatron(per_token: bool = False, loss_scale: float | None = None) -> SimpleNamespace:
    scale = None if loss_scale is None else lambda ones: ones * loss_scale
    return SimpleNamespace(calculate_per_token_loss=per_token, grad_scale_func=scale)


def batch() -> dict[str, Tensor]:
    labels = torch.randint(0, 4, (BATCH, LENGTH), generator=torch.Generator().manual_seed(3))
    return {"tokens": labels.roll(1, dims=1), "labels": labels, "loss_mask": MASK.clone()}


@pytest.fixture
def _newer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "adds_up_tokens_of_context_ranks", lambda: False)


@pytest.mark.usefixtures("_newer")
@pytest.mark.parametrize(
    ("config", "factor"),
    [
        (megatron(), 1 / 19 / 4),
        (megatron(per_token=True), 1.0),
        (megatron(loss_scale=1024), 1024 / 19 / 4),
        (megatron(per_token=True, loss_scale=1024), 1024.0),
    ],
)
def test_weights_are_megatrons(config: SimpleNamespace, factor: float) -> None:
    """19 tokens count, in one of 4 micro-batches."""
    torch.testing.assert_close(layers.token_weights(MASK, config, 4, Group()), MASK * factor)
    nothing = layers.token_weights(torch.zeros_like(MASK), config, 4, Group())
    assert torch.equal(nothing, torch.zeros_like(MASK)), "a micro-batch without tokens has no weight, and no NaN"


def test_weights_of_0_12_count_tokens_over_context_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "adds_up_tokens_of_context_ranks", lambda: True)
    monkeypatch.setattr(layers.dist, "all_reduce", lambda tokens, group: tokens.add_(6))  # the other rank has 6
    found = layers.token_weights(MASK, megatron(), 4, Group(0, 2))
    torch.testing.assert_close(found, MASK * 2 / 25 / 4)
    assert torch.equal(layers.token_weights(MASK, megatron(per_token=True), 4, Group(0, 2)), MASK)


@pytest.mark.megatron
def test_this_release_counts_tokens_of_a_context_rank() -> None:
    assert not compat.adds_up_tokens_of_context_ranks()


def run_step(iterator, script, stage: Stage | None = None) -> layers.MicroBatch:
    """What the plugin was told of the micro-batch that `script` ran."""
    given = []
    stage = stage or Stage()

    def add_to(output: Tensor, model: Stage, micro_batch: layers.MicroBatch) -> Tensor:
        given.append(micro_batch)
        return output

    step = layers.with_terms(script, add_to, megatron(per_token=True), 4)
    rows = LENGTH // stage.pg_collection.cp.size()
    output, loss_function = step(iterator, stage, "more")
    assert output.shape == (rows, BATCH, WIDTH) and loss_function == "loss function"
    return given[0]


def reads_nothing(data_iterator, model: Stage, more: str) -> tuple[Tensor, str]:
    return torch.zeros(LENGTH // model.pg_collection.cp.size(), BATCH, WIDTH), "loss function"


def reads_and_cuts(data_iterator, model: Stage, more: str) -> tuple[Tensor, str]:
    """As Megatron's scripts on the first stage, which cut what they read for context parallelism, in place."""
    read = next(data_iterator)
    for name in read:
        read[name] = read[name][:, :3]
    return reads_nothing(None, model, more)


@pytest.mark.usefixtures("_newer")
@pytest.mark.parametrize("script", [reads_nothing, reads_and_cuts])
def test_each_micro_batch_is_read_once(script) -> None:
    others = {name: tensor.flip(0) for name, tensor in batch().items()}
    iterator = iter([batch(), others])
    for expected in (batch(), {name: tensor.flip(0) for name, tensor in batch().items()}):
        found = run_step(iterator, script)
        assert torch.equal(found.labels, expected["labels"]) and torch.equal(found.loss_mask, expected["loss_mask"])
        assert torch.equal(found.weights, expected["loss_mask"])
    assert next(iterator, None) is None


@pytest.mark.usefixtures("_newer")
def test_context_ranks_take_their_two_blocks() -> None:
    for rank, places in ((0, [0, 1, 2, 9, 10, 11]), (1, [3, 4, 5, 6, 7, 8])):
        found = run_step(iter([batch()]), reads_nothing, Stage(Group(rank, 2)))
        assert torch.equal(found.labels, batch()["labels"][:, places])
        assert torch.equal(found.loss_mask, MASK[:, places])


def reads_twice(data_iterator, model: Stage, more: str) -> tuple[Tensor, str]:
    next(data_iterator)
    return reads_and_cuts(data_iterator, model, more)


def test_a_stage_that_predicts_further_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its output holds those states, too, and its labels were looked for in twice as many rows."""
    monkeypatch.setattr(Stage, "mtp_process", True, raising=False)
    with pytest.raises(NotImplementedError, match="that holds layers of multi-token prediction, too: name layers of"):
        run_step(iter([batch()]), reads_nothing)


@pytest.mark.parametrize(
    ("iterator", "script", "sentence"),
    [
        (None, reads_nothing, "stage with layers 3 to 4, which has no data and so no labels"),
        ([torch.zeros(2)], reads_nothing, "this script's data loader gives something else"),
        ([{"text": torch.zeros(2)}], reads_nothing, "this script's data loader gives something else"),
        ([{"labels": torch.zeros(2, 5), "loss_mask": torch.zeros(2, 5)}], reads_nothing, "gives something else"),
        ([batch(), batch()], reads_twice, "this script's data loader gives something else"),
    ],
)
def test_data_of_another_kind_is_refused(iterator, script, sentence: str) -> None:
    with pytest.raises(NotImplementedError, match=sentence):
        run_step(None if iterator is None else iter(iterator), script)


@pytest.mark.parametrize("what", ["trains", "evaluates", "needs no gradient", "is paused", "collects no loss"])
def test_only_a_stage_that_trains_gets_terms(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @add_terms_of_stage
    def forward_step(forward_step_func, data_iterator, model, num_microbatches, config, collect_non_loss_data=False):
        return forward_step_func

    here = installation.Installation(SimRegConfig(lambda_=1, layers=4), lambda config: ())
    here.paused = what == "is paused"
    monkeypatch.setattr(installation, "_installation", here)
    stage = Stage().train(what != "evaluates")
    given = reads_nothing, iter([batch()]), [stage], 4, megatron()
    with torch.set_grad_enabled(what != "needs no gradient"):
        done = forward_step(*given, collect_non_loss_data=what == "collects no loss")
    assert (done is reads_nothing) == (what != "trains")


@pytest.mark.megatron
def test_frozen_states_are_refused() -> None:
    regularizer = Regularizer(SimRegConfig(lambda_=3, layers=3))
    stage = Stage()
    regularizer.inner_states._caught[stage.decoder] = {3: torch.zeros(LENGTH, BATCH, WIDTH)}
    with pytest.raises(NotImplementedError, match="layer 3 were computed without a graph"):
        regularizer.inner_states.take(stage)


def agreed(first: tuple[Tensor, Tensor], last: tuple[Tensor, Tensor]) -> None:
    """Stages 0 and 2 of three, two micro-batches each; the stage between holds nothing."""
    tables = []
    for stage, (labels, weights) in ((0, first), (2, last)):
        agreement, models = Agreement(), (Stage(), Stage())
        for model in models:  # two parts of the model on one stage
            for _ in range(2):
                agreement.add(model, labels, weights)
        tables.append(agreement.table(stage, 3, labels.device, reset=True))
        assert not agreement.table(stage, 3, labels.device, reset=True).any(), "an interval starts at zero"
    Agreement().check(sum(tables))


def test_other_labels_masks_or_weights_are_found_out() -> None:
    labels = batch()["labels"]
    agreed((labels, MASK), (labels, MASK))
    agreed((labels, MASK), (labels, MASK * float("nan")))  # Megatron's own check speaks of that
    for wrong in ((labels.roll(1, 1), MASK), (labels, 2 * MASK), (labels, torch.ones_like(MASK))):
        with pytest.raises(RuntimeError, match="pipeline stage 0 computed its --simreg-layers with other labels"):
            agreed(wrong, (labels, MASK))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"similarity": "learnable"}, "simreg trains scalars, which only the last stage has"),
        ({"objective": "sigmoid", "temperature": 0.1}, "sigmoid trains scalars, which only the last stage has"),
        (
            {"objective": "sigmoid", "objective_options": "pairs=hidden-head,trains=none", "temperature": 0.1},
            "sigmoid needs the output layer, which only the last stage has",
        ),
    ],
)
def test_what_needs_the_last_stage_is_refused(settings, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "refuse_decoder", lambda config, decoder: None)
    with pytest.raises(NotImplementedError, match=f"--simreg-layers 4 lies on an earlier .* objective {sentence}"):
        refusals.refuse_stage(SimRegConfig(lambda_=1, layers=4, **settings), Stage())
    refusals.refuse_stage(SimRegConfig(lambda_=1, layers=4), Stage())


def test_directions_need_the_iteration() -> None:
    regularizer = Regularizer(SimRegConfig(lambda_=1, layers=4, objective="sigreg"))
    with pytest.raises(NotImplementedError, match="which is not known here"):
        regularizer.add_to_stage(torch.zeros(1), Stage(), layers.MicroBatch(MASK, MASK, MASK))


@pytest.mark.megatron
@pytest.mark.parametrize(("tensor_rank", "built"), [(0, True), (1, False)])
def test_a_stage_in_the_middle_builds_the_training_set(tensor_rank, built, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import parallel_state
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder as Builder

    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: tensor_rank)
    monkeypatch.setattr(
        Builder, "__init__", initialize := lambda self, wants: vars(self).update(is_built_on_rank=wants)
    )

    def provider(sizes: str, vp_stage: int | None = None) -> list[str | None]:
        found = Builder(lambda: False).is_built_on_rank()
        return ["train", "valid", "test"] if found else [None, None, None]

    provider.is_distributed = True

    def build_iterators(provider):
        assert provider.is_distributed
        return tuple(provider("sizes"))

    data = layers.DataOfStages(SimRegConfig(lambda_=1, layers=4))
    other = Stage()
    other.decoder.layers = [SimpleNamespace(layer_number=5)]
    data.parts = [other, Stage()]
    assert data.build(build_iterators, provider) == (None, None, None), "a part of the model without named layers"
    assert data.build(build_iterators, provider) == ("train" if built else None, None, None)
    assert data.build(build_iterators, provider) == (None, None, None)
    assert Builder.__init__ is initialize, "as it was"
