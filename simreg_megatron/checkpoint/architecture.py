# SPDX-License-Identifier: Apache-2.0
"""What a LLaMA or Mixtral is made of, read from Megatron's arguments; what neither can express is refused by name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from simreg_megatron.checkpoint import weights
from simreg_megatron.checkpoint.errors import CheckpointError
from simreg_megatron.checkpoint.weights import Weight
from simreg_megatron.sentences import brief

LLAMA, MIXTRAL = "llama", "mixtral"
LLAMA3_SCALING: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# Argument -> the values under which the model is still a plain LLaMA or Mixtral; None stands for "not given".
_MUST_BE: dict[str, tuple[Any, ...]] = {
    "normalization": ("RMSNorm",),
    "apply_layernorm_1p": (None, False),
    "layernorm_zero_centered_gamma": (None, False),
    "swiglu": (True,),
    "quick_geglu": (None, False),
    "glu_linear_offset": (None, 0.0),
    "activation_func_clamp_value": (None,),
    "add_bias_linear": (False,),
    "add_qkv_bias": (None, False),
    "position_embedding_type": ("rope",),
    "rotary_percent": (None, 1.0),
    "rotary_interleaved": (None, False),
    "rotary_seq_len_interpolation_factor": (None,),  # not every release hands it to the model
    "no_rope_freq": (None,),
    "qk_layernorm": (None, False),
    "qk_l2_norm": (None, False),
    "softmax_scale": (None,),
    "softmax_type": (None, "vanilla"),
    "attention_output_gate": (None, False),
    "window_size": (None,),
    "multi_latent_attention": (None, False),
    "experimental_attention_variant": (None,),
    "apply_residual_connection_post_layernorm": (None, False),
    "use_mup": (None, False),
    "mtp_num_layers": (None, 0),
    "is_hybrid_model": (None, False),
    "hybrid_override_pattern": (None,),
    "hybrid_layer_pattern": (None,),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None, ""),
    "spec": (None,),
}
_MUST_BE_WITH_EXPERTS: dict[str, tuple[Any, ...]] = {
    "moe_router_pre_softmax": (None, False),
    "moe_router_score_function": (None, "softmax"),
    "moe_router_topk_scaling_factor": (None, 1.0),
    "moe_router_num_groups": (None,),
    "moe_router_group_topk": (None,),
    "moe_router_topk_limited_devices": (None,),
    "moe_router_enable_expert_bias": (None, False),
    "moe_shared_expert_intermediate_size": (None, 0),
    "moe_latent_size": (None,),
    "moe_apply_probs_on_input": (None, False),
    "moe_mlp_glu_interleave_size": (None,),
    "moe_expert_capacity_factor": (None,),
    "moe_expert_rank_capacity_factor": (None,),
}
_BALANCED_BY = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")  # each leaves the choice of experts as it is
LARGEST = 1 << 40  # of any size, so that no product of two overflows what torch counts with


@dataclass(frozen=True)
class Architecture:
    """The numbers that both Megatron and transformers need.

    Attributes:
        vocabulary: tokens, without the rows that Megatron adds to share them out evenly.
        rope_scaling: in transformers' terms, without the base; None for plain rotary embeddings.
        num_experts: 0 for a dense model.
        dtype: "float32", "bfloat16" or "float16", as trained.
    """

    num_layers: int
    hidden: int
    num_heads: int
    num_groups: int
    head_size: int
    ffn: int
    vocabulary: int
    is_tied: bool
    norm_epsilon: float
    max_positions: int
    rope_base: float
    rope_scaling: dict[str, Any] | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    balance_coefficient: float = 0.0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        sizes = (
            self.num_layers,
            self.hidden,
            self.num_heads,
            self.num_groups,
            self.head_size,
            self.ffn,
            self.vocabulary,
        )
        if not all(0 < size < LARGEST for size in sizes) or self.num_heads % self.num_groups:
            raise CheckpointError(
                f"the model's sizes (layers, hidden, heads, groups, head channels, FFN, vocabulary) are {sizes}: all "
                "must be numbers above 0, and the groups must divide the heads"
            )
        if not all(map(math.isfinite, (self.norm_epsilon, self.rope_base, self.balance_coefficient))):
            raise CheckpointError("the model's norm epsilon, rotary base or load-balancing coefficient is not finite")

    @property
    def family(self) -> str:
        return MIXTRAL if self.num_experts else LLAMA

    def shapes(self, num_rows: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every weight by canonical name, in the order of the model; `num_rows` of vocabulary, padded or not."""
        queries, keys = self.num_heads * self.head_size, self.num_groups * self.head_size
        yield weights.EMBEDDING, (num_rows, self.hidden)
        for layer in range(self.num_layers):
            always = (
                (weights.INPUT_NORM, (self.hidden,)),
                (weights.QKV, (queries + 2 * keys, self.hidden)),
                (weights.PROJ, (self.hidden, queries)),
                (weights.MLP_NORM, (self.hidden,)),
            )
            for rest, shape in chain(always, self._mlp_shapes()):
                yield weights.canonical(rest, layer), shape
        yield weights.FINAL_NORM, (self.hidden,)
        if not self.is_tied:
            yield weights.HEAD, (num_rows, self.hidden)

    def _mlp_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        first, second = (2 * self.ffn, self.hidden), (self.hidden, self.ffn)
        if not self.num_experts:
            yield from ((weights.FC1, first), (weights.FC2, second))
            return
        yield weights.ROUTER, (self.num_experts, self.hidden)
        for expert in range(self.num_experts):
            yield weights.expert_name(expert, 1), first
            yield weights.expert_name(expert, 2), second


