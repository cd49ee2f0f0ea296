# SPDX-License-Identifier: Apache-2.0
"""SimReg's values next to "lm loss": summed on the device, reduced once per log interval."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from simreg_megatron.config import SimRegConfig
from simreg_megatron.losses import geometry
from simreg_megatron.losses.geometry import NormSums, coefficient_of_variation, cohens_d, mean_norm, norm_table
from simreg_megatron.losses.roles import pair_counts
from simreg_megatron.notices import log_once
from simreg_megatron.parallel.collectives import quantiles_over
from simreg_megatron.parallel.learnable import as_logged
from simreg_megatron.parallel.output_layer import has_whole_head, margins
from simreg_megatron.parallel.pairs import View
from simreg_megatron.parallel.shard import EveryKth, SequenceShard

_SAMPLED_TOKENS = 8192  # of a micro-batch, at most, over all ranks that share it: evenly spaced on the sequence
_PREDICTED_TOKENS = 512  # likewise; fewer, as their logits are taken once more
_KEPT_MICRO_BATCHES = 4096  # whose margins are kept, at most: some loops never ask for them
_WIDEST = 4096  # beyond it the products of all features take too much memory to be logged by the way


# Places in the tensor; terms of further objectives come last.
TERM, TOKENS, ALL_MASKED, ZERO_NORM, ONE_LABEL = range(5)
ODDITIES = {
    ALL_MASKED: "sequences (or a rank's parts of them) whose tokens are all masked",
    ONE_LABEL: "tokens in chunks with one label only",
    ZERO_NORM: "hidden states of norm zero (or tokens whose row of the output layer is zero)",
}
PAIRS = slice(5, 11)  # (sum, count) of positive, negative and largest negative cosines
NORMS = slice(11, 14)  # geometry.NormSums of the tokens that count
ONCE_NORMS, OFTEN_NORMS = slice(14, 17), slice(17, 20)  # of tokens alone with their label in a chunk; of all others
OF_LABELS = slice(ONCE_NORMS.start, OFTEN_NORMS.stop)
MARGIN, RIGHT_MARGIN = slice(20, 22), slice(22, 24)  # sum and count of classification margins
OF_MARGINS = slice(MARGIN.start, RIGHT_MARGIN.stop)
NUMBER = 24
MEASURED = slice(ALL_MASKED, NUMBER)  # in log steps alone; what is before it, and terms behind it, in every step

_SHARES = (0.1, 0.5, 0.9)
QUANTILES = {f"simreg margin {share:.0%}": share for share in _SHARES}
RIGHT_QUANTILES = {f"simreg margin of right predictions {share:.0%}": share for share in _SHARES}
_NOT_IN_CONSOLE = {"simreg norm difference of rare labels", "simreg effective rank"}  # Megatron's line is long enough
_NOT_IN_CONSOLE |= {"simreg margin of right predictions", "simreg share of right predictions"}
_NOT_IN_CONSOLE |= {*QUANTILES, *RIGHT_QUANTILES}


class Metrics:
    """Sums and counts of one log interval on this rank, in one device tensor that lives as long as the run."""

    def __init__(self, config: SimRegConfig) -> None:
        self._parts = config.parts
        self._objectives = names = [part.objective for part in config.parts]
        self._term_slots = [TERM, *range(NUMBER, NUMBER + len(names) - 1)]
        self.primary = names.index("simreg") if "simreg" in names else 0  # whose chunks the geometry is of
        self.config = config.parts[self.primary]
        self.has_geometry = True  # else it is measured in no step
        self.wants_geometry = False  # in this step; a training loop asks for it in the steps that it logs
        self._has_measured = False  # it, since the last report
        self._sums: Any = None  # a Tensor after the first micro-batch
        self._moments: list[Tensor] | None = None  # geometry.Moments of the log steps in this interval
        self._margins: deque[Tensor] = deque(maxlen=_KEPT_MICRO_BATCHES)  # of the same steps, of this rank's tokens
        self._learned: dict[str, Tensor] = {}  # the same on every rank
        self._tensor_group: dist.ProcessGroup | None = None
        self._oddities_logged: set[int] = set()
        self._checks_documents = self.config.document_mask  # once: in the first step whose geometry is logged

    def _nothing(self, device: torch.device) -> Tensor:
        """Zeros, and with a document mask one more: tokens that are not of their view's first document."""
        size = NUMBER + len(self._term_slots) - 1 + self.config.document_mask
        return torch.zeros(size, dtype=torch.float64, device=device)

    @torch.no_grad()
    def observe(
        self, terms: list[Tensor], views: list[View], hidden_states: Tensor, valid: Tensor, shard: SequenceShard,
        learned: Sequence[Mapping[str, Tensor]],
    ) -> list[Tensor]:  # fmt: skip
        """Add one micro-batch of this rank: terms [B, A] of each objective, views of the primary one, hidden states
        [S, B, D], valid [B, S], trained scalars of each. Return the sums of the terms, float64."""
        if self._sums is None:
            self._sums = self._nothing(valid.device)
        self._tensor_group = shard.tensor_group
        self._has_measured = self._has_measured or self.wants_geometry
        totals = [each.sum(dtype=torch.float64) for each in terms]
        for slot, total in zip(self._term_slots, totals, strict=True):
            self._sums[slot].add_(total)
        anchor_valid = shard.anchor_columns(valid)
        self._sums[TOKENS].add_(anchor_valid.sum(dtype=torch.float64))
        if self.wants_geometry:
            self._sums[ALL_MASKED].add_((~anchor_valid.any(dim=1)).sum())
            if views:  # a view leaves out masked tokens, and hidden states of norm zero
                usable = sum(view.usable[:, slice(*view.anchors)].sum() for view in views)
                self._sums[ZERO_NORM].add_(anchor_valid.sum() - usable)
            anchor_states = shard.anchor_columns(hidden_states.transpose(0, 1))
            self._sums[NORMS].add_(norm_table(anchor_states, anchor_valid).flatten())
            self._learned = as_logged(self._parts, learned)
            self._add_moments(hidden_states.transpose(0, 1), valid, shard)
            for view in views:
                self._add_pairs(view)
        return totals

    def _add_moments(self, hidden_states: Tensor, valid: Tensor, shard: SequenceShard) -> None:
        """Add the moments of every k-th position of the sequence: the same sample in every parallel layout."""
        if hidden_states.shape[-1] > _WIDEST:
            log_once(f"SimReg: isotropy is not logged for states wider than {_WIDEST}, as it needs width^2 numbers")
            return
        sample = EveryKth.at_most(_SAMPLED_TOKENS, len(hidden_states), shard)
        moments = geometry.moments(sample.select(hidden_states), sample.select(valid))
        self._moments = [*map(Tensor.add_, self._moments, moments)] if self._moments else [*moments]

    def _add_pairs(self, view: View) -> None:
        """Add up cosines, and norms of tokens that are alone with their label and of all others."""
        if self._checks_documents and view.documents is not None:
            self._sums[-1].add_((view.documents != view.documents[:, :1]).sum())
        anchors = slice(*view.anchors)
        options: dict[str, Any] = {"documents": view.documents, "chunk_size": self.config.chunk_size}
        usable = view.usable[:, anchors]
        same, different = (count[:, anchors] for count in pair_counts(view.labels, view.usable, **options))
        cosines = geometry.row_cosines(view.embeddings, view.labels, view.usable, anchors=view.anchors, **options)
        pairs = geometry.cosine_sums(cosines, same, different)
        self._sums[PAIRS].add_(pairs)
        if self.config.is_simreg and not self.config.record.relabels:  # others may have a term there
            self._sums[ONE_LABEL].add_(usable.sum() - pairs[-1])
        alone = usable & (same == 0)
        of_labels = torch.stack([alone, usable ^ alone])
        self._sums[OF_LABELS].add_(norm_table(view.embeddings[:, anchors], of_labels).flatten())

    def observe_predictions(
        self, model: Any, predicting: Tensor, labels: Tensor, valid: Tensor, shard: SequenceShard
    ) -> None:
        """Add classification margins of `predicting` [S, B, D], what enters the output layer, for the labels [B, S].

        A collective over the tensor-parallel group, in log steps alone, on a bounded sample of the tokens.
        """
        if not self.wants_geometry:
            return
        if not has_whole_head(model):
            log_once("SimReg: margins are not logged, as no rank holds the output layer's rows")
            return
        sample = EveryKth.at_most(_PREDICTED_TOKENS, len(labels), shard)
        anchor_labels = sample.select(labels.masked_fill(~valid, -1))
        missing = sample.max_per_tensor_rank() - anchor_labels.shape[1]  # these ranks must bring equally many
        margin = margins(
            model,
            functional.pad(sample.select(predicting.transpose(0, 1)), (0, 0, 0, missing)).flatten(0, 1),
            functional.pad(anchor_labels, (0, missing), value=-1).flatten(),
            shard.tensor_group,
        ).view(len(labels), -1)[:, : anchor_labels.shape[1]]
        counted, right = anchor_labels >= 0, margin > 0  # a tie, at 0, is no right prediction
        left_out = torch.stack([~counted, ~right])
        sums = torch.stack([margin.double().masked_fill(left_out, 0.0), ~left_out], dim=1)
        self._sums[OF_MARGINS].add_(sums.sum(dim=(-2, -1)).flatten())
        self._margins.append(torch.where(counted, margin, torch.nan).flatten())

    def reduce(self, dp_cp_group: dist.ProcessGroup, *, reset: bool = True) -> dict[str, Tensor]:
        """Return means over all data- and context-parallel ranks; empty if nothing was observed.

        Losses cover all steps since the last reset. Geometry covers the steps measured since the last report, and is
        always reset. A collective over `dp_cp_group` and the tensor-parallel group.
        """
        if self._sums is None:
            return {}
        sums, moments = self._sums.clone(), self._moments or []
        (self._sums if reset else self._sums[MEASURED]).zero_()
        self._moments = None
        for group in (dp_cp_group, self._tensor_group):
            if group is not None and group.size() > 1:
                for part in (sums, *moments):
                    dist.all_reduce(part, group=group)
        quantiles = self._margin_quantiles(dp_cp_group)
        for slot, what in ODDITIES.items():  # tokens that SimReg had to leave out, which only the data knew
            if slot not in self._oddities_logged and (count := int(sums[slot])):
                self._oddities_logged.add(slot)
                log_once(f"SimReg left out {count} {what} in the steps that are logged; their term and gradient are 0")
        if self._checks_documents and self._has_measured:
            self._checks_documents = False
            if not sums[-1]:
                log_once(
                    "warning: --simreg-document-mask has no effect so far: no chunk of this step reaches into a second "
                    "document; if yours are shorter, tokenize them with an end-of-document token after each"
                )
        named = {
            f"{'simreg' if name == 'none' else name} loss": (sums[slot] / sums[TOKENS].clamp(min=1)).float()
            for name, slot in zip(self._objectives, self._term_slots, strict=True)
        }
        has_measured, self._has_measured = self._has_measured, False
        if has_measured:
            named |= named_geometry(sums, moments) | self._learned
            named |= named_margins(sums) | quantiles if quantiles else {}
        elif self.has_geometry:
            log_once(
                "SimReg: only its loss is logged, as no step since the last log was measured: call "
                "simreg_megatron.loop.begin_step(step, measures=True) before each step that is logged"
            )
        return named

    def _margin_quantiles(self, dp_cp_group: dist.ProcessGroup) -> dict[str, Tensor]:
        """Return quantiles over the ranks of the stage with the output layer; empty if none were measured."""
        if not self._margins:
            return {}
        groups = [group for group in (dp_cp_group, self._tensor_group) if group is not None and group.size() > 1]
        margins_of_all = torch.cat(list(self._margins))
        of_right = torch.where(margins_of_all > 0, margins_of_all, torch.nan)  # NaN is left out
        named: dict[str, Tensor] = {}
        for wanted, values in ((QUANTILES, margins_of_all), (RIGHT_QUANTILES, of_right)):
            quantiles = quantiles_over(values, list(wanted.values()), groups)
            named |= dict(zip(wanted, quantiles.unbind(), strict=True))
        self._margins.clear()
        return named


