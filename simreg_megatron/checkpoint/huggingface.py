# SPDX-License-Identifier: Apache-2.0
"""The same model in transformers' terms: its configuration, and which of its tensors is which part of Megatron's.

Megatron keeps queries, keys and values of one group together, q_1 .. q_r k v of the first group, then the next group
(r = heads / groups); transformers has three matrices. Megatron's first layer of an MLP is gate and up, one above the
other; transformers has two. Everything else has another name and the same numbers. Both rotate halves, so that no
channel moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from simreg_megatron.checkpoint import weights
from simreg_megatron.checkpoint.architecture import LLAMA, LLAMA3_SCALING, MIXTRAL, Architecture
from simreg_megatron.checkpoint.errors import CheckpointError

_CLASSES = {LLAMA: "LlamaForCausalLM", MIXTRAL: "MixtralForCausalLM"}
_ATTENTION_NAMES = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")


@dataclass(frozen=True)
class Target:
    """A tensor of transformers' and how it comes out of one of Megatron's.

    Attributes:
        name: transformers' name.
        shape: its shape.
        source: the canonical name of Megatron's weight.
        cut: takes it out of that weight.
    """

    name: str
    shape: tuple[int, ...]
    source: str
    cut: Callable[[Tensor], Tensor]


def targets(architecture: Architecture) -> Iterator[Target]:
    """All tensors of transformers' model, in its order; those cut from one weight follow one another."""
    a = architecture
    rows = (a.vocabulary, a.hidden)

    def without_padding(weight: Tensor) -> Tensor:
        return weight[: a.vocabulary]

    yield Target("model.embed_tokens.weight", rows, weights.EMBEDDING, without_padding)
    for layer in range(a.num_layers):
        for target in _layer_targets(a):
            source = weights.canonical(target.source, layer)
            yield Target(f"model.layers.{layer}.{target.name}", target.shape, source, target.cut)
    yield Target("model.norm.weight", (a.hidden,), weights.FINAL_NORM, _same)
    if not a.is_tied:
        yield Target("lm_head.weight", rows, weights.HEAD, without_padding)


def _same(weight: Tensor) -> Tensor:
    return weight


def _layer_targets(a: Architecture) -> Iterator[Target]:
    queries, keys = a.num_heads * a.head_size, a.num_groups * a.head_size
    yield Target("input_layernorm.weight", (a.hidden,), weights.INPUT_NORM, _same)
    for part, (name, rows) in enumerate(zip(_ATTENTION_NAMES, (queries, keys, keys), strict=True)):
        yield Target(name, (rows, a.hidden), weights.QKV, partial(_part_of_qkv, a, part))
    yield Target("self_attn.o_proj.weight", (a.hidden, queries), weights.PROJ, _same)
    yield Target("post_attention_layernorm.weight", (a.hidden,), weights.MLP_NORM, _same)
    if not a.num_experts:
        yield from _mlp_targets(a, "mlp.{}_proj.weight", ("gate", "up", "down"), weights.FC1, weights.FC2)
        return
    yield Target("block_sparse_moe.gate.weight", (a.num_experts, a.hidden), weights.ROUTER, _same)
    for expert in range(a.num_experts):
        name = f"block_sparse_moe.experts.{expert}.{{}}.weight"
        first, second = (weights.expert_name(expert, number) for number in (1, 2))
        yield from _mlp_targets(a, name, ("w1", "w3", "w2"), first, second)


def _mlp_targets(a: Architecture, name: str, parts: tuple[str, str, str], first: str, second: str) -> Iterator[Target]:
    gate, up, down = (name.format(part) for part in parts)
    yield Target(gate, (a.ffn, a.hidden), first, lambda weight: weight.chunk(2)[0])
    yield Target(up, (a.ffn, a.hidden), first, lambda weight: weight.chunk(2)[1])
    yield Target(down, (a.hidden, a.ffn), second, _same)


def _part_of_qkv(a: Architecture, part: int, weight: Tensor) -> Tensor:
    return split_qkv(weight, a)[part]


def split_qkv(weight: Tensor, a: Architecture) -> tuple[Tensor, Tensor, Tensor]:
    """[groups * (r + 2) * d, h], by group -> queries [heads * d, h], keys and values [groups * d, h]."""
    per_group = a.num_heads // a.num_groups
    grouped = weight.view(a.num_groups, per_group + 2, a.head_size, a.hidden)
    queries, keys, values = grouped.split((per_group, 1, 1), dim=1)
    return (
        queries.reshape(-1, a.hidden),
        keys.reshape(-1, a.hidden),
        values.reshape(-1, a.hidden),
    )


def join_qkv(queries: Tensor, keys: Tensor, values: Tensor, a: Architecture) -> Tensor:
    """The way back of `split_qkv`."""
    apart = [part.view(a.num_groups, -1, a.head_size, a.hidden) for part in (queries, keys, values)]
    return torch.cat(apart, dim=1).reshape(-1, a.hidden)


