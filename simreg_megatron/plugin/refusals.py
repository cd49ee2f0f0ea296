# SPDX-License-Identifier: Apache-2.0
"""Settings, flags of Megatron and models under which SimReg would be wrong, or silent: refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from simreg_megatron.config import SimRegConfig
from simreg_megatron.notices import refuse
from simreg_megatron.parallel import output_layer
from simreg_megatron.plugin import compat

WAY_OUT = "or set --simreg-lambda 0 (docs/ecosystem.md explains SimReg in other frameworks)"
WHOLE_GRAPH = "--cuda-graph-impl full_iteration"
CUT_AS_ONE = (
    "Megatron cuts packed rows of one length (--dataloader-inter-document-masking) over context ranks as a whole, and "
    "its attention expects each document cut: use --sft alone, drop --context-parallel-size, or set --simreg-lambda 0"
)
HYBRID = (
    "SimReg follows hybrid (dynamic) context parallelism, but not with --sequence-parallel or sample=replicas: drop "
    "these, or set --simreg-lambda 0"
)
OTHER_LOSS = (
    "SimReg adds to Megatron's per-token loss, and an output processor returns something else here: "
    "drop the processor, or set --simreg-lambda 0"
)
_TRACKER = "latest_checkpointed_iteration.txt"
_SCATTERING = {"FullyShardedDataParallel", "MegatronFSDP", "TorchFullyShardedDataParallel", "FSDPModule"}
"""Wrapper classes of Megatron and torch that keep only some rows of a weight on each rank."""


def is_whole_graph(settings: Any) -> bool:
    """Return whether Megatron captures a whole step in one CUDA graph: Python runs in the capture alone."""
    asked = f"{getattr(settings, 'cuda_graph_impl', '')} {getattr(settings, 'cuda_graph_scope', '')}"
    return re.search(r"full_iteration(?!_inference)", asked) is not None


def _flag(args: Any, *names: str) -> str:
    """Return the first of these flags that is given, as it is typed; empty without one."""
    return next((f"--{name.replace('_', '-')}" for name in names if getattr(args, name, None)), "")


def _packs(args: Any) -> bool:
    return bool(_flag(args, "sft", "dataloader_inter_document_masking", "sequence_packing_scheduler"))


# The table: what is refused, and the sentence, in which {} is replaced by what the condition gives.
_Check = tuple[type[Exception], Callable[[Any, SimRegConfig], object], str]
_LAYERS_ONLY = "capture layers only (--cuda-graph-impl local or transformer_engine)"
_IN_WHOLE_GRAPHS: tuple[_Check, ...] = (
    (ValueError, lambda args, config: not config.trains,
     f"SimReg only measures here, which {WHOLE_GRAPH} leaves no room for: {_LAYERS_ONLY}, or drop SimReg"),
    (ValueError, lambda args, config: config.log_interval,
     f"--simreg-log-interval has no effect with {WHOLE_GRAPH}, as no geometry is measured then: drop it, or "
     f"{_LAYERS_ONLY}"),
    (NotImplementedError, lambda args, config: config.every > 1 and config.every,
     f"--simreg-every {{}} leaves SimReg out of most steps, and {WHOLE_GRAPH} computes the same in each: drop it, or "
     f"{_LAYERS_ONLY}"),
    (NotImplementedError, lambda args, config: next((p.objective for p in config.parts if p.record.draws), None),
     f"SimReg objective {{}} draws again in each step, and {WHOLE_GRAPH} would repeat the first draw: {_LAYERS_ONLY}, "
     "or choose another objective"),
    (ValueError, lambda args, config: getattr(args, "cuda_graph_warmup_steps", 1) < 1,
     f"SimReg makes what it keeps from step to step in the first one, which {WHOLE_GRAPH} must not capture: set "
     "--cuda-graph-warmup-steps to 1 or more"),
)  # fmt: skip
_INSIDE_THE_DECODER: tuple[_Check, ...] = (
    (NotImplementedError, lambda args, config: _flag(args, "overlap_moe_expert_parallel_comm"),
     "under {} Megatron never calls the decoder's layers as such, so SimReg sees the final states only: drop that "
     "flag, or --simreg-layers and --simreg-placement"),
)  # fmt: skip
_IN_LAYERS: tuple[_Check, ...] = (
    (NotImplementedError, lambda args, config: _flag(args, "distribute_saved_activations"),
     "{} takes the states between layers apart before SimReg reads them: drop that flag, or --simreg-layers"),
    (NotImplementedError, lambda args, config: _flag(args, "fine_grained_activation_offloading")
     and "attn_norm" in (args.offload_modules or ()),
     "--offload-modules attn_norm frees what enters a layer before SimReg reads it: leave attn_norm out, or drop "
     "--simreg-layers"),
    (NotImplementedError, lambda args, config: _flag(args, "enable_mhc_connections", "enable_hyper_connections"),
     "with {} several streams pass between layers, and no hidden state: drop that flag, or --simreg-layers"),
    (NotImplementedError, lambda args, config: _flag(args, "enable_cuda_graph", "external_cuda_graph")  # up to 0.14
     or (getattr(args, "cuda_graph_impl", None) not in (None, "none") and "--cuda-graph-impl"),
     "CUDA graphs replay layers without their hooks, so SimReg sees the final states only: drop {}, or "
     "--simreg-layers"),
)  # fmt: skip
_IN_MEGATRONS_LOOP: tuple[_Check, ...] = (
    (ValueError,
     lambda args, config: config.log_interval and config.log_interval % args.log_interval and config.log_interval,
     "--simreg-log-interval {} must be a multiple of --log-interval {args.log_interval}: SimReg's values appear in "
     "Megatron's own log line"),
    # Distillation, from cached logits or by ModelOpt, weighs the loss that SimReg's gradient is tied to.
    (NotImplementedError,
     lambda args, config: config.trains and _flag(args, "logits_load_dir", "export_kd_teacher_load"),
     "{} trains on the language-model loss times a weight, 0 by default, and SimReg would be weighed with it, or "
     "silenced: drop one of them, set --simreg-lambda 0, or measure alone with --simreg-objective none"),
    (NotImplementedError,
     lambda args, config: _flag(args, "hybrid_context_parallel", "dynamic_context_parallel") and (
        _flag(args, "sequence_parallel") or any(part.options.get("sample") == "replicas" for part in config.parts)
     ), HYBRID),
    (NotImplementedError,
     lambda args, config: _flag(args, "dataloader_inter_document_masking")
     and getattr(args, "context_parallel_size", 1) > 1, CUT_AS_ONE),
    (NotImplementedError, lambda args, config: _packs(args) and _flag(args, "overlap_moe_expert_parallel_comm"),
     "Megatron does not tell the model where packed sequences begin under {}, so SimReg would mix them: drop that "
     "flag, train unpacked, or set --simreg-lambda 0"),
)  # fmt: skip


def _refuse_first(checks: tuple[_Check, ...], args: Any, config: SimRegConfig) -> None:
    for error, condition, sentence in checks:
        if value := condition(args, config):
            raise error(sentence.format(value, args=args))


def refuse_settings(args: Any, config: SimRegConfig) -> None:
    """Refuse settings that have one name among Megatron's flags and in its model configuration."""
    if is_whole_graph(args):
        _refuse_first(_IN_WHOLE_GRAPHS, args, config)
    if config.looks_inside:
        _refuse_first(_INSIDE_THE_DECODER, args, config)
    if config.layer_numbers:
        _refuse_first(_IN_LAYERS, args, config)


