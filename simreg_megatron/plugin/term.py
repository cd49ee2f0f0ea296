# SPDX-License-Identifier: Apache-2.0
"""From the hidden states and labels of one micro-batch to SimReg's term, and from there to Megatron's loss.

Shapes: S tokens of this rank, T of its context rank, B micro-batch, D hidden, A anchors of this rank. Hidden states are
[S, B, D]; labels, loss mask and per-token loss [B, T], also where sequence parallelism splits the hidden states.
"""

from __future__ import annotations

import functools
import math
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import _profiler_enabled
from torch.profiler import record_function

from simreg_megatron.config import SimRegConfig
from simreg_megatron.notices import log_once
from simreg_megatron.parallel.collectives import add_gradient
from simreg_megatron.parallel.learnable import learned_scalars, wanted
from simreg_megatron.parallel.metrics import Metrics
from simreg_megatron.parallel.pairs import View
from simreg_megatron.parallel.sequence import chunk_views, objective_terms, simreg_over_ranks
from simreg_megatron.plugin import compat
from simreg_megatron.plugin.refusals import OTHER_LOSS
from simreg_megatron.plugin.tokens import InnerStates, MicroBatch, MicroBatchReader

_NOT_FINITE = (
    "the SimReg term is not finite while the language-model loss is: the step is stopped "
    "(with tensor or context parallelism, see the other ranks' logs too: one of them may have failed first)"
)
_NEEDS_LOOP = (
    "a SimReg lambda that changes (--simreg-start-iter, --simreg-warmup-iters, --simreg-lambda-schedule, "
    "--simreg-off-after, --simreg-every) needs Megatron's training loop, or one that passes the number of the step and "
    "of all steps to simreg_megatron.loop.begin_step: call that before each step, or drop these settings"
)


class Strength:
    """The strength of the term in one run, from step to step."""

    def __init__(self, config: SimRegConfig) -> None:
        self.config = config
        self.factor: Tensor | None = None  # of lambda, 0-d on the device; None while lambda is constant
        self.is_off = False  # in this step, as the settings say
        self.is_captured = False  # one step is captured and replayed: none may leave anything out
        self.follows_iterations = False  # set once a training loop passes the iteration
        self.iteration = 0  # without one: micro-batches so far
        self.hidden_size, self.lambdas = 0, [0.0] * len(config.parts)  # of the model; of each objective, for its width

    def set_iteration(self, iteration: int, num_iterations: int | None = None) -> None:
        """Set the factor of lambda for step `iteration`, counted from 0."""
        self.follows_iterations, self.iteration = True, iteration
        self.is_off = iteration % self.config.every != 0
        schedule = self.config.schedule
        if schedule.is_constant:
            return
        if schedule.needs_length and num_iterations is None:
            raise RuntimeError(_NEEDS_LOOP)
        if self.factor is None:
            self.factor = torch.zeros((), dtype=torch.float32, device=torch.cuda.current_device())
        self.factor.fill_(schedule.factor(iteration, num_iterations))
        # Learned scalars need a (possibly zero) gradient in every step: Megatron's DDP waits for it.
        is_out = schedule.is_off(iteration, num_iterations) and not wanted(self.config)
        self.is_off = self.is_off or (is_out and not self.is_captured)

    def set_hidden_size(self, hidden_size: int) -> None:
        """Find lambda for a model of this width."""
        if hidden_size != self.hidden_size:
            self.hidden_size, self.lambdas = hidden_size, [part.weight(hidden_size) for part in self.config.parts]

    def weights(self) -> list[Any]:
        """Return the weight of each objective in this step."""
        lacks_factor = self.factor is None and not self.config.schedule.is_constant
        if lacks_factor or (self.config.every > 1 and not self.follows_iterations):
            raise RuntimeError(_NEEDS_LOOP)
        factor = 1 if self.factor is None else self.factor
        return [self.config.every * lambda_ * factor for lambda_ in self.lambdas]

    def count_micro_batch(self) -> None:
        """Count a micro-batch, for loops that do not pass the iteration."""
        if self.follows_iterations:
            return
        self.iteration += 1
        if any(part.record.draws for part in self.config.parts):
            log_once(
                "SimReg: nothing passes the step's number (simreg_megatron.loop.begin_step), so each micro-batch draws "
                "its own random directions, samples or permutations, and a resumed run repeats the first ones"
            )


