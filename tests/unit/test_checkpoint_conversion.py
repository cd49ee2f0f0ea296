# SPDX-License-Identifier: Apache-2.0
"""Megatron to Hugging Face and back: settings, files, tokenizers; every bit in its place, every refusal by name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from simreg_megatron.checkpoint import export as exporting
from simreg_megatron.checkpoint.architecture import LLAMA3_SCALING, Architecture, from_args
from simreg_megatron.checkpoint.dist_writer import arguments, flags
from simreg_megatron.checkpoint.errors import CheckpointError
from simreg_megatron.checkpoint.export import export, plan_export
from simreg_megatron.checkpoint.hf_folder import open_model
from simreg_megatron.checkpoint.hf_import import import_model
from simreg_megatron.checkpoint.huggingface import join_qkv, split_qkv
from simreg_megatron.checkpoint.source import open_checkpoint
from simreg_megatron.checkpoint.tokenizer import open_tokenizer
from tests.fuzz.target import REGRESSIONS
from tests.helpers import jobs
from tests.helpers.checkpoints import (
    DENSE,
    EXPERTS,
    as_weights,
    dist_checkpoint,
    random_weights,
    transformers_release,
)

transformers = pytest.importorskip("transformers")
RELEASE = transformers_release()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("normalization", "LayerNorm"),
        ("layernorm_zero_centered_gamma", True),
        ("apply_layernorm_1p", True),
        ("swiglu", False),
        ("add_bias_linear", True),
        ("add_qkv_bias", True),
        ("position_embedding_type", "learned_absolute"),
        ("position_embedding_type", "yarn"),
        ("rotary_percent", 0.5),
        ("rotary_interleaved", True),
        ("rotary_seq_len_interpolation_factor", 4),
        ("no_rope_freq", 4),
        ("qk_layernorm", True),
        ("softmax_type", "off-by-one"),
        ("window_size", (128, 0)),
        ("multi_latent_attention", True),
        ("mtp_num_layers", 1),
        ("use_mup", True),
        ("spec", ["my.module", "my_spec"]),
        ("hybrid_layer_pattern", "M*-"),
        ("moe_router_pre_softmax", True),
        ("moe_router_score_function", "sigmoid"),
        ("moe_router_topk_scaling_factor", 2.5),
        ("moe_router_enable_expert_bias", True),
        ("moe_shared_expert_intermediate_size", 64),
        ("moe_expert_capacity_factor", 1.25),
        ("moe_expert_rank_capacity_factor", 1.5),
        ("moe_router_load_balancing_type", "sinkhorn"),
        ("moe_router_load_balancing_type", "quantile_balancing"),
        ("moe_router_load_balancing_type", ["aux_loss", "sinkhorn"]),
        ("moe_layer_freq", 2),
        ("moe_layer_freq", [0, 1]),
    ],
)
def test_what_transformers_lacks_is_refused_by_name(name: str, value: Any) -> None:
    args = arguments(EXPERTS)
    assert from_args(args, vocabulary=10) == EXPERTS
    with pytest.raises(CheckpointError, match=name):
        from_args({**args, name: value}, vocabulary=10)


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "none", ["aux_loss", "global_aux_loss"], None])
def test_a_balance_that_leaves_the_choice_of_experts_alone_is_taken(kind: Any) -> None:
    args = {**arguments(EXPERTS), "moe_router_load_balancing_type": kind}
    assert from_args(args, vocabulary=10) == EXPERTS


def test_the_printed_flags_train_the_model_as_it_is() -> None:
    """Megatron's own defaults are dropout of a tenth and experts that nothing balances."""
    words = flags(replace(EXPERTS, balance_coefficient=0.02))
    given = dict(pairwise(words))
    assert given["--hidden-dropout"] == given["--attention-dropout"] == "0"
    assert given["--moe-aux-loss-coeff"] == "0.02" and "--moe-aux-loss-coeff" not in flags(DENSE)


def test_a_scaling_factor_that_megatron_passes_over_is_refused() -> None:
    args = {**arguments(DENSE), "use_rope_scaling": True}
    assert from_args({**args, "rope_scaling_factor": 8.0}, vocabulary=10).rope_scaling == LLAMA3_SCALING
    with pytest.raises(CheckpointError, match="rope_scaling_factor = 32"):
        from_args({**args, "rope_scaling_factor": 32.0}, vocabulary=10)


