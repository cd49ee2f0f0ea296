# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of Megatron's own loop, in every layout and format, become one and the same Hugging Face model."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from simreg_megatron.checkpoint.dist_format import DistCheckpoint
from simreg_megatron.checkpoint.export import export, plan_export
from simreg_megatron.checkpoint.hf_folder import open_model
from simreg_megatron.checkpoint.hf_import import import_model
from simreg_megatron.checkpoint.source import open_checkpoint
from simreg_megatron.checkpoint.tokenizer import open_tokenizer
from simreg_megatron.checkpoint.verify import compare
from simreg_megatron.checkpoint.weights import Weight
from simreg_megatron.tools.builtin_corpus import BuiltinCorpus
from tests.helpers import jobs
from tests.megatron import saved
from tests.megatron.saved import Saved

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def dense(data_flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("dense"), data_flags, "gqa")


@pytest.fixture(scope="module")
def experts(data_flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("experts"), data_flags, "moe")


def exported(load: Path, save: Path, **options) -> Path:
    export(plan_export(open_checkpoint(load), **options), save)
    return save


def digest(model: Path) -> str:
    return hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()


def from_memory(of: Saved, run: str, load: Path, save: Path) -> Path:
    """The export of what Megatron's ranks had in memory when the run ended, joined by the recorder of the tests."""
    truth = of.recorded[run].params
    weights = {
        name: Weight(tuple(value.shape), value.dtype, lambda value=value: value) for name, value in truth.items()
    }
    export(plan_export(dataclasses.replace(open_checkpoint(load), weights=weights)), save)
    return save


def same_bits(of: Saved, load: Path, run: str, scratch: Path) -> str:
    """The exported file is that of Megatron's memory, bit for bit; its hash."""
    found = digest(exported(load, scratch / "from-file"))
    assert found == digest(from_memory(of, run, load, scratch / "from-memory"))
    return found


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_dense_layouts_export_the_same_bits(layout: str, dense: Saved, tmp_path: Path) -> None:
    _same_in(dense, layout, tmp_path)


@pytest.mark.parametrize("layout", ["tp2-sp", "ep2"])
def test_expert_layouts_export_the_same_bits(layout: str, experts: Saved, tmp_path: Path) -> None:
    _same_in(experts, layout, tmp_path)


def _same_in(of: Saved, layout: str, scratch: Path) -> None:
    """One checkpoint, loaded and saved by Megatron in another layout: files of other shapes, the same export."""
    one = same_bits(of, of.trained(), "trained", scratch / "one")
    load = of.again(layout)
    assert same_bits(of, load, load.parent.name, scratch / layout) == one
    if layout.startswith("tp"):
        assert _num_chunks(load) > _num_chunks(of.trained()), "the layouts are the same"
    assert (scratch / layout / "from-file" / "config.json").read_bytes() == (
        scratch / "one" / "from-file" / "config.json"
    ).read_bytes()


def _num_chunks(load: Path) -> int:
    return sum(len(stored.chunks) for stored in DistCheckpoint(open_checkpoint(load).folder).tensors.values())


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("gqa", "tp2"),
        ("moe", "ep2"),
        ("tied", "pp2"),
        pytest.param("deep", "vpp2", marks=pytest.mark.slow),
        pytest.param("moe", "tp2-ep2", marks=pytest.mark.slow),
    ],
)
def test_the_older_format_is_put_together_right(model: str, layout: str, data_flags, tmp_path: Path) -> None:
    of = Saved(tmp_path / "runs", data_flags, model)
    load = of.trained_in(layout, "torch")
    assert open_checkpoint(load).format == "torch"
    same_bits(of, load, load.parent.name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *(("gqa", layout) for layout in ("tp2-sp",)),
        *(("deep", layout) for layout in ("vpp2", "tp2")),
        *(("tied", layout) for layout in ("tp2", "pp2")),
        *(("moe", layout) for layout in ("pp2", "tp2-ep2", "tp2-ep2-whole")),
    ],
)
def test_further_layouts(model: str, layout: str, data_flags, tmp_path: Path) -> None:
    _same_in(Saved(tmp_path / "runs", data_flags, model), layout, tmp_path)


