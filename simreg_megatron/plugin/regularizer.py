# SPDX-License-Identifier: Apache-2.0
"""SimReg on the final hidden states of one micro-batch of a Megatron model.

Shapes: S tokens of this rank, B micro-batch, D hidden. Megatron's hidden states are [S, B, D], its labels, loss mask
and per-token loss [B, S] (all tokens of the context rank, also where sequence parallelism splits the hidden states).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from simreg_megatron.config import SimRegConfig
from simreg_megatron.parallel.autograd import add_gradient
from simreg_megatron.parallel.layout import ShardLayout
from simreg_megatron.parallel.shard import SequenceShard
from simreg_megatron.plugin import compat
from simreg_megatron.plugin.documents import Documents, EndTokens, PackedLengths
from simreg_megatron.plugin.inner import InnerStates
from simreg_megatron.plugin.learnable import learned_scalars
from simreg_megatron.plugin.objectives import objective_terms
from simreg_megatron.plugin.reporting import Metrics, log_once
from simreg_megatron.plugin.sequence import views_of
from simreg_megatron.plugin.views import View


class Regularizer:
    """Adds lambda * SimReg to a model's per-token loss and keeps count of what it saw."""

    def __init__(self, config: SimRegConfig) -> None:
        self.config = config
        self.end_of_document: int | None = None  # token id, where Megatron has a tokenizer
        self.inner_states = InnerStates(config)
        self.metrics = Metrics(config)
        self.ramp: Tensor | None = None  # 0-d device tensor; None while lambda is constant
        self.follows_iterations = False  # set once a training loop tells the iteration
        self._iteration = 0  # without one: micro-batches so far

    def set_iteration(self, iteration: int) -> None:
        """Before step `iteration` (counted from 0): set the ramp to min(1, (iteration + 1) / warmup_iters)."""
        self.follows_iterations = True
        self._iteration = iteration
        if self.config.warmup_iters:
            if self.ramp is None:
                self.ramp = torch.zeros((), dtype=torch.float32, device=torch.cuda.current_device())
            self.ramp.fill_(min(1.0, (iteration + 1) / self.config.warmup_iters))

    def add_to(
        self,
        loss_BS: Tensor,
        model: Any,
        *,
        hidden_states: Tensor,
        labels: Tensor,
        loss_mask: Any,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Return `loss_BS` with SimReg in its gradient; the value is untouched.

        Args:
            loss_BS: Megatron's per-token language-model loss.
            model: the GPTModel that computed it.
            hidden_states: [S, B, D], what enters the output layer (or, with multi-token prediction, its stack).
            labels: [B, S] target ids; negative ids are ignored.
            loss_mask: [B, S], 0 where a token does not count; None counts every token with a label.
            packed_seq_params: Megatron's description of a row that packs several texts, or None.
        """
        shard = shard_of(model, labels)
        hidden_states = _main_hidden_states(hidden_states, shard)
        valid = shard.held_columns(_valid_tokens(labels, loss_mask))
        labels = shard.held_columns(labels)
        self._describe_chunks(shard, getattr(packed_seq_params, "tokens_per_sample", None))

        trains = self.config.trains
        with torch.set_grad_enabled(trains):
            states = self.inner_states.take(model, hidden_states)
            views = [
                self._views(shard, prefix, labels, valid, packed_seq_params)
                for state in states
                for prefix in self._prefixes(state)
            ]
            learned = learned_scalars(self.config, model, shard.tensor_group)
            of_states = [objective_terms(self.config, of_state, shard, learned, self._iteration) for of_state in views]
            terms = torch.stack(of_states).sum(dim=0) / (len(views) / len(states))
        self._count_by_itself()
        self.metrics.observe(terms.detach(), views[-1], states[-1].detach(), valid, shard, learned)
        if not trains:
            return loss_BS
        _stop_hidden_failure(loss_BS, terms)
        weighted = terms.to(loss_BS.dtype) * self._weight(model)
        return add_gradient(loss_BS, weighted, start=shard.start)

    def _prefixes(self, states: Tensor) -> list[Tensor]:
        """The parts of the states that get a term each: the first features, or all of them."""
        if self.config.objective != "simreg" or not self.config.prefixes:
            return [states]
        return [states[..., :prefix] for prefix in self.config.prefixes]

    def _count_by_itself(self) -> None:
        if self.follows_iterations:
            return
        self._iteration += 1
        if self.config.objective == "sigreg":
            log_once(
                "SimReg: no training loop tells the iteration, so each micro-batch draws directions of its own, and a "
                "run that is resumed begins with the first ones again"
            )

    def _views(
        self, shard: SequenceShard, states: Tensor, labels: Tensor, valid: Tensor, packed_seq_params: Any
    ) -> list[View]:
        return views_of(
            self.config,
            shard,
            states,
            labels,
            valid,
            documents=self._documents(packed_seq_params),
            sample_length=getattr(packed_seq_params, "tokens_per_sample", None),
        )

    def _documents(self, packed_seq_params: Any) -> Documents | None:
        if not self.config.document_mask:
            return None
        if packed_seq_params is not None:
            padded = packed_seq_params.cu_seqlens_q_padded
            return PackedLengths(packed_seq_params.cu_seqlens_q if padded is None else padded)
        if self.end_of_document is None:
            raise RuntimeError(
                "--simreg-document-mask needs the tokenizer's end-of-document token, and this script has no "
                "Megatron tokenizer: pass packed_seq_params to the model, or drop it"
            )
        return EndTokens(self.end_of_document)

    def _weight(self, model: Any) -> Any:
        weight = self.config.weight(model.config.hidden_size)
        if not self.config.warmup_iters:
            return weight
        if self.ramp is None:
            raise RuntimeError(
                "--simreg-warmup-iters needs Megatron's training loop to tell the iteration: "
                "drop it where megatron.training does not run"
            )
        return weight * self.ramp

    def _describe_chunks(self, shard: SequenceShard, sample_length: int | None) -> None:
        if self.config.by_sequence:
            return
        size, sequence = self.config.chunk_size, sample_length or shard.layout.length
        if size > sequence:
            log_once(f"SimReg chunk size {size} is beyond the sequence: chunks are whole sequences of {sequence}")
        longest = max(last - first for first, last in shard.layout.held(shard.rank))
        if self.config.scope == "local" and longest < sequence:
            log_once(
                f"SimReg scope local: chunks of {min(size or longest, longest)} tokens end where a rank's block of "
                f"{longest} ends, so the objective depends on the parallel layout"
            )


def shard_of(model: Any, labels: Tensor) -> SequenceShard:
    """This rank's part of the sequences whose labels [B, tokens of the context rank] the model was given."""
    tp, cp = compat.tensor_group(model), compat.context_group(model)
    rows_split = bool(model.config.sequence_parallel) and tp.size() > 1
    rank = (cp.rank(), tp.rank())
    layout = ShardLayout(labels.shape[1] * cp.size(), cp.size(), tp.size(), rows_split)
    row_group = None
    if len(layout.exchange_members(rank)) > 1:
        row_group = cp if not rows_split else tp if cp.size() == 1 else compat.tensor_and_context_group(model)
        if layout.exchange_members(rank)[row_group.rank()] != rank:
            raise NotImplementedError(
                "SimReg expects tensor-parallel ranks to be numbered before context-parallel ones, and this run "
                "orders them otherwise: leave the rank order to Megatron, or set --simreg-lambda 0"
            )
    return SequenceShard(layout, rank, row_group, tp if tp.size() > 1 else None)


def _main_hidden_states(hidden_states: Tensor, shard: SequenceShard) -> Tensor:
    """Drop the states of multi-token-prediction depths, which some stages append after the main ones."""
    rows, main = hidden_states.shape[0], shard.num_rows
    if rows % main:
        raise RuntimeError(
            f"SimReg expected {main} hidden states a rank (or a multiple, with MTP), Megatron gave {rows}"
        )
    return hidden_states if rows == main else hidden_states[:main]


def _valid_tokens(labels: Tensor, loss_mask: Tensor | None) -> Tensor:
    valid = labels >= 0
    if loss_mask is None:
        log_once("SimReg: no loss mask reaches the model, so every token with a label counts (pass loss_mask=)")
        return valid
    return valid & (loss_mask.view_as(labels) > 0)


def _stop_hidden_failure(loss: Tensor, terms: Tensor) -> None:
    """Stop the step, without a host sync, if SimReg fails where the language-model loss alone looks sound.

    A loss that is not finite itself is left to Megatron, which stops or reruns the step.
    """
    sound = torch.isfinite(terms).all() | ~torch.isfinite(loss).all()
    torch._assert_async(sound, "the SimReg term is not finite while the language-model loss is: the step is stopped")