def test_an_epsilon_is_never_guessed() -> None:
    args = {**arguments(DENSE), "layernorm_epsilon": 3e-6, "norm_epsilon": 3e-6}
    assert from_args(args, vocabulary=10).norm_epsilon == 3e-6
    del args["layernorm_epsilon"]
    assert from_args(args, vocabulary=10).norm_epsilon == 3e-6
    del args["norm_epsilon"]
    with pytest.raises(CheckpointError, match="epsilon"):
        from_args(args, vocabulary=10)


def test_groups_count_only_where_they_are_asked_for() -> None:
    args = {**arguments(DENSE), "group_query_attention": False, "num_query_groups": 1}
    assert from_args(args, vocabulary=10).num_groups == DENSE.num_heads


def test_queries_keys_and_values_lie_by_group() -> None:
    """Rows are numbered: group 0 holds queries of heads 0 and 1, its key, its value; then group 1."""
    rows = torch.arange(32.0)[:, None].expand(32, 16).contiguous()
    queries, keys, values = split_qkv(rows, DENSE)
    assert queries[:, 0].tolist() == [*range(0, 8), *range(16, 24)]
    assert keys[:, 0].tolist() == [*range(8, 12), *range(24, 28)]
    assert values[:, 0].tolist() == [*range(12, 16), *range(28, 32)]
    assert torch.equal(join_qkv(queries, keys, values, DENSE), rows)


def exported(architecture: Architecture, folder: Path, **options: Any) -> Path:
    checkpoint = open_checkpoint(dist_checkpoint(folder / "megatron", architecture))
    export(plan_export(checkpoint, **options), folder / "model")
    return folder / "model"


