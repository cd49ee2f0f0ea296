# SPDX-License-Identifier: Apache-2.0
"""GPT, MoE and hybrid pretraining, and fine-tuning (--sft), over `megatron.training`: datasets, forward step, loss.

Only what every Megatron pretraining script must say itself is here; model, schedule, optimizer, checkpoints and log
are Megatron's (0.19). It knows nothing of SimReg: `python -m simreg_megatron simreg_megatron/pretrain.py ...`
adds that, as it would to a script of your own.
"""

from __future__ import annotations

from dataclasses import fields
from functools import partial, wraps
from typing import Any

import torch
from megatron.core import mpu, utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.optimizer import distrib_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.training import argument_utils, get_args, get_timers, inprocess_restart, pretrain, print_rank_0
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage
from torch import Tensor

_BATCH = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
# Megatron's batch helpers look all of these up; they stay None while sequences are not packed.
_PACKING = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group")
_UNREAD = ("spec", "fim_data", "logits_load_dir", "per_dataset_sequences_path", "hybrid_context_parallel")
_SPIKE = 10  # a loss this many times the largest one seen so far is reported by --check-for-spiky-loss


def datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> Any:
    """Build train, validation and test sets on the ranks that read data."""
    args = get_args()
    print_rank_0("> building train, validation and test datasets ...")
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    named = {field.name: getattr(args, field.name) for field in fields(GPTDatasetConfig) if hasattr(args, field.name)}
    settings = named | {  # these have other names among Megatron's flags
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": blend,
        "blend_per_split": blend_per_split,
        "path_to_cache": args.data_cache_path,
        "tokenizer": build_tokenizer(args),
        "create_attention_mask": args.create_attention_mask_in_dataloader,
        "fast_cache_load": args.dataloader_fast_cache_load,
        "defer_npy_index_mmap": args.dataloader_defer_npy_index_mmap,
        "inter_document_masking": args.dataloader_inter_document_masking,
        "sequence_parallel_size": args.tensor_model_parallel_size * args.sequence_parallel,
    }
    dataset_class = SFTDataset if args.sft else MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(
        dataset_class,
        num_samples,
        lambda: mpu.get_tensor_model_parallel_rank() == 0 and _needs_batch(vp_stage),
        GPTDatasetConfig(**settings),
    ).build()


datasets_provider.is_distributed = True  # type: ignore[attr-defined]  # Megatron calls it on every rank


def _predicts_further(vp_stage: int | None) -> bool:
    """Return whether multi-token-prediction layers sit on this stage."""
    config = core_transformer_config_from_args(get_args())
    layout, depths = config.pipeline_model_parallel_layout, config.mtp_num_layers
    return mtp_on_this_rank(layout, depths, ignore_virtual=False, vp_stage=vp_stage)


def _needs_batch(vp_stage: int | None) -> bool:
    """Return whether this stage reads batches; all do if documents are packed, as attention must know the borders."""
    return is_first_or_last_pipeline_stage(vp_stage) or _predicts_further(vp_stage) or _packs(get_args())


def _packs(args: Any) -> bool:
    return bool(args.sft or args.dataloader_inter_document_masking)


def get_batch(data_iterator: Any, vp_stage: int | None = None) -> dict[str, Any]:
    """Return this rank's part of the next micro-batch, read on tensor rank 0, broadcast, cut over context ranks."""
    args = get_args()
    if not _needs_batch(vp_stage):
        return dict.fromkeys((*_BATCH, *_PACKING))
    batch: dict[str, Any] = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        read = next(data_iterator)
        batch = dict.fromkeys((*_BATCH, *_PACKING))
        batch |= {name: read[name].cuda(non_blocking=True) for name in batch if read.get(name) is not None}
    batch = utils.get_batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        has_cu_seqlens=_packs(args),
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=_predicts_further(vp_stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    batch = utils.flatten_batch_for_packed_sequences(batch)
    return utils.get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())


def packed_sequences(batch: dict[str, Any]) -> PackedSeqParams | None:
    """Return where the documents of a packed micro-batch begin and end; None if sequences are not packed."""
    if batch["cu_seqlens"] is None:
        return None
    cu_seqlens, longest = batch["cu_seqlens"].squeeze(0), int(batch["max_seqlen"].item())
    update_seqlen_stats_from_cu_seqlens(cu_seqlens)  # for the FLOP/s of Megatron's log
    lengths = {"max_seqlen_q": longest, "max_seqlen_kv": longest, "tokens_per_sample": get_args().seq_length}
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, **lengths)


