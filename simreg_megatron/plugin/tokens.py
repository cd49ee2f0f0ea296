# SPDX-License-Identifier: Apache-2.0
"""One micro-batch on this rank: its part of each sequence, the tokens that count, and states inside the decoder.

Shapes: S tokens of this rank, T of its context rank, B micro-batch, D hidden.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from simreg_megatron.config import SimRegConfig
from simreg_megatron.notices import log_once, refuse
from simreg_megatron.parallel.layout import ShardLayout
from simreg_megatron.parallel.output_layer import label_rows
from simreg_megatron.parallel.sequence import Documents, EndTokens, PackedLengths
from simreg_megatron.parallel.shard import SequenceShard
from simreg_megatron.plugin import compat
from simreg_megatron.plugin.refusals import packs_pretraining, refuse_cut, refuse_micro_batch


class MicroBatch(NamedTuple):
    """The tokens of one micro-batch that an objective may ask for."""

    shard: SequenceShard
    labels: Tensor  # [B, S]
    valid: Tensor  # bool [B, S]
    all_labels: Tensor  # [B, T]
    all_valid: Tensor  # bool [B, T]
    hidden_states: Tensor  # [S, B, D], what enters the output layer, or what an earlier stage sends on
    output_rows: Tensor | None  # [S, B, D], the output layer's rows for the labels, where an objective asks for them
    documents: Documents | None  # where tokens of different ones never meet
    sample_length: int | None  # tokens in a sample, where a row packs several


class MicroBatchReader:
    """Finds the tokens of micro-batches. What their shape decides is checked and computed once for each shape."""

    def __init__(self, config: SimRegConfig) -> None:
        self.config = config
        self.end_of_document: int | None = None  # token id, where Megatron has a tokenizer
        self._shards: dict[tuple[Any, ...], tuple[SequenceShard, Any, Any]] = {}  # with the groups whose ids are keys

    def read(self, model: Any, hidden_states: Tensor, labels: Tensor, loss_mask: Any, packed: Any = None) -> MicroBatch:
        """Find this rank's tokens; a collective where an objective asks for the output layer's rows.

        `hidden_states` [S, B, D] may be followed by those of multi-token-prediction depths, which are left out; labels
        and loss mask are [B, T], `packed` Megatron's `packed_seq_params`.
        """
        tp, cp = compat.tensor_group(model), compat.context_group(model, packed)
        sample_length, width = getattr(packed, "tokens_per_sample", None), hidden_states.shape[-1]
        key = labels.shape, width, packed is None, sample_length, bool(model.config.sequence_parallel), id(tp), id(cp)
        if key not in self._shards:
            replicas = functools.partial(compat.data_group, model)
            refuse_micro_batch(self.config, width, len(labels), replicas, packed=packed is not None)
            self._shards[key] = shard_of(model, labels, cp), tp, cp
            _describe_chunks(self.config, self._shards[key][0], sample_length)
        shard = self._shards[key][0]
        padded = getattr(packed, "cu_seqlens_q_padded", None)
        cu_seqlens: Any = getattr(packed, "cu_seqlens_q", None) if padded is None else padded
        if packed is not None and cp.size() > 1:
            is_hybrid = cp is not compat.context_group(model)
            refuse_cut(packed, sample_length, is_hybrid=is_hybrid, rows_split=shard.layout.rows_split)
            how: dict[str, Any] = {"contiguous": True}
            if getattr(packed, "cp_partition_mode", None) != "contiguous":
                # Some end in copies of the last. This waits for the device, as Megatron's scripts do for max_seqlen.
                how = {"cu_seqlens": tuple(dict.fromkeys(cu_seqlens.flatten().tolist()))}
            shard = dataclasses.replace(shard, layout=dataclasses.replace(shard.layout, **how))
        valid, output_rows = valid_tokens(labels, loss_mask), None
        if any(part.meets_output_rows for part in self.config.parts):
            output_rows = label_rows(model, labels, shard.tensor_group)
            output_rows = shard.held_columns(output_rows.transpose(0, 1)).transpose(0, 1)
        packs_tuning = cu_seqlens is not None and not packs_pretraining(sample_length)
        if packs_tuning:
            log_once("SimReg: rows pack the samples of a fine-tuning, so tokens are compared inside each sample alone")
        documents: Documents | None = None
        if cu_seqlens is not None and (packs_tuning or self.config.document_mask):
            documents = PackedLengths(cu_seqlens)
        elif self.config.document_mask:
            if self.end_of_document is None:
                raise RuntimeError(
                    "--simreg-document-mask needs the tokenizer's end-of-document token, and this script has no "
                    "Megatron tokenizer: pass packed_seq_params to the model, or drop it"
                )
            documents = EndTokens(self.end_of_document)
        main_states = main_hidden_states(hidden_states, shard)
        held = shard.held_columns(labels), shard.held_columns(valid)
        return MicroBatch(shard, *held, labels, valid, main_states, output_rows, documents, sample_length)


class InnerStates:
    """States inside the decoder of the stage that computes the loss: outputs of layers, and what enters the final norm.

    Each is caught as the input of the next layer, which is in the graph even if activations are recomputed, and kept
    until the loss is computed.
    """

    def __init__(self, config: SimRegConfig) -> None:
        self.config = config
        self._caught: WeakKeyDictionary[Any, dict[Any, Tensor]] = WeakKeyDictionary()  # by layer number, or "final"

    def catch(self, forward: Callable[..., Any], decoder: Any, *args: Any, **kwargs: Any) -> Any:
        caught: dict[Any, Tensor] = {}

        def keep(name: int | str, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            caught[name] = args[0] if args else kwargs["hidden_states"]

        numbers, layers = self.config.layer_numbers, list(decoder.layers)
        final_norm = getattr(decoder, "final_layernorm", None)
        followed = zip(layers, [*layers, final_norm][1:], strict=True)  # there may be no layer at all
        watched = [(after, layer.layer_number) for layer, after in followed if layer.layer_number in numbers]
        watched += [(final_norm, "final")] if self.config.placement == "pre-norm" else []
        with contextlib.ExitStack() as hooks:
            for module, name in watched:
                if module is not None:
                    hook = functools.partial(keep, name)
                    hooks.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
            output = forward(decoder, *args, **kwargs)
        if layers and layers[-1].layer_number in numbers:  # nothing follows it here
            caught.setdefault(layers[-1].layer_number, output[0] if isinstance(output, tuple) else output)
        self._caught[decoder] = caught
        return output

    def forget(self, model: Any) -> None:
        """Drop the states of a model whose loss is not computed, and their graph."""
        if self._caught:
            self._caught.pop(model.decoder, None)

    def take(self, model: Any, final: Tensor) -> dict[Any, Tensor]:
        """Return the states of `model` that the settings name, in order; `final` is what the last decoder returned."""
        states = self._caught.pop(model.decoder, {})
        if self.config.placement == "post-norm":
            states["final"] = final
        for layer in self.config.layers:
            refuse(
                (layer not in states,
                 f"the states {'before the final norm' if layer == 'final' else f'of layer {layer}'} were not caught, "
                 "as this loop does not call the decoder and its layers as modules in training (CUDA graphs and "
                 "schedules that take layers apart do not, either): let it do so, or drop --simreg-layers and "
                 "--simreg-placement"),
                (self.config.trains and layer in states and not states[layer].requires_grad,
                 f"the states of layer {layer} were computed without a graph (all parameters before it are frozen, or "
                 "it is recomputed), so SimReg cannot train on them: choose another layer in --simreg-layers"),
                error=NotImplementedError,
            )  # fmt: skip
        return {layer: states[layer] for layer in self.config.layers}


def shard_of(model: Any, labels: Tensor, cp: Any) -> SequenceShard:
    """Describe this rank's part of the sequences whose labels [B, T] the model has, over the context ranks `cp`."""
    tp = compat.tensor_group(model)
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