def named_geometry(sums: Tensor, moments: list[Tensor]) -> dict[str, Tensor]:
    """Name cosines, norms, angles, and the isotropy of the states if moments were measured."""
    positive, negative, largest = (total / number for total, number in sums[PAIRS].view(3, 2))
    norms, once, often = (NormSums(*sums[place].unbind()) for place in (NORMS, ONCE_NORMS, OFTEN_NORMS))
    named = {
        "simreg positive cosine": positive,
        "simreg negative cosine": negative,
        "simreg largest negative cosine": largest,
        "simreg norm": mean_norm(norms),
        "simreg norm variation": coefficient_of_variation(norms),
        "simreg norm difference of rare labels": cohens_d(once, often),
        "simreg mean angle": negative.clamp(-1.0, 1.0).acos().rad2deg(),
    }
    if moments:
        names = "simreg isotropy", "simreg effective rank", "simreg mean cosine"
        named |= zip(names, geometry.isotropy(geometry.Moments._make(moments)), strict=True)
    return {name: value.float() for name, value in named.items()}


def named_margins(sums: Tensor) -> dict[str, Tensor]:
    """Name mean margins and the share of right predictions; NaN if there are none."""
    total, number = sums[MARGIN]
    of_right, number_right = sums[RIGHT_MARGIN]
    return {
        "simreg margin": (total / number).float(),
        "simreg margin of right predictions": (of_right / number_right).float(),
        "simreg share of right predictions": (number_right / number).float(),
    }


def add_to_console(means: dict[str, Tensor], total_loss_dict: dict[str, Any], *, skipped: bool) -> None:
    """Put interval means where `training_log` prints its own: it divides every entry by the advanced iterations."""
    advanced = total_loss_dict.get("advanced iterations", 0) + (0 if skipped else 1)
    for name, value in means.items():
        if name not in _NOT_IN_CONSOLE:
            total_loss_dict[name] = value * max(1, advanced)


def left_out_of_console(means: Mapping[str, Tensor]) -> str:
    """Select the values that `training_log` does not print, as it prints only numbers of 0 and more."""
    values = {name: float(value) for name, value in means.items() if name not in _NOT_IN_CONSOLE}
    return " | ".join(f"{name}: {value:.6E}" for name, value in values.items() if not value >= 0)
