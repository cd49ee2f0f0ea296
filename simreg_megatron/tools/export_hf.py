# SPDX-License-Identifier: Apache-2.0
"""`simreg-megatron export-hf`: write a `torch_dist` checkpoint of a LLaMA or Mixtral as a Hugging Face model.

Megatron stacks the weights of all layers (and experts) under one key. Its QKV matrix holds, for each group of heads,
the group's queries, its key and its value; its first MLP matrix holds gate, then up.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simreg_megatron.tools import checkpoints
from simreg_megatron.tools.checkpoints import CheckpointError
from simreg_megatron.tools.tokens import Tokenizer, check_size, load_tokenizer, write_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

# The only scaling of rotary embeddings that Megatron has; it fixes these numbers.
LLAMA3_ROPE: dict[str, Any] = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_ROPE |= {"original_max_position_embeddings": 8192}
SIZES = {  # Megatron's argument: the setting of transformers
    "num_layers": "num_hidden_layers", "hidden_size": "hidden_size", "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads", "kv_channels": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
}  # fmt: skip
TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight", "output_layer.weight": "lm_head.weight",
}  # fmt: skip
LAYER = {  # Transformer Engine fuses a norm into the layer that follows; `torch_dist` has both names
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.weight": tuple(f"self_attn.{name}_proj.weight" for name in "qkv"),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
    "mlp.router.weight": ("block_sparse_moe.gate.weight",),
    "mlp.experts.experts.linear_fc1.weight": tuple(f"block_sparse_moe.experts.{{}}.{w}.weight" for w in ("w1", "w3")),
    "mlp.experts.experts.linear_fc2.weight": ("block_sparse_moe.experts.{}.w2.weight",),
}
# The values with which the model is a LLaMA or Mixtral, and arguments that must be absent, false or 0.
_MUST_BE: dict[str, Any] = {
    "normalization": "RMSNorm", "swiglu": True, "position_embedding_type": "rope", "rotary_percent": 1.0,
    "softmax_type": "vanilla", "moe_router_score_function": "softmax", "moe_router_topk_scaling_factor": 1.0,
    "rope_scaling_factor": 8.0,  # Megatron's scripts never pass another factor to the model
}  # fmt: skip
_MUST_NOT_BE = """apply_layernorm_1p layernorm_zero_centered_gamma quick_geglu glu_linear_offset
    activation_func_clamp_value add_bias_linear add_qkv_bias rotary_interleaved rotary_seq_len_interpolation_factor
    no_rope_freq qk_layernorm qk_l2_norm softmax_scale attention_output_gate window_size multi_latent_attention
    experimental_attention_variant apply_residual_connection_post_layernorm use_mup mtp_num_layers is_hybrid_model
    hybrid_override_pattern hybrid_layer_pattern heterogeneous_layers_config_path spec moe_router_pre_softmax
    heterogeneous_layers_config_encoded_json moe_router_num_groups moe_router_group_topk moe_router_enable_expert_bias
    moe_router_topk_limited_devices moe_shared_expert_intermediate_size moe_latent_size moe_apply_probs_on_input
    moe_mlp_glu_interleave_size moe_expert_capacity_factor moe_expert_rank_capacity_factor"""
_BALANCED_BY = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")  # others change which experts are chosen


def add_command(commands: Any) -> None:
    text = "write a Megatron checkpoint of a LLaMA or Mixtral as a Hugging Face model"
    parser = commands.add_parser("export-hf", help=text, description=text)
    parser.add_argument("--load", type=Path, required=True, help="the folder that Megatron's --save named")
    parser.add_argument("--ckpt-step", type=int, help="the step to take (default: the newest)")
    parser.add_argument("--save", type=Path, required=True, help="the folder to make")
    parser.add_argument("--tokenizer", type=Path, help="that of training: a Hugging Face folder or a .model file")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    folder = checkpoints.checkpoint_folder(options.load, options.ckpt_step)
    export(folder, options.save, options.tokenizer)
    print(f"{options.save}: exported from {folder}")


def export(folder: Path, save: Path, tokenizer: Path | None = None) -> None:
    """Write the checkpoint in `folder` to the new folder `save`, in the type of its embedding."""
    import torch
    from huggingface_hub import save_torch_state_dict

    checkpoints.refuse_taken(save)
    loaded = load_tokenizer(str(tokenizer)) if tokenizer else None
    args, stored = read(folder)
    embedding, weights = stored["embedding.word_embeddings.weight"], {}
    with checkpoints.one_sentence(folder):
        refuse_others(args)
        if loaded:
            check_size(args, len(embedding), loaded)
        config = make_config(args, loaded.vocab_size if loaded else len(embedding), loaded)
        for key in list(stored):
            for name, weight in convert(key, stored.pop(key), config):
                weights[name] = weight.to(embedding.dtype).clone(memory_format=torch.contiguous_format)
        check_weights(weights, config, folder)
    with checkpoints.new_folder(save) as made:
        save_torch_state_dict(weights, made, max_shard_size="4GB")
        write_config(config, str(embedding.dtype).removeprefix("torch."), made)
        for path in made.glob("*.safetensors"):  # which are made unreadable to others
            shutil.copymode(made / "config.json", path)
        if loaded:
            write_tokenizer(loaded, made)


def read(folder: Path) -> tuple[argparse.Namespace, dict[str, Tensor]]:
    """Read Megatron's arguments and the model's tensors by key, without the scalars that SimReg trained."""
    if missing := [name for name in (".metadata", "metadata.json") if not (folder / name).is_file()]:
        raise CheckpointError(
            f"{folder} is no whole torch_dist checkpoint: it has no {missing[0]}. Give the folder that --save named "
            "and --ckpt-step. Megatron converts the older format torch: load it there with --ckpt-convert-format "
            "torch_dist --ckpt-convert-save FOLDER, which writes FOLDER/torch_dist"
        )
    left_out = ("optimizer.", "chained_", "simreg_")
    with checkpoints.one_sentence(folder):
        stored = checkpoints.read_metadata(folder)
        args = checkpoints.read_arguments(folder, stored)
        wanted = {key: entry for key, entry in stored.items() if entry.dtype and not key.startswith(left_out)}
        num_bytes = sum(math.prod(entry.shape) * entry.dtype.itemsize for entry in wanted.values())
        if num_bytes > sum(path.stat().st_size for path in folder.glob("*.distcp")):
            raise ValueError("its tensors are larger than its .distcp files")
        tensors = {key: checkpoints.read_tensor(folder, entry) for key, entry in wanted.items()}
    if "embedding.word_embeddings.weight" not in tensors:
        raise CheckpointError(f"{folder} has no embedding: Megatron's training loop did not save it")
    return args, tensors


def refuse_others(args: argparse.Namespace) -> None:
    """Refuse a model that computes something else than transformers' LLaMA and Mixtral."""
    for name in (*SIZES, *(["num_experts"] if args.num_experts else [])):
        if type(value := getattr(args, name)) is not int or value < 1:
            raise CheckpointError(f"{name} is {value!r} in the checkpoint's arguments: they are damaged")
    balanced = getattr(args, "moe_router_load_balancing_type", None) or "none"
    wrong = [name for name in _MUST_NOT_BE.split() if getattr(args, name, None) not in (None, False, 0, "")]
    wrong += [name for name, value in _MUST_BE.items() if getattr(args, name, value) not in (None, value)]
    if not set([balanced] if isinstance(balanced, str) else balanced) <= set(_BALANCED_BY):
        wrong.append("moe_router_load_balancing_type")
    if args.num_experts and set(str(getattr(args, "moe_layer_freq", 1))) - set("1,[] "):
        wrong.append("moe_layer_freq")
    for name in wrong:
        raise CheckpointError(f"transformers' LLaMA and Mixtral do not support {name} = {getattr(args, name)}")
    if args.hidden_size % (heads := args.num_attention_heads):
        raise CheckpointError(f"transformers does not support width {args.hidden_size} with {heads} attention heads")