class _Computed(NamedTuple):
    terms: Tensor  # [B, A]
    views: list[View]  # of the last states; whole chunks in log steps alone where an objective has others
    learned: dict[str, Tensor]


class Terms(NamedTuple):
    """SimReg's terms of one micro-batch, until its language-model loss is there."""

    # Of each objective: the terms [B, A], their sum, and their weight in this step. Empty where none trains.
    weighted: list[tuple[Tensor, Tensor, float | Tensor]]
    labels: Tensor  # [B, T]
    start: int  # first column of the loss that they belong to


class Regularizer:
    """Adds lambda * SimReg to the gradient of a model's per-token loss, and sums up what is logged, for one run."""

    def __init__(self, config: SimRegConfig) -> None:
        self.config = config
        self.reader = MicroBatchReader(config)
        self.inner_states = InnerStates(config)
        self.metrics = Metrics(config)
        self.strength = Strength(config)
        self.has_seen_model = False  # set by the first micro-batch with labels
        self._has_sent_term, self.has_gradient_arrived = False, False  # a term with a loss; a gradient for it

    @property
    def trains_now(self) -> bool:
        """Return whether this step's term adds to the gradient."""
        return self.config.trains and not self.strength.is_off

    @property
    def computes_now(self) -> bool:
        """Return whether this step computes terms: if it trains on them, or if it is a log step."""
        return self.trains_now or self.metrics.wants_geometry

    def lambdas(self) -> dict[str, Tensor]:
        """Return lambda of each objective in this step by its name in the log; empty while all are constant."""
        if (factor := self.strength.factor) is None:
            return {}
        each = zip(self.config.parts, self.strength.lambdas, strict=True)
        return {f"{part.objective} lambda": factor * lambda_ for part, lambda_ in each}

    def terms(
        self, model: Any, hidden_states: Tensor, labels: Tensor, loss_mask: Any, packed_seq_params: Any = None
    ) -> Terms | None:
        """Compute SimReg's terms of a micro-batch; None in steps in which it neither trains nor measures.

        The hidden states are what enters the output layer (or, with multi-token prediction, its stack). A token counts
        if its label is not negative and its loss mask not 0; without a mask every label counts.
        """
        self.strength.set_hidden_size(model.config.hidden_size)
        self.has_seen_model = True
        if not (self.config.trains or self.strength.follows_iterations):
            raise RuntimeError(
                "SimReg only measures here, in steps that the training loop names, and this one names none: call "
                "simreg_megatron.loop.begin_step(step, measures=True) before each step to measure, or drop SimReg"
            )
        if not self.computes_now:
            return None
        with record_function("SimReg forward") if _profiler_enabled() else nullcontext():
            tokens = self.reader.read(model, hidden_states, labels, loss_mask, packed_seq_params)
            shard, main_states = tokens.shard, tokens.hidden_states
            states: dict[Any, Tensor] = {"final": main_states}
            if self.config.looks_inside:
                states = self.inner_states.take(model, main_states)
            with torch.set_grad_enabled(self.trains_now):
                computed = [self._compute(part, model, tokens, list(states.values())) for part in self.config.parts]
            last, views = states[self.config.layers[-1]].detach(), computed[self.metrics.primary].views
            terms, learned = [each.terms.detach() for each in computed], [each.learned for each in computed]
            totals = self.metrics.observe(terms, views, last, tokens.valid, shard, learned)
            self.strength.count_micro_batch()
            if self.metrics.wants_geometry:
                self.metrics.observe_predictions(model, main_states.detach(), tokens.labels, tokens.valid, shard)
        if not self.trains_now:
            return Terms([], labels, shard.start)
        weighted = zip((each.terms for each in computed), totals, self.strength.weights(), strict=True)
        return Terms(list(weighted), labels, shard.start)

    def add_to(self, loss_BT: Tensor, terms: Terms | None) -> Tensor:
        """Return Megatron's per-token loss with SimReg in its gradient; the value is untouched."""
        if terms is None:
            return loss_BT
        if loss_BT.shape != terms.labels.shape:
            raise NotImplementedError(OTHER_LOSS)
        for term, total, weight in terms.weighted:
            # For bools `>=` is implication: a finite loss needs a finite total, else the step stops, with no host sync.
            # A loss that is not finite is left to Megatron, which stops or reruns the step: another rank's bad states
            # may reach these terms, but then that rank's own loss is not finite.
            of_loss = loss_BT.detach().sum(dtype=total.dtype)
            torch._assert_async((total < math.inf) >= (of_loss < math.inf), _NOT_FINITE)
            if loss_BT.requires_grad:  # a teacher's loss trains nothing
                if not term.requires_grad:
                    raise NotImplementedError(
                        "SimReg cannot train here: all parameters before the output layer are frozen, or an objective "
                        "of your own detaches its terms. Change that, or set --simreg-lambda 0"
                    )
                self._has_sent_term = True
                if not self.has_gradient_arrived:
                    term.register_hook(lambda _: setattr(self, "has_gradient_arrived", True))
            loss_BT = add_gradient(loss_BT, term, weight, start=terms.start)
        return loss_BT

    def check_gradient_arrived(self, model_chunks: Any) -> None:
        """Raise NotImplementedError or MegatronSeamError if a step passed SimReg by; call it after each step."""
        if self._has_sent_term and not self.has_gradient_arrived:
            raise NotImplementedError(
                "SimReg trained nothing in this step: no gradient came back to the per-token loss that the model "
                "returned. Let the loss function compute what it trains on from that loss, or set --simreg-lambda 0"
            )
        for model in () if self.has_seen_model else compat.language_models(model_chunks):
            if getattr(model, "post_process", True):
                raise compat.MegatronSeamError(
                    f"SimReg is on, but {type(model).__name__} computed its loss without calling the function that "
                    "SimReg wraps: make its override call super(), or set --simreg-lambda 0"
                )

    def _compute(self, config: SimRegConfig, model: Any, tokens: MicroBatch, states: list[Tensor]) -> _Computed:
        """Compute the terms of one objective, summed over its states and averaged over their prefixes."""
        shard, wants_log = tokens.shard, self.metrics.wants_geometry
        if config.through_head:
            head_terms: Any = config.record.terms
            terms = head_terms(config, model, tokens.hidden_states, tokens.all_labels, tokens.all_valid, shard)
            return _Computed(terms, self._views(config, tokens, states[-1], for_log=True) if wants_log else [], {})
        prefixes = config.prefixes if config.is_simreg else ()
        prefixed = [state[..., :prefix] for state in states for prefix in prefixes] if prefixes else states
        views = [self._views(config, tokens, rows) for rows in prefixed]
        learned = learned_scalars(config, model, shard.tensor_group) if config.trains_scalars else {}
        exponents = (learned["query"], learned["key"]) if "query" in learned else None
        length, replicas = tokens.sample_length, functools.partial(compat.data_group, model)
        terms_of_states = [
            simreg_over_ranks(config, shard, rows, its_views, sample_length=length, exponents=exponents)
            if config.is_simreg
            else objective_terms(config, its_views, shard, learned, self.strength.iteration, replicas)
            for rows, its_views in zip(prefixed, views, strict=True)
        ]
        terms = functools.reduce(torch.add, terms_of_states)
        if prefixes:
            terms = terms / len(prefixes)
        log_views = views[-1]
        if config.sends_no_rows or config.record.relabels or prefixes:  # the log describes whole states, in chunks
            log_views = self._views(config, tokens, states[-1], for_log=True) if wants_log else []
        return _Computed(terms, log_views, learned)

    def _views(self, config: SimRegConfig, tokens: MicroBatch, states: Tensor, *, for_log: bool = False) -> list[View]:
        masks_documents = tokens.documents is not None and "document_mask" not in config.idle_settings
        return chunk_views(
            config,
            tokens.shard,
            states.detach() if for_log else states,
            tokens.labels,
            tokens.valid,
            documents=tokens.documents if masks_documents else None,
            sample_length=tokens.sample_length,
            output_rows=tokens.output_rows if config.meets_output_rows else None,
            iteration=self.strength.iteration,
            for_log=for_log,
            measures=self.metrics.wants_geometry,
        )
