# SPDX-License-Identifier: Apache-2.0
"""`export-hf`: settings, files and tokenizers; what transformers lacks or is damaged is refused in a sentence."""

from __future__ import annotations

import json
import pickle
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from simreg_megatron import cli
from simreg_megatron.tools import import_hf
from simreg_megatron.tools.checkpoints import TRACKER, CheckpointError, checkpoint_folder, new_folder
from simreg_megatron.tools.export_hf import LLAMA3_ROPE, export, refuse_others
from simreg_megatron.tools.tokens import Tokenizer, check_size, load_tokenizer
from tests.helpers.checkpoints import dist_checkpoint, random_weights, tiny_config

transformers = pytest.importorskip("transformers")
pytest.importorskip("megatron")  # the name alone: importing its core takes seconds of every worker

VARIANTS = {
    "dense": {},
    "experts": {"experts": 4, "rope_theta": 20000.0},
    "tied": {"tie_word_embeddings": True},
    "wide heads": {"head_dim": 6, "rope_theta": 500000.0, "rope_scaling": dict(LLAMA3_ROPE), "rms_norm_eps": 2e-6},
}


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert cli.main(["export-hf", *map(str, words)]) == 2
    (sentence,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
    return sentence


@pytest.mark.parametrize("name", VARIANTS)
def test_transformers_reads_every_number_and_every_weight(name: str, tmp_path: Path) -> None:
    config = tiny_config(**VARIANTS[name])
    export(dist_checkpoint(tmp_path / "checkpoint", config), tmp_path / "model")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    sizes = ("rms_norm_eps", "head_dim", "num_key_value_heads", "max_position_embeddings", "tie_word_embeddings")
    for setting in sizes:
        assert getattr(model.config, setting) == getattr(config, setting)
    entries = json.loads((tmp_path / "model" / "config.json").read_text())
    assert entries["rope_theta"] == VARIANTS[name].get("rope_theta", 10000.0), "release 4 of transformers reads this"
    assert entries["rope_scaling"] == (LLAMA3_ROPE if "rope_scaling" in VARIANTS[name] else None)
    truth, state = random_weights(config), model.state_dict()
    for weight in truth.keys() & state.keys():
        assert torch.equal(state[weight], truth[weight]), weight
    assert len(truth.keys() & state.keys()) >= 8 and model.generate(torch.tensor([[1, 2]]), max_new_tokens=2).numel()
    readable = stat.S_IMODE((tmp_path / "model" / "config.json").stat().st_mode)
    assert stat.S_IMODE((tmp_path / "model" / "model.safetensors").stat().st_mode) == readable


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("normalization", "LayerNorm"),
        ("position_embedding_type", "yarn"),
        ("rotary_seq_len_interpolation_factor", 4),
        ("window_size", (128, 0)),
        ("hybrid_layer_pattern", "M*-"),
        ("moe_router_score_function", "sigmoid"),
        ("moe_router_load_balancing_type", ["aux_loss", "sinkhorn"]),
        ("moe_layer_freq", [0, 1]),
        ("num_attention_heads", 6),
    ],
)
def test_what_transformers_lacks_is_refused_by_name(name: str, value: Any) -> None:
    args = import_hf.common_state(tiny_config(experts=4), torch.float32)["args"]
    args.moe_layer_freq, args.moe_router_load_balancing_type = [1, 1], ["aux_loss", "global_aux_loss"]
    refuse_others(args)
    setattr(args, name, value)
    with pytest.raises(CheckpointError, match=f"not support ({name} = |width 16 with 6 attention h)"):
        refuse_others(args)


def test_trained_scalars_are_left_out_and_other_weights_refused(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    def with_more(name: str, key: str) -> Path:
        folder = dist_checkpoint(tmp_path / name)
        state = dict(import_hf.megatron_tensors(tiny_config(), random_weights(tiny_config())))
        dcp.save({**state, key: torch.ones(3)}, checkpoint_id=folder)
        return folder

    export(with_more("scalars", "simreg_similarity.query"), tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"decoder\.final_layernorm\.bias is no weight of a LLaMA"):
        export(with_more("bias", "decoder.final_layernorm.bias"), tmp_path / "other")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [("gap", "incomplete or holds NaN"), ("missing", r"model\.norm\.weight \(missing\)"), ("file", "cannot be read"),
     *((size, "cannot be read") for size in ((10**9, 1), (-(10**12),), (10**6, 0)))],
)  # fmt: skip
def test_damaged_checkpoints_are_refused(damage: str | tuple[int, ...], sentence: str, tmp_path: Path) -> None:
    folder = dist_checkpoint(tmp_path / "checkpoint")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    if damage == "gap":
        key = next(index for index in metadata.storage_data if index.fqn == "decoder.layers.mlp.linear_fc2.weight")
        del metadata.storage_data[key]
    elif isinstance(damage, tuple):
        metadata.state_dict_metadata["output_layer.weight"].size = torch.Size(damage)
    elif damage == "missing":
        del metadata.state_dict_metadata["decoder.final_layernorm.weight"]
    else:
        next(folder.glob("*.distcp")).unlink()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises((CheckpointError, OSError), match=sentence if damage != "file" else "distcp"):
        export(folder, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_folders_that_are_no_checkpoint_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def sentence(load: Path) -> str:
        return refused(capsys, "--load", load, "--save", tmp_path / "model")

    assert "there is no folder" in sentence(tmp_path / "nowhere")
    assert "it has no .metadata" in sentence(tmp_path)
    (tmp_path / "old" / "iter_0000005" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "old" / TRACKER).write_text("5")
    assert "iter_0000005 is no whole" in (said := sentence(tmp_path / "old")) and "--ckpt-convert-format" in said
    assert checkpoint_folder(tmp_path / "old", 7) == tmp_path / "old" / "iter_0000007"
    (tmp_path / "old").rename(tmp_path / "checkpoints")
    assert checkpoint_folder(tmp_path) == tmp_path / "checkpoints" / "iter_0000005", "of the folder of a run"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "precious").write_text("kept")
    assert "already exists" in sentence(dist_checkpoint(tmp_path / "checkpoint"))
    assert (tmp_path / "model" / "precious").read_text() == "kept"


