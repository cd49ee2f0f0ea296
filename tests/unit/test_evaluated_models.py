# SPDX-License-Identifier: Apache-2.0
"""Which model is evaluated, with which tokenizer and on which set: never another one by the same name."""

from __future__ import annotations

import ast
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("lm_eval")

import simreg_megatron
from simreg_megatron.checkpoint import dist_writer
from simreg_megatron.checkpoint.dist_writer import write
from simreg_megatron.checkpoint.export import export, plan_export
from simreg_megatron.checkpoint.source import TRACKER, open_checkpoint
from simreg_megatron.checkpoint.tokenizer import open_tokenizer
from simreg_megatron.cli import app
from simreg_megatron.data.encoding import describe_tokenizer, write_dataset
from simreg_megatron.data.tokenizer import train_tokenizer
from simreg_megatron.evaluation import compare, harness, models, paired, perplexity
from simreg_megatron.evaluation.errors import EvaluationError
from simreg_megatron.evaluation.results import Score, read
from tests.helpers.checkpoints import DENSE, as_weights, random_weights, transformers_release

TEXTS = [Path(json.__file__).read_text(), Path(shutil.__file__).read_text()]
SMALL = replace(DENSE, vocabulary=400)
COMMON = ("--tasks", "none", "--seq-length", "16", "--data-tokens", "64", "--dtype", "float32", "--offline")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """own.model and other.model, of 400 pieces each."""
    root = tmp_path_factory.mktemp("words")
    for name, text in zip(("own", "other"), TEXTS, strict=True):
        train_tokenizer([text], root / f"{name}.model", vocab_size=400)
    return root


@pytest.fixture(scope="module")
def data(words: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("data"), words / "own.model")


def prepared(folder: Path, tokenizer: Path, *, told: Path | None = None) -> Path:
    """A set with its manifest, which tells of the tokenizer `told`."""
    write_dataset(folder / "valid", TEXTS, tokenizer)
    facts = describe_tokenizer(str(told or tokenizer))
    files = {name: {"bytes": (folder / name).stat().st_size} for name in ("valid.bin", "valid.idx")}
    entries = {"files": files, "tokenizer_sha256": facts.sha256, "vocab_size": facts.vocab_size}
    settings = {"settings": {"tokenizer": {"kind": facts.kind}}, "tokenizer_name": facts.name}
    (folder / "manifest.json").write_text(json.dumps(entries | settings))
    return folder / "valid"


def trained(folder: Path, scale: float, monkeypatch: pytest.MonkeyPatch | None = None, **args: Any) -> Path:
    """A run's checkpoints, of step 10."""
    step = folder / "iter_0000010"
    step.mkdir(parents=True)
    if monkeypatch is not None:
        own = dist_writer.arguments
        monkeypatch.setattr(dist_writer, "arguments", lambda architecture: own(architecture) | args)
    write(step, SMALL, as_weights({name: scale * tensor for name, tensor in random_weights(SMALL).items()}))
    (folder / TRACKER).write_text("10")
    return folder


def run(*words: object) -> Any:
    return CliRunner().invoke(app, ["evaluate", *map(str, words)], env={"COLUMNS": "200"})


def losses(output: Path) -> list[float]:
    return [model.perplexities[0].loss for model in read(output / "results.json")[0]]


def test_another_run_by_the_same_name_and_step_is_another_model(words: Path, data: Path, tmp_path: Path) -> None:
    one, other = (trained(tmp_path / name, scale) for name, scale in (("A", 0.3), ("B", 0.6)))
    common = ["--output", tmp_path / "s", "--tokenizer", words / "own.model", "--data", data, *COMMON]
    found = []
    for checkpoints in (one, other, one):
        done = run("--model", f"m={checkpoints}", *common)
        assert done.exit_code == 0, done.output
        found += losses(tmp_path / "s")
    assert found[0] == found[2] and abs(found[0] - found[1]) > 0.01
    assert len(list((tmp_path / "s" / "models").iterdir())) == 2, "each is exported once"
    again = run("--model", f"m={one}", *common)
    assert again.exit_code == 0 and "> m:" not in again.output, "and evaluated once"