def from_args(args: Mapping[str, Any], *, vocabulary: int) -> Architecture:
    """Read Megatron's arguments of any release from 0.12 on.

    Raises:
        CheckpointError: a setting is missing, or is one that LLaMA and Mixtral do not have.
    """
    num_experts = _number(args, "num_experts", default=0)
    _refuse_others(args, num_experts)
    heads, hidden = _number(args, "num_attention_heads"), _number(args, "hidden_size")
    ffn = _number(args, "ffn_hidden_size")
    return Architecture(
        num_layers=_number(args, "num_layers"),
        hidden=hidden,
        num_heads=heads,
        num_groups=_number(args, "num_query_groups") if args.get("group_query_attention") else heads,
        head_size=_number(args, "kv_channels", default=hidden // max(1, heads)),
        ffn=_number(args, "moe_ffn_hidden_size", default=ffn) if num_experts else ffn,
        vocabulary=vocabulary,
        is_tied=not args.get("untie_embeddings_and_output_weights"),
        norm_epsilon=_epsilon(args),
        max_positions=_number(args, "max_position_embeddings"),
        rope_base=_rope_base(args),
        rope_scaling=_rope_scaling(args),
        num_experts=num_experts,
        experts_per_token=_number(args, "moe_router_topk") if num_experts else 0,
        balance_coefficient=_balance(args) if num_experts else 0.0,
        dtype=brief(args.get("params_dtype", "float32")).strip("'").removeprefix("torch."),
    )


def _refuse_others(args: Mapping[str, Any], num_experts: int) -> None:
    table = {**_MUST_BE, **(_MUST_BE_WITH_EXPERTS if num_experts else {})}
    family = "Mixtral" if num_experts else "LLaMA"
    for name, allowed in table.items():
        value = args.get(name)
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed):
            raise CheckpointError(
                f"the model was trained with {name} = {_shown(value)}, which transformers' {family} does not support: "
                f"only {' or '.join(_shown(one) for one in allowed)} can be converted"
            )
    balanced = args.get("moe_router_load_balancing_type") or "none"
    kinds = balanced if isinstance(balanced, list) else [balanced]
    if num_experts and not all(isinstance(kind, str) and kind in _BALANCED_BY for kind in kinds):
        raise CheckpointError(
            f"the model was trained with moe_router_load_balancing_type = {brief(balanced)}, which chooses experts as "
            f"transformers' Mixtral does not: only {', '.join(_BALANCED_BY)} can be converted"
        )
    frequency = args.get("moe_layer_freq", 1)
    pattern = frequency if isinstance(frequency, list) else [1]
    if num_experts and (not all(pattern) or (not isinstance(frequency, list) and frequency != 1)):
        raise CheckpointError(
            f"the model has moe_layer_freq = {brief(frequency)}, but transformers' Mixtral needs experts in every layer"
        )


