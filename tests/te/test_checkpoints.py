# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that Megatron saves from Transformer Engine's layers become Hugging Face models, and come back."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.helpers import jobs, stored
from tests.te import models
from tests.te.models import EXPERTS, FFN, GROUPS, HEADS, HIDDEN, LAYERS, VOCABULARY, whole

HEAD = HIDDEN // HEADS


def command(*words: object) -> None:
    jobs.run([sys.executable, "-m", "simreg_megatron.cli", *map(str, words)], check=True)


def expected(model: str) -> dict[str, Tensor]:
    """The Hugging Face model, from the tensors of the checkpoint and the definition of each layer."""
    rows = (HEADS // GROUPS + 2) * HEAD
    found = {
        "model.embed_tokens.weight": whole("embedding.word_embeddings.weight", (VOCABULARY, HIDDEN)),
        "lm_head.weight": whole("output_layer.weight", (VOCABULARY, HIDDEN)),
        "model.norm.weight": whole("decoder.final_layernorm.weight", (HIDDEN,)),
    }

    def layered(name: str, *shape: int) -> Tensor:
        return whole(f"decoder.layers.{name}", (LAYERS, *shape))

    norm = layered("self_attention.linear_qkv.layer_norm_weight", HIDDEN)
    qkv = layered("self_attention.linear_qkv.weight", GROUPS * rows, HIDDEN).view(LAYERS, GROUPS, -1, HEAD, HIDDEN)
    proj = layered("self_attention.linear_proj.weight", HIDDEN, HIDDEN)
    fused = "mlp.linear_fc1.layer_norm_weight" if model == "dense" else "pre_mlp_layernorm.weight"
    mlp_norm = layered(fused, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        found[f"{prefix}.input_layernorm.weight"] = norm[layer]
        found[f"{prefix}.post_attention_layernorm.weight"] = mlp_norm[layer]
        for name, part in (("q", qkv[layer, :, :-2]), ("k", qkv[layer, :, -2]), ("v", qkv[layer, :, -1])):
            found[f"{prefix}.self_attn.{name}_proj.weight"] = part.reshape(-1, HIDDEN)
        found[f"{prefix}.self_attn.o_proj.weight"] = proj[layer]
        found |= dense_mlp(layered, layer) if model == "dense" else experts(layered, layer)
    return found


def dense_mlp(layered, layer: int) -> dict[str, Tensor]:
    gate, up = layered("mlp.linear_fc1.weight", 2 * FFN, HIDDEN)[layer].chunk(2)
    down = layered("mlp.linear_fc2.weight", HIDDEN, FFN)[layer]
    return {f"model.layers.{layer}.mlp.{n}_proj.weight": t for n, t in (("gate", gate), ("up", up), ("down", down))}


def experts(layered, layer: int) -> dict[str, Tensor]:
    prefix = f"model.layers.{layer}.block_sparse_moe"
    found = {f"{prefix}.gate.weight": layered("mlp.router.weight", EXPERTS, HIDDEN)[layer]}
    first = layered("mlp.experts.experts.linear_fc1.weight", EXPERTS, 2 * FFN, HIDDEN)[layer]
    second = layered("mlp.experts.experts.linear_fc2.weight", EXPERTS, HIDDEN, FFN)[layer]
    for expert in range(EXPERTS):
        gate, up = first[expert].chunk(2)
        for name, tensor in (("w1", gate), ("w3", up), ("w2", second[expert])):
            found[f"{prefix}.experts.{expert}.{name}.weight"] = tensor
    return found


CASES = [
    ("dense", "tp2", "pp2"),
    ("dense", "pp2", "tp2"),
    ("grouped", "ep2", "pp2"),
    ("grouped", "tp2", "ep2"),
    ("sequential", "ep2", "tp2"),
    ("sequential", "pp2", "ep2"),
]


@pytest.mark.parametrize(("model", "layout", "other"), CASES)
def test_an_imported_model_is_exported_unchanged(model: str, layout: str, other: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    saved = models.save(tmp_path / "saved", model, layout, tmp_path / "save.log")
    folder = saved / f"iter_{models.ITERATION:07d}"
    assert any("_extra_state" in key for key in stored.objects(folder)), "Transformer Engine's states are there"
    assert stored.tensors(folder).keys() >= models.SCALARS

    command("export-hf", "--load", saved, "--save", tmp_path / "model")
    found, truth = load_file(tmp_path / "model" / "model.safetensors"), expected(model)
    assert found.keys() == truth.keys()
    for name, tensor in truth.items():
        assert torch.equal(found[name], tensor), name

    command("import-hf", "--model", tmp_path / "model", "--save", tmp_path / "imported")
    models.load(tmp_path / "imported", model, other, tmp_path / "load.log")
