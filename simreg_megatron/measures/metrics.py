# SPDX-License-Identifier: Apache-2.0
"""SimReg's values next to "lm loss": summed on the device, reduced once per log interval."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from simreg_megatron.config import SimRegConfig
from simreg_megatron.losses.roles import pair_counts
from simreg_megatron.measures import geometry, naming, slots
from simreg_megatron.measures.geometry import norm_table
from simreg_megatron.notices import log_once
from simreg_megatron.parallel.collectives import quantiles_over
from simreg_megatron.parallel.heads import has_whole_head, margins
from simreg_megatron.parallel.learnable import as_logged
from simreg_megatron.parallel.pairs import View
from simreg_megatron.parallel.shard import EveryKth, SequenceShard

logger = logging.getLogger("simreg_megatron")

_SAMPLED_TOKENS = 8192  # of a micro-batch, at most, over all ranks that share it: evenly spaced on the sequence
_PREDICTED_TOKENS = 512  # likewise; fewer, as their logits are taken once more
_KEPT_MICRO_BATCHES = 4096  # whose margins are kept, at most: some loops never ask for them
_WIDEST = 4096  # beyond it the products of all features take too much memory to be logged by the way


class Metrics:
    """Sums and counts of one log interval on this rank, in one device tensor that lives as long as the run."""

    def __init__(self, config: SimRegConfig) -> None:
        self._parts = config.parts
        names = [part.objective for part in config.parts]
        self._objectives = names
        self._term_slots = [slots.TERM, *range(slots.NUMBER, slots.NUMBER + len(names) - 1)]
        self.primary = names.index("simreg") if "simreg" in names else 0  # whose chunks the geometry is of
        self.config = config.parts[self.primary]
        self.has_geometry = True  # else it is measured in no step
        self.wants_geometry = False  # in this step; a training loop asks for it in the steps that it logs
        self._has_measured = False  # it, since the last report
        self._sums: Tensor | None = None
        self._moments: list[Tensor] | None = None  # geometry.Moments of the log steps in this interval
        self._margins: deque[Tensor] = deque(maxlen=_KEPT_MICRO_BATCHES)  # of the same steps, of this rank's tokens
        self._learned: dict[str, Tensor] = {}  # the same on every rank
        self._tensor_group: dist.ProcessGroup | None = None
        self._oddities_told: set[int] = set()
        self._checks_documents = self.config.document_mask  # once: in the first step whose geometry is logged

    def _nothing(self, device: torch.device | int) -> Tensor:
        """Zeros, and with a document mask one more: tokens that are not of their view's first document."""
        size = slots.NUMBER + len(self._term_slots) - 1 + self.config.document_mask
        return torch.zeros(size, dtype=torch.float64, device=device)

    @torch.no_grad()
    def observe(
        self,
        terms: list[Tensor],
        views: list[View],
        hidden_states: Tensor,
        valid: Tensor,
        shard: SequenceShard,
        learned: Sequence[Mapping[str, Tensor]],
    ) -> list[Tensor]:
        """Add one micro-batch of this rank: terms [B, A] of each objective, views of the primary one, hidden states
        [S, B, D], valid [B, S], trained scalars of each. Return the sums of the terms, float64."""
        if self._sums is None:
            self._sums = self._nothing(valid.device)
        self._tensor_group = shard.tensor_group
        self._has_measured = self._has_measured or self.wants_geometry
        totals = [of_objective.sum(dtype=torch.float64) for of_objective in terms]
        for slot, total in zip(self._term_slots, totals, strict=True):
            self._sums[slot].add_(total)
        own_valid = shard.own_columns(valid)
        self._sums[slots.TOKENS].add_(own_valid.sum(dtype=torch.float64))
        if self.wants_geometry:
            self._count_oddities(own_valid, [view.usable[:, slice(*view.anchors)] for view in views])
            self._add_norms(slots.NORMS, shard.own_columns(hidden_states.transpose(0, 1)), own_valid)
            self._learned = as_logged(self._parts, learned)
            self._add_moments(hidden_states.transpose(0, 1), valid, shard)
            for view in views:
                self._add_pairs(view)
        return totals

    def _count_oddities(self, own_valid: Tensor, usable: list[Tensor]) -> None:
        """Count sequences without a token that counts, and (if there are views) hidden states of norm zero."""
        assert self._sums is not None
        self._sums[slots.ALL_MASKED].add_((~own_valid.any(dim=1)).sum())
        if usable:  # a view leaves nothing else out
            self._sums[slots.ZERO_NORM].add_(own_valid.sum() - sum(of_view.sum() for of_view in usable))

    def _add_moments(self, hidden_states: Tensor, valid: Tensor, shard: SequenceShard) -> None:
        """Add the moments of every k-th position of the sequence: the same sample in every parallel layout."""
        num_sequences, width = len(hidden_states), hidden_states.shape[-1]
        if width > _WIDEST:
            log_once(f"SimReg: isotropy is not logged for states wider than {_WIDEST}, as it needs width^2 numbers")
            return
        sample = EveryKth.of_at_most(_SAMPLED_TOKENS, num_sequences, shard)
        found = geometry.moments(sample.taken(hidden_states), sample.taken(valid))
        if self._moments is None:
            self._moments = list(found)
        else:
            for total, part in zip(self._moments, found, strict=True):
                total += part

    def _add_pairs(self, view: View) -> None:
        """Add up cosines, and norms of tokens that are alone with their label and of all others."""
        assert self._sums is not None
        if self._checks_documents and view.documents is not None:
            self._sums[-1].add_((view.documents != view.documents[:, :1]).sum())
        own = slice(*view.anchors)
        met: dict[str, Any] = {"documents": view.documents, "chunk_size": self.config.chunk_size}
        usable = view.usable[:, own]
        same, different = (count[:, own] for count in pair_counts(view.labels, view.usable, **met))
        cosines = geometry.row_cosines(view.embeddings, view.labels, view.usable, anchors=view.anchors, **met)
        pairs = geometry.pair_sums(cosines, same, different)
        self._sums[slots.PAIRS].add_(pairs)
        if not self.config.sends_no_rows:  # those do not ask for other labels
            self._sums[slots.ONE_LABEL].add_(usable.sum() - pairs[-1])
        alone = usable & (same == 0)
        self._add_norms(slots.OF_LABELS, view.embeddings[:, own], torch.stack([alone, usable ^ alone]))

    def _add_norms(self, place: slice, states: Tensor, weights: Tensor) -> None:
        assert self._sums is not None
        self._sums[place].add_(norm_table(states, weights).flatten())

    def observe_predictions(
        self, model: Any, predicting: Tensor, labels: Tensor, valid: Tensor, shard: SequenceShard
    ) -> None:
        """Classification margins of `predicting` [S, B, D], what enters the output layer, for the labels [B, S].

        A collective over the tensor-parallel group, in log steps alone, on a bounded sample of the tokens.
        """
        if not self.wants_geometry:
            return
        if not has_whole_head(model):
            log_once("SimReg: margins are not logged, as no rank holds the output layer's rows")
            return
        sample = EveryKth.of_at_most(_PREDICTED_TOKENS, len(labels), shard)
        own_labels = sample.taken(labels.masked_fill(~valid, -1))
        missing = sample.most_of_a_tensor_rank() - own_labels.shape[1]  # these ranks must bring equally many
        found = margins(
            model,
            functional.pad(sample.taken(predicting.transpose(0, 1)), (0, 0, 0, missing)).flatten(0, 1),
            functional.pad(own_labels, (0, missing), value=-1).flatten(),
            shard.tensor_group,
        ).view(len(labels), -1)[:, : own_labels.shape[1]]
        counted, right = own_labels >= 0, found > 0  # a tie, at 0, is no right prediction
        assert self._sums is not None
        left_out = torch.stack([~counted, ~right])
        sums = torch.stack([found.double().masked_fill(left_out, 0.0), ~left_out], dim=1)
        self._sums[slots.OF_MARGINS].add_(sums.sum(dim=(-2, -1)).flatten())
        self._margins.append(torch.where(counted, found, torch.nan).flatten())

    def reduce(self, dp_cp_group: dist.ProcessGroup, *, reset: bool = True) -> dict[str, Tensor]:
        """Return means over all data- and context-parallel ranks; empty if nothing was observed.

        Losses are of all steps since the last reset. The geometry is of those measured since the last report, whose
        numbers it forgets in any case: the line after a run's first step is not in the next one.

        A collective over `dp_cp_group` (and over the tensor-parallel group): all ranks of the last stage call it.
        """
        if self._sums is None:
            return {}
        sums, moments = self._sums.clone(), self._moments or []
        (self._sums if reset else self._sums[slots.MEASURED]).zero_()
        self._moments = None
        for group in (dp_cp_group, self._tensor_group):
            if group is not None and group.size() > 1:
                for part in (sums, *moments):
                    dist.all_reduce(part, group=group)
        quantiles = self._margin_quantiles(dp_cp_group)
        self._tell_oddities(sums)
        if self._checks_documents and self._has_measured:
            self._checks_documents = False
            if not sums[-1]:
                log_once(
                    "warning: --simreg-document-mask has no effect so far: no chunk of this step reaches into a second "
                    "document; if yours are shorter, tokenize them with an end-of-document token after each"
                )
        losses = naming.losses(sums, dict(zip(self._objectives, self._term_slots, strict=True)))
        if not self._shows_geometry():
            return losses
        named = losses | naming.geometry_of(sums) | naming.isotropy(moments) | self._learned
        return named | naming.margins(sums) | quantiles if quantiles else named

    def _shows_geometry(self) -> bool:
        """Return whether the geometry was measured since the last report; log once if no loop asks for it."""
        has_measured, self._has_measured = self._has_measured, False
        if self.has_geometry and not has_measured:
            log_once(
                "SimReg: only its loss is logged, as no step since the last log was measured: call "
                "simreg_megatron.loop.begin_step(step, measures=True) before each step that is logged"
            )
        return has_measured

    def _margin_quantiles(self, dp_cp_group: dist.ProcessGroup) -> dict[str, Tensor]:
        """Return quantiles over the ranks of the stage with the output layer; empty if none were measured."""
        if not self._margins:
            return {}
        groups = [group for group in (dp_cp_group, self._tensor_group) if group is not None and group.size() > 1]
        margins_of_all = torch.cat(list(self._margins))
        of_right = torch.where(margins_of_all > 0, margins_of_all, torch.nan)  # NaN is left out
        found: dict[str, Tensor] = {}
        for wanted, values in ((naming.QUANTILES, margins_of_all), (naming.RIGHT_QUANTILES, of_right)):
            quantiles = quantiles_over(values, list(wanted.values()), groups)
            found |= dict(zip(wanted, quantiles.unbind(), strict=True))
        self._margins.clear()
        return found

    def _tell_oddities(self, sums: Tensor) -> None:
        """Say once, at log time, what only the data knew: tokens that SimReg had to leave out."""
        for slot, what in slots.ODDITIES.items():
            if slot not in self._oddities_told and (count := int(sums[slot])):
                self._oddities_told.add(slot)
                log_once(f"SimReg left out {count} {what} in the steps that are logged; their term and gradient are 0")
