# SPDX-License-Identifier: Apache-2.0
"""`evaluate`: scores against a computation by hand, paired differences, a Megatron checkpoint, refusals."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from pathlib import Path
from statistics import stdev

import numpy as np
import pytest
import torch

from simreg_megatron import cli
from simreg_megatron.notices import SentenceError
from simreg_megatron.tools.evaluate import PAPER, Score, chosen_tasks, difference, score_of, table
from simreg_megatron.tools.tokens import load_tokenizer, write_tokenizer
from tests.helpers.checkpoints import dist_checkpoint, tiny_config
from tests.helpers.questions import NAME, write_task
from tests.unit.test_export_hf import train_sentencepiece

lm_eval = pytest.importorskip("lm_eval")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_sentencepiece(tmp_path_factory.mktemp("tokenizer") / "t.model", json.__file__)


@pytest.fixture(scope="module")
def models(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models with weights of two seeds, wide enough that their answers differ from each other."""
    made = {}
    for seed, name in enumerate(("baseline", "simreg")):
        torch.manual_seed(seed)
        folder = tmp_path_factory.mktemp("models") / name
        config = tiny_config(hidden_size=64, vocab_size=500, max_position_embeddings=256, initializer_range=0.3)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
        write_tokenizer(load_tokenizer(str(tokenizer)), folder)
        made[name] = folder
    return made


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    folder = tmp_path_factory.mktemp("task")
    texts = [Path(module.__file__).read_text() for module in (json, subprocess, np, torch)]
    return folder, write_task(folder, [text[start : start + 800] for text in texts for start in (0, 1500, 4000)], 12)


