# SPDX-License-Identifier: Apache-2.0
"""A training loop of another framework is refused what Megatron's own is: before its first step if it calls
`begin_run`, else in the forward pass of the first micro-batch that shows it."""

import argparse
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from simreg_megatron import SimRegConfig, loop
from simreg_megatron.adagc.clipping import Clipping
from simreg_megatron.config.flags import add_simreg_arguments
from simreg_megatron.loop import contract
from simreg_megatron.parallel import learnable
from simreg_megatron.plugin import compat, installation, refusals
from simreg_megatron.plugin import loop as plugin_loop
from simreg_megatron.plugin.model import regularize
from tests.helpers.fixtures import One

TOO_WIDE = "objective simreg cannot take 16 features of states of width 8: give prefixes of at most 8"


pytestmark = pytest.mark.megatron

WIDTH, LENGTH = 8, 6


class Model(nn.Module):
    """A GPTModel of one layer, as far as SimReg looks at it."""

    data_ranks = One()

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.post_process = True
        given = {"hidden_size": WIDTH, "sequence_parallel": False, "num_layers": 1, "params_dtype": torch.float32}
        self.config = SimpleNamespace(**given | settings)
        self.pg_collection = SimpleNamespace(tp=One(), cp=One(), dp=self.data_ranks, dp_cp=One())
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList([nn.Identity()])
        self.decoder.layers[0].layer_number = 1

    def forward(self, hidden_states: Tensor, labels: Tensor, packed_seq_params: object = None, **more: Any) -> Tensor:
        return regularize(_postprocess, self, hidden_states, labels, packed_seq_params=packed_seq_params, **more)


def _postprocess(
    model: Model,
    hidden_states: Tensor,
    labels: Tensor,
    packed_seq_params: object = None,
    inference_context: object = None,
    output_processor: object = None,
) -> Tensor:
    return hidden_states.sum(dim=-1).T


@pytest.fixture(autouse=True)
def data_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[One]:
    """The model's own: there are no groups of Megatron's here."""
    ranks = One()
    monkeypatch.setattr(Model, "data_ranks", ranks)
    yield ranks
    installation.set_current(None)


def installed(**settings: Any) -> None:
    made = installation.Installation(SimRegConfig(**{"lambda_": 1} | settings), lambda config: ())
    made.model_classes = (Model,)
    installation.set_current(made)


def train(model: Model, num_sequences: int = 2, packed: object = None) -> None:
    hidden_states = torch.randn(LENGTH, num_sequences, WIDTH, requires_grad=True)
    labels = torch.arange(LENGTH).expand(num_sequences, LENGTH) % 3
    model(hidden_states, labels, packed).sum().backward()


@pytest.mark.parametrize("what", ["trains", "evaluates", "is paused", "generates"])
def test_only_a_model_that_trains_gets_the_term(what: str) -> None:
    """Without it, the gradient of this loss is 1 everywhere."""
    installed(temperature=0.1)
    model = Model().train(what != "evaluates")
    hidden_states = torch.randn(LENGTH, 2, WIDTH, requires_grad=True)
    more = {"inference_context": object()} if what == "generates" else {}
    installation.current().paused = what == "is paused"
    model(hidden_states, torch.arange(LENGTH).expand(2, LENGTH) % 3, **more).sum().backward()
    assert torch.equal(hidden_states.grad, torch.ones_like(hidden_states)) == (what != "trains")


def test_states_of_a_forward_pass_without_a_loss_are_let_go() -> None:
    """With them their graph, and all activations of that pass."""
    installed(layers=(1, "final"))
    model, hidden_states = Model(), torch.randn(LENGTH, 2, WIDTH, requires_grad=True)
    caught = installation.regularizer().inner_states
    for labels in (torch.arange(LENGTH).expand(2, LENGTH) % 3, None):
        caught.catch(lambda decoder, states: states * 2, model.decoder, hidden_states)
        assert caught._caught[model.decoder]
        model(hidden_states * 2, labels)
        assert not caught._caught


@pytest.mark.parametrize("settings", [{"similarity": "learnable"}, {"objective": "sigmoid"}, {}])
def test_the_check_of_a_loop_leaves_out_what_only_simreg_trains(settings: dict[str, Any]) -> None:
    installed(**settings, temperature=0.5)
    model = Model()
    model.states = nn.Parameter(torch.randn(LENGTH, 2, WIDTH))
    learnable.add_to(model, learnable.wanted(installation.regularizer().config))
    labels = torch.arange(LENGTH).expand(2, LENGTH) % 3

    def forward_backward() -> Tensor:
        loss = model(model.states, labels).sum()
        loss.backward()
        return loss

    found = contract.check(model, forward_backward)
    assert (found.changed, found.parameters) == (1, 1) and found.change > 0


def test_the_log_is_reduced_over_the_ranks_of_the_model(data_ranks: One) -> None:
    """Megatron's global groups, which are not there, may be none, or another model's."""
    installed(temperature=0.1)
    model = Model()
    loop.begin_run(model)
    train(model)
    assert loop.end_step(model, reduces=True)["simreg loss"] > 0
    assert compat.data_group(model) is data_ranks
    with pytest.raises(AssertionError, match="is not initialized"):
        compat.data_group()