def loss_function(loss_mask: Tensor, per_token_loss: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the sum of the unmasked losses, their number, and both for the log: Megatron divides, in its own modes.

    Megatron's own checks of a micro-batch's loss are made here, before data-parallel ranks are averaged.
    """
    mask = loss_mask.view(-1).float()
    loss = torch.sum(per_token_loss.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    args, machine = get_args(), get_rerun_state_machine()
    check = partial(machine.validate_result, result=loss, tolerance=0.0)
    if args.check_for_nan_in_loss_and_grad:
        check(rejection_func=torch.isnan, message="found NaN in local forward loss", fatal=True)
        check(rejection_func=torch.isinf, message="found Inf in local forward loss", fatal=True)
    if args.check_for_spiky_loss:
        is_spike = partial(machine.is_unexpectedly_large, threshold=_SPIKE, context="loss")
        check(rejection_func=is_spike, message="Spiky loss", fatal=False)
    return loss, num_tokens, {"lm loss": torch.cat([loss.detach().view(1), num_tokens.view(1)])}


def forward_step(data_iterator: Any, model: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
    """Run a micro-batch through the model; return its output and the function that makes a loss of it."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator, utils.get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    run = model.build_schedule_plan if return_schedule_plan else model
    named = {"labels": batch["labels"], "loss_mask": batch["loss_mask"], "packed_seq_params": packed_sequences(batch)}
    output = run(batch["tokens"], batch["position_ids"], batch["attention_mask"], **named)
    return output, partial(loss_function, batch["loss_mask"])


def embedding_ranks(pipeline_ranks: list[int]) -> list[int]:
    """Return the ranks of a pipeline that hold the word embeddings: Megatron keeps their copies equal."""
    args = get_args()
    further = get_mtp_ranks(pipeline_ranks, core_transformer_config_from_args(args))
    last = [] if args.untie_embeddings_and_output_weights else pipeline_ranks[-1:]
    return sorted({pipeline_ranks[0], *last, *further})


def check_settings(args: Any) -> None:
    """Refuse settings that this script does not read, or with which Megatron 0.19 loses the borders of documents."""
    stages, packing = args.pipeline_model_parallel_size, args.dataloader_inter_document_masking
    names = _UNREAD[1:] if args.hybrid_layer_pattern else _UNREAD  # a HybridModel is built by --spec
    unread = next((f"--{name.replace('_', '-')}" for name in names if getattr(args, name, None)), "")
    for condition, sentence in (
        (unread,
         f"{unread} is read by Megatron-LM's own pretrain_gpt.py alone: start that, or set MEGATRON_PATH to its tree"),
        (args.reset_attention_mask and args.transformer_impl != "local",
         "--reset-attention-mask has no effect with Transformer Engine, whose causal attention reads no mask: "
         "use --dataloader-inter-document-masking instead"),
        (args.reset_attention_mask and (stages > 2 or args.virtual_pipeline_model_parallel_size),
         "--reset-attention-mask reaches the first and the last pipeline stage only, so layers in between would "
         "attend across documents: use --dataloader-inter-document-masking with --micro-batch-size 1 instead"),
        (packing and args.context_parallel_size > 1,
         "--dataloader-inter-document-masking cannot be split by context parallelism: rows are cut whole, while "
         "rotary embeddings and attention expect each document to be cut alone; leave --context-parallel-size out"),
        (_packs(args) and stages > 1 and args.micro_batch_size > 1,
         f"{'--sft' if args.sft else '--dataloader-inter-document-masking'} packs a micro-batch into one row, and "
         f"pipeline stages exchange {args.micro_batch_size} rows: set --micro-batch-size 1"),
    ):  # fmt: skip
        if condition:
            raise ValueError(sentence)


def make_plain_adam_loadable() -> None:
    """Let torch's own Adam go on from a checkpoint under the distributed optimizer.

    Without Apex and Transformer Engine, Megatron 0.19 asks it at each load for steps that are yet to come, and fails.
    Past that, the count of steps would be overwritten by 0, and be one tensor of all parameters, which each raises.
    """
    optimizer = distrib_optimizer.DistributedOptimizer
    if getattr(distrib_optimizer, "HAVE_APEX_OR_TE", True) or hasattr(optimizer.state_dict, "__wrapped__"):
        return
    state_dict, set_states = optimizer.state_dict, optimizer._set_main_param_and_optimizer_states
    load_state_dict = optimizer.load_state_dict

    @wraps(state_dict)
    def at_step_zero(self: Any) -> Any:
        if self.optimizer.state:
            return state_dict(self)
        self.optimizer.state[self.optimizer.param_groups[0]["params"][0]] = {"step": torch.tensor(0.0)}
        try:
            return state_dict(self)
        finally:
            self.optimizer.state.clear()

    @torch.no_grad()  # Megatron copies into views of float32 parameters, which autograd refuses
    def without_step(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        set_states(self, parameter, {**tensors, "step": None})

    def with_counts_of_their_own(self: Any, state: dict[str, Any]) -> None:
        load_state_dict(self, state)
        for of_parameter in self.optimizer.state.values():
            if "step" in of_parameter:
                of_parameter["step"] = of_parameter["step"].clone()

    optimizer.state_dict, optimizer._set_main_param_and_optimizer_states = at_step_zero, without_step
    optimizer.load_state_dict = with_counts_of_their_own


def main() -> None:
    make_plain_adam_loadable()
    run, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)  # as it is without --inprocess-restart
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "HuggingFaceTokenizer"})
    check_settings(args)
    is_hybrid = args.hybrid_layer_pattern is not None
    model_config = argument_utils.hybrid_config_from_args if is_hybrid else argument_utils.gpt_config_from_args
    config = argument_utils.pretrain_cfg_container_from_args(args, model_config(args))
    model_type = ModelType.encoder_or_decoder
    run(config, datasets_provider, model_type, forward_step, store=store, get_embedding_ranks=embedding_ranks)


if __name__ == "__main__":
    main()