def right_by_hand(folder: Path, questions: list[dict], *, bos: bool = False) -> list[bool]:
    """Return for each question whether the right choice is the likeliest."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    network = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    right = []
    for question in questions:
        sums = []
        for choice in question["choices"]:
            context = tokenizer(question["context"])["input_ids"]
            whole = [*([1] if bos else []), *tokenizer(question["context"] + choice)["input_ids"]]
            with torch.inference_mode():
                logs = network(torch.tensor([whole])).logits[0].double().log_softmax(-1)
            places = range(len(context) + bos, len(whole))
            sums.append(sum(logs[place - 1, whole[place]].item() for place in places))
        right.append(int(np.argmax(sums)) == question["answer"])
    return right


@pytest.mark.parametrize("bos", ["none", pytest.param("document", marks=pytest.mark.slow)])
def test_scores_and_differences_are_those_of_a_computation_by_hand(
    bos: str, models: dict[str, Path], task: tuple[Path, list[dict]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for name, path in models.items() for word in ("--model", f"{name}={path}")]
    options = ["--dtype", "float32", "--batch-size", "4", "--include", str(task[0]), "--bos", bos, "--device", "cpu"]
    status = cli.main(["evaluate", *words, "--output", str(tmp_path / "out"), "--tasks", NAME, *options])
    if bos == "document" and transformers.__version__ < "5":
        assert status == 2 and "puts no BOS before a text" in capsys.readouterr().err
        return
    assert status == 0
    printed = capsys.readouterr().out
    by_hand = [right_by_hand(folder, task[1], bos=bos == "document") for folder in models.values()]
    count = len(task[1])
    for name, right in zip(models, by_hand, strict=True):
        found = json.loads((tmp_path / "out" / f"{name}.json").read_text())
        answers = sorted(found["samples"][NAME], key=lambda sample: sample["doc_id"])
        assert [sample["acc"] for sample in answers] == right
        score = sum(right) / count
        error = math.sqrt(score * (1 - score) / (count - 1))
        assert f"| {name} | {100 * score:.2f} ± {100 * error:.2f} |" in printed
    apart = [100 * (int(other) - int(first)) for first, other in zip(*by_hand, strict=True)]
    line = f"| simreg | {sum(apart) / count:.2f} ± {stdev(apart) / count**0.5:.2f} |"
    assert printed.rstrip().endswith(line) and (tmp_path / "out" / "results.md").read_text().rstrip().endswith(line)
    assert f"|{NAME}|" in printed, "the harness's own table, too"


@pytest.mark.slow
def test_a_megatron_checkpoint_is_exported_first(
    tokenizer: Path, task: tuple[Path, list[dict]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("megatron.core")
    load = dist_checkpoint(tmp_path / "load", tiny_config(vocab_size=500, max_position_embeddings=256))
    words = ["evaluate", "--model", f"m={load}", "--output", str(tmp_path / "out"), "--tasks", f"{NAME}:acc_norm"]
    words += ["--dtype", "float32", "--include", str(task[0]), "--limit", "3"]
    assert cli.main(words) == 2 and "give the --tokenizer of its training" in capsys.readouterr().err
    assert cli.main([*words, "--tokenizer", str(tokenizer)]) == 0
    assert (tmp_path / "out" / "models" / "m" / "model.safetensors").is_file()
    found = json.loads((tmp_path / "out" / "m.json").read_text())
    value = 100 * found["results"][NAME]["acc_norm,none"]
    assert f"| m | {value:.2f} ± " in capsys.readouterr().out and len(found["samples"][NAME]) == 3


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--model", "a=MODEL", "--model", "a=MODEL"], "another name without"),
        (["--model", "a/b=MODEL"], "without /"),
        pytest.param(
            ["--model", "a=MODEL", "--tasks", f"{NAME}:f1"],
            f"{NAME}:METRIC with one of acc acc_norm",
            marks=pytest.mark.slow,
        ),
        (["--model", "a=MODEL", "--output", "FULL"], "already exists: name a new folder"),
        (["--model", "b=BARE"], "--model b has no tokenizer in"),
        (["--model", "p=PICKLED"], "names other files than .safetensors"),
    ],
)
def test_refusals(
    words: list[str], sentence: str, models: dict[str, Path], task: tuple[Path, list[dict]], tmp_path: Path, capsys
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "results.md").touch()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").touch()
    shutil.copytree(models["baseline"], pickled := tmp_path / "pickled")
    (pickled / "model.safetensors.index.json").write_text('{"weight_map": {"a": "weights.bin"}}')
    given, places = words, {"MODEL": models["baseline"], "FULL": tmp_path / "full", "BARE": tmp_path / "bare"}
    for name, place in {**places, "PICKLED": pickled}.items():
        given = [word.replace(name, str(place)) for word in given]
    output = [] if "--output" in words else ["--output", str(tmp_path / "out")]
    more = ["--include", str(task[0]), "--limit", "1", "--dtype", "float32"]
    assert cli.main(["evaluate", *given, *output, *more]) == 2
    assert sentence in capsys.readouterr().err


def test_the_papers_tasks_in_its_order() -> None:
    assert list(chosen_tasks("paper")) == list(PAPER)
    assert chosen_tasks("boolq,mine,piqa:acc") == {"boolq": "acc", "mine": "", "piqa": "acc"}


@pytest.mark.slow
def test_every_task_is_one_of_the_harness(task: tuple[Path, list[dict]]) -> None:
    assert not PAPER.keys() - set(lm_eval.tasks.TaskManager(include_path=str(task[0])).task_index)


def test_a_groups_questions_are_those_of_its_tasks() -> None:
    samples = {part: [{"doc_id": n, "filter": "none", "acc": float(n < right)} for n in range(4)]
               for part, right in (("x", 1), ("y", 3))}  # fmt: skip
    found = {
        "results": {"g": {"acc,none": 0.5, "acc_stderr,none": 0.2}, "p": {"word_perplexity,none": 80.0}},
        "group_subtasks": {"g": ["inner"], "inner": ["x", "y"]}, "samples": samples,
    }  # fmt: skip
    score = score_of(found, "g", "acc")
    assert (score.value, score.error, len(score.questions)) == (50.0, 20.0, 8)
    perplexity = score_of(found, "p", "word_perplexity")
    assert perplexity.value == 80.0 and math.isnan(perplexity.error) and not perplexity.questions, "shown as it is"
    with pytest.raises(SentenceError, match="one of acc"):
        score_of(found, "g", "f1")


def test_differences_without_questions_take_both_errors() -> None:
    assert difference(Score(50.0, 3.0), Score(46.0, 4.0)) == Score(4.0, 5.0)
    assert math.isnan(difference(Score(50.0, 3.0), Score(46.0, math.nan)).error)
    scores = {
        name: {task: Score(value, 3.0) for task in ("boolq", "piqa")} for name, value in (("a", 40.0), ("b", 41.0))
    }
    lines = list(table(scores))
    assert "| b | 41.00 ± 3.00 | 41.00 ± 3.00 | 41.00 ± 2.12 |" in lines
    assert lines[-1] == "| b | 1.00 ± 4.24 | 1.00 ± 4.24 | 1.00 ± 3.00 |"
