# SPDX-License-Identifier: Apache-2.0
"""Settings, flags of Megatron and models under which SimReg would be wrong, or silent: refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from simreg_megatron.config import SimRegConfig
from simreg_megatron.plugin import compat, inner, stages, whole_graph
from simreg_megatron.plugin.regularizer import Regularizer
from simreg_megatron.weights import heads

PACKED_AND_SPLIT = (
    "SimReg does not support how packed sequences are cut over context-parallel ranks: train without "
    "--context-parallel-size and --hybrid-context-parallel, or unpacked (drop --sft and "
    "--dataloader-inter-document-masking), or set --simreg-lambda 0"
)
_SCATTERING = {"FullyShardedDataParallel", "MegatronFSDP", "TorchFullyShardedDataParallel", "FSDPModule"}
"""Classes, Megatron's and torch's, of which a model keeps only some rows of its weights on each rank."""
_TRACKER = "latest_checkpointed_iteration.txt"


def refuse_arguments(args: Any, config: SimRegConfig) -> None:
    """Refuse flags of Megatron under which SimReg would be wrong, or silent.

    Raises:
        ValueError, NotImplementedError: there is one; the sentence names it and the way out.
    """
    interval = config.log_interval
    if interval is not None and interval % args.log_interval:
        raise ValueError(
            f"--simreg-log-interval {interval} must be a multiple of --log-interval {args.log_interval}: "
            "SimReg's values appear in Megatron's own log line"
        )
    iterations = getattr(args, "train_iters", None)
    if iterations:  # with samples Megatron counts them later
        config.schedule.end(iterations)  # refuses a training that is too short for it
    refuse_settings(args, config)
    _refuse_other_losses(args, config)
    for name in ("use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp"):
        if getattr(args, name, False):
            _refuse_scattered(config, f"--{name.replace('_', '-')}")
    packed = getattr(args, "sft", False) or getattr(args, "dataloader_inter_document_masking", False)
    if getattr(args, "hybrid_context_parallel", False) or (packed and getattr(args, "context_parallel_size", 1) > 1):
        raise NotImplementedError(PACKED_AND_SPLIT)
    refuse_rows(
        config,
        width=getattr(args, "hidden_size", None),
        num_sequences=getattr(args, "micro_batch_size", None),
        num_data_ranks=lambda: args.data_parallel_size,
        packed=packed,
    )
    if packed and getattr(args, "overlap_moe_expert_parallel_comm", False):
        raise NotImplementedError(
            "Megatron does not tell the model where packed sequences begin under --overlap-moe-expert-parallel-comm, "
            "so SimReg would mix them: drop that flag, train unpacked, or set --simreg-lambda 0"
        )


def _refuse_other_losses(args: Any, config: SimRegConfig) -> None:
    """Distillation weighs the language-model loss, to which SimReg's gradient is tied, or leaves it out."""
    for name in ("logits_load_dir", "export_kd_teacher_load"):  # of cached logits; of a teacher, by ModelOpt
        if config.trains and getattr(args, name, None):
            raise NotImplementedError(
                f"--{name.replace('_', '-')} trains on the language-model loss times a weight, 0 by default, "
                "and SimReg would be weighed with it, or silenced: drop one of them, set --simreg-lambda 0, or measure "
                "alone with --simreg-objective none"
            )


def _refuse_scattered(config: SimRegConfig, by: str) -> None:
    for part in config.parts:
        if part.meets_heads or part.through_head:
            who = f"SimReg objective {part.objective}" if part.through_head else "pairs=hidden-head"
            raise NotImplementedError(
                f"{who} needs the output layer's rows on each rank, and {by} scatters them: drop one of them"
            )


def refuse_start_over(args: Any) -> None:
    """Refuse to resume at step 0 from a folder that holds checkpoints: without its tracker file Megatron would.

    Raises:
        ValueError: complete checkpoints are there, and nothing that names one.
    """
    if not getattr(args, "load", None) or getattr(args, "ckpt_step", None) is not None:
        return
    folder = Path(args.load)
    if (folder / _TRACKER).exists():
        return
    if whole := sorted(path.parent.name for path in folder.glob("iter_*/metadata.json")):
        raise ValueError(
            f"{folder} holds {whole[-1]} and no {_TRACKER}, so Megatron would start at step 0: write the number of the "
            "checkpoint to resume from into that file, or give another --load"
        )


def refuse_settings(settings: Any, config: SimRegConfig) -> None:
    """Refuse what Megatron's flags and the configuration of its models call by the same names.

    Raises:
        ValueError, NotImplementedError: the sentence names it and the way out.
    """
    if whole_graph.is_asked_for(settings):
        whole_graph.refuse(settings, config)
    if config.looks_inside:
        inner.refuse_arguments(config, settings)