def random_tokens(vocabulary: int) -> Tensor:
    return torch.randint(vocabulary, (2, 64), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def logits_of(model, tokens: Tensor) -> Tensor:
    return model(tokens, use_cache=False).logits


def mistakes(model) -> dict[str, object]:
    """Edits of an exported model that stand for conversions done wrong, as functions to call."""
    layer = model.model.layers[0]
    attention, config = layer.self_attn, model.config
    head = config.head_dim

    def swap(one: Tensor, other: Tensor) -> None:
        one.data, other.data = other.data.clone(), one.data.clone()

    def roll(weight: Tensor, rows: int) -> None:
        weight.data = weight.data.roll(rows, dims=0)

    found = {
        "keys and values exchanged": lambda: swap(attention.k_proj.weight, attention.v_proj.weight),
        "queries of the next head": lambda: roll(attention.q_proj.weight, head),
        "channels of a head paired otherwise": lambda: roll(attention.k_proj.weight, 1),
        "another epsilon": lambda: setattr(layer.input_layernorm, "variance_epsilon", 1e-4),
    }
    if hasattr(layer.mlp, "gate_proj"):
        found["gate and up exchanged"] = lambda: swap(layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight)
    else:
        found["experts in another order"] = lambda: roll(layer.mlp.gate.weight, 1)
    return found


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_the_exported_model_computes_what_megatrons_does(kind: str, request, tmp_path: Path) -> None:
    of: Saved = request.getfixturevalue(kind)
    tokens = random_tokens(512)
    reference = saved.megatron_logits(of.trained(), tokens, tmp_path)
    folder = exported(of.trained(), tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    report = compare(reference, logits_of(model, tokens), tokens, "random")
    assert report.agrees and report.spread > 1 and report.difference < 2e-5, str(report)  # as docs/checkpoints.md says
    for what in mistakes(model):
        broken = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        mistakes(broken)[what]()
        assert not compare(reference, logits_of(broken, tokens), tokens, "random").agrees, what


def test_transformers_generates_with_the_exported_tokenizer(dense: Saved, text: BuiltinCorpus, tmp_path: Path) -> None:
    tokenizer = open_tokenizer(text.tokenizer_model)
    folder = exported(dense.trained(), tmp_path / "model", tokenizer=tokenizer)
    words = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    prompt = words("import logging", return_tensors="pt", return_token_type_ids=False)
    assert prompt["input_ids"][0].tolist() == tokenizer.encode("import logging")
    answer = model.generate(**prompt, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert answer.shape[1] == prompt["input_ids"].shape[1] + 5
    assert words.decode(answer[0]).startswith("import logging")
    assert (model.config.bos_token_id, model.config.eos_token_id) == (1, 2)


def test_the_command_exports_and_verifies(experts: Saved, text: BuiltinCorpus, tmp_path: Path) -> None:
    words = ["export-hf", "--load", experts.trained(), "--save", tmp_path / "model", "--dtype", "bf16", "--verify"]
    words += ["--tokenizer", text.tokenizer_model]
    done = jobs.run([sys.executable, "-m", "simreg_megatron.cli", *map(str, words)], check=True)
    said = " ".join(done.stdout.split())
    assert "mixtral, bfloat16" in said and "agree: 4 sequences of 64 tokens (text)" in said
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert model.dtype == torch.bfloat16


def tiny_llama(folder: Path, dtype: torch.dtype) -> Path:
    """A Hugging Face LLaMA of the sizes of the tiny runs, with fewer tokens than a padded vocabulary."""
    config = transformers.LlamaConfig(
        vocab_size=510, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5, initializer_range=0.15,
    )  # fmt: skip
    torch.manual_seed(5)
    transformers.LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("layout", "dtype"), [("tp2", torch.float32), ("pp2", torch.bfloat16)])
def test_megatron_trains_from_an_imported_model(layout: str, dtype, data_flags, tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model", dtype)
    import_model(open_model(model), tmp_path / "imported")
    more = ("--bf16",) if dtype == torch.bfloat16 else ()
    of = Saved(tmp_path / "runs", data_flags, "gqa", more)
    load = of.again(layout, load=tmp_path / "imported")
    back = exported(load, tmp_path / "back", vocabulary=510)
    truth = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto").state_dict()
    found = transformers.AutoModelForCausalLM.from_pretrained(back, dtype="auto").state_dict()
    assert found.keys() == truth.keys() and found["lm_head.weight"].dtype == dtype
    for name, tensor in truth.items():
        assert torch.equal(found[name], tensor), name
    assert open_checkpoint(load).format == "torch_dist"


def test_an_interrupted_export_leaves_nothing(dense: Saved, tmp_path: Path) -> None:
    plan = plan_export(open_checkpoint(dense.trained()))

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        export(plan, tmp_path / "model", progress=stop)
        pytest.fail("the export was to be interrupted")
    assert list(tmp_path.iterdir()) == []