def _shown(value: Any) -> str:
    return "nothing given" if value is None else brief(value)


def _number(args: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = args.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < LARGEST:
        raise CheckpointError(f"the checkpoint's arguments have {name} = {brief(value)}, where a number is needed")
    return value


def _epsilon(args: Mapping[str, Any]) -> float:
    """`layernorm_epsilon` since 0.17, `norm_epsilon` before; never a default: a wrong one would go unnoticed."""
    value = args.get("layernorm_epsilon", args.get("norm_epsilon"))
    if not isinstance(value, float):
        raise CheckpointError("the checkpoint's arguments have no norm epsilon (layernorm_epsilon or norm_epsilon)")
    return value


def _rope_base(args: Mapping[str, Any]) -> float:
    value = args.get("rotary_base") or 10000
    if not isinstance(value, int | float) or not 0 < value < LARGEST:
        raise CheckpointError(f"its arguments give rotary_base as {brief(value)}, where a number is needed")
    return float(value)


def _rope_scaling(args: Mapping[str, Any]) -> dict[str, Any] | None:
    """LLaMA 3's scaling, of which Megatron fixes every number: --rope-scaling-factor never reaches its model."""
    if not args.get("use_rope_scaling"):
        return None
    factor = args.get("rope_scaling_factor")
    if factor not in (None, LLAMA3_SCALING["factor"]):
        raise CheckpointError(
            f"the checkpoint's arguments have rope_scaling_factor = {brief(factor)}, but Megatron's own scripts always "
            "build the model with 8: which of the two it was trained with is unknown, so it cannot be converted"
        )
    return dict(LLAMA3_SCALING)


def _balance(args: Mapping[str, Any]) -> float:
    value = args.get("moe_aux_loss_coeff") or 0.0
    return float(value) if isinstance(value, int | float) and abs(value) < LARGEST else 0.0


def check_weights(architecture: Architecture, found: Mapping[str, Weight]) -> int:
    """See that the checkpoint holds exactly the weights of this architecture.

    Returns:
        The rows of its embedding, padding included.

    Raises:
        CheckpointError: one is missing, too many, of another shape, or of a type that is not one of floats.
    """
    if weights.EMBEDDING not in found:
        raise CheckpointError(f"the checkpoint has no {weights.EMBEDDING}: it is not a complete Megatron model")
    num_rows = (*found[weights.EMBEDDING].shape, 0)[0]
    if num_rows < architecture.vocabulary:
        raise CheckpointError(f"its embedding has {num_rows} rows, fewer than the {architecture.vocabulary} tokens")
    expected = set()
    for name, shape in architecture.shapes(num_rows):  # one by one: a damaged number of layers may have no end
        expected.add(name)
        if name not in found:
            raise CheckpointError(f"the checkpoint has no {name}: it was not saved completely, or is of another model")
        if found[name].shape != shape:
            raise CheckpointError(f"{name} has the shape {found[name].shape}, and its arguments say {shape}")
        if not found[name].dtype.is_floating_point or found[name].dtype.itemsize < 2:
            raise CheckpointError(f"{name} is stored as {found[name].dtype}: only fp32, bf16 and fp16 are converted")
    # Stages of a pipeline keep a copy of a tied embedding as the head.
    extra = [name for name in found if name not in expected and not (architecture.is_tied and name == weights.HEAD)]
    if extra:
        raise CheckpointError(f"the checkpoint has {extra[0]}, which a model of its arguments does not have")
    return num_rows