def test_another_tokenizer_is_another_setting(words: Path, data: Path, tmp_path: Path) -> None:
    run_of = trained(tmp_path / "A", 0.3)
    common = ["--model", f"m={run_of}", "--output", tmp_path / "s", "--data", data, *COMMON]
    done = run(*common, "--tokenizer", words / "own.model")
    assert done.exit_code == 0, done.output
    page = (tmp_path / "s" / "results.md").read_text()
    assert f"- tokenizer: sha256 {describe_tokenizer(str(words / 'own.model')).sha256}" in page
    note = "nothing shows whether"
    assert note in done.output and f"  - {note}" in page, "what the export says is told, and stays on the page"
    again = run(*common, "--tokenizer", words / "other.model")
    assert again.exit_code == 2 and "was made with another tokenizer: give another --output" in again.output


@pytest.mark.parametrize("said", [(), ("--bos", "none")])
def test_whether_texts_began_with_bos_must_be_said_where_releases_differ(
    said: tuple[str, ...], words: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = trained(tmp_path / "A", 0.3, monkeypatch, tokenizer_type="Llama2Tokenizer")
    monkeypatch.setattr(harness, "evaluate", lambda *_: ({"piqa": Score("acc_norm", 0.5, None, 4)}, {}))
    common = ["--model", f"m={checkpoints}", "--output", tmp_path / "s", "--tokenizer", words / "own.model"]
    done = run(*common, "--tasks", "piqa", "--offline", *said)
    if said:
        assert done.exit_code == 0 and "began every document with BOS" in (tmp_path / "s/results.md").read_text()
    else:
        assert done.exit_code == 2 and "say --bos document or --bos none" in done.output
        assert not (tmp_path / "s" / "models").exists()


def exported(words: Path, folder: Path) -> Path:
    checkpoints = trained(folder / "run", 0.3)
    export(plan_export(open_checkpoint(checkpoints), tokenizer=open_tokenizer(words / "own.model")), folder / "model")
    return folder / "model"


def test_bos_is_added_or_refused(words: Path, tmp_path: Path) -> None:
    model = exported(words, tmp_path)
    if transformers_release() < 5:
        with pytest.raises(EvaluationError, match="install transformers 5 or later"):
            models.refuse_without_bos(model)
    else:
        models.refuse_without_bos(model)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (model / name).exists():
            entries = json.loads((model / name).read_text())
            entries.pop("bos_token", None)
            (model / name).write_text(json.dumps(entries))
    with pytest.raises(EvaluationError, match="puts no begin-of-text token before a text: name its bos_token"):
        models.refuse_without_bos(model)


def test_a_set_of_another_tokenizer_is_refused_before_anything_is_loaded(
    words: Path, data: Path, tmp_path: Path
) -> None:
    model = exported(words, tmp_path)
    unfit: Callable[..., list[str]] = perplexity.refuse_unfit
    assert unfit(model, data, seq_length=16) == []
    foreign = prepared(tmp_path, words / "other.model")
    with pytest.raises(EvaluationError, match=r"valid was made with another tokenizer \(other.model\) than the one in"):
        unfit(model, foreign, seq_length=16)
    with pytest.raises(EvaluationError, match="made with another tokenizer"):
        perplexity.measure(model, foreign, seq_length=16)
    (model / "tokenizer.model").unlink()  # what is left is of another kind
    assert "nothing shows whether" in unfit(model, foreign, seq_length=16)[0]
    (tmp_path / "manifest.json").unlink()
    assert "nothing shows whether" in unfit(model, foreign, seq_length=16)[0]
    of_model = tmp_path / "of-model"
    of_model.mkdir()
    assert unfit(model, prepared(of_model, words / "own.model", told=model), seq_length=16) == []


def test_what_is_wrong_with_the_set_is_told_before_the_tasks(
    words: Path, data: Path, tmp_path: Path, monkeypatch
) -> None:
    model = exported(words, tmp_path)
    monkeypatch.setattr(harness, "evaluate", lambda *_: pytest.fail("hours are spent on tasks"))
    common = ["--model", f"m={model}", "--output", tmp_path / "s", "--tasks", "piqa", "--offline"]
    for more, sentence in (
        (("--data", tmp_path / "none"), "none"),
        (("--data", data, "--features", "17"), "the model has 16 features"),
        (("--data", data, "--seq-length", "999999"), "less than one sequence"),
    ):
        done = run(*common, *more)
        assert done.exit_code == 2 and sentence in done.output, done.output
        assert done.output.startswith("error: ") and len(done.output.splitlines()) == 1


def test_scores_stay_where_the_losses_fail(words: Path, data: Path, tmp_path: Path, monkeypatch) -> None:
    model = exported(words, tmp_path)
    asked = []
    found = harness.Found({"piqa": Score("acc_norm", 0.5, None, 4)}, {})
    monkeypatch.setattr(harness, "evaluate", lambda *_: asked.append(1) or found)
    common = ["--model", f"m={model}", "--output", tmp_path / "s", "--data", data, *COMMON, "--tasks", "piqa"]
    with monkeypatch.context() as patch:
        patch.setattr(compare.HeldOut, "measure", lambda *_: (_ for _ in ()).throw(EvaluationError("no memory")))
        assert "no memory" in run(*common).output
    (kept,) = read(tmp_path / "s" / "results.json")[0]
    assert kept.scores["piqa"].value == 0.5 and kept.perplexities == []
    done = run(*common)
    assert done.exit_code == 0 and len(asked) == 1, "no question is asked twice"
    assert losses(tmp_path / "s")[0] > 0


def test_the_batch_size_is_that_of_the_losses_too(words: Path, data: Path, tmp_path: Path, monkeypatch) -> None:
    sizes = []
    own = perplexity._batches
    monkeypatch.setattr(perplexity, "_batches", lambda *given: sizes.append(given[3]) or own(*given))
    common = ["--model", f"m={exported(words, tmp_path)}", "--data", data, *COMMON]
    for size in ("2", "auto"):
        assert run(*common, "--output", tmp_path / size, "--batch-size", size).exit_code == 0
    assert sizes == [2, 8] and losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "auto"))


