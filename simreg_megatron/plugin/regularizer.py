# SPDX-License-Identifier: Apache-2.0
"""SimReg on the hidden states of one micro-batch of a Megatron model: the final ones, or those of chosen layers.

Shapes: S tokens of this rank, B micro-batch, D hidden. Megatron's hidden states are [S, B, D], its labels, loss mask
and per-token loss [B, S] (all tokens of the context rank, also where sequence parallelism splits the hidden states).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from simreg_megatron.config import SimRegConfig
from simreg_megatron.measures.agreement import Agreement
from simreg_megatron.measures.metrics import Metrics
from simreg_megatron.parallel.autograd import add_gradient, add_gradient_of_sum
from simreg_megatron.parallel.shard import SequenceShard
from simreg_megatron.plugin import compat
from simreg_megatron.plugin.gradient_returns import Returns, stop_hidden_failure
from simreg_megatron.plugin.inner import InnerStates, State
from simreg_megatron.plugin.stages import DataOfStages, MicroBatch
from simreg_megatron.plugin.tokens import (
    Given,
    Tokens,
    describe_chunks,
    documents_of,
    main_hidden_states,
    shard_of,
    valid_tokens,
)
from simreg_megatron.plugin.writers import timed
from simreg_megatron.sharded.objectives import objective_terms
from simreg_megatron.sharded.sequence import chunk_views, simreg_over_ranks
from simreg_megatron.sharded.views import View
from simreg_megatron.strength import Strength
from simreg_megatron.weights.heads import head_terms, label_rows
from simreg_megatron.weights.learnable import learned_scalars


class _Part(NamedTuple):
    """One objective's result for a micro-batch."""

    terms: Tensor  # [B, anchors of this rank]
    views: list[View]  # of the last states; whole chunks in log steps alone where an objective has others
    learned: dict[str, Tensor]


class Terms(NamedTuple):
    """SimReg's terms of one micro-batch, one part an objective, until its language-model loss is there."""

    parts: list[_Part]
    model: Any
    labels: Tensor  # [B, S]
    start: int  # first column of the loss that they belong to


