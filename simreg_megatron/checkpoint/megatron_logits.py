# SPDX-License-Identifier: Apache-2.0
"""Logits of Megatron's own GPTModel, in fp32 on the CPU: the reference for an exported model.

`python -m simreg_megatron.checkpoint.megatron_logits LOAD TOKENS.safetensors LOGITS.safetensors DTYPE` in a process of
its own, for Megatron needs the CPU stand-ins there. Megatron reads its arguments and builds the model as in training;
only the layout, the fused kernels and the number type are those of one CPU. The weights come from this package's safe
reader, rounded to DTYPE first.
"""

from __future__ import annotations

import argparse
import enum
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from simreg_megatron.checkpoint.source import Checkpoint, open_checkpoint

# What decides where and how fast the model runs, or how it is trained, not what it computes.
_NOT_THE_FUNCTION = (
    "tensor_", "pipeline_", "virtual_", "num_layers_per_virtual", "num_virtual", "expert_", "context_", "hierarchical_",
    "hybrid_context", "sequence_parallel", "decoder_first", "decoder_last", "account_for", "microbatch_", "world_size",
    "tp_comm", "overlap_", "delay_", "cuda_graph", "enable_cuda", "external_cuda", "recompute_", "fp8", "fp4", "fp16",
    "bf16", "params_dtype", "cpu_offload", "fine_grained", "offload", "use_te", "use_transformer_engine", "use_kitchen",
    "use_megatron_fsdp", "use_torch_fsdp2", "transformer_impl", "attention_backend", "spec", "gradient_", "bias_",
    "apply_rope_fusion", "masked_softmax", "persist_", "no_persist", "moe_grouped", "moe_permute", "moe_router_fusion",
    "moe_token_dispatcher", "moe_flex", "moe_enable_deepep", "moe_deepep", "moe_hybridep", "moe_ncclep", "inference_",
    "fused_", "batch_invariant", "hidden_dropout", "attention_dropout", "moe_router_load_balancing", "moe_aux_loss",
    "distributed_", "nccl_", "simreg_", "adagc", "use_cpu_initialization", "perform_initialization",
    "defer_embedding", "cross_entropy", "deterministic", "calculate_per_token",
)  # fmt: skip


def namespace(checkpoint: Checkpoint) -> argparse.Namespace:
    """Megatron's own defaults, then the checkpoint's arguments as far as they decide what the model computes."""
    from megatron.core.transformer.enums import AttnBackend
    from megatron.training.arguments import add_megatron_arguments

    from simreg_megatron.cpu.backend import MEGATRON_FLAGS

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    args = parser.parse_known_args([*MEGATRON_FLAGS])[0]
    for name, value in checkpoint.args.items():
        plain = value is None or isinstance(value, bool | int | float | str | list | tuple)
        if plain and not name.startswith(_NOT_THE_FUNCTION) and not isinstance(getattr(args, name, None), enum.Enum):
            setattr(args, name, value)
    if not hasattr(args, "layernorm_epsilon") or "layernorm_epsilon" not in checkpoint.args:
        args.layernorm_epsilon = checkpoint.args.get("norm_epsilon", getattr(args, "layernorm_epsilon", None))
    args.params_dtype = torch.float32
    args.attention_backend = AttnBackend.unfused
    args.hidden_dropout = args.attention_dropout = 0.0
    args.spec = None
    args.moe_router_load_balancing_type = "none"
    args.use_cpu_initialization, args.perform_initialization = True, False
    if not args.num_experts:
        args.moe_ffn_hidden_size = None  # Megatron 0.12 kept it for dense models too, and 0.19 refuses it there
    return args


def build(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> Any:
    """Megatron's model with the checkpoint's weights; every weight of the model must be there."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models.gpt import GPTModelBuilder

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    args = namespace(checkpoint)
    config = gpt_config_from_args(args)
    config.vocab_size = checkpoint.weights["embedding.word_embeddings.weight"].shape[0]
    config.should_pad_vocab, config.parallel_output = False, False
    model = GPTModelBuilder(config).build_model(ProcessGroupCollection.use_mpu_process_groups())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(checkpoint.weights[name].read().to(dtype))
    return model.eval()


@torch.no_grad()
def logits(model: Any, tokens: Tensor) -> Tensor:
    """[b, n, vocabulary] float32 for tokens [b, n], one sequence at a time."""
    length = tokens.shape[1]
    positions = torch.arange(length)[None]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)  # True where attention must not look
    return torch.cat([model(sequence[None], positions, mask).float() for sequence in tokens])


def main() -> None:
    from simreg_megatron.cpu import backend as cpu_backend

    cpu_backend.activate("force")
    from safetensors.torch import load_file, save_file

    load, tokens, output, dtype = sys.argv[1:]
    model = build(open_checkpoint(Path(load)), getattr(torch, dtype))
    save_file({"logits": logits(model, load_file(tokens)["tokens"]).contiguous()}, output)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