@pytest.mark.parametrize("kind", ["output", "weights", "config", "batch", "limit"])
def test_an_ordinary_mistake_is_one_sentence(kind: str, words: Path, data: Path, tmp_path: Path) -> None:
    model = exported(words, tmp_path)
    (tmp_path / "file").write_text("")
    more: tuple[object, ...] = ()
    output = tmp_path / "s"
    if kind == "output":
        output, sentence = tmp_path / "file" / "s", "file/s: Not a directory"
    elif kind == "weights":
        (model / "model.safetensors").rename(model / "other.safetensors")
        torch.save({"lm_head.weight": torch.zeros(1)}, model / "pytorch_model.bin")
        sentence = "has a config.json and no model.safetensors (pickled weights are not read)"
    elif kind == "config":
        (model / "config.json").write_text('{"model_type": "lla')
        sentence = "transformers cannot read"
    else:
        more, sentence = {
            "batch": (("--batch-size", "0"), "--batch-size takes a number above 0, or auto, not '0'"),
            "limit": (("--limit", "-1"), "--limit"),
        }[kind]
    done = run("--model", f"m={model}", "--output", output, "--data", data, *COMMON, *more)
    assert done.exit_code == 2 and sentence in done.output, done.output
    assert not isinstance(done.exception, ValueError | OSError)
    if kind != "limit":
        assert done.output.startswith("error: ") and len(done.output.splitlines()) == 1, done.output


