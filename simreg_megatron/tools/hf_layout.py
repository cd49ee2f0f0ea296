# SPDX-License-Identifier: Apache-2.0
"""How Megatron and transformers name and arrange the weights of a LLaMA or Mixtral.

Megatron stacks the weights of all layers (and experts) under one key. Its QKV matrix holds, for each group of heads,
the group's queries, its key and its value; its first MLP matrix holds gate, then up. Everything else has another name
and the same numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simreg_megatron.tools.checkpoints import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

LLAMA3_ROPE = {  # the only scaling of rotary embeddings that Megatron has; it fixes these numbers
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
SIZES = {  # Megatron's argument: the setting of transformers
    "num_layers": "num_hidden_layers", "hidden_size": "hidden_size", "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads", "kv_channels": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
}  # fmt: skip
TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
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


def convert(key: str, tensor: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    """Split one of Megatron's tensors into those of transformers, which are views of it."""
    if key in TOP:
        if not (key == "output_layer.weight" and config.tie_word_embeddings):  # a pipeline's copy of the embedding
            yield TOP[key], tensor if tensor.dim() == 1 else tensor[: config.vocab_size]
        return
    found = re.fullmatch(r"decoder\.layers\.(?:(\d+)\.)?(.+)", key)
    names = LAYER.get(found[2]) if found else None
    if found is None or names is None:
        raise CheckpointError(f"{key} is no weight of a LLaMA or Mixtral: a model that has it cannot be exported")
    for layer, weight in enumerate(tensor) if found[1] is None else [(int(found[1]), tensor)]:
        for expert, matrix in enumerate(weight) if ".experts." in key else [(0, weight)]:
            parts = split(matrix, len(names), config)
            for name, part in zip(names, parts, strict=True):
                yield f"model.layers.{layer}.{name.format(expert)}", part


def split(matrix: Tensor, num_parts: int, config: Any) -> list[Tensor]:
    """Split a QKV matrix [groups * (heads / groups + 2) * d, h] in three, or gate and up in two."""
    if num_parts < 3:
        return list(matrix.chunk(num_parts))
    per_group = config.num_attention_heads // config.num_key_value_heads
    grouped = matrix.view(config.num_key_value_heads, per_group + 2, config.head_dim, -1)
    return [part.flatten(0, 2) for part in grouped.split((per_group, 1, 1), dim=1)]


def join(parts: list[Tensor], config: Any) -> Tensor:
    """Join what `split` splits."""
    import torch

    if len(parts) < 3:
        return torch.cat(parts)
    grouped = [part.view(config.num_key_value_heads, -1, config.head_dim, part.shape[-1]) for part in parts]
    return torch.cat(grouped, dim=1).flatten(0, 2)


def shapes_of(config: Any) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of all weights of a model."""
    hidden, ffn, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    queries, keys = (count * config.head_dim for count in (heads, config.num_key_value_heads))
    experts = getattr(config, "num_local_experts", 0)
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,), "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries),
    }  # fmt: skip
    if experts:
        layer["block_sparse_moe.gate"] = (experts, hidden)
    for expert in range(experts or 1):
        names = [f"block_sparse_moe.experts.{expert}.{name}" for name in ("w1", "w3", "w2")]
        names = names if experts else [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
        layer |= zip(names, ((ffn, hidden), (ffn, hidden), (hidden, ffn)), strict=True)
    shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    for number in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    return shapes if config.tie_word_embeddings else {**shapes, "lm_head.weight": (config.vocab_size, hidden)}


def check_shapes(weights: dict[str, Tensor], config: Any, folder: Path) -> None:
    """Refuse a model in `folder` whose weights are not exactly those of its configuration."""
    expected = shapes_of(config)
    found = {name: tuple(weight.shape) for name, weight in weights.items()}
    for name in [*expected, *found]:
        if found.get(name) != expected.get(name):
            raise CheckpointError(
                f"{folder} has {name} {found.get(name, '(missing)')}, but its configuration asks for "
                f"{expected.get(name, 'none')}: it is incomplete, or of another model"
            )


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