def test_a_program_that_is_ended_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "model") as partial:
        (partial / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


PADDING = {"make_vocab_size_divisible_by": 128, "tensor_model_parallel_size": 2}  # 1024 rows


@pytest.mark.parametrize(
    ("args", "size", "fits"),
    [
        (PADDING, 900, True),
        (PADDING, 768, False),
        ({"tensor_model_parallel_size": 1}, 100, True),  # imported: how it was padded is not known
        # Up to 0.15 Megatron added tokens of its own behind those of a sentencepiece model.
        ({**PADDING, "tokenizer_type": "SentencePieceTokenizer"}, 762, True),
        ({**PADDING, "tokenizer_type": "SentencePieceTokenizer"}, 761, False),
    ],
)
def test_a_vocabulary_must_be_that_of_training(args: dict, size: int, fits: bool) -> None:
    import argparse

    given = argparse.Namespace(**{"tokenizer_type": None, **args})
    tokenizer = Tokenizer("t", "", size, 2, 1, lambda texts: [])
    if fits:
        check_size(given, 1024, tokenizer)
        return
    with pytest.raises(CheckpointError, match=f"with {size} tokens is not the tokenizer of training"):
        check_size(given, 1024, tokenizer)


def train_sentencepiece(path: Path, source: str, **options: Any) -> Path:
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(Path(source).read_text().splitlines()), model_prefix=str(path.with_suffix("")),
        vocab_size=500, model_type="bpe", byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, minloglevel=2, **options,
    )  # fmt: skip
    return path


@pytest.mark.parametrize(
    "options", [{}, {"add_dummy_prefix": False}, {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3}]
)
def test_a_sentencepiece_model_becomes_the_same_tokenizer(options: dict, tmp_path: Path) -> None:
    path = train_sentencepiece(tmp_path / "t.model", json.__file__, **options)
    rows = tiny_config(vocab_size=512)
    folder = dist_checkpoint(tmp_path / "c", rows, tokenizer_model=str(path), make_vocab_size_divisible_by=64)
    export(folder, tmp_path / "model", path)
    fast = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    text = Path(__file__).read_text() + "\n\u00e9\u4f60 \t  x <s> </s> <unk> as plain text"
    (truth,) = load_tokenizer(str(path)).encode([text])
    assert fast(text)["input_ids"] == truth and fast.decode(truth) == text, "and nothing is added in front or behind"
    assert (fast.bos_token_id, fast.eos_token_id, fast.unk_token_id) == (1, 2, options.get("unk_id", 0))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(model.lm_head.weight, random_weights(rows)["lm_head.weight"][:500]), "padding is left out"
    export(folder, tmp_path / "copied", tmp_path / "model")
    assert (tmp_path / "copied" / "tokenizer.json").read_bytes() == (tmp_path / "model/tokenizer.json").read_bytes()


def test_a_tokenizer_whose_class_stands_in_a_config_keeps_it(tmp_path: Path) -> None:
    pieces = ["<|endoftext|>", *map(chr, range(256, 767))]
    (own := tmp_path / "own").mkdir()  # as GPT-2's on the Hub, whose other files name no class
    (own / "config.json").write_text('{"model_type": "gpt2"}')
    (own / "vocab.json").write_text(json.dumps({piece: number for number, piece in enumerate(pieces)}))
    (own / "merges.txt").write_text("#version: 0.2\n")
    (own / "tokenizer_notes").symlink_to(__file__)  # in a folder from elsewhere: a file that is not to be published
    export(dist_checkpoint(tmp_path / "c", tiny_config(vocab_size=512)), tmp_path / "model", own)
    assert load_tokenizer(str(tmp_path / "model")).sha256 == load_tokenizer(str(own)).sha256
    assert not (tmp_path / "model" / "tokenizer_notes").exists()


def test_other_tokenizers_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = train_sentencepiece(tmp_path / "own.model", json.__file__)
    other = train_sentencepiece(tmp_path / "other.model", subprocess.__file__)
    symbols = train_sentencepiece(tmp_path / "s.model", json.__file__, user_defined_symbols=["<|turn|>"])
    (tmp_path / "notes.txt").write_text("no tokenizer")
    folder = dist_checkpoint(tmp_path / "checkpoint", tiny_config(vocab_size=500), tokenizer_model=str(own))
    for tokenizer, sentence in {
        other: "is not the tokenizer of training",
        tmp_path / "notes.txt": "cannot be loaded as a tokenizer",
    }.items():
        words = ("--load", folder, "--save", tmp_path / "model", "--tokenizer", tokenizer)
        assert sentence in refused(capsys, *words)
    unnamed = dist_checkpoint(tmp_path / "unnamed", tiny_config(vocab_size=500))
    with pytest.raises(CheckpointError, match="would tokenize some texts differently"):
        export(unnamed, tmp_path / "model", symbols)
    assert not (tmp_path / "model").exists()


def test_a_tied_checkpoint_with_a_head_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = dist_checkpoint(tmp_path / "checkpoint", untie_embeddings_and_output_weights=False)
    sentence = refused(capsys, "--load", folder, "--save", tmp_path / "model")
    assert "ties the head to the embedding, but the two differ" in sentence