class Regularizer:
    """Adds lambda * SimReg to a model's per-token loss and keeps count of what it saw."""

    def __init__(self, config: SimRegConfig) -> None:
        self.config = config
        self.end_of_document: int | None = None  # token id, where Megatron has a tokenizer
        self.inner_states = InnerStates(config)
        self.data_of_stages = DataOfStages(config)
        self.agreement = Agreement()
        self.metrics = Metrics(config, self.agreement)
        self.strength = Strength(config)
        self.has_met_model = False  # set once a model's loss came by
        self.returns = Returns()
        self._hidden_size = 0  # of the model that it met

    @property
    def trains(self) -> bool:
        """Whether this step's term adds to the gradient."""
        return self.config.trains and not self.strength.is_off

    @property
    def computes(self) -> bool:
        """Whether this step's micro-batches are computed on: every step in training, log steps where SimReg only
        measures."""
        return self.trains or self.metrics.wants_geometry

    def set_iteration(self, iteration: int, num_iterations: int | None = None) -> None:
        """Before step `iteration`, see `Strength.set_iteration`."""
        self.strength.set_iteration(iteration, num_iterations)

    def repeat_one_step(self) -> None:
        """From now on the host decides nothing anew in a step, see whole_graph.py."""
        self.strength.repeats, self.metrics.has_geometry = True, False

    def _refuse_idleness(self) -> None:
        if not (self.config.trains or self.strength.follows_iterations):
            raise RuntimeError(
                "SimReg only measures here, in steps that the training loop names, and this one names none: call "
                "simreg_megatron.loop.begin_step(step, measures=True) before each step to measure, or drop SimReg"
            )

    def lambdas(self) -> dict[str, Tensor]:
        """The weight of each objective in this step, under the names of the log; empty while all are constant."""
        return self.strength.lambdas(self._hidden_size)

    def terms(
        self, model: Any, hidden_states: Tensor, labels: Tensor, loss_mask: Any, packed_seq_params: Any = None
    ) -> Terms | None:
        """Compute SimReg's terms of a micro-batch; None in steps in which it neither trains nor measures.

        Call it before the output layer and the loss: autograd runs the newest node first, so that the terms' backward
        follows the output layer's, which keeps the device busy while the host prepares the terms'.

        Args:
            model: the GPTModel.
            hidden_states: [S, B, D], what enters the output layer (or, with multi-token prediction, its stack).
            labels: [B, S] target ids; negative ids are ignored.
            loss_mask: [B, S], 0 where a token does not count; None counts every token with a label.
            packed_seq_params: Megatron's description of a row that packs several texts, or None.
        """
        self.has_met_model, self._hidden_size = True, model.config.hidden_size
        self._refuse_idleness()
        if not self.computes:
            return None
        with timed():
            shard = shard_of(model, labels)
            main_states = main_hidden_states(hidden_states, shard)
            tokens = self._tokens(model, labels, loss_mask, shard, main_states, packed_seq_params)
            states = self.inner_states.take(model, main_states)
            parts = self._parts(model, tokens, states)
            self.strength.count_by_itself()
            last = states.get(self.config.layers[-1])
            self.metrics.observe_predictions(
                model, main_states.detach(), None if last is None else last.detach(), tokens.labels, tokens.valid, shard
            )
            if last is not None:
                # Hook the tensor that was given: a part of it would get only its own share of the gradient.
                self.metrics.watch_gradient(hidden_states if last is main_states else last, tokens.valid, shard)
        return Terms(parts, model, labels, shard.start)

    def add_to(self, loss_BS: Tensor, terms: Terms | None) -> Tensor:
        """Return Megatron's per-token loss with SimReg in its gradient; the value is untouched."""
        if terms is None or not self.trains:
            return loss_BS
        if terms.parts:
            term = self._weighted(terms.parts, terms.model, loss_BS)
            self.returns.expect(term, loss_BS)
            loss_BS = add_gradient(loss_BS, term, start=terms.start)
        if self.config.layer_numbers and compat.pipeline_group(terms.model).size() > 1:
            loss_BS.register_hook(functools.partial(self.agreement.add, terms.model, terms.labels))
        return loss_BS

    def add_to_stage(self, output_SBD: Tensor, model: Any, given: MicroBatch) -> Tensor:
        """Return what a stage before the last sends on, with the terms of its layers in the gradient; the value stays.

        Args:
            output_SBD: of the stage's decoder.
            model: the part of the GPTModel on this stage.
            given: labels, mask and weights [B, S] of its tokens.
        """
        self.has_met_model = True
        self._refuse_idleness()
        if not self.computes:
            return output_SBD
        with timed():
            return self._add_to_stage(output_SBD, model, given)

    def _add_to_stage(self, output_SBD: Tensor, model: Any, given: MicroBatch) -> Tensor:
        from megatron.core.utils import make_viewless_tensor

        self.strength.refuse_uncounted()
        shard = shard_of(model, given.labels)
        tokens = self._tokens(model, given.labels, given.loss_mask, shard)
        states = self.inner_states.take(model)
        parts = self._parts(model, tokens, states)
        if self.config.layers[-1] in states:
            self.metrics.watch_gradient(states[self.config.layers[-1]], tokens.valid, shard)
        if not self.trains:
            return output_SBD
        terms = self._weighted(parts, model, output_SBD)
        total = (terms * given.weights[:, shard.start : shard.start + terms.shape[1]]).sum()
        self.agreement.add(model, given.labels, given.weights)
        # Megatron frees the data of what it has sent, and refuses a view.
        return make_viewless_tensor(add_gradient_of_sum(output_SBD, total), requires_grad=True, keep_graph=True)

    def _tokens(
        self,
        model: Any,
        labels: Tensor,
        loss_mask: Any,
        shard: SequenceShard,
        hidden_states: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tokens:
        whole = Given(hidden_states, labels, valid_tokens(labels, loss_mask))
        valid = shard.held_columns(whole.valid)
        heads = self._heads(model, labels, shard)
        tokens = Tokens(shard, whole, shard.held_columns(labels), valid, heads, packed_seq_params)
        describe_chunks(self.config, shard, tokens.sample_length)
        return tokens

    def _parts(self, model: Any, tokens: Tokens, states: dict[State, Tensor]) -> list[_Part]:
        """What each objective came to on the named states that are here; nothing where none is."""
        parts: list[_Part] = []
        if states:
            with torch.set_grad_enabled(self.trains):
                parts = [self._part(part, model, tokens, list(states.values())) for part in self.config.parts]
        self.metrics.observe_terms([part.terms.detach() for part in parts], tokens.valid, tokens.shard)
        if self.config.layers[-1] in states:  # what the log describes
            views = parts[self.metrics.primary].views
            learned = {name: scalar for part in parts for name, scalar in part.learned.items()}
            last = states[self.config.layers[-1]].detach()
            self.metrics.observe(views, last, tokens.valid, tokens.shard, learned)
        return parts

    def _weighted(self, parts: list[_Part], model: Any, beside: Tensor) -> Tensor:
        """lambda * term of all objectives, [B, anchors of this rank], in the type of `beside`, or float32."""
        stop_hidden_failure(beside, [part.terms for part in parts])
        dtype = torch.promote_types(beside.dtype, torch.float32)
        weighted = [
            part.terms.to(dtype) * self.strength.weight(config, model.config.hidden_size)
            for part, config in zip(parts, self.config.parts, strict=True)
        ]
        return functools.reduce(torch.add, weighted)

    def _part(self, config: SimRegConfig, model: Any, tokens: Tokens, states: list[Tensor]) -> _Part:
        """The terms of one objective, summed over the states that it is given and averaged over their prefixes."""
        if config.through_head:
            given = tokens.whole
            assert given.hidden_states is not None  # the settings leave it to the stage with the output layer
            terms = head_terms(config, model, given.hidden_states, given.labels, given.valid, tokens.shard)
            return _Part(terms, self._views_for_log(config, tokens, states[-1]), {})
        prefixes = [prefix for state in states for prefix in _prefixes(config, state)]
        views = [self._views(config, tokens, prefix) for prefix in prefixes]
        learned = learned_scalars(config, model, tokens.shard.tensor_group)
        exponents = (learned["query"], learned["key"]) if "query" in learned else None
        data_group = functools.partial(compat.data_group, model)
        terms_of_states = [
            simreg_over_ranks(config, tokens.shard, rows, own, sample_length=tokens.sample_length, exponents=exponents)
            if config.is_simreg
            else objective_terms(config, own, tokens.shard, learned, self.strength.iteration, data_group)
            for rows, own in zip(prefixes, views, strict=True)
        ]
        terms = functools.reduce(torch.add, terms_of_states)
        if config.is_simreg and config.prefixes:
            terms = terms / len(config.prefixes)
        others = config.sends_no_rows or config.record.relabels  # than what the log describes
        shown = self._views_for_log(config, tokens, states[-1]) if others else views[-1]
        return _Part(terms, shown, learned)

    def _views_for_log(self, config: SimRegConfig, tokens: Tokens, states: Tensor) -> list[View]:
        """Whole chunks of the states, in log steps: what the objective computes on are a rank's own rows."""
        return self._views(config, tokens, states.detach(), for_log=True) if self.metrics.wants_geometry else []

    def _views(self, config: SimRegConfig, tokens: Tokens, states: Tensor, *, for_log: bool = False) -> list[View]:
        return chunk_views(
            config,
            tokens.shard,
            states,
            tokens.labels,
            tokens.valid,
            documents=documents_of(tokens.packed_seq_params, self.end_of_document) if config.document_mask else None,
            sample_length=tokens.sample_length,
            heads=tokens.heads if config.meets_heads else None,
            iteration=self.strength.iteration,
            for_log=for_log,
        )

    def _heads(self, model: Any, labels: Tensor, shard: SequenceShard) -> Tensor | None:
        """The output layer's rows for this rank's labels, where an objective asks for them. A collective then."""
        if not any(part.meets_heads for part in self.config.parts):
            return None
        rows = label_rows(model, labels, shard.tensor_group)
        return shard.held_columns(rows.transpose(0, 1)).transpose(0, 1)


def _prefixes(config: SimRegConfig, states: Tensor) -> list[Tensor]:
    """The parts of the states that get a term each: the first features, or all of them."""
    if not (config.is_simreg and config.prefixes):
        return [states]
    return [states[..., :prefix] for prefix in config.prefixes]
