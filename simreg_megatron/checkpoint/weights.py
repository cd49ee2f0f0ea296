# SPDX-License-Identifier: Apache-2.0
"""One name and one shape for every weight, whatever wrote it.

The names are those of Megatron's own GPTModel of local layers on one rank, layers counted over all pipeline stages:

    embedding.word_embeddings.weight                        [vocabulary, h]
    decoder.layers.L.input_layernorm.weight                 [h]
    decoder.layers.L.self_attention.linear_qkv.weight       [groups * (heads/groups + 2) * d, h]: by group q.. k v
    decoder.layers.L.self_attention.linear_proj.weight      [h, heads * d]
    decoder.layers.L.pre_mlp_layernorm.weight               [h]
    decoder.layers.L.mlp.linear_fc1.weight                  [2 * f, h]: gate, then up
    decoder.layers.L.mlp.linear_fc2.weight                  [h, f]
    decoder.layers.L.mlp.router.weight                      [experts, h]
    decoder.layers.L.mlp.experts.local_experts.E.linear_fc1.weight, ...fc2.weight: as of a dense layer
    decoder.final_layernorm.weight                          [h]
    output_layer.weight                                     [vocabulary, h], where it is not the embedding

h: hidden size, d: channels of a head, f: width of the feed-forward layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
FINAL_NORM = "decoder.final_layernorm.weight"
INPUT_NORM, MLP_NORM = "input_layernorm.weight", "pre_mlp_layernorm.weight"
QKV, PROJ = "self_attention.linear_qkv.weight", "self_attention.linear_proj.weight"
FC1, FC2, ROUTER = "mlp.linear_fc1.weight", "mlp.linear_fc2.weight", "mlp.router.weight"

# Transformer Engine fuses a norm into the linear layer behind it, and `torch_dist` uses its names for local layers too.
_ALIASES = {
    "self_attention.linear_qkv.layer_norm_weight": INPUT_NORM,
    "mlp.linear_fc1.layer_norm_weight": MLP_NORM,
    **{name: name for name in (INPUT_NORM, MLP_NORM, QKV, PROJ, FC1, FC2, ROUTER)},
}
_TOP = (EMBEDDING, HEAD, FINAL_NORM)
_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts|experts)\.(\d+)\.linear_fc([12])\.weight")
_GROUPED = re.compile(r"mlp\.experts\.linear_fc([12])\.weight(\d+)")
_STACKED = re.compile(r"mlp\.experts\.experts\.linear_fc([12])\.weight")
_HALVES = ("_w", "_v")  # gate and up as two tensors


@dataclass(frozen=True)
class Weight:
    """A weight that is read when it is asked for."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class Name:
    """A name in a checkpoint, taken apart.

    Attributes:
        layer: None where layers are stacked, or outside of them.
        rest: the canonical name, without the layer and with `E` for the expert.
        expert: None where experts are stacked, or without them.
        is_layered: inside the decoder's layers.
        has_experts: one expert of a layer, or all of them stacked.
        half: "_w" or "_v", for half of a gated layer.
    """

    layer: int | None
    rest: str
    expert: int | None = None
    is_layered: bool = False
    has_experts: bool = False
    half: str = ""


def parse(name: str) -> Name | None:
    """Take a name of any layout apart; None for one that is no weight of a LLaMA or Mixtral."""
    half = name[-2:] if name.endswith(_HALVES) else ""
    name = name[: len(name) - len(half)]
    if name in _TOP:
        return None if half else Name(None, name)
    in_layer = _LAYER.fullmatch(name)
    if in_layer is None:
        return None
    layer = None if in_layer[1] is None else int(in_layer[1])
    rest = in_layer[2]
    if rest in _ALIASES:
        return Name(layer, _ALIASES[rest], is_layered=True, half=half)
    for pattern, kind, expert in ((_EXPERT, 2, 1), (_GROUPED, 1, 2), (_STACKED, 1, 0)):
        if found := pattern.fullmatch(rest):
            number = int(found[expert]) if expert else None
            return Name(layer, expert_name("E", int(found[kind])), number, is_layered=True, has_experts=True, half=half)
    return None


def expert_name(expert: int | str, layer_of_mlp: int) -> str:
    return f"mlp.experts.local_experts.{expert}.linear_fc{layer_of_mlp}.weight"


def canonical(rest: str, layer: int | None = None, expert: int | None = None) -> str:
    named = rest if expert is None else rest.replace(".E.", f".{expert}.")
    return named if layer is None else f"decoder.layers.{layer}.{named}"


def is_gated(rest: str) -> bool:
    """Whether it is a first layer of an MLP: gate and up in one."""
    return rest.endswith("linear_fc1.weight")


def is_dropped(name: str) -> bool:
    """What a checkpoint holds beside the model: states of fused layers, of random numbers, of the run."""
    return name.partition("/")[0].endswith("_extra_state") or name.startswith(
        ("rng_state", "rerun_state_machine_state", "common_state", "dataloader_state")
    )


def joined_halves(parts: Iterable[tuple[str, str, Weight]]) -> dict[str, Weight]:
    """Weights by canonical name, from (canonical name, half, weight); two halves become one."""
    whole: dict[str, Weight] = {}
    halves: dict[str, dict[str, Weight]] = {}
    for name, half, weight in parts:
        if half:
            halves.setdefault(name, {})[half] = weight
        else:
            whole[name] = weight
    for name, found in halves.items():
        if set(found) == set(_HALVES):
            gate, up = (found[half] for half in _HALVES)
            shape = (gate.shape[0] + up.shape[0], *gate.shape[1:])
            whole[name] = Weight(shape, gate.dtype, partial(_read_both, gate, up))
    return whole


def _read_both(gate: Weight, up: Weight) -> Tensor:
    return torch.cat([gate.read(), up.read()])
