# SPDX-License-Identifier: Apache-2.0
"""Write weights as a `torch_dist` checkpoint that Megatron loads in any layout, one weight in memory at a time.

Layers and experts are stacked under one key each, as Megatron's own loop writes them; the norms of an MLP of experts
are there under both names that Megatron gives them, for local layers and for Transformer Engine's.
"""

from __future__ import annotations

import argparse
import io
import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from simreg_megatron.checkpoint import weights
from simreg_megatron.checkpoint.architecture import Architecture
from simreg_megatron.checkpoint.weights import Weight

_DATA = "__0_0.distcp"
_FUSED_INPUT_NORM = "self_attention.linear_qkv.layer_norm_weight"
_FUSED_MLP_NORM = "mlp.linear_fc1.layer_norm_weight"
# Layers, local or of Transformer Engine, that ask for a state of theirs when they are loaded; it is empty here.
_WITH_STATE = (
    "input_layernorm",
    "pre_mlp_layernorm",
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "self_attention.core_attention",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
_EXPERTS_WITH_STATE = ("mlp.experts.experts.linear_fc1", "mlp.experts.experts.linear_fc2")


class DistWriter:
    """Appends tensors and objects to one file and keeps the account of them."""

    def __init__(self, folder: Path, stream: BinaryIO) -> None:
        self._folder, self._stream = folder, stream
        self._entries: dict[str, Any] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}

    def add_part(self, key: str, shape: tuple[int, ...], index: tuple[int, ...], tensor: Tensor) -> None:
        """Write `tensor` as `whole[index]` of the tensor `key` of `shape`."""
        tensor = tensor.contiguous()[(None,) * len(index)]
        offsets = torch.Size((*index, *(0,) * (len(shape) - len(index))))
        if key not in self._entries:
            properties = TensorProperties(dtype=tensor.dtype)
            self._entries[key] = TensorStorageMetadata(properties, torch.Size(shape), [])
        self._entries[key].chunks.append(ChunkStorageMetadata(offsets, tensor.shape))
        self._append(MetadataIndex(key, offsets), tensor)

    def add_empty_state(self, key: str) -> None:
        self._entries[key] = BytesStorageMetadata()
        self._append(MetadataIndex(key), [None])

    def _append(self, index: MetadataIndex, content: Any) -> None:
        archive = io.BytesIO()
        torch.save(content, archive)
        self._places[index] = _StorageInfo(_DATA, self._stream.tell(), archive.tell())
        self._stream.write(archive.getbuffer())

    def finish(self, common: Mapping[str, Any]) -> None:
        torch.save(dict(common), self._folder / "common.pt")
        metadata = Metadata(state_dict_metadata=self._entries, storage_data=self._places)
        (self._folder / ".metadata").write_bytes(pickle.dumps(metadata))
        config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        config |= {"common_backend": "torch", "common_backend_version": 1}  # asked for by releases before 0.19
        (self._folder / "metadata.json").write_text(json.dumps(config))