def refuse_arguments(args: Any, config: SimRegConfig) -> None:
    """Refuse flags of Megatron under which SimReg would be wrong, or silent."""
    if iterations := getattr(args, "train_iters", None):  # with samples Megatron counts them later
        first, end = -(-config.start_iter // config.every) * config.every, config.schedule.end(iterations)
        sentence = f"--simreg-every {config.every} has no step before {first}, and SimReg ends at {end}: lower it"
        refuse((first >= end, sentence))
    refuse_settings(args, config)
    _refuse_first(_IN_MEGATRONS_LOOP, args, config)
    if fsdp := _flag(args, "use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp"):
        _refuse_scattered(config, fsdp)
    width, num_sequences = getattr(args, "hidden_size", None), getattr(args, "micro_batch_size", None)
    replicas = SimpleNamespace(size=lambda: args.data_parallel_size)
    refuse_micro_batch(config, width, num_sequences, lambda: replicas, packed=_packs(args))


def _refuse_scattered(config: SimRegConfig, by: str) -> None:
    for part in config.parts:
        who = f"SimReg objective {part.objective}" if part.through_head else "pairs=hidden-head"
        sentence = f"{who} needs the output layer's rows on each rank, and {by} scatters them: drop one of them"
        refuse((part.meets_output_rows or part.through_head, sentence), error=NotImplementedError)


def refuse_cut(packing: Any, sample_length: int | None, *, is_hybrid: bool = False, rows_split: bool = False) -> None:
    """Refuse a packed row that is cut neither zigzag inside each document nor into one part for each rank."""
    followed = {"qkv_format": ("thd",), "cp_partition_mode": ("zigzag", "contiguous")}
    refuse(
        (is_hybrid and rows_split, HYBRID),
        *((getattr(packing, name, None) not in (None, *values),
           f"SimReg follows packed rows with {name} {' or '.join(values)} over context ranks, and here it is "
           f"{getattr(packing, name, None)}: choose that, drop context parallelism, or set --simreg-lambda 0")
          for name, values in followed.items()),
        (not is_hybrid and packs_pretraining(sample_length), CUT_AS_ONE),
        error=NotImplementedError,
    )  # fmt: skip


def packs_pretraining(sample_length: int | None) -> bool:
    """Return whether a packed row is a pretraining sequence, which Megatron cuts over context ranks as a whole."""
    # Megatron's scripts give the length of their samples, for fine-tuning too; other loops do not.
    return bool(sample_length) and not _flag(compat.arguments(), "sft", "use_varlen_dataset")


def refuse_start_over(args: Any) -> None:
    """Refuse to resume at step 0 from a folder that holds checkpoints: without its tracker file Megatron would."""
    if not getattr(args, "load", None) or getattr(args, "ckpt_step", None) is not None:
        return
    folder = Path(args.load)
    whole = sorted(path.parent.name for path in folder.glob("iter_*/metadata.json"))
    if whole and not (folder / _TRACKER).exists():
        raise ValueError(
            f"{folder} holds {whole[-1]} and no {_TRACKER}, so Megatron would start at step 0: write the number of the "
            "checkpoint to resume from into that file, or give another --load"
        )


def refuse_micro_batch(
    config: SimRegConfig, width: int | None, num_sequences: int | None, replicas: Callable[[], Any], *, packed: bool
) -> None:
    """Refuse objectives that can make nothing of micro-batches like these, of hidden states of this width.

    What is None is not known yet. `replicas`, the group of ranks with other sequences, is called if these are gathered.
    """
    for part in config.parts:
        longest = max(part.prefixes, default=0)
        if width is not None and longest > (most := width - part.record.prefixes_below_width):
            raise ValueError(
                f"SimReg objective {part.objective} cannot take {longest} features of states of width {width}: give "
                f"prefixes of at most {most}"
            )
        if part.by_sequence and num_sequences is not None:
            gathers = part.options.get("gather") == "yes"
            total = num_sequences * (replicas().size() if gathers else 1)
            if total < 2:
                where = "all data-parallel ranks have together" if gathers else "a micro-batch has"
                raise ValueError(
                    f"SimReg objective {part.objective} compares sequences, at least 2 of them, and {where} {total}: "
                    "give --micro-batch-size 2 or more"
                )
        if packed and part.record.takes_rows(part.options):
            raise NotImplementedError(
                f"SimReg objective {part.objective} treats each row as one sequence, but packed rows hold several: "
                "train unpacked (drop --sft, --use-varlen-dataset and --dataloader-inter-document-masking), or choose "
                "another objective"
            )


def refuse_models(config: SimRegConfig, model_chunks: Any, model_classes: tuple[Any, ...]) -> None:
    """Refuse models that SimReg would not reach: they would train without it and say nothing."""
    for wrapper in chain.from_iterable(map(compat.wrappers, compat.as_list(model_chunks))):
        for name in _SCATTERING & {kind.__name__ for kind in type(wrapper).__mro__}:
            _refuse_scattered(config, name)
    for model in compat.language_models(model_chunks):
        if not getattr(model, "post_process", True):
            continue
        known, built = " and ".join(known.__name__ for known in model_classes), type(model).__name__
        lacks = " without a language model on this rank" if hasattr(model, "language_model") else ""
        sentence = f"SimReg supports only {known}, and this run builds {built}{lacks}: set --simreg-lambda 0"
        refuse((not isinstance(model, model_classes), sentence), error=NotImplementedError)
        if config.looks_inside:
            refuse_decoder(config, model.decoder)
        for part in config.parts:
            if part.through_head:
                output_layer.refuse_second_use(model, part.objective)
            if part.meets_output_rows and output_layer.is_cut_up(model):
                _refuse_scattered(config, "--tensor-parallel-num-weight-shards")


def refuse_decoder(config: SimRegConfig, decoder: Any) -> None:
    """Refuse a decoder that lacks a state that this stage should have, or recomputes it."""
    from megatron.core.transformer.transformer_block import TransformerBlock

    if not isinstance(decoder, TransformerBlock):
        raise NotImplementedError(
            f"SimReg sees only the final states of a {type(decoder).__name__}: drop --simreg-layers and "
            "--simreg-placement"
        )
    on_stage, settings = [layer.layer_number for layer in decoder.layers], decoder.config
    is_grouped = settings.recompute_granularity == "full" and settings.recompute_method == "uniform"
    # Full recompute keeps what enters each group of layers; "block" recomputes layer by layer.
    size = settings.recompute_num_layers if is_grouped else 1
    for number in config.layer_numbers:
        last = on_stage[-1] if on_stage else number
        place = on_stage.index(number) + 1 if number in on_stage else size
        end = min(number - place % size + size, last)  # of its group; inside one, the forward pass has no graph
        if number > last:
            raise ValueError(f"--simreg-layers {number} is beyond the model, whose last layer is {last}: name others")
        refuse(
            (number == last and config.placement == "pre-norm" and "final" in config.layers,
             f"--simreg-layers {number} and final are the same states with --simreg-placement pre-norm: drop one"),
            (number not in on_stage,
             f"--simreg-layers {number} lies on an earlier pipeline stage than the loss, which has layers "
             f"{f'{on_stage[0]} to {last}' if on_stage else 'none'}: name layers of that stage, or use fewer stages"),
            (place % size and number != last,
             f"--simreg-layers {number} lies inside a group of {size} layers that full recompute runs as one: name the "
             f"group's last layer, {end}, or set --recompute-num-layers 1 or --recompute-method block"),
            error=NotImplementedError,
        )  # fmt: skip
    if config.placement == "pre-norm" and getattr(decoder, "final_layernorm", None) is None:
        raise NotImplementedError(
            "--simreg-placement pre-norm needs the final norm on the stage that computes the loss, and it lies on an "
            "earlier one here: use post-norm, or another pipeline layout"
        )