def make_config(args: argparse.Namespace, vocab_size: int, tokenizer: Tokenizer | None) -> Any:
    """Make transformers' configuration from Megatron's arguments (of any release since 0.12)."""
    from transformers import LlamaConfig, MixtralConfig

    common = {
        "vocab_size": vocab_size, **{theirs: getattr(args, ours) for ours, theirs in SIZES.items()},
        "num_key_value_heads": args.num_query_groups if args.group_query_attention else args.num_attention_heads,
        "rms_norm_eps": getattr(args, "layernorm_epsilon", None) or args.norm_epsilon,  # before 0.17, and since
        "rope_theta": float(args.rotary_base or 10000), "pad_token_id": None,
        "tie_word_embeddings": not args.untie_embeddings_and_output_weights,
        "bos_token_id": tokenizer and tokenizer.bos_id, "eos_token_id": tokenizer and tokenizer.eos_id,
        "rope_scaling": dict(LLAMA3_ROPE) if getattr(args, "use_rope_scaling", False) else None,
    }  # fmt: skip
    if not args.num_experts:
        return LlamaConfig(architectures=["LlamaForCausalLM"], **common)
    common["intermediate_size"] = args.moe_ffn_hidden_size or args.ffn_hidden_size
    balance = args.moe_aux_loss_coeff if isinstance(args.moe_aux_loss_coeff, float) else 0.0
    return MixtralConfig(
        architectures=["MixtralForCausalLM"], num_local_experts=args.num_experts, sliding_window=None,
        num_experts_per_tok=args.moe_router_topk, router_aux_loss_coef=balance, **common,
    )  # fmt: skip