def device_of(models: list[Any]) -> torch.device:
    """Return the device of their parameters; a part of a pipeline may have none."""
    devices = (parameter.device for model in models for parameter in model.parameters())
    return next(devices, None) or torch.device("cuda", torch.cuda.current_device())


def rows_dtype(config: SimRegConfig, model: Any) -> torch.dtype:
    """Return the type of the hidden states that the term is computed from."""
    # The final norm takes a float32 residual stream to the parameters' type; inside the decoder it stays wide.
    wide = config.looks_inside and getattr(model.config, "fp32_residual_connection", False)
    return torch.float32 if wide else getattr(model.config, "params_dtype", torch.float32)


def open_row_group(model: Any) -> None:
    """Let NCCL make the communicator of tensor and context ranks, which is SimReg's alone, before the first step."""
    tp, cp = compat.tensor_group(model), compat.context_group(model)
    if model.config.sequence_parallel and tp.size() > 1 and cp.size() > 1:
        dist.all_reduce(torch.zeros(1, device=device_of([model])), group=compat.tensor_and_context_group(model))


def main_hidden_states(hidden_states: Tensor, shard: SequenceShard) -> Tensor:
    """Drop the states of multi-token-prediction depths, which some stages append after the main ones."""
    rows, main = hidden_states.shape[0], shard.num_rows
    if rows % main:
        raise RuntimeError(f"SimReg expected {main} states a rank (or a multiple, with MTP), Megatron gave {rows}")
    return hidden_states if rows == main else hidden_states[:main]


def valid_tokens(labels: Tensor, loss_mask: Tensor | None) -> Tensor:
    """Return which tokens count, bool like the labels."""
    if loss_mask is None:
        log_once("SimReg: no loss mask reaches the model, so every token with a label counts (pass loss_mask=)")
        return labels >= 0
    return torch.logical_and(labels >= 0, loss_mask.view_as(labels))


def _describe_chunks(config: SimRegConfig, shard: SequenceShard, sample_length: int | None) -> None:
    """Log once if the effective chunks differ from the setting."""
    if not any(part.has_chunks for part in config.parts):
        return
    size, sequence = config.chunk_size, sample_length or shard.layout.length
    if size > sequence:  # no length is named: packed rows have another in each micro-batch, and this is logged once
        log_once(f"SimReg chunk size {size} is beyond the sequence: chunks are whole sequences")
    longest = max(last - first for first, last in shard.layout.held(shard.rank))
    if config.scope == "local" and longest < sequence:
        log_once(
            "SimReg scope local: chunks end where a rank's block of the sequence ends (in packed rows, in each "
            "document), so the objective depends on the parallel layout"
        )