def test_bytes_are_those_of_the_text_as_it_was_written(words: Path, tmp_path: Path) -> None:
    """Some tokenizers are set to take spaces before punctuation out of what they decode."""
    model = exported(words, tmp_path)
    config = model / "tokenizer_config.json"
    name = "clean_up_tokenization_spaces"  # release 4 heeds it for every tokenizer, 5 only with the longer one
    spoiled = {name: True, f"{name}_for_bpe_even_though_it_will_corrupt_output": True}
    config.write_text(json.dumps(json.loads(config.read_text()) | spoiled))
    text = "one , two . three ! it 's"
    ids = open_tokenizer(words / "own.model").encode(text)
    assert perplexity._bytes_of(model, iter([ids, ids])) == [len(text)] * 2


def test_code_in_a_model_s_folder_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks on standard input, where the next line of a list may say y."""
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "unheard-of", "auto_map": {"AutoConfig": "own.Own"}, "vocab_size": 5})
    )
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(EvaluationError, match="transformers cannot read"):
        models.find("m", tmp_path)
    assert not (tmp_path / "ran").exists()


def test_every_model_is_loaded_without_its_code() -> None:
    """Also by those calls that a test of one folder does not reach."""
    calls = [
        (path, call)
        for path in (Path(simreg_megatron.__file__).parent).rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "from_pretrained"
    ]
    assert len(calls) >= 9
    for path, call in calls:
        given = {word.arg: getattr(word.value, "value", None) for word in call.keywords}
        assert given.get("trust_remote_code") is False, f"{path}:{call.lineno}"


def test_a_damaged_file_of_questions_is_named(tmp_path: Path) -> None:
    paired.keep(tmp_path / "q" / "a.npz", {"task x": np.arange(3)})
    assert paired.kept(tmp_path / "q" / "a.npz")["task x"].tolist() == [0, 1, 2]
    (tmp_path / "q" / "a.npz").write_bytes((tmp_path / "q" / "a.npz").read_bytes()[:40])
    with pytest.raises(EvaluationError, match=r"a\.npz is damaged"):
        paired.kept(tmp_path / "q" / "a.npz")

    def fails(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    paired.keep(tmp_path / "q" / "a.npz", {"task x": np.arange(3)})
    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError):
        patch.setattr(np, "savez_compressed", fails)
        paired.keep(tmp_path / "q" / "a.npz", {"task x": np.arange(9)})
    assert len(paired.kept(tmp_path / "q" / "a.npz")["task x"]) == 3, "the old one or the new one"


def test_two_programs_add_to_one_table(
    words: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One model on each GPU: who ended last once wrote its own alone."""
    for name, scale in (("A", 0.3), ("B", 0.6)):
        trained(tmp_path / name, scale)
    common = ["--output", tmp_path / "s", "--tokenizer", words / "own.model", "--data", data, *COMMON]
    measure, inside = compare.HeldOut.measure, list[Any]()

    def meanwhile(*given: Any) -> Any:
        if not inside:
            inside.append(None)
            inside[0] = run("--model", f"b={tmp_path / 'B'}", *common)
        return measure(*given)

    monkeypatch.setattr(compare.HeldOut, "measure", meanwhile)
    assert run("--model", f"a={tmp_path / 'A'}", *common).exit_code == 0
    assert inside[0].exit_code == 0, inside[0].output
    assert {model.name for model in read(tmp_path / "s" / "results.json")[0]} == {"a", "b"}


def test_another_set_by_the_same_name_is_another_setting(words: Path, data: Path, tmp_path: Path) -> None:
    trained(tmp_path / "A", 0.3)
    for path in data.parent.iterdir():
        shutil.copyfile(path, tmp_path / path.name)
    common = ["--output", tmp_path / "s", "--tokenizer", words / "own.model", "--data", tmp_path / data.name, *COMMON]
    assert run("--model", f"a={tmp_path / 'A'}", *common).exit_code == 0
    os.utime(tmp_path / f"{data.name}.bin")
    found = run("--model", f"c={tmp_path / 'A'}", *common)
    assert found.exit_code == 2 and "was made with another data files: give another --output" in found.output
