# SPDX-License-Identifier: Apache-2.0
"""SimReg on the final hidden states of one micro-batch of a Megatron model.

Shapes: S tokens of this rank, B micro-batch, D hidden. Megatron's hidden states are [S, B, D], its labels, loss mask
and per-token loss [B, S] (all tokens of the context rank, also where sequence parallelism splits the hidden states).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from simreg_megatron.config import SimRegConfig
from simreg_megatron.losses import simreg_loss
from simreg_megatron.parallel.autograd import add_gradient
from simreg_megatron.parallel.shard import SequenceShard
from simreg_megatron.plugin import compat
from simreg_megatron.plugin.reporting import Metrics, log_once


class Regularizer:
    """Adds lambda * SimReg to a model's per-token loss and keeps count of what it saw."""

    def __init__(self, config: SimRegConfig) -> None:
        self.config = config
        self.metrics = Metrics(config)
        self.ramp: Tensor | None = None  # 0-d device tensor; None while lambda is constant
        self.follows_iterations = False  # set once a training loop tells the iteration

    def set_iteration(self, iteration: int) -> None:
        """Before step `iteration` (counted from 0): set the ramp to min(1, (iteration + 1) / warmup_iters)."""
        self.follows_iterations = True
        if self.config.warmup_iters:
            if self.ramp is None:
                self.ramp = torch.zeros((), dtype=torch.float32, device=torch.cuda.current_device())
            self.ramp.fill_(min(1.0, (iteration + 1) / self.config.warmup_iters))

    def add_to(self, loss_BS: Tensor, model: Any, *, hidden_states: Tensor, labels: Tensor, loss_mask: Any) -> Tensor:
        """Return `loss_BS` with SimReg in its gradient; the value is untouched.

        Args:
            loss_BS: Megatron's per-token language-model loss.
            model: the GPTModel that computed it.
            hidden_states: [S, B, D], what enters the output layer (or, with multi-token prediction, its stack).
            labels: [B, S] target ids; negative ids are ignored.
            loss_mask: [B, S], 0 where a token does not count; None counts every token with a label.
        """
        shard = _shard_of(model, labels)
        hidden_states = _main_hidden_states(hidden_states, shard)
        embeddings = hidden_states.transpose(0, 1)
        valid = shard.own_columns(_valid_tokens(labels, loss_mask))
        labels = shard.own_columns(labels)
        self._describe_chunks(shard)

        trains = self.config.trains
        with torch.set_grad_enabled(trains):
            terms = self._terms(shard, embeddings, labels, valid)
        self.metrics.observe(terms.detach(), embeddings.detach(), labels, valid, shard)
        if not trains:
            return loss_BS
        _stop_hidden_failure(loss_BS, terms)
        weighted = terms.to(loss_BS.dtype) * self._weight(model)
        return add_gradient(loss_BS, weighted, start=shard.start)

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

    def _terms(self, shard: SequenceShard, embeddings: Tensor, labels: Tensor, valid: Tensor) -> Tensor:
        loss = partial(_token_loss, self.config)
        if self._stays_on_rank(shard):
            return shard.terms_in_place(loss, embeddings, labels, valid)
        return shard.own_part(loss(*shard.whole_sequence(embeddings, labels, valid)))

    def _stays_on_rank(self, shard: SequenceShard) -> bool:
        """Whether this rank's terms need no other rank's tokens.

        Chunk weights other than "token" are normalised over the whole sequence, so they need all of it.
        """
        if shard.replicas == 1 or self.config.scope == "local":
            return True
        return self.config.chunk_weight == "token" and shard.layout.chunks_stay_on_ranks(self.config.chunk_size)

    def _describe_chunks(self, shard: SequenceShard) -> None:
        size = self.config.chunk_size
        if size > shard.length:
            log_once(f"SimReg chunk size {size} is beyond the sequence: chunks are whole sequences of {shard.length}")
        if self.config.scope == "local" and shard.replicas > 1:
            longest = max(stop - first for first, stop in shard.runs)
            effective = min(size or longest, longest)
            log_once(
                f"SimReg scope local: chunks of {effective} tokens end where a rank's block of {longest} ends, "
                "so the objective depends on the parallel layout"
            )


def _token_loss(config: SimRegConfig, embeddings: Tensor, labels: Tensor, valid: Tensor) -> Tensor:
    return simreg_loss(
        embeddings,
        labels,
        temperature=config.temperature,
        valid=valid,
        chunk_size=config.chunk_size,
        similarity=config.similarity,
        group_reduce=config.group_reduce,
        self_positive=config.self_positive,
        chunk_weight=config.chunk_weight,
        reduction="none",
        impl=config.impl,
    )


def _shard_of(model: Any, labels: Tensor) -> SequenceShard:
    tp, cp, _ = compat.process_groups(model)
    return SequenceShard(
        length=labels.shape[1] * cp.size(),
        sequence_group=tp if model.config.sequence_parallel and tp.size() > 1 else None,
        context_group=cp if cp.size() > 1 else None,
    )


def _main_hidden_states(hidden_states: Tensor, shard: SequenceShard) -> Tensor:
    """Drop the states of multi-token-prediction depths, which some stages append after the main ones."""
    rows, main = hidden_states.shape[0], shard.layout.rows
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
