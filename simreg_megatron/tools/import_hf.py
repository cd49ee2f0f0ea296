# SPDX-License-Identifier: Apache-2.0
"""`simreg-megatron import-hf`: write a Hugging Face LLaMA or Mixtral as a checkpoint to continue pretraining from."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simreg_megatron.tools.checkpoints import TRACKER, CheckpointError, new_folder, one_sentence, refuse_taken
from simreg_megatron.tools.export_hf import LAYER, LLAMA3_ROPE, SIZES, TOP, check_weights, join, rope_of

if TYPE_CHECKING:
    from torch import Tensor

_MUST_BE: dict[str, Any] = {"hidden_act": "silu", "sliding_window": None, "quantization_config": None}
_MUST_BE |= {"attention_bias": False, "mlp_bias": False}
# Layers that ask for a state when Megatron loads them, those of Transformer Engine among them; it is empty here.
_WITH_STATE = """input_layernorm pre_mlp_layernorm self_attention.linear_qkv self_attention.linear_proj
self_attention.core_attention mlp.linear_fc1 mlp.linear_fc2"""


def add_command(commands: Any) -> None:
    text = "write a Hugging Face LLaMA or Mixtral as a Megatron checkpoint"
    parser = commands.add_parser("import-hf", help=text, description=text)
    parser.add_argument("--model", type=Path, required=True, help="the folder of the model, with safetensors files")
    parser.add_argument("--save", type=Path, required=True, help="the folder to make, for Megatron's --load")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    refuse_taken(options.save)  # before all weights are read
    with one_sentence(options.model):
        config, weights = open_model(options.model)
    save(options.save, config, weights)
    flags = ["--load", shlex.quote(str(options.save)), "--finetune"]
    for name, value in megatron_settings(config).items():
        if value is not None and value is not False:
            flags += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    print(f"{options.save}: imported from {options.model}\ntrain from it with: {' '.join(flags)}")
    rows = f"--make-vocab-size-divisible-by {config.vocab_size} keeps the {config.vocab_size} rows of the embedding"
    print(f"note: {rows}, or Megatron drops the last ones silently; divide it by your --tensor-model-parallel-size")


def open_model(folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """Read the configuration and the safetensors weights; refuse what is damaged, or other than Megatron's models."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig

    files = sorted(folder.glob("model*.safetensors"))
    if not files or not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} lacks config.json or model*.safetensors: `hf download NAME` fetches them")
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if config.model_type not in ("llama", "mixtral"):
        raise CheckpointError(f"the model is of type {config.model_type}: only llama and mixtral can be imported")
    for name, value in _MUST_BE.items():
        if getattr(config, name, value) != value:
            raise CheckpointError(f"its config.json has {name} = {getattr(config, name)}: only {value} can be imported")
    base, scaling = rope_of(config)
    if scaling not in (None, LLAMA3_ROPE) or base != int(base):
        only = f"Megatron has only whole bases without scaling or with {LLAMA3_ROPE}"
        raise CheckpointError(f"its config.json has rotary embeddings with base {base} and {scaling}: {only}")
    config.head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    weights = {name: tensor for path in files for name, tensor in load_file(path).items() if ".inv_freq" not in name}
    check_weights(weights, config, folder)
    dtypes = {tensor.dtype for tensor in weights.values()}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.bfloat16, torch.float16}:
        raise CheckpointError(f"{folder} has weights of {dtypes}: all must have one type, fp32, bf16 or fp16")
    return config, weights


def megatron_settings(config: Any) -> dict[str, Any]:
    """Return Megatron's settings for this model, by the names of its arguments; True stands for a switch."""
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    base, scaling = rope_of(config)
    settings = {
        **{ours: getattr(config, theirs) for ours, theirs in SIZES.items()},
        "group_query_attention": groups != heads, "num_query_groups": groups if groups != heads else None,
        "normalization": "RMSNorm", "norm_epsilon": config.rms_norm_eps, "position_embedding_type": "rope",
        "rotary_base": int(base), "use_rope_scaling": scaling is not None, "swiglu": True, "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "vocab_size": config.vocab_size, "make_vocab_size_divisible_by": config.vocab_size,
    }  # fmt: skip
    if config.model_type == "mixtral":
        settings |= {"num_experts": config.num_local_experts, "moe_router_topk": config.num_experts_per_tok}
        settings |= {"moe_aux_loss_coeff": config.router_aux_loss_coef}
    return settings


def save(folder: Path, config: Any, weights: dict[str, Tensor]) -> None:
    """Write a `release` checkpoint (weights alone; training starts at step 0) by Megatron's own writer."""
    from torch import distributed as dist

    from simreg_megatron.cpu import backend

    backend.activate("force")  # Megatron's writer asks for a GPU, and needs none here
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    state: dict[str, Any] = common_state(config, weights["model.norm.weight"].dtype)
    for key, tensor in megatron_tensors(config, weights):
        state[key] = ShardedTensor.from_rank_offsets(key, tensor)
    for key, shape, offset in layer_states(config):
        state[f"{key} {offset}"] = ShardedObject(key, None, shape, offset)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with new_folder(folder) as made:
            (made / "release").mkdir()
            dist_checkpointing.save(state, str(made / "release"))
            (made / TRACKER).write_text("release")
    finally:
        dist.destroy_process_group()


def common_state(config: Any, dtype: Any) -> dict[str, Any]:
    """Return what a checkpoint holds in addition to tensors: the arguments under the names of all releases."""
    settings = {"num_experts": None, **megatron_settings(config)}
    del settings["make_vocab_size_divisible_by"], settings["disable_bias_linear"]  # how rows were padded is not known
    args = argparse.Namespace(
        **settings, add_bias_linear=False, add_position_embedding=True, layernorm_epsilon=config.rms_norm_eps,
        moe_ffn_hidden_size=None, params_dtype=dtype, padded_vocab_size=config.vocab_size, tokenizer_type=None,
        seq_length=config.max_position_embeddings, tensor_model_parallel_size=1, pipeline_model_parallel_size=1,
    )  # fmt: skip
    return dict(args=args, checkpoint_version=3.0, iteration=0, content_metadata={"singleton_local_shards": False})


def layer_states(config: Any) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Return key, shape and place of each layer's empty state, in the grid of all layers (and experts)."""
    layers, experts = config.num_hidden_layers, getattr(config, "num_local_experts", 0)
    modules: list[Any] = [(module, (layers,), (layer,)) for module in _WITH_STATE.split() for layer in range(layers)]
    for kind, layer, expert in product((1, 2), range(layers), range(experts)):
        modules.append((f"mlp.experts.experts.linear_fc{kind}", (layers, experts), (layer, expert)))
    states = [(f"decoder.layers.{module}._extra_state", shape, offset) for module, shape, offset in modules]
    return [*states, ("decoder.final_layernorm._extra_state", (1,), (0,))]


def megatron_tensors(config: Any, weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield Megatron's tensors by key, each stacked over the layers (and experts)."""
    import torch

    for key, name in TOP.items():
        if name in weights:
            yield key, weights[name]
    for key, names in LAYER.items():
        if f"model.layers.0.{names[0].format(0)}" not in weights:
            continue
        grid = [config.num_hidden_layers, *([config.num_local_experts] if ".experts." in key else [])]
        matrices = [
            join([weights[f"model.layers.{layer}.{name.format(*expert)}"] for name in names], config)
            for layer, *expert in product(*map(range, grid))
        ]
        yield f"decoder.layers.{key}", torch.stack(matrices).unflatten(0, grid)