def refuse_rows(
    config: SimRegConfig,
    *,
    width: int | None,
    num_sequences: int | None,
    num_data_ranks: Callable[[], int],
    packed: bool = False,
) -> None:
    """Refuse objectives that can make nothing of micro-batches like these, of which None is not known yet.

    Args:
        width: of the hidden states.
        num_sequences: in a micro-batch.
        num_data_ranks: asked where an objective gathers sequences from them.
        packed: whether a row may hold several texts.

    Raises:
        ValueError, NotImplementedError: the sentence names the objective and the way out.
    """
    for part in config.parts:
        if part.prefixes and width is not None:
            _refuse_prefixes(width, part)
        if part.by_sequence and num_sequences is not None:
            _refuse_lonely_sequences(part, num_sequences, num_data_ranks)
        if packed and part.record.takes_rows(part.options):
            raise NotImplementedError(
                f"SimReg objective {part.objective} treats each row as one sequence, but packed rows hold several: "
                "train unpacked (drop --sft and --dataloader-inter-document-masking), or choose another objective"
            )


def _refuse_prefixes(hidden_size: int, config: SimRegConfig) -> None:
    most = hidden_size - config.record.prefixes_below_width
    if config.prefixes[-1] > most:
        raise ValueError(
            f"SimReg objective {config.objective} cannot take {config.prefixes[-1]} features of states of width "
            f"{hidden_size}: give prefixes of at most {most}"
        )


def _refuse_lonely_sequences(config: SimRegConfig, num_sequences: int, num_data_ranks: Callable[[], int]) -> None:
    """A sequence without another one to be compared with has no term."""
    gathers = config.options.get("gather") == "yes"
    if num_sequences * (num_data_ranks() if gathers else 1) < 2:
        whose = "of all data-parallel ranks, of which there is one" if gathers else "of a micro-batch"
        raise ValueError(
            f"SimReg objective {config.objective} compares the sequences {whose}, and the micro-batch size is "
            f"{num_sequences}: give --micro-batch-size 2 or more"
        )


def refuse_models(config: SimRegConfig, model_chunks: Any, model_classes: tuple[Any, ...]) -> None:
    """A model that never passes a wrapped function would train without SimReg and say nothing."""
    chunks = model_chunks if isinstance(model_chunks, list) else [model_chunks]
    for wrapper in (wrapper for chunk in chunks for wrapper in compat.wrappers(chunk)):
        for name in _SCATTERING & {kind.__name__ for kind in type(wrapper).__mro__}:
            _refuse_scattered(config, name)
    for model in compat.unwrapped(model_chunks):
        if not getattr(model, "post_process", True):
            if inner.holds_earlier_layers(config, model):
                stages.refuse(config, model)
            continue
        if not isinstance(model, model_classes):
            known = " and ".join(known.__name__ for known in model_classes)
            raise NotImplementedError(
                f"SimReg supports only {known}, and this run builds {type(model).__name__}: set --simreg-lambda 0"
            )
        if config.looks_inside:
            inner.refuse_decoder(config, model.decoder)
            stages.announce(config, model.decoder)
        for part in config.parts:
            if part.through_head:
                heads.refuse_second_use(model, part.objective)
            if part.meets_heads and heads.is_cut_up(model):
                _refuse_scattered(config, "--tensor-parallel-num-weight-shards")


def refuse_unknown_loss(model: Any, given: dict[str, Any]) -> None:
    """Refuse a call that packs rows under context parallelism, or hands the loss to an output processor."""
    if given.get("packed_seq_params") is not None and compat.context_group(model).size() > 1:
        raise NotImplementedError(PACKED_AND_SPLIT)
    if given.get("output_processor") is not None:
        raise NotImplementedError(_OTHER_LOSS)


def refuse_shape(loss: Any, labels: Any) -> None:
    """Refuse a loss that is not Megatron's per-token loss, [B, S] like the labels."""
    if loss.shape != labels.shape:
        raise NotImplementedError(_OTHER_LOSS)


_OTHER_LOSS = (
    "SimReg adds to Megatron's per-token loss, and an output processor returns something else here: "
    "drop the processor, or set --simreg-lambda 0"
)


def num_data_ranks(model: Any) -> int:
    return int(compat.data_group(model).size())


def refuse_silence(regularizer: Regularizer, model_chunks: Any) -> None:
    """After a step. A model that overrides the wrapped function without calling it would train without SimReg, and so
    would a loop whose own loss is not computed from the one that the model returns."""
    if regularizer.returns.are_missing:
        raise NotImplementedError(
            "SimReg trained nothing in this step: no gradient came back to the per-token loss that the model returned. "
            "Let the loss function compute what it trains on from that loss, or set --simreg-lambda 0"
        )
    if regularizer.has_met_model:
        return
    for model in compat.unwrapped(model_chunks):
        if getattr(model, "post_process", True) or inner.holds_earlier_layers(regularizer.config, model):
            raise compat.MegatronSeamError(
                f"SimReg is on, but {type(model).__name__} computed its loss without calling the function that SimReg "
                "wraps: make its override call super(), or set --simreg-lambda 0"
            )
