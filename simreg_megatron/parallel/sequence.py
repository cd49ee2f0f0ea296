# SPDX-License-Identifier: Apache-2.0
"""Terms on a sequence that several ranks hold together: `chunk_views` gathers, `simreg_over_ranks` computes SimReg, and
`objective_terms` another objective.

Each rank computes the terms of its own anchors once, against all tokens of their chunks. Labels are gathered where
chunks, chunk weights or documents reach beyond a rank; hidden states travel only where a chunk does.

Shapes: S rows of this rank, B micro-batch, D hidden, K tokens in a view, A anchors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from simreg_megatron.config import SimRegConfig
from simreg_megatron.kernels.contrast import Span
from simreg_megatron.losses._anchored import anchored_terms, with_rows
from simreg_megatron.losses._chunks import joined, nonzero_rows
from simreg_megatron.losses.roles import TokenRoles, token_roles
from simreg_megatron.losses.simreg import FAST_IMPLS, chosen_impl, load_kernels, simreg_terms, with_roles
from simreg_megatron.notices import log_once, refuse
from simreg_megatron.objectives.record import Kind
from simreg_megatron.parallel.layout import ChunkRules, RowPlan, Run, Window, row_plan
from simreg_megatron.parallel.pairs import KernelSetup, View, terms_over_ranks
from simreg_megatron.parallel.shard import Located, SequenceShard


@dataclass(frozen=True)
class EndTokens:
    """Documents end with a token of their own: document of position i = end tokens among the inputs before i.

    The inputs are the labels, one position later; so an end token still belongs to the document it ends, as in
    Megatron's masks. The input before the first label of a stretch is not known: its first two positions count as one
    document even if it begins with an end token.
    """

    token: int
    needs_domain = True  # counted from the first label on

    def of(self, labels: Tensor, run: Run) -> Tensor:
        """[B, tokens of the run] from the labels [B, tokens of the run]."""
        ends = (labels == self.token).long().cumsum(dim=1)
        return F.pad(ends, (2, 0))[:, : labels.shape[1]]


@dataclass(frozen=True)
class PackedLengths:
    """Documents lie one after the other in one row: document of position i = cu_seqlens at or before i.

    Attributes:
        cu_seqlens: int [documents + 1] on the device, cumulative lengths from 0 (Megatron's cu_seqlens).
    """

    cu_seqlens: Tensor
    needs_domain = False

    def of(self, labels: Tensor, run: Run) -> Tensor:
        """[B, tokens of the run], the same in every row."""
        positions = torch.arange(*run, device=self.cu_seqlens.device, dtype=self.cu_seqlens.dtype)
        return torch.searchsorted(self.cu_seqlens, positions, right=True).expand_as(labels)


Documents = EndTokens | PackedLengths


def simreg_over_ranks(
    config: SimRegConfig, shard: SequenceShard, hidden_states: Tensor, views: list[View], *,
    sample_length: int | None = None, exponents: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Compute SimReg's terms of this rank's anchors against all tokens of their chunks, whichever ranks hold these.

        term_i = log(1 + S_neg,i / S_pos,i),    S = sum over negatives (positives) j of exp((cos(e_i, e_j) - 1) / tau)

    A fast implementation computes the terms of all views at once, and sends two numbers of each anchor in the backward;
    the reference differentiates through the rows that `chunk_views` gathered.

    Args:
        hidden_states: [S, B, D] of this rank; their gradient is complete, whichever rank's anchors it came from.
        views: of the same states.
        sample_length: tokens in a sample, where a row packs several.
        exponents: the two scalars of similarity "learnable".

    Returns:
        [B, anchors of this rank], in the order of its rows.
    """
    impl = fast_impl(config, hidden_states)
    if impl is None:
        return joined([
            simreg_terms(
                view.embeddings, view.labels, view.usable, view.roles, anchors=view.anchors, documents=view.documents,
                chunk_size=config.chunk_size, temperature=config.tau, similarity=config.similarity,
                exponents=exponents, self_positive=config.self_positive,
            )
            for view in views
        ])  # fmt: skip
    plan = row_plan(shard.layout, shard.rank, ChunkRules(config.chunk_size, config.scope, sample_length))
    setup = KernelSetup(config.chunk_size, config.tau, load_kernels(impl))
    terms = terms_over_ranks(hidden_states, views, shard, plan, setup)
    if len(views) == 1:  # a split would be one launch more in the backward
        return with_roles(terms, views[0].roles)
    of_views = terms.split([view.roles.anchor.shape[1] for view in views], dim=1)
    return joined([with_roles(part, view.roles) for view, part in zip(views, of_views, strict=True)])


def objective_terms(
    config: SimRegConfig, views: list[View], shard: SequenceShard, learned: Mapping[str, Tensor], iteration: int,
    replicas: Callable[[], dist.ProcessGroup],
) -> Tensor:  # fmt: skip
    """Compute term_i of every anchor of this rank, [B, A], in the order of its rows; a collective for some kinds.

    Args:
        learned: the scalars that the settings train, by name.
        iteration: of the training loop, from 0.
        replicas: returns the group of the ranks with other sequences.
    """
    record, options = config.record, config.options
    kind = record.kind_with(options)
    terms: Any = record.terms  # SimReg alone has none
    if kind is not Kind.PAIRS:
        result: Tensor = terms(config, views, shard, iteration if kind is Kind.SUMS else learned, replicas)
        shape, by = (len(views[0].labels), sum(view.roles.anchor.shape[1] for view in views)), config.objective
        refuse((result.shape != shape, f"the terms of objective {by} must be {list(shape)}, not {list(result.shape)}"))
        return result
    keywords: dict[str, Any] = {name: value for name, value in options.items() if name not in record.other_options}
    switches = ("yes", "no"), ("no", "yes")
    keywords |= {name: value == "yes" for name, value in keywords.items() if record.options[name] in switches}
    keywords |= {"has_output_rows": True} if config.meets_output_rows else {}
    keywords |= {"temperature": config.tau} if record.temperature is not None else {}
    block_terms = terms(**keywords | dict(learned))
    parts = []
    for view in views:
        rows = view.embeddings if view.output_rows is None else with_rows(view.embeddings, view.output_rows)
        where: dict[str, Any] = {"anchors": view.anchors, "documents": view.documents}
        parts.append(anchored_terms(block_terms, rows, view.labels, view.usable, chunk_size=config.chunk_size, **where))
    return torch.cat(parts, dim=1)


def chunk_views(
    config: SimRegConfig, shard: SequenceShard, hidden_states: Tensor, labels: Tensor, valid: Tensor, *,
    documents: Documents | None = None, sample_length: int | None = None, output_rows: Tensor | None = None,
    iteration: int = 0, for_log: bool = False, measures: bool = False,
) -> list[View]:  # fmt: skip
    """Gather what this rank's anchors are compared with: whole chunks, in the order of its rows.

    A collective wherever the plan exchanges labels or rows. The rows have no gradient if fast kernels of SimReg
    compute on them: `simreg_over_ranks` computes that gradient itself.

    Args:
        hidden_states: [S, B, D] of this rank.
        labels: [B, S] of the same tokens.
        valid: bool [B, S]; none with a label below 0.
        documents: source of document borders; None if tokens of all documents meet.
        sample_length: tokens in a sample, where a row packs several.
        output_rows: [S, B, D], the output layer's row for each label, where states meet these.
        iteration: of the training loop, from 0.
        for_log: whole chunks also for an objective that sends no rows, and the tokens' own labels: what the log says is
            the same in every layout, and means the same for every objective.
        measures: whether the log describes the views, in which rows that are exactly zero do not count.
    """
    scope = "local" if config.sends_no_rows and not for_log else config.scope
    plan = row_plan(shard.layout, shard.rank, ChunkRules(config.chunk_size, scope, sample_length))
    usable, impl = valid, fast_impl(config, hidden_states)
    counts_tokens = (config.group_reduce, config.chunk_weight) != ("sum", "token")
    if impl is None or counts_tokens or measures:  # else the kernels leave out the rows that are exactly zero
        usable = nonzero_rows(hidden_states.transpose(0, 1), valid)
    if output_rows is not None:  # a zero row has no cosine either, as in an output layer that begins with zeros
        usable = nonzero_rows(output_rows.transpose(0, 1).to(hidden_states.dtype), usable)
    by_domain = config.chunk_weight != "token" or (documents is not None and documents.needs_domain)
    beyond = plan.travels or (by_domain and config.scope == "exact")
    all_labels, all_usable = _gathered(labels, usable, shard) if beyond else map(shard.located, (labels, usable))
    if config.chunk_weight != "token":
        _say_if_weightless(config, plan)
    rows = shard.gather_rows_detached(hidden_states, plan) if impl else shard.gather_rows(hidden_states, plan)
    all_output_rows = None if output_rows is None else shard.gather_rows_detached(output_rows, plan)
    relabels = None if for_log else config.record.relabels
    dtype = torch.promote_types(hidden_states.dtype, torch.float32)
    by_run: dict[Run, tuple[_RunLabels, TokenRoles]] = {}  # several runs of a rank may meet the same chunk
    views = []
    for window in plan.windows:
        run = window.domain if by_domain else window.tokens
        if run not in by_run:
            run_labels = all_labels.at(run)
            run_documents = None if documents is None else documents.of(run_labels, run)
            tokens = _RunLabels(run, run_labels, all_usable.at(run), run_documents)
            if relabels is not None:  # drawn again in each iteration
                tokens = tokens._replace(labels=relabels(config, *tokens[1:], shard.layout.length, iteration))
            by_run[run] = tokens, token_roles(
                tokens.labels, tokens.usable, documents=tokens.documents, chunk_size=config.chunk_size, dtype=dtype,
                group_reduce=config.group_reduce, self_positive=config.self_positive, chunk_weight=config.chunk_weight,
            )  # fmt: skip
        views.append(_view(window, *by_run[run], rows, all_output_rows))
    return views


def _say_if_weightless(config: SimRegConfig, plan: RowPlan) -> None:
    """Log once if weights of chunks have no effect: they are normalised in each domain, and each is one chunk."""
    longest = max((window.domain[1] - window.domain[0] for window in plan.windows), default=0)
    if 0 < longest <= config.chunk_size:
        log_once(
            f"SimReg chunk weight {config.chunk_weight} has no effect here, as it weighs the chunks of each {longest} "
            f"tokens against each other and one of {config.chunk_size} holds them all: give a smaller chunk size"
        )


class _RunLabels(NamedTuple):
    """Labels and documents of the tokens of one run of the sequence, [B, tokens]."""

    run: Run
    labels: Tensor
    usable: Tensor
    documents: Tensor | None


def _view(window: Window, own: _RunLabels, roles: TokenRoles, rows: Located, output_rows: Located | None) -> View:
    """Build the view of one window's anchors; their roles may need the labels of more tokens than the window's."""
    inside = slice(*_relative(window.tokens, own.run))
    return View(
        window.tokens, rows.at(window.tokens), own.labels[:, inside], own.usable[:, inside],
        documents=None if own.documents is None else own.documents[:, inside],
        anchors=_relative(window.anchors, window.tokens), roles=roles.cut(*_relative(window.anchors, own.run)),
        output_rows=None if output_rows is None else output_rows.at(window.tokens),
    )  # fmt: skip


def _gathered(labels: Tensor, usable: Tensor, shard: SequenceShard) -> tuple[Located, Located]:
    """Gather labels and usability of all tokens of the sequence, in one collective."""
    both = shard.gather_all(torch.stack([labels.long(), usable.long()], dim=-1))
    all_labels, all_usable = both.values.unbind(dim=-1)
    return Located(all_labels, both.runs), Located(all_usable.bool(), both.runs)


def fast_impl(config: SimRegConfig, rows: Tensor | None = None) -> str | None:
    """Choose the fast implementation for these rows; None for the reference, and for another objective."""
    impl = chosen_impl(config.impl, config.similarity, config.self_positive, rows) if config.is_simreg else ""
    return impl if impl in FAST_IMPLS else None


def _relative(run: Run, origin: Run) -> Span:
    return run[0] - origin[0], run[1] - origin[0]
