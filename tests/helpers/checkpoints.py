# SPDX-License-Identifier: Apache-2.0
"""Small models and checkpoints of random weights, made without Megatron."""

import io
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from simreg_megatron.tools import import_hf
from simreg_megatron.tools.export_hf import shapes_of

_SIZES = {
    "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 10, "max_position_embeddings": 32, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip


def tiny_config(*, experts: int = 0, **changes: Any) -> Any:
    """transformers' configuration of a LLaMA with grouped queries, or of a Mixtral."""
    from transformers import LlamaConfig, MixtralConfig

    sizes = {**_SIZES, **changes}
    if not experts:
        return LlamaConfig(architectures=["LlamaForCausalLM"], **sizes)
    return MixtralConfig(
        architectures=["MixtralForCausalLM"], num_local_experts=experts, num_experts_per_tok=2, sliding_window=None,
        **sizes,
    )  # fmt: skip


def random_weights(config: Any) -> dict[str, Tensor]:
    """All weights by transformers' names; no two numbers are alike, so that no exchange goes unseen."""
    generator = torch.Generator().manual_seed(11)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes_of(config).items()}


def hugging_face(folder: Path, config: Any, weights: dict[str, Tensor] | None = None) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    save_file(random_weights(config) if weights is None else weights, folder / "model.safetensors")
    config.save_pretrained(folder)
    return folder


def dist_checkpoint(folder: Path, config: Any = None, **args: Any) -> Path:
    """A `torch_dist` checkpoint as releases before 0.19 write it, with `args` among Megatron's arguments."""
    config = config or tiny_config()
    state: dict[str, Any] = dict(import_hf.megatron_tensors(config, random_weights(config)))
    for key, shape, offset in import_hf.layer_states(config):
        state[f"{key}/shard_{'.'.join(map(str, offset))}_{'.'.join(map(str, shape))}"] = archive_of([None])
    dcp.save(state, checkpoint_id=folder, planner=_AsMegatron())
    common = import_hf.common_state(config, torch.float32)
    vars(common["args"]).update(args)
    torch.save(common, folder / "common.pt")
    backends = {"sharded_backend": "torch_dist", "common_backend": "torch"}
    versions = {"sharded_backend_version": 1, "common_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps({**backends, **versions}))
    return folder


class _AsMegatron(dcp.DefaultSavePlanner):
    """Writes an object's bytes as they are."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return object if isinstance(object, io.BytesIO) else super().transform_object(write_item, object)


def archive_of(content: object) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream


class Calls:
    """Pickles as a call of any function: what a malicious checkpoint is made of."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call