def test_another_loss_and_packing_that_cannot_be_followed_are_refused() -> None:
    installed(temperature=0.1)
    model, hidden_states = Model(), torch.randn(LENGTH, 2, WIDTH, requires_grad=True)
    labels = torch.arange(LENGTH).expand(2, LENGTH) % 3
    with pytest.raises(NotImplementedError, match=r"an output processor returns something else.*--simreg-lambda 0"):
        model(hidden_states, labels, output_processor=print)
    packed = SimpleNamespace(cu_seqlens_q=torch.tensor([0, LENGTH]), cu_seqlens_q_padded=None)
    model(hidden_states, labels, packed).sum().backward()
    packed.local_cp_size = 2
    with pytest.raises(NotImplementedError, match=r"local_cp_size is 2 without a cp_group.*--simreg-lambda 0"):
        model(hidden_states, labels, packed)


EXCLUDED = [
    ({"layers": 1}, {"overlap_moe_expert_parallel_comm": True}, "never calls the decoder's layers"),
    ({"every": 2}, {"cuda_graph_impl": "full_iteration"}, "computes the same in each"),
    ({"log_interval": 5}, {}, "log interval has no effect here"),  # the loop says itself when it logs
]


@pytest.mark.parametrize(("settings", "of_model", "sentence"), EXCLUDED)
def test_what_the_models_configuration_excludes_is_refused(settings, of_model, sentence: str, monkeypatch) -> None:
    monkeypatch.setattr(refusals, "refuse_models", lambda *_: None)  # asks for a real decoder
    installed(**settings)
    with pytest.raises((ValueError, NotImplementedError), match=sentence):
        loop.begin_run(Model(**of_model))


def test_without_flags_and_without_settings_nothing_trains_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "arguments", lambda: None)
    installation.set_current(installation.Installation(None, lambda config: ()))
    with pytest.raises(ValueError, match=r"no flags are parsed here: pass install\(config="):
        loop.begin_run(Model())


class FullyShardedDataParallel(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class FSDPModule:
    """The mixin that torch's `fully_shard` adds to the class of a model."""


class ShardedModel(FSDPModule, Model):
    pass


@pytest.mark.parametrize("sharded", [lambda: [FullyShardedDataParallel(Model())], ShardedModel])
def test_rows_of_the_output_layer_that_lie_elsewhere_are_refused(sharded: Any) -> None:
    for settings in ({"objective": "z-loss"}, {"objective": "sigmoid", "objective_options": "pairs=hidden-head"}):
        installed(**settings)
        with pytest.raises(NotImplementedError, match=r"needs the output layer's rows on each rank, and F\w+ scatters"):
            loop.begin_run(sharded())
    installed()
    loop.begin_run(sharded())


NOT_CAUGHT = [({"layers": (1, "final")}, "of layer 1"), ({"placement": "pre-norm"}, "before the final norm")]


@pytest.mark.parametrize(("settings", "what"), NOT_CAUGHT)
def test_states_that_were_not_caught_are_no_silent_loss(settings: dict, what: str) -> None:
    """A decoder that a loop calls piece by piece, or replays, passes no hook."""
    installed(**settings)
    with pytest.raises(NotImplementedError, match=f"the states {what} were not caught"):
        train(Model())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("every", [1, 2])
def test_adagc_that_clips_most_of_the_term_away_is_logged(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Megatron's loop, before its first step."""
    flags = ["--simreg-lambda", "1", "--adagc", "--simreg-every", str(every)]
    args = add_simreg_arguments(argparse.ArgumentParser()).parse_args(flags)
    vars(args).update(micro_batch_size=3, seq_length=LENGTH, hidden_size=WIDTH, log_interval=1, clip_grad=1.0)
    monkeypatch.setattr(compat, "arguments", lambda: args)
    attached: list[tuple] = []
    monkeypatch.setattr(Clipping, "attach", lambda *given: attached.append(given))
    for module, name in ((plugin_loop, "choose_impl"), (plugin_loop, "open_row_group"), (refusals, "refuse_models")):
        monkeypatch.setattr(module, name, lambda *given: None)
    installation.set_current(installation.Installation(None, lambda config: ()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plugin_loop.set_up(lambda: ([Model()], "optimizer", "scheduler"))
    assert attached[0][1] == "optimizer"
    sentence = "with --simreg-every 2 it clips most of the term away in the steps with it: drop one of the two"
    assert [sentence in str(each.message) for each in caught if "AdaGC" in str(each.message)] == [True] * (every == 2)


def test_prefixes_wider_than_the_states_are_refused() -> None:
    installed(objective_options="prefixes=4/16")
    with pytest.raises(ValueError, match=TOO_WIDE):
        loop.begin_run(Model())
    with pytest.raises(ValueError, match=TOO_WIDE):
        train(Model())
    installed(objective_options="prefixes=4/8")
    loop.begin_run(Model())
    train(Model())
