# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of Megatron's own loop, in every layout, become one and the same Hugging Face model, and come back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from simreg_megatron import cli
from simreg_megatron.tools.builtin_corpus import BuiltinCorpus
from simreg_megatron.tools.checkpoints import checkpoint_folder
from simreg_megatron.tools.export_hf import export, read
from tests.helpers.megatron_logits import TOLERANCE, compare
from tests.helpers.quick import quick_rows
from tests.megatron import forks, runs
from tests.megatron.runs import Recorded

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def saved(data_flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    return cache(lambda model: Saved(tmp_path_factory.mktemp(model), data_flags, model))


def exported(load: Path, save: Path) -> Path:
    export(checkpoint_folder(load), save)
    return save


QUICK = [("gqa", "tp2"), ("moe", "ep2")]
SAME = [*QUICK, ("gqa", "pp2"), ("gqa", "tp2-sp"), ("deep", "vpp2"), ("deep", "tp2"), ("tied", "tp2"), ("tied", "pp2")]
SAME += [("moe", layout) for layout in ("pp2", "tp2-sp", "tp2-ep2", "tp2-ep2-whole")]


@pytest.mark.parametrize(("model", "layout"), quick_rows(SAME, lambda case: case in QUICK))
def test_layouts_export_the_same_bits(model: str, layout: str, saved, tmp_path: Path) -> None:
    """One checkpoint, loaded and saved by Megatron in another layout: files of other shapes, the same export."""
    of = saved(model)
    one, other = exported(of.trained(), tmp_path / "one"), exported(of.again(layout), tmp_path / layout)
    for file in ("model.safetensors", "config.json"):
        assert (one / file).read_bytes() == (other / file).read_bytes(), file
    found = transformers.AutoModelForCausalLM.from_pretrained(other).state_dict()
    truth = of.recorded["trained"].params  # what Megatron's rank had in memory
    for name, megatrons in {
        "model.embed_tokens.weight": "embedding.word_embeddings.weight",
        "model.layers.1.self_attn.o_proj.weight": "decoder.layers.1.self_attention.linear_proj.weight",
        "model.layers.1.post_attention_layernorm.weight": "decoder.layers.1.pre_mlp_layernorm.weight",
    }.items():
        assert torch.equal(found[name], truth[megatrons]), name
    if layout.startswith("tp"):
        assert _num_chunks(of.again(layout)) > _num_chunks(of.trained()), "the layouts are the same"


def _num_chunks(load: Path) -> int:
    from torch.distributed.checkpoint import FileSystemReader

    stored = FileSystemReader(checkpoint_folder(load)).read_metadata().state_dict_metadata
    return sum(len(getattr(entry, "chunks", ())) for entry in stored.values())


@pytest.mark.slow
def test_the_older_format_is_left_to_megatron(data_flags, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The sentence names flags with which Megatron converts it; what it writes exports."""
    of = Saved(tmp_path / "runs", data_flags, "gqa")
    load = of.trained_in("tp2", "torch")
    assert cli.main(["export-hf", "--load", str(load), "--save", str(tmp_path / "model")]) == 2
    assert "--ckpt-convert-format torch_dist --ckpt-convert-save FOLDER" in capsys.readouterr().err
    flags = (*data_flags, "--load", str(load), *LAYOUTS["tp2"], "--train-iters", "2", "--eval-iters", "0")
    convert = "--ckpt-format torch --ckpt-convert-format torch_dist --ckpt-convert-save"
    flags += (*convert.split(), str(tmp_path / "to"))
    runs.attempt(tmp_path / "out", flags, model="gqa", processes=2, plain=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(exported(tmp_path / "to/torch_dist", tmp_path / "model"))
    head = of.recorded[load.parent.name].params["output_layer.weight"]
    assert torch.equal(model.lm_head.weight, head)


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


@pytest.mark.parametrize("model", ["gqa", "moe"])
def test_the_exported_model_computes_what_megatrons_does(model: str, saved, tmp_path: Path) -> None:
    of, tokens = saved(model), random_tokens(512)
    reference = logits_of_megatron(of.trained(), tokens, tmp_path)
    folder = exported(of.trained(), tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    difference, spread = compare(reference, logits_of(model, tokens))
    assert spread > 1 and difference < 2e-5, "as docs/checkpoints.md says"
    for what in mistakes(model):
        broken = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        mistakes(broken)[what]()
        difference, spread = compare(reference, logits_of(broken, tokens))
        assert difference > TOLERANCE * spread, what


def test_the_command_exports(saved, text: BuiltinCorpus, tmp_path: Path) -> None:
    words = ["export-hf", "--load", saved("moe").trained(), "--save", tmp_path / "model"]
    words += ["--tokenizer", text.tokenizer_model]
    done = runs.forked(_command, [str(word) for word in words], folder=tmp_path)
    assert done.status == 0, done.output
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert model.dtype == torch.float32 and type(model).__name__ == "MixtralForCausalLM"


def tiny_llama(folder: Path, dtype: torch.dtype, rows: int) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=rows, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5, initializer_range=0.15,
    )  # fmt: skip
    torch.manual_seed(5)
    transformers.LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    return folder


def _command(words: list[str]) -> None:
    forks.quick_save()
    sys.exit(cli.main(words))


@pytest.mark.parametrize(("layout", "dtype", "rows"), [("tp2", torch.float32, 510), ("pp2", torch.bfloat16, 600)])
def test_megatron_trains_from_an_imported_model(layout: str, dtype, rows: int, data_flags, tmp_path: Path) -> None:
    """With fewer rows than the tokenizer's 512 tokens, and with more, which a flag of those printed keeps."""
    model = tiny_llama(tmp_path / "model", dtype, rows)
    words = ["import-hf", "--model", str(model), "--save", str(tmp_path / "imported")]
    done = runs.forked(_command, words, folder=tmp_path)
    assert done.status == 0, done.output
    more = ("--bf16",) if dtype == torch.bfloat16 else ()
    if rows > 512:
        assert f"--make-vocab-size-divisible-by {rows} keeps the {rows} rows of the embedding" in done.output
        more += ("--make-vocab-size-divisible-by", str(rows))
    of = Saved(tmp_path / "runs", data_flags, "gqa", more)
    load = of.again(layout, load=tmp_path / "imported")
    back = exported(load, tmp_path / "back")
    truth = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto").state_dict()
    found = transformers.AutoModelForCausalLM.from_pretrained(back, dtype="auto").state_dict()
    assert found.keys() == truth.keys() and found["lm_head.weight"].dtype == dtype
    for name, tensor in truth.items():
        assert torch.equal(found[name][: len(tensor)], tensor), name
    assert len(read(checkpoint_folder(load))[1]["output_layer.weight"]) >= max(rows, 512)


# Tiny checkpoints of Megatron's own loop, and the same weights saved again in other layouts ---------------------------

# Wide initial weights: attention and experts then matter for the logits after two steps already.
_TRAINING = ("--init-method-std", "0.15", "--train-iters", "2", "--eval-iters", "0")
_STANDING_STILL = ("--lr", "0", "--min-lr", "0", "--weight-decay", "0", "--finetune", "--train-iters", "1")
LAYOUTS: dict[str, tuple[str, ...]] = {
    "one": (),
    "tp2": ("--tensor-model-parallel-size", "2"),
    "pp2": ("--pipeline-model-parallel-size", "2"),
    "vpp2": ("--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"),
    "ep2": ("--expert-model-parallel-size", "2"),
    "tp2-sp": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
}
LAYOUTS["tp2-ep2-whole"] = (*LAYOUTS["tp2-sp"], *LAYOUTS["ep2"], "--expert-tensor-parallel-size", "1")
# Experts are split over tensor ranks too; gloo cannot gather the unequal numbers of tokens of the other dispatcher.
LAYOUTS["tp2-ep2"] = (*LAYOUTS["tp2-sp"], *LAYOUTS["ep2"], "--moe-token-dispatcher-type", "allgather")


@dataclass
class Saved:
    """A model's checkpoints in several layouts; each is made when it is first asked for."""

    folder: Path
    data_flags: tuple[str, ...]
    model: str  # of `runs.MODELS`
    more: tuple[str, ...] = ()  # flags for all runs
    recorded: dict[str, Recorded] = field(default_factory=dict)

    def trained(self) -> Path:
        """Two steps on one rank: the weights that all others hold again."""
        return self._run("trained", _TRAINING)

    def trained_in(self, layout: str, ckpt_format: str) -> Path:
        """Two steps in another layout: other weights, by rounding."""
        name = f"trained-{layout}-{ckpt_format}"
        return self._run(name, (*_TRAINING, *LAYOUTS[layout], "--ckpt-format", ckpt_format), layout)

    def again(self, layout: str, *, load: Path | None = None) -> Path:
        """The same weights, loaded by Megatron in another layout and saved after a step that moves nothing."""
        source = load or self.trained()
        flags = (*_STANDING_STILL, "--load", str(source), *LAYOUTS[layout], "--eval-iters", "0")
        return self._run(f"{layout}-{source.name}", flags, layout)

    def _run(self, name: str, flags: Sequence[str], layout: str = "one") -> Path:
        out = self.folder / self.model / name
        if name not in self.recorded:
            place = ("--save", str(out / "saved"), "--save-interval", "2")
            processes = {"one": 1, "tp2-ep2": 4}.get(layout, 2)
            options = {"model": self.model, "processes": processes, "plain": True}
            self.recorded[name] = runs.train(out, (*self.data_flags, *self.more, *flags, *place), **options)
        return out / "saved"


def logits_of_megatron(load: Path, tokens: Tensor, scratch: Path) -> Tensor:
    """Logits of Megatron's own model, on a forked rank that has Megatron in memory already."""
    given, found = scratch / "tokens.pt", scratch / "logits.pt"
    torch.save(tokens, given)
    log = scratch / "log"
    if forks.run_ranks(_write_logits, load, given, found, processes=1, log=log, timeout=120):
        raise runs.RunError(log.read_text()[-4000:])
    return torch.load(found, weights_only=True)


def _write_logits(load: Path, given: Path, found: Path) -> None:
    from simreg_megatron.tools.checkpoints import checkpoint_folder
    from tests.helpers.megatron_logits import megatron_logits

    tokens = torch.load(given, weights_only=True)
    torch.save(megatron_logits(checkpoint_folder(load), tokens), found)
