# SPDX-License-Identifier: Apache-2.0
"""`import-hf`: there and back bit for bit; what Megatron has not, and what is damaged, is refused in a sentence."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from simreg_megatron import cli
from simreg_megatron.tools.checkpoints import CheckpointError, checkpoint_folder
from simreg_megatron.tools.export_hf import LLAMA3_ROPE, export
from simreg_megatron.tools.import_hf import open_model
from tests.helpers.checkpoints import hugging_face, random_weights, tiny_config
from tests.megatron import forks, runs

pytest.importorskip("transformers")
pytest.importorskip("megatron")  # the name alone: importing its core takes seconds of every worker


def imported(model: Path, save: Path) -> str:
    """Return what the command prints, on a forked rank that has Megatron and its CPU backend in memory already."""
    done = runs.forked(_run, ["import-hf", "--model", str(model), "--save", str(save)], folder=save.parent)
    assert done.status == 0, done.output
    return done.output


def _run(words: list[str]) -> None:
    forks.quick_save()
    sys.exit(cli.main(words))


def refused(model: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["import-hf", "--model", str(model), "--save", str(model.parent / "start")]) == 2
    (sentence,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
    assert not (model.parent / "start").exists()
    return sentence


def test_a_taken_folder_is_refused_before_the_weights_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "start").touch()
    assert cli.main(["import-hf", "--model", str(tmp_path / "none"), "--save", str(tmp_path / "start")]) == 2
    assert "start already exists: name a new folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({}, torch.float32),
        ({"experts": 4, "rope_theta": 20000.0, "router_aux_loss_coef": 0.02}, torch.bfloat16),
        ({"tie_word_embeddings": True, "head_dim": 6, "rope_scaling": LLAMA3_ROPE}, torch.float32),
    ],
    ids=["dense", "experts", "tied"],
)  # fmt: skip
def test_an_imported_model_is_exported_unchanged(changes: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    config = tiny_config(**json.loads(json.dumps(changes)))
    weights = {name: tensor.to(dtype) for name, tensor in random_weights(config).items()}
    model = hugging_face(tmp_path / "model", config, weights)
    said = imported(model, tmp_path / "start")
    export(checkpoint_folder(tmp_path / "start"), tmp_path / "back")
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == dtype, name
    again = open_model(tmp_path / "back")[0]
    for name, value in config.to_diff_dict().items():
        if name not in ("transformers_version", "dtype", "bos_token_id", "eos_token_id"):
            assert getattr(again, name) == value, name
    # Megatron's own defaults are a dropout of 0.1 and experts that nothing balances.
    assert "--hidden-dropout 0.0 --attention-dropout 0.0" in said
    assert ("--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.02" in said) == ("experts" in changes)
    assert ("--untie-embeddings-and-output-weights" in said) == ("tie_word_embeddings" not in changes)
    assert "--make-vocab-size-divisible-by 10 keeps the 10 rows" in said


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_tied_model_with_a_head_of_its_own(is_equal: bool, tmp_path: Path, capsys: Any) -> None:
    config = tiny_config(tie_word_embeddings=True)
    weights = random_weights(config)
    head = weights["model.embed_tokens.weight"] * (1.0 if is_equal else 2.0)
    model = hugging_face(tmp_path / "model", config, {**weights, "lm_head.weight": head})
    if is_equal:
        said = imported(model, tmp_path / "start")
        assert "--untie" not in said and "--finetune --num-layers 2" in said
        export(checkpoint_folder(tmp_path / "start"), tmp_path / "back")
        assert load_file(tmp_path / "back" / "model.safetensors").keys() == weights.keys()
    else:
        sentence = refused(model, capsys)
        assert "ties the head to the embedding, but the two differ" in sentence


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinite_weights_are_refused(value: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = random_weights(tiny_config())
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = value
    sentence = refused(hugging_face(tmp_path / "model", tiny_config(), weights), capsys)
    assert "model.layers.1.mlp.up_proj.weight in" in sentence and "holds NaN or infinity" in sentence


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ({"model_type": "gpt2"}, "only llama and mixtral"),
        ({"hidden_act": "gelu"}, "hidden_act = gelu"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "without scaling or with"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.5}}, "only whole bases"),
        ({"num_hidden_layers": 3}, r"model\.layers\.2\.input_layernorm\.weight \(missing\)"),
        ({"intermediate_size": 11}, r"asks for \(11, 16\)"),
    ],
)  # fmt: skip
def test_a_model_that_megatron_cannot_hold_is_refused(entries: dict, sentence: str, tmp_path: Path) -> None:
    folder = hugging_face(tmp_path / "model", tiny_config())
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))
    with pytest.raises(CheckpointError, match=sentence):
        open_model(folder)


def test_pickled_models_are_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = hugging_face(tmp_path / "model", tiny_config())
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "lacks config.json or model*.safetensors" in refused(folder, capsys)
