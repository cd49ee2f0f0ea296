# SPDX-License-Identifier: Apache-2.0
"""Compare the logits of an exported model with those of Megatron's own GPTModel, in fp32 on the CPU.

`export-hf --verify` runs this module in a process of its own, since it needs the CPU backend. Megatron builds the model
from the checkpoint's arguments and loads the weights by its own reader; only the layout, the fused kernels and the
number type are those of one CPU.
"""

from __future__ import annotations

import argparse
import enum
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simreg_megatron.tools.safe_load import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCE = 1e-4  # of the logits' standard deviation: what fp32 makes of two orders of the same sums
_SEQUENCES, _LENGTH = 4, 256
# Arguments that decide where and how fast the model runs or how it is trained, not what it computes.
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


def verify(checkpoint: Path, model: Path) -> int:
    """Print how far the logits of the two are apart; return 1 if they differ.

    Raises:
        CheckpointError: Megatron's model could not be run.
    """
    command = [sys.executable, "-m", "simreg_megatron.tools.verify_export", str(checkpoint), str(model)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 1) or not done.stdout:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise CheckpointError(f"{model} is complete, but Megatron's model could not be run to compare: {reason}")
    print(done.stdout.splitlines()[-1])
    return done.returncode


def megatron_logits(checkpoint: Path, tokens: Tensor, dtype: Any) -> Tensor:
    """Compute Megatron's logits [b, n, rows] for tokens [b, n], with weights rounded to `dtype`.

    Needs the CPU backend and no process group. The checkpoint must have passed `safe_load.check_checkpoint`.
    """
    import torch
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models.gpt import GPTModelBuilder

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    found = dist_checkpointing.load_tensors_metadata(str(checkpoint))
    config = gpt_config_from_args(model_args(dist_checkpointing.load_common_state_dict(str(checkpoint))["args"]))
    config.vocab_size = found["embedding.word_embeddings.weight"].global_shape[0]
    config.should_pad_vocab, config.parallel_output = False, False
    model = GPTModelBuilder(config).build_model(ProcessGroupCollection.use_mpu_process_groups()).eval()
    asked = {name: part for name, part in model.sharded_state_dict().items() if not isinstance(part, ShardedObject)}
    loaded = dist_checkpointing.load(asked, str(checkpoint))
    weights = {name: loaded[name].to(dtype) for name, _ in model.named_parameters()}
    model.load_state_dict(weights, strict=False)  # states of layers that no weight depends on are left out
    length = tokens.shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)  # True where attention must not look
    with torch.no_grad():
        return torch.cat([model(row[None], torch.arange(length)[None], mask).float() for row in tokens])


def model_args(saved: argparse.Namespace) -> argparse.Namespace:
    """Return Megatron's defaults with the saved arguments that decide what the model computes."""
    import torch
    from megatron.core.transformer.enums import AttnBackend
    from megatron.training.arguments import add_megatron_arguments

    from simreg_megatron.cpu.backend import MEGATRON_FLAGS

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    args = parser.parse_known_args([*MEGATRON_FLAGS])[0]
    for name, value in vars(saved).items():
        is_plain = value is None or isinstance(value, bool | int | float | str | list | tuple)
        if is_plain and not name.startswith(_NOT_THE_FUNCTION) and not isinstance(getattr(args, name, None), enum.Enum):
            setattr(args, name, value)
    args.layernorm_epsilon = getattr(saved, "layernorm_epsilon", None) or saved.norm_epsilon  # before 0.17
    args.params_dtype, args.attention_backend = torch.float32, AttnBackend.unfused
    args.hidden_dropout = args.attention_dropout = 0.0
    args.spec, args.moe_router_load_balancing_type = None, "none"
    args.use_cpu_initialization, args.perform_initialization = True, False
    if not args.num_experts:
        args.moe_ffn_hidden_size = None  # Megatron 0.12 kept it for dense models too, and 0.19 refuses it there
    return args


def compare(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """Return the largest difference of two logits and the standard deviation of `ours`, without padding."""
    ours = ours[..., : theirs.shape[-1]]
    return (ours - theirs).abs().max().item(), ours.std().item()


def main() -> int:
    import torch
    import transformers

    from simreg_megatron.cpu import backend

    checkpoint, folder = map(Path, sys.argv[1:])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, use_safetensors=True, attn_implementation="eager", dtype="auto"
    )
    shape = (_SEQUENCES, min(_LENGTH, model.config.max_position_embeddings))
    tokens = torch.randint(model.config.vocab_size, shape, generator=torch.Generator().manual_seed(1))
    dtype = model.dtype
    with torch.no_grad():
        theirs = model.float().eval()(tokens, use_cache=False).logits
    del model
    backend.activate("force")  # only now: transformers would ask its stand-ins for a GPU
    difference, spread = compare(megatron_logits(checkpoint, tokens, dtype), theirs)
    agrees = difference <= TOLERANCE * spread
    print(
        f"Megatron's GPTModel and the exported model {'agree' if agrees else 'DIFFER'}: {shape[0]} sequences of "
        f"{shape[1]} random tokens in fp32 on the CPU; largest difference of a logit {difference:.3g}, where logits "
        f"spread by {spread:.3g}"
    )
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