def convert(key: str, tensor: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    """Split one of Megatron's tensors into those of transformers, which are views of it."""
    if key in TOP:
        yield TOP[key], tensor if tensor.dim() == 1 else tensor[: config.vocab_size]
        return
    match = re.fullmatch(r"decoder\.layers\.(?:(\d+)\.)?(.+)", key)
    if match is None or match[2] not in LAYER:
        raise CheckpointError(f"{key} is no weight of a LLaMA or Mixtral: a model that has it cannot be exported")
    names, num_experts = LAYER[match[2]], getattr(config, "num_local_experts", 0)
    grid = [config.num_hidden_layers] * (match[1] is None) + [num_experts] * (".experts." in key)
    if list(tensor.shape[: len(grid)]) != grid:
        raise CheckpointError(f"{key} has the shape {[*tensor.shape]}, but its configuration asks for {grid} first")
    for layer, weight in enumerate(tensor) if match[1] is None else [(int(match[1]), tensor)]:
        for expert, matrix in enumerate(weight) if ".experts." in key else [(0, weight)]:
            for name, part in zip(names, split(matrix, len(names), config), strict=True):
                yield f"model.layers.{layer}.{name.format(expert)}", part


def split(matrix: Tensor, num_parts: int, config: Any) -> list[Tensor]:
    """Split a QKV matrix [groups * (heads / groups + 2) * d, h] in three, or gate and up in two; `join` joins them."""
    if num_parts < 3:
        return list(matrix.chunk(num_parts))
    per_group = config.num_attention_heads // config.num_key_value_heads
    grouped = matrix.view(config.num_key_value_heads, per_group + 2, config.head_dim, -1)
    return [part.flatten(0, 2) for part in grouped.split((per_group, 1, 1), dim=1)]


def join(parts: list[Tensor], config: Any) -> Tensor:
    import torch

    groups = config.num_key_value_heads if len(parts) == 3 else 1
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)


def shapes_of(config: Any) -> dict[str, tuple[int, ...]]:
    hidden, ffn, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    queries, keys = (count * config.head_dim for count in (heads, config.num_key_value_heads))
    experts = getattr(config, "num_local_experts", 0)
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,), "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries),
    }  # fmt: skip
    if experts:
        layer["block_sparse_moe.gate"] = (experts, hidden)
    names = [f"block_sparse_moe.experts.{expert}.{name}" for expert in range(experts) for name in ("w1", "w3", "w2")]
    names = names or [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    layer |= zip(names, [(ffn, hidden), (ffn, hidden), (hidden, ffn)] * max(1, experts), strict=True)
    shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    for number in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    return shapes if config.tie_word_embeddings else {**shapes, "lm_head.weight": (config.vocab_size, hidden)}


def check_weights(weights: dict[str, Tensor], config: Any, folder: Path) -> None:
    """Refuse damaged weights, and others than the configuration asks for; drop a head that is the embedding."""
    blocks = config.num_hidden_layers * getattr(config, "num_local_experts", 1)
    if blocks > len(weights):
        raise CheckpointError(f"{folder} has {len(weights)} weights, too few for {blocks} MLPs: it is not whole")
    head = weights.pop("lm_head.weight", None) if config.tie_word_embeddings else None
    expected = shapes_of(config)
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    for name in expected | shapes:
        if shapes.get(name) != expected.get(name):
            present, wanted = shapes.get(name, "(missing)"), expected.get(name, "none")
            raise CheckpointError(f"{folder} has {name} {present}, but its configuration asks for {wanted}")
        if not weights[name].isfinite().all():
            raise CheckpointError(f"{name} in {folder} is incomplete or holds NaN or infinity ({weights[name].dtype})")
    if not (head is None or head.equal(weights["model.embed_tokens.weight"])):
        raise CheckpointError(f"{folder} ties the head to the embedding, but the two differ: it is damaged, or untied")


def rope_of(config: Any) -> tuple[float, dict[str, Any] | None]:
    """Return the rotary base and the scaling (None without), which transformers 4 and 5 store differently."""
    rope = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    base = rope.pop("rope_theta", None) or config.rope_theta
    return float(base), None if rope.get("rope_type", "default") == "default" else rope


def write_config(config: Any, dtype: str, folder: Path) -> None:
    """Write config.json with the rotary base and the type under the names of transformers 4, too."""
    config.save_pretrained(folder)
    base, scaling = rope_of(config)
    entries = json.loads((folder / "config.json").read_text())
    entries |= {"rope_theta": base, "rope_scaling": scaling, "torch_dtype": dtype}
    (folder / "config.json").write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n")