def write(
    folder: Path,
    architecture: Architecture,
    found: Mapping[str, Weight],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write all weights, and the arguments that go with them, to an existing folder."""
    total = sum(1 for _ in architecture.shapes(architecture.vocabulary))
    with (folder / _DATA).open("wb") as stream:
        writer = DistWriter(folder, stream)
        for done, (name, _) in enumerate(architecture.shapes(architecture.vocabulary), start=1):
            tensor = found[name].read()
            for key, stacked, index in _places(name, architecture):
                writer.add_part(key, (*stacked, *tensor.shape), index, tensor)
            progress(done, total)
        for key in _states(architecture):
            writer.add_empty_state(key)
    writer.finish(
        {
            "args": argparse.Namespace(**arguments(architecture)),
            "checkpoint_version": 3.0,
            "iteration": 0,
            "content_metadata": {"singleton_local_shards": False},
        }
    )


def _places(name: str, architecture: Architecture) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """(key, sizes of the stacked dimensions, place in them) of a weight; a norm may have two keys."""
    parsed = weights.parse(name)
    assert parsed is not None, name
    if parsed.layer is None:
        yield name, (), ()
        return
    layers = architecture.num_layers
    if parsed.expert is not None:
        number = 1 if weights.is_gated(parsed.rest) else 2
        key = f"decoder.layers.mlp.experts.experts.linear_fc{number}.weight"
        yield key, (layers, architecture.num_experts), (parsed.layer, parsed.expert)
        return
    fused = {weights.INPUT_NORM: _FUSED_INPUT_NORM, weights.MLP_NORM: _FUSED_MLP_NORM}
    keys = [fused.get(parsed.rest, parsed.rest)]
    if parsed.rest == weights.MLP_NORM and architecture.num_experts:
        keys.append(parsed.rest)  # Transformer Engine cannot fuse it where a router stands between
    for key in keys:
        yield f"decoder.layers.{key}", (layers,), (parsed.layer,)


def _states(architecture: Architecture) -> Iterator[str]:
    layers, experts = architecture.num_layers, architecture.num_experts
    for layer in range(layers):
        for module in _WITH_STATE:
            yield f"decoder.layers.{module}._extra_state/shard_{layer}_{layers}"
        for module in _EXPERTS_WITH_STATE:
            for expert in range(experts):
                yield f"decoder.layers.{module}._extra_state/shard_{layer}.{expert}_{layers}.{experts}"
    yield "decoder.final_layernorm._extra_state/shard_0_1"


def arguments(architecture: Architecture) -> dict[str, Any]:
    """Megatron's arguments for this model, under the names of all releases."""
    a = architecture
    found: dict[str, Any] = {
        "num_layers": a.num_layers,
        "hidden_size": a.hidden,
        "ffn_hidden_size": a.ffn,
        "num_attention_heads": a.num_heads,
        "group_query_attention": a.num_groups != a.num_heads,
        "num_query_groups": a.num_groups,
        "kv_channels": a.head_size,
        "seq_length": a.max_positions,
        "max_position_embeddings": a.max_positions,
        "position_embedding_type": "rope",
        "add_position_embedding": True,
        "use_rotary_position_embeddings": False,
        "rotary_base": int(a.rope_base),
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "use_rope_scaling": a.rope_scaling is not None,
        "normalization": "RMSNorm",
        "norm_epsilon": a.norm_epsilon,
        "layernorm_epsilon": a.norm_epsilon,
        "apply_layernorm_1p": False,
        "swiglu": True,
        "squared_relu": False,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "untie_embeddings_and_output_weights": not a.is_tied,
        "apply_query_key_layer_scaling": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "vocab_size": a.vocabulary,
        "padded_vocab_size": a.vocabulary,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "params_dtype": getattr(torch, a.dtype),
        "num_experts": a.num_experts or None,
    }
    if a.num_experts:
        found |= {
            "moe_ffn_hidden_size": a.ffn,
            "moe_router_topk": a.experts_per_token,
            "moe_router_pre_softmax": False,
            "moe_router_score_function": "softmax",
            "moe_layer_freq": 1,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": a.balance_coefficient,
        }
    return found


def flags(architecture: Architecture) -> list[str]:
    """The same as words for Megatron's command line."""
    a = architecture
    words: dict[str, Any] = {
        "--num-layers": a.num_layers,
        "--hidden-size": a.hidden,
        "--ffn-hidden-size": a.ffn,
        "--num-attention-heads": a.num_heads,
        "--kv-channels": a.head_size,
        "--max-position-embeddings": a.max_positions,
        "--normalization": "RMSNorm",
        "--norm-epsilon": a.norm_epsilon,
        "--position-embedding-type": "rope",
        "--rotary-base": int(a.rope_base),
        "--vocab-size": a.vocabulary,
        "--hidden-dropout": 0,
        "--attention-dropout": 0,
    }
    switches = ["--swiglu", "--disable-bias-linear"]
    if a.num_groups != a.num_heads:
        words["--num-query-groups"] = a.num_groups
        switches.append("--group-query-attention")
    if not a.is_tied:
        switches.append("--untie-embeddings-and-output-weights")
    if a.rope_scaling is not None:
        switches.append("--use-rope-scaling")
    if a.num_experts:
        words |= {"--num-experts": a.num_experts, "--moe-router-topk": a.experts_per_token}
        words["--moe-aux-loss-coeff"] = a.balance_coefficient
    return [*(str(word) for pair in words.items() for word in pair), *switches]