def joined(source: str, parts: list[Tensor], a: Architecture) -> Tensor:
    """Megatron's weight from transformers' tensors, in the order in which `targets` cuts them."""
    if source.endswith(weights.QKV):
        return join_qkv(parts[0], parts[1], parts[2], a)
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def config_of(architecture: Architecture, *, bos: int | None, eos: int | None) -> Any:
    """transformers' own configuration, complete for releases 4 and 5 of it."""
    import transformers

    a = architecture
    common: dict[str, Any] = {
        "architectures": [_CLASSES[a.family]],
        "vocab_size": a.vocabulary,
        "hidden_size": a.hidden,
        "intermediate_size": a.ffn,
        "num_hidden_layers": a.num_layers,
        "num_attention_heads": a.num_heads,
        "num_key_value_heads": a.num_groups,
        "head_dim": a.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": a.max_positions,
        "rms_norm_eps": a.norm_epsilon,
        "rope_theta": a.rope_base,
        "tie_word_embeddings": a.is_tied,
        "attention_dropout": 0.0,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": None,
    }
    if a.rope_scaling is not None:
        common["rope_scaling"] = dict(a.rope_scaling)
    if a.family == LLAMA:
        return transformers.LlamaConfig(**common, attention_bias=False, mlp_bias=False)
    return transformers.MixtralConfig(
        **common,
        num_local_experts=a.num_experts,
        num_experts_per_tok=a.experts_per_token,
        router_aux_loss_coef=a.balance_coefficient,
        sliding_window=None,
    )


def config_entries(architecture: Architecture, config: Any, dtype: str) -> dict[str, Any]:
    """What config.json says: transformers' own entries, with the rotary base under the names of both its releases.

    Release 5 writes `rope_parameters`, which release 4, and servers built on it, would pass over in silence and take
    10000 for the base.
    """
    entries = dict(config.to_diff_dict())
    entries["rope_theta"] = architecture.rope_base
    entries["rope_scaling"] = architecture.rope_scaling
    entries.pop("dtype", None)
    entries["torch_dtype"] = dtype
    return entries


def architecture_of(entries: Mapping[str, Any], *, dtype: str) -> Architecture:
    """Read a config.json, of release 4 or 5 of transformers.

    Raises:
        CheckpointError: it is of another model, or has what Megatron's LLaMA and Mixtral do not.
    """
    family = entries.get("model_type")
    if not isinstance(family, str) or family not in _CLASSES:
        raise CheckpointError(f"the model is of type {family!r}: only llama and mixtral can be imported")
    _refuse_unknown(entries)
    heads, hidden = _whole(entries, "num_attention_heads"), _whole(entries, "hidden_size")
    base, scaling = _rope(entries)
    has_experts = family == MIXTRAL
    return Architecture(
        num_layers=_whole(entries, "num_hidden_layers"),
        hidden=hidden,
        num_heads=heads,
        num_groups=_whole(entries, "num_key_value_heads", default=heads),
        head_size=_whole(entries, "head_dim", default=max(1, hidden // heads)),
        ffn=_whole(entries, "intermediate_size"),
        vocabulary=_whole(entries, "vocab_size"),
        is_tied=bool(entries.get("tie_word_embeddings", False)),
        norm_epsilon=_real(entries, "rms_norm_eps", 1e-6 if family == LLAMA else 1e-5),
        max_positions=_whole(entries, "max_position_embeddings", default=2048 if family == LLAMA else 131072),
        rope_base=base if base is not None else (10000.0 if family == LLAMA else 1e6),
        rope_scaling=scaling,
        num_experts=_whole(entries, "num_local_experts", default=8) if has_experts else 0,
        experts_per_token=_whole(entries, "num_experts_per_tok", default=2) if has_experts else 0,
        balance_coefficient=_real(entries, "router_aux_loss_coef", 0.001) if has_experts else 0.0,
        dtype=dtype,
    )


def _refuse_unknown(entries: Mapping[str, Any]) -> None:
    for name, allowed in {
        "hidden_act": (None, "silu"),
        "attention_bias": (None, False),
        "mlp_bias": (None, False),
        "sliding_window": (None,),
        "quantization_config": (None,),
    }.items():
        if entries.get(name) not in allowed:
            raise CheckpointError(f"its config.json has {name} = {entries[name]!r}, which cannot be imported")


def _rope(entries: Mapping[str, Any]) -> tuple[float | None, dict[str, Any] | None]:
    given = entries.get("rope_parameters") or entries.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise CheckpointError(f"its config.json gives the rotary embeddings as {given!r}, where a table is needed")
    rope = dict(given)
    rope.setdefault("rope_theta", entries.get("rope_theta"))
    base = None if rope["rope_theta"] is None else _real(rope, "rope_theta", 0.0)
    rope.pop("rope_theta")
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    if kind == "default":
        return base, None
    if {"rope_type": kind, **rope} == LLAMA3_SCALING:
        return base, dict(LLAMA3_SCALING)
    raise CheckpointError(f"its config.json scales rotary embeddings by {kind} {rope}, which Megatron does not do")


def _real(entries: Mapping[str, Any], name: str, default: float) -> float:
    value = entries.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e30:
        raise CheckpointError(f"its config.json gives {name} as {value!r}, where a number is needed")
    return float(value)


def _whole(entries: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = entries.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise CheckpointError(f"its config.json gives {name} as {value!r}, where a number is needed")
    return value