VARIANTS = {
    "dense": DENSE,
    "experts": EXPERTS,
    "tied": replace(DENSE, is_tied=True),
    "wide heads": replace(DENSE, head_size=6, rope_base=500000.0, rope_scaling=LLAMA3_SCALING, norm_epsilon=2e-6),
    "one group": replace(DENSE, num_groups=1),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_transformers_reads_every_number_and_every_weight(name: str, tmp_path: Path) -> None:
    a = VARIANTS[name]
    folder = exported(a, tmp_path)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    config = model.config
    assert type(model).__name__ == ("MixtralForCausalLM" if a.num_experts else "LlamaForCausalLM")
    assert (config.rms_norm_eps, config.head_dim, config.num_key_value_heads) == (
        a.norm_epsilon,
        a.head_size,
        a.num_groups,
    )
    assert config.max_position_embeddings == a.max_positions and config.tie_word_embeddings == a.is_tied
    entries = json.loads((folder / "config.json").read_text())
    assert entries["rope_theta"] == a.rope_base, "release 4 of transformers reads this one"
    if RELEASE >= 5:
        assert config.rope_parameters["rope_theta"] == a.rope_base
        assert config.rope_parameters["rope_type"] == (a.rope_scaling or {"rope_type": "default"})["rope_type"]
    else:
        assert (config.rope_theta, config.rope_scaling) == (a.rope_base, a.rope_scaling)
    truth = random_weights(a)
    state = model.state_dict()
    assert torch.equal(state["model.embed_tokens.weight"], truth["embedding.word_embeddings.weight"])
    queries, keys, values = split_qkv(truth["decoder.layers.1.self_attention.linear_qkv.weight"], a)
    for part, tensor in {"q": queries, "k": keys, "v": values}.items():
        assert torch.equal(state[f"model.layers.1.self_attn.{part}_proj.weight"], tensor)
    assert model.generate(torch.tensor([[1, 2]]), max_new_tokens=3, min_new_tokens=3).shape == (1, 5)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", VARIANTS)
def test_there_and_back_keeps_every_bit(name: str, dtype: str, tmp_path: Path) -> None:
    folder = exported(VARIANTS[name], tmp_path, dtype=dtype)
    opened = open_model(folder)
    kind = torch.float32 if dtype == "fp32" else torch.bfloat16
    assert opened.architecture == replace(VARIANTS[name], dtype=str(kind).removeprefix("torch."))
    for weight, tensor in random_weights(VARIANTS[name]).items():
        assert torch.equal(opened.weights[weight].read(), tensor.to(kind)), weight
    import_model(opened, tmp_path / "imported")
    again = open_checkpoint(tmp_path / "imported")
    assert again.args["norm_epsilon"] == VARIANTS[name].norm_epsilon
    export(plan_export(again), tmp_path / "again")
    for file in ("model.safetensors", "config.json", "generation_config.json"):
        assert (tmp_path / "again" / file).read_bytes() == (folder / file).read_bytes(), file


def test_padding_of_the_vocabulary_is_left_out(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(dist_checkpoint(tmp_path / "megatron"))
    checkpoint.args.update(vocab_size=None, padded_vocab_size=10)
    assert any("give --tokenizer or --vocab-size" in note for note in plan_export(checkpoint).notes)
    checkpoint.args.update(tokenizer_model="words.model")
    assert any("training used words.model" in note for note in plan_export(checkpoint, vocabulary=7).notes)
    export(plan_export(checkpoint, vocabulary=7), tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(model.lm_head.weight, random_weights(DENSE)["output_layer.weight"][:7])
    with pytest.raises(CheckpointError, match="10 rows, fewer than the 11 tokens"):
        plan_export(checkpoint, vocabulary=11)


def test_a_large_model_comes_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = exported(DENSE, tmp_path / "whole")
    monkeypatch.setattr(exporting, "SHARD_BYTES", 3000)
    steps: list[tuple[int, int]] = []
    plan = plan_export(open_checkpoint(tmp_path / "whole" / "megatron"))
    export(plan, tmp_path / "parts", progress=lambda done, total: steps.append((done, total)))
    files = sorted(path.name for path in (tmp_path / "parts").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert steps[-1][0] == steps[-1][1] and steps == sorted(steps)
    one, other = (transformers.AutoModelForCausalLM.from_pretrained(path) for path in (whole, tmp_path / "parts"))
    for name, tensor in one.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    opened = open_model(tmp_path / "parts")
    assert all(torch.equal(opened.weights[name].read(), tensor) for name, tensor in random_weights(DENSE).items())


def test_one_type_for_all_weights_and_a_line_where_it_rounds(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(dist_checkpoint(tmp_path / "megatron", EXPERTS))
    narrow = {n: t if "router" in n else t.bfloat16() for n, t in random_weights(EXPERTS).items()}
    checkpoint.weights.update(as_weights(narrow))
    plan = plan_export(checkpoint)
    assert plan.dtype == torch.bfloat16 and any("router.weight" in note for note in plan.notes)
    assert (
        not plan_export(checkpoint, dtype="bf16").notes and plan_export(checkpoint, dtype="fp32").dtype == torch.float32
    )


def test_too_narrow_a_type_is_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(dist_checkpoint(tmp_path / "megatron"))
    large = random_weights(DENSE)
    large["output_layer.weight"] *= 1e6
    checkpoint.weights.update(as_weights(large))
    with pytest.raises(CheckpointError, match="too narrow"):
        export(plan_export(checkpoint, dtype="fp16"), tmp_path / "model")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["megatron"]


def changed(folder: Path, **entries: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))
    return folder


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ({"model_type": "gpt2"}, "only llama and mixtral"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"sliding_window": 4096}, "sliding_window = 4096"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": "yarn"}, "gives the rotary embeddings as 'yarn', where a table is needed"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "by yarn"),
        ({"num_hidden_layers": 3}, "has no model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, "has no place for"),
        ({"intermediate_size": 11}, "has the shape"),
        ({"vocab_size": "many"}, "vocab_size as 'many'"),
    ],
)
def test_a_model_that_megatron_cannot_hold_is_refused(entries: dict, sentence: str, tmp_path: Path) -> None:
    folder = changed(exported(DENSE, tmp_path), **entries)
    with pytest.raises(CheckpointError, match=sentence):
        open_model(folder)


def test_pickled_and_damaged_models_are_not_read(tmp_path: Path) -> None:
    folder = exported(DENSE, tmp_path)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_model(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="could run code and are not read"):
        open_model(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../x.safetensors"}}))
    with pytest.raises(CheckpointError, match="points outside its folder"):
        open_model(folder)


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from simreg_megatron.tools.tokenizers import train_tokenizer

    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    text = Path(json.__file__).read_text() + Path(subprocess.__file__).read_text()
    train_tokenizer([text], path, vocab_size=600)
    return path


def test_a_sentencepiece_model_becomes_the_same_tokenizer(sentencepiece_model: Path, tmp_path: Path) -> None:
    tokenizer = open_tokenizer(sentencepiece_model)
    assert (tokenizer.size, tokenizer.bos, tokenizer.eos) == (600, 1, 2)
    folder = exported(replace(DENSE, vocabulary=600), tmp_path, tokenizer=tokenizer)
    fast = transformers.AutoTokenizer.from_pretrained(folder)
    text = Path(__file__).read_text() + "\n\u00e9\u4f60 \t  x"
    assert fast(text)["input_ids"] == tokenizer.encode(text), "and nothing is added in front or behind"
    assert fast.decode(tokenizer.encode(text)) == text
    assert (fast.bos_token_id, fast.eos_token_id) == (1, 2)
    copied = exported(replace(DENSE, vocabulary=600), tmp_path / "copied", tokenizer=open_tokenizer(folder))
    assert (copied / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("ids", [{}, {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3}])
def test_what_looks_like_a_special_token_stays_text(ids: dict[str, int], tmp_path: Path) -> None:
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(Path(json.__file__).read_text().splitlines()), model_prefix=str(tmp_path / "t"),
        vocab_size=500, model_type="bpe", byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, minloglevel=2, **ids,
    )  # fmt: skip
    tokenizer = open_tokenizer(tmp_path / "t.model")
    folder = exported(replace(DENSE, vocabulary=500), tmp_path, tokenizer=tokenizer)
    fast = transformers.AutoTokenizer.from_pretrained(folder)
    text = "<s> </s> <unk> as plain text"
    assert fast(text)["input_ids"] == tokenizer.encode(text) and fast.decode(tokenizer.encode(text)) == text
    assert (fast.bos_token_id, fast.eos_token_id, fast.unk_token_id) == (1, 2, ids.get("unk_id", 0))
    if RELEASE >= 5:  # release 4 cannot be told to; `evaluate --bos document` says so
        with_bos = transformers.AutoTokenizer.from_pretrained(folder, add_bos_token=True)
        assert with_bos(text)["input_ids"] == [1, *tokenizer.encode(text)]


def test_symbols_that_cannot_be_converted_are_refused(tmp_path: Path) -> None:
    """A symbol that is cut out whole would become several pieces in the export."""
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(Path(json.__file__).read_text().splitlines()), model_prefix=str(tmp_path / "t"),
        vocab_size=500, model_type="bpe", byte_fallback=True, user_defined_symbols=["<|turn|>"],
        normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    with pytest.raises(CheckpointError, match=r"t\.model cuts text in a way that could not be converted exactly"):
        exported(replace(DENSE, vocabulary=500), tmp_path, tokenizer=open_tokenizer(tmp_path / "t.model"))


def test_tokens_added_to_a_sentencepiece_model_are_not_dropped(sentencepiece_model: Path, tmp_path: Path) -> None:
    shutil.copyfile(sentencepiece_model, tmp_path / "tokenizer.model")
    assert open_tokenizer(tmp_path).size == open_tokenizer(sentencepiece_model).size
    (tmp_path / "added_tokens.json").write_text('{"<|turn|>": 500}')
    with pytest.raises(CheckpointError, match=r"adds tokens \(added_tokens\.json\) to its tokenizer\.model"):
        open_tokenizer(tmp_path)


@pytest.mark.parametrize("content", [None, b"", b"not a model"])
def test_what_is_no_tokenizer_is_refused(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.model"):
        open_tokenizer(path)
    with pytest.raises(CheckpointError, match=r"holds no tokenizer" if content is None else r"tokenizer\.model"):
        open_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be loaded as a tokenizer"):
        open_tokenizer(tmp_path)


def test_ids_beyond_reason_are_refused(tmp_path: Path) -> None:
    shutil.copyfile(REGRESSIONS / "tokenizer-json" / "id-beyond-any", tmp_path / "tokenizer.json")
    with pytest.raises(CheckpointError, match="get it again"):
        open_tokenizer(tmp_path)


class PanicException(BaseException):
    """What Rust raises in Python when it gives up, by the name and of the kind that pyo3 gives it."""


def test_a_tokenizer_that_makes_its_library_fail_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def panics(*_: object, local_files_only: bool, **__: object) -> None:
        assert local_files_only, "nothing is fetched for a folder"
        raise PanicException("index out of bounds")

    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", panics)
    with pytest.raises(CheckpointError, match=r"makes its library fail \(index out of bounds\)"):
        open_tokenizer(tmp_path)


def test_the_commands_cost_nothing_until_they_run() -> None:
    code = "import sys, simreg_megatron.cli; print({'torch', 'transformers', 'megatron', 'numpy'} & sys.modules.keys())"
    done = jobs.run([sys.executable, "-c", code])
    assert done.stdout.strip() == "set()", done.stdout + done.stderr
