# SPDX-License-Identifier: Apache-2.0
"""Evaluation: scores against a computation by hand, perplexity likewise, tables, offline data, refusals."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("lm_eval")

from simreg_megatron.checkpoint.tokenizer import open_tokenizer
from simreg_megatron.cli import app
from simreg_megatron.data import BuiltinCorpus
from simreg_megatron.data.tokens import document_lengths, open_tokens
from simreg_megatron.evaluation import compare, harness, local_data, paired, table
from simreg_megatron.evaluation import models as sources
from simreg_megatron.evaluation.errors import EvaluationError
from simreg_megatron.evaluation.harness import task_manager
from simreg_megatron.evaluation.local_data import local_datasets
from simreg_megatron.evaluation.paper import rows
from simreg_megatron.evaluation.perplexity import measure
from simreg_megatron.evaluation.results import ModelResults, Score, difference, read, write
from simreg_megatron.evaluation.tasks import FURTHER, PAPER, Choice, choose
from tests.helpers.questions import NAME, write_task
from tests.megatron import text as texts


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> BuiltinCorpus:
    return texts.make_corpus(tmp_path_factory.mktemp("text") / "corpus")


@pytest.fixture(scope="module")
def models(corpus: BuiltinCorpus, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two tiny models with weights of two seeds, wide enough that their answers differ from each other."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = open_tokenizer(corpus.tokenizer_model)
    made = {}
    for seed, name in enumerate(("baseline", "simreg")):
        torch.manual_seed(seed)
        folder = tmp_path_factory.mktemp("models") / name
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = LlamaConfig(
            vocab_size=tokenizer.size, max_position_embeddings=256, initializer_range=0.3,
            bos_token_id=tokenizer.bos, eos_token_id=tokenizer.eos, pad_token_id=tokenizer.eos, **sizes,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder)
        tokenizer.write(folder)
        made[name] = folder
    return made


SHORT = [{"context": one, "choices": [" in", " of", " to", " as"], "answer": 0} for one in "abcdefghijklmnopqrstuvwx"]
"""Questions whose answers depend on every token before them."""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    folder = tmp_path_factory.mktemp("task")
    questions = write_task(folder, texts.documents(), 12)
    (folder / "short.jsonl").write_text("".join(json.dumps(question) + "\n" for question in SHORT))
    of_the_other = (folder / f"{NAME}.yaml").read_text()
    (folder / "short.yaml").write_text(of_the_other.replace(NAME, "short").replace("questions.jsonl", "short.jsonl"))
    return folder, questions


def run(*words: str):
    return CliRunner().invoke(app, ["evaluate", *words], env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def found(models, task, corpus, tmp_path_factory):
    """One evaluation of both models, for all tests that look at what it left."""
    output = tmp_path_factory.mktemp("found")
    words = [word for name, path in models.items() for word in ("--model", f"{name}={path}")]
    options = ["--dtype", "float32", "--batch-size", "4", "--offline", "--include", str(task[0])]
    held_out = ["--data", str(corpus.valid_prefix), "--seq-length", "64", "--data-tokens", "500", "--features", "16"]
    command = [*words, "--output", str(output), "--tasks", NAME, *options, *held_out]
    return output, command, run(*command)


@functools.cache
def network_of(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits_of(folder: Path, tokens: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return network_of(folder)(torch.tensor([tokens])).logits[0].double().numpy()


def log_probability(logits: np.ndarray, targets: list[int]) -> float:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    normal = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return float(sum(normal[place, target] for place, target in enumerate(targets)))


def right_by_hand(folder: Path, questions: list[dict], *, bos: bool = False) -> list[bool]:
    """Of each question, whether the right choice is the likeliest."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    before = [tokenizer.bos_token_id] if bos else []
    right = []
    for question in questions:
        context = [*before, *tokenizer(question["context"], add_special_tokens=False)["input_ids"]]
        sums = []
        for choice in question["choices"]:
            whole = [*before, *tokenizer(question["context"] + choice, add_special_tokens=False)["input_ids"]]
            sums.append(log_probability(logits_of(folder, whole[:-1])[len(context) - 1 :], whole[len(context) :]))
        right.append(int(np.argmax(sums)) == question["answer"])
    return right


def test_the_score_is_what_a_computation_by_hand_gives(found, models, task) -> None:
    output, _, done = found
    assert done.exit_code == 0, done.output
    results, settings = read(output / "results.json")
    assert settings["begin-of-text token"] == "none" and settings["few-shot examples"] == 0
    for result in results:
        right = sum(right_by_hand(models[result.name], task[1]))
        score = result.scores[NAME]
        assert score.value == pytest.approx(right / len(task[1])) and score.questions == len(task[1])
        assert score.error == pytest.approx(math.sqrt(score.value * (1 - score.value) / (len(task[1]) - 1)))


def test_a_begin_of_text_token_is_the_first_of_every_question(models, task) -> None:
    protocol = harness.Protocol(
        add_bos=True, dtype="float32", batch_size="4", device="cpu", include=task[0], offline=True
    )
    answers = harness.evaluate(models["simreg"], [Choice("short")], protocol).questions[paired.task_of("short")]
    right = right_by_hand(models["simreg"], SHORT, bos=True)
    assert answers.tolist() == right != right_by_hand(models["simreg"], SHORT)


def states_of(folder: Path, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    network = network_of(folder)
    with torch.inference_mode():
        states = network(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0]
    return states.double().numpy(), network.lm_head.weight.detach().double().numpy()


@pytest.mark.parametrize("family", ["cohere", "gpt2"])
def test_a_model_has_its_own_logits(family: str, corpus, tmp_path: Path) -> None:
    """Scaled, or of a model whose body has another name; a prefix of scaled ones means nothing."""
    from transformers import CohereConfig, CohereForCausalLM, GPT2Config, GPT2LMHeadModel

    size = open_tokenizer(corpus.tokenizer_model).size
    if family == "cohere":
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        CohereForCausalLM(CohereConfig(vocab_size=size, logit_scale=0.0625, **sizes)).save_pretrained(tmp_path)
    else:
        GPT2LMHeadModel(GPT2Config(vocab_size=size, n_positions=64, n_embd=32, n_layer=1, n_head=2)).save_pretrained(
            tmp_path
        )
    tokens = open_tokens(corpus.valid_prefix)[:33].tolist()
    by_hand = -log_probability(logits_of(tmp_path, tokens[:-1]), tokens[1:]) / 32
    settings = {"seq_length": 32, "max_tokens": 32, "dtype": "float32", "device": "cpu"}
    (whole,) = measure(tmp_path, corpus.valid_prefix, **settings).losses
    assert whole.loss == pytest.approx(by_hand, rel=1e-5)
    if family == "gpt2":
        with pytest.raises(EvaluationError, match=r"--seq-length 65: the model has 64 positions"):
            measure(tmp_path, corpus.valid_prefix, **settings | {"seq_length": 65})
    if family == "cohere":
        with pytest.raises(EvaluationError, match=r"scaled, capped or shifted"):
            measure(tmp_path, corpus.valid_prefix, features=(16,), **settings)


def test_a_later_step_is_another_model(tmp_path: Path) -> None:
    run, states = tmp_path / "run", set()
    for step in (10, 20):
        (run / f"iter_00000{step}").mkdir(parents=True)
        (run / f"iter_00000{step}" / "common.pt").write_text(str(step))
        (run / "latest_checkpointed_iteration.txt").write_text(str(step))
        source = sources.find("a", run)
        assert source.path == run / f"iter_00000{step}" and source.is_checkpoint
        states.add(source.state)
        with pytest.raises(EvaluationError, match="give the --tokenizer"):
            sources.exported("a", source, tmp_path / "out", None, bos_is_said=True)
    assert len(states) == 2


def test_another_sequence_length_is_another_setting() -> None:
    one, other = (compare.HeldOut(Path("valid"), length, None, ()).shown() for length in (64, 128))
    assert one != other


def test_the_perplexity_is_what_a_computation_by_hand_gives(found, models, corpus) -> None:
    """From all features, and from a prefix of them through the truncated output layer."""
    tokens = open_tokens(corpus.valid_prefix)
    for result in read(found[0] / "results.json")[0]:
        assert [held.features for held in result.perplexities] == [64, 16]
        for held in result.perplexities:
            assert held.tokens == 500 // 64 * 64
            total = 0.0
            for at in range(0, held.tokens, 64):
                states, head = states_of(models[result.name], tokens[at : at + 64].tolist())
                logits = states[:, : held.features] @ head[:, : held.features].T
                total += log_probability(logits, tokens[at + 1 : at + 65].tolist())
            assert held.loss == pytest.approx(-total / held.tokens, rel=1e-5)
            assert held.perplexity == pytest.approx(math.exp(held.loss))
        assert result.perplexities[0].loss != pytest.approx(result.perplexities[1].loss, rel=1e-2)


def test_each_question_and_each_document_is_kept_and_adds_up(found, corpus, models) -> None:
    from transformers import AutoTokenizer

    tokens = open_tokens(corpus.valid_prefix)
    lengths = document_lengths(corpus.valid_prefix)
    assert lengths.sum() == len(tokens) and len(lengths) > 1
    for result in read(found[0] / "results.json")[0]:
        kept = paired.kept(found[0] / "questions" / f"{result.name}.npz")
        score, whole = result.scores[NAME], result.perplexities[0]
        assert kept[f"task {NAME}"].shape == (12,) and kept[f"task {NAME}"].mean() == pytest.approx(score.value)
        assert score.chance == 0.25
        assert kept[paired.TOKENS].sum() == whole.tokens
        assert kept[paired.LOSS].sum() == pytest.approx(whole.loss * whole.tokens)
        first = int(lengths[0])  # its first token is no target
        assert kept[paired.TOKENS][0] == min(first - 1, whole.tokens)
        tokenizer = AutoTokenizer.from_pretrained(models[result.name])
        text = tokenizer.decode(tokens[1 : min(first, whole.tokens + 1)].astype(int).tolist(), skip_special_tokens=True)
        assert kept[paired.BYTES][0] == len(text.encode()) > 0
        assert whole.bytes == kept[paired.BYTES].sum()
        assert whole.bits_per_byte == pytest.approx(whole.loss * whole.tokens / whole.bytes / math.log(2))


def test_differences_are_paired_with_their_intervals(found) -> None:
    first, other = (paired.kept(found[0] / "questions" / f"{name}.npz") for name in ("baseline", "simreg"))
    pairs = paired.pairs_of(other, first)
    page = (found[0] / "results.md").read_text()
    asked = pairs.tasks[NAME]
    told = f"{100 * asked.value:+.2f} ({100 * asked.low:+.2f} to {100 * asked.high:+.2f})"
    assert f"| simreg minus baseline | {told} | {told} |" in page, "the task, and the mean over tasks"
    scores = [model.scores[NAME].value for model in read(found[0] / "results.json")[0]]
    assert asked.value == pytest.approx(scores[1] - scores[0])


def test_the_losses_of_documents_are_those_of_their_own_targets(models, tmp_path: Path) -> None:
    from simreg_megatron.data.indexed import PairWriter

    ids = np.random.default_rng(0).integers(300, 500, 200).astype(np.uint16)
    pair = PairWriter(tmp_path / "three", "uint16")
    pair.append(ids, np.array([70, 30, 100]))
    pair.commit()
    losses, documents = measure(models["baseline"], tmp_path / "three", seq_length=64, dtype="float32")
    assert losses[0].tokens == 192 and documents[paired.TOKENS].tolist() == [69, 30, 93]
    logits = [logits_of(models["baseline"], ids[at : at + 64].tolist()) for at in (0, 64, 128)]
    each = [
        -log_probability(part[place : place + 1], [int(ids[64 * number + place + 1])])
        for number, part in enumerate(logits)
        for place in range(64)
    ]
    expected = [sum(each[:69]), sum(each[69:99]), sum(each[99:])]
    assert documents[paired.LOSS] == pytest.approx(expected, rel=1e-5)
    other = measure(models["simreg"], tmp_path / "three", seq_length=64, dtype="float32")
    pairs = paired.pairs_of(other.documents, documents)
    assert pairs.nats_per_token.value == pytest.approx(other.losses[0].loss - losses[0].loss)
    page = table.losses_paired("baseline", {"simreg": pairs})
    nats, bits = pairs.nats_per_token, pairs.bits_per_byte
    assert f"| nats per token | {nats.value:+.4f} | {nats.low:+.4f} to {nats.high:+.4f} | 3 |" in page
    assert f"| bits per byte | {bits.value:+.4f} |" in page


def test_the_paired_interval_is_the_one_of_the_differences() -> None:
    """Two models that differ in one question of twenty: independent errors would hide it."""
    draw = np.random.default_rng(0)
    first = (draw.random(2000) < 0.4).astype(float)
    other = first.copy()
    other[np.flatnonzero(first == 0)[:100]] = 1.0
    got = paired.paired(other, first)
    error = (other - first).std() / math.sqrt(2000)
    assert got.value == pytest.approx(0.05) and got.is_clear
    assert (got.low, got.high) == pytest.approx((0.05 - 1.96 * error, 0.05 + 1.96 * error), abs=0.1 * error)
    independent = math.hypot(first.std(), other.std()) / math.sqrt(2000)
    assert independent > 3 * error
    assert paired.paired(other, first).low == got.low, "the same draws every time"
    assert paired.paired(other, first, name="other").low != got.low, "and others for another task of as many questions"
    assert paired.paired(other[:-1], first) is None and paired.paired(other[:1], first[:1]) is None
    mean = paired.mean_of([got, paired.paired(first, first)])
    assert mean.value == pytest.approx(0.025) and mean.high - mean.low == pytest.approx((got.high - got.low) / 2)


def test_losses_are_weighed_by_their_tokens() -> None:
    tokens = np.array([10.0, 1000.0])
    first = {paired.LOSS: np.array([50.0, 4000.0]), paired.TOKENS: tokens, paired.BYTES: 4 * tokens}
    other = first | {paired.LOSS: np.array([60.0, 4100.0])}
    pairs = paired.pairs_of(other, first)
    assert pairs.nats_per_token.value == pytest.approx(110 / 1010) and pairs.nats_per_token.value != pytest.approx(0.55)
    assert pairs.bits_per_byte.value == pytest.approx(110 / 4040 / math.log(2))
    elsewhere = other | {paired.TOKENS: tokens + 1}
    assert paired.pairs_of(elsewhere, first).nats_per_token is None, "other documents"


@pytest.mark.parametrize(
    ("value", "chance", "questions", "noise"),
    [
        (0.27, 0.25, 500, True),
        (0.30, 0.25, 500, False),
        (0.27, 0.25, 50_000, False),
        (0.2, 0.25, 500, True),
        (0.3, None, 9, False),
    ],
)
def test_what_guessing_could_have_scored_is_marked(value, chance, questions, noise) -> None:
    score = Score("acc", value, 0.01, questions, chance)
    assert score.is_noise == noise
    page = table.report([ModelResults("a", "x", {"t": score})], {})
    assert (" * |" in page) == noise and ("within the noise of chance" in page) == noise


def sample(number: int, right: str, *, choices: int = 2, answer: int = 0) -> dict:
    texts = [right if place == answer else f"wrong {number} {place}" for place in range(choices)]
    asked = [("question", text) for text in texts]
    return {
        "doc_id": number,
        "acc": 1.0,
        "filter": "none",
        "target": answer,
        "arguments": asked,
        "filtered_resps": asked,
    }


@pytest.mark.parametrize(
    ("samples", "chance"),
    [
        ([sample(number, f"right {number}") for number in range(100)], 0.5),  # always the first: nobody's answer
        ([sample(number, "yes" if number < 80 else "no") for number in range(100)], 0.8),
        ([sample(number, "yes" if number < 52 else "no") for number in range(100)], 0.5),
        ([sample(number, f"{number}", choices=2 + 2 * (number % 2)) for number in range(100)], 0.375),
    ],
)
def test_chance_is_a_guess_or_the_commonest_answer(samples: list[dict], chance: float) -> None:
    found = {
        "n-samples": {"t": {"effective": 100}},
        "configs": {"t": {"output_type": "multiple_choice"}},
        "samples": {"t": samples},
    }
    answers = harness.Answers(found)
    assert answers.chance(Choice("t", "acc")) == pytest.approx(chance)
    found["configs"]["t"]["output_type"] = "generate_until"
    assert harness.Answers(found).chance(Choice("t", "acc")) is None


def test_the_questions_of_a_group_are_those_of_its_tasks_in_one_order() -> None:
    logged = [
        {"doc_id": place, "acc": float(place), "filter": name} for place in (2, 0, 1) for name in ("none", "other")
    ]
    found = {
        "n-samples": {"one": {"effective": 3}, "two": {"effective": 3}},
        "group_subtasks": {"all": ["part", "two"], "part": ["one"]},
        "samples": {"one": logged, "two": logged},
    }
    answers = harness.Answers(found)
    assert answers.number("all") == 6 and answers.number("one") == 3
    assert answers.parts(Choice("all"), Score("acc", 1.0, None, 6))["task all"].tolist() == [0, 1, 2, 0, 1, 2]
    assert answers.parts(Choice("all"), Score("acc", 0.9, None, 6)) == {}, "the score is no mean of them"
    for each in logged:
        each["acc"] = (["a prediction"], 1.0)
    assert answers.parts(Choice("all"), Score("acc", 1.0, None, 6)) == {}


def answered(**right: list[float]) -> harness.Answers:
    """A group of tasks, and what each of their questions counts."""
    return harness.Answers(
        {
            "n-samples": {task: {"effective": len(values)} for task, values in right.items()},
            "group_subtasks": {"all": list(right)},
            "samples": {
                task: [{"doc_id": place, "m": value} for place, value in enumerate(values)]
                for task, values in right.items()
            },
        }
    )


def test_the_difference_of_a_mean_over_tasks_is_that_of_the_scores() -> None:
    """Of a large task and a small one, each half of the score: questions alike in weight would say -0.98."""
    large, small = [1.0] * 990 + [0.0] * 10, [1.0, 0.0]
    first = Score("m", (0.99 + 0.5) / 2, 0.01, 1002)
    other = Score("m", (0.01 + 0.5) / 2, 0.01, 1002)
    kept = [
        answered(one=one, two=small).parts(Choice("all", "m"), score)
        for one, score in ((large, first), ([1 - value for value in large], other))
    ]
    assert set(kept[0]) == {"task all / one", "task all / two"}
    pairs = paired.pairs_of(kept[1], kept[0])
    assert pairs.tasks["all"].value == pytest.approx(other.value - first.value) == pytest.approx(-0.49)
    assert -0.51 < pairs.tasks["all"].low < -0.49 < pairs.tasks["all"].high < -0.47
    models = [ModelResults(name, "x", {"all": score}) for name, score in (("a", first), ("b", other))]
    assert "| b minus a | -49.00 (" in table.scores_table(models, pairs={"b": pairs})


def test_a_perplexity_is_shown_as_it_is_and_paired_with_nothing() -> None:
    """The harness logs log-likelihoods, and its score is the exponential of less their mean."""
    values = [-2.0, -3.0, -4.0]
    choice = Choice("one", "m")
    answers = answered(one=values)
    score = harness._score(choice, {"one": {"m,none": math.exp(3), "m_stderr,none": 2.0}}, answers)
    assert not score.is_share and answers.parts(choice, score) == {}
    share = Score("acc", 0.5, 0.1, 3)
    models = [ModelResults(name, "x", {"one": replace(score, value=value), "t": share}) for name, value in
              (("a", 20.0), ("b", 18.5))]  # fmt: skip
    page = table.scores_table(models)
    assert (
        "| model | one (m, as it is) | t (acc) | mean |" in page and "| a | 20.00 ± 2.00 | 50.00 ± 10.00 |  |" in page
    )
    assert "| b minus a | -1.50 ± 2.83 | +0.00 ± 14.14 |  |" in page


def test_a_score_out_of_a_hundred_becomes_a_share() -> None:
    """As the F1 of squadv2, of which the harness's number is a percentage."""
    choice = Choice("one", "m", scale=0.01)
    answers = answered(one=[100.0, 40.0, 10.0])
    score = harness._score(choice, {"one": {"m,none": 50.0, "m_stderr,none": 26.5}}, answers)
    assert (score.value, score.error) == (pytest.approx(0.5), pytest.approx(0.265))
    assert answers.parts(choice, score)["task one"].tolist() == pytest.approx([1.0, 0.4, 0.1])
    assert {known.name: known.scale for known in (*PAPER, *FURTHER) if known.scale != 1} == {"squadv2": 0.01}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("ai2_arc", "ai2_arc is a tag of tasks and has no score of its own: name them, --tasks arc_challenge,arc_easy"),
        ("mmlu:em", "the group mmlu has no mean of em over its tasks: name one of acc as --tasks mmlu:METRIC"),
        (
            "two_of_them",
            "two_of_them is a group of tasks and has no score of its own: name them, --tasks arc_easy,piqa",
        ),
    ],
)
def test_names_without_a_score_of_their_own_are_refused(name: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text("group: two_of_them\ntask: [arc_easy, piqa]\n")
    with pytest.raises(EvaluationError, match=re.escape(told)):
        harness.refuse_unknown(choose([name], allow_code=False), tmp_path)


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("paper", "mmlu_anatomy"), "--tasks names mmlu and mmlu_anatomy, and the task mmlu_anatomy is in both"),
        (("arc_easy", "both_arcs"), "--tasks names arc_easy and both_arcs, and the task arc_easy is in both"),
    ],
)
def test_tasks_that_overlap_are_refused(names: tuple[str, str], told: str, tmp_path: Path) -> None:
    (tmp_path / "both.yaml").write_text("group: both_arcs\ntask: [ai2_arc]\naggregate_metric_list: [{metric: acc}]\n")
    with pytest.raises(EvaluationError, match=re.escape(told)):
        harness.refuse_unknown(choose(names, allow_code=False), tmp_path)
    harness.refuse_unknown(choose(["piqa", "both_arcs"], allow_code=False), tmp_path)


def test_a_name_that_no_definition_mentions_is_refused_before_anything_is_loaded(task, monkeypatch) -> None:
    monkeypatch.setattr(harness, "task_manager", lambda include: pytest.fail("the index was made"))
    with pytest.raises(EvaluationError, match=r"knows no task helaswag \(near it: .*hellaswag"):
        harness.refuse_unknown([Choice("helaswag")], task[0])
    harness.refuse_unknown([*PAPER, *FURTHER], None)
    known = {NAME: SimpleNamespace(kind=SimpleNamespace(name="TASK"), cfg={})}
    monkeypatch.setattr(harness, "task_manager", lambda include: SimpleNamespace(task_index=known))
    harness.refuse_unknown([Choice(NAME)], task[0])
    with pytest.raises(EvaluationError, match="knows no task dataset_path"):
        harness.refuse_unknown([Choice("dataset_path")], None)


def test_what_is_written_and_that_a_second_start_finds_it(found) -> None:
    output, command, _ = found
    assert (output / "results.png").stat().st_size > 1000
    page = (output / "results.md").read_text()
    assert "| simreg minus baseline |" in page and "± " in page and "perplexity" in page
    before = (output / "results.json").stat().st_mtime_ns
    again = run(*command)
    assert again.exit_code == 0 and "> baseline:" not in again.output, "nothing is asked twice"
    assert (output / "results.json").stat().st_mtime_ns == before and (output / "results.md").read_text() == page


def test_other_settings_do_not_mix_with_what_is_there(found) -> None:
    _, command, _ = found
    other = run(*command, "--limit", "3")
    assert other.exit_code == 2 and "was made with another limit" in other.output


@pytest.mark.parametrize("changed", ["metric", "weights", "none"])
def test_results_of_something_else_are_not_taken_for_these(changed: str, found, models, task, tmp_path: Path) -> None:
    output, command, _ = found
    shutil.copytree(output, tmp_path / "out")
    words = [str(tmp_path / "out") if word == str(output) else word for word in command]
    weights = models["simreg"] / "model.safetensors"
    before = weights.stat()
    if changed == "metric":
        words[words.index(NAME)] = f"{NAME}:acc_norm"
    elif changed == "weights":
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    again = run(*words)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    sentence = {"metric": f"it was asked other tasks before ({NAME}:acc)", "weights": "holds other files than"}
    assert again.exit_code == (0 if changed == "none" else 2) and sentence.get(changed, "") in again.output
    assert (tmp_path / "out/results.json").read_bytes() == (output / "results.json").read_bytes()


def test_one_model_of_two_leaves_the_others_results(found, models, tmp_path: Path) -> None:
    output, command, _ = found
    shutil.copytree(output, tmp_path / "out")
    words = [str(tmp_path / "out") if word == str(output) else word for word in command]
    place = words.index(f"simreg={models['simreg']}")
    assert run(*words[: place - 1], *words[place + 1 :]).exit_code == 0
    assert [model.name for model in read(tmp_path / "out/results.json")[0]] == ["baseline", "simreg"]


def test_a_task_whose_data_lies_in_a_folder(models, task, tmp_path: Path) -> None:
    """The harness's own sciq, from a copy of its data set that is not the Hub's."""
    copy = tmp_path / "allenai" / "sciq"
    copy.mkdir(parents=True)
    row = {"question": "What is wet?", "distractor1": "sand", "distractor2": "fire", "distractor3": "air",
           "correct_answer": "water", "support": "Water is wet."}  # fmt: skip
    for split in ("train", "validation", "test"):
        (copy / f"{split}.jsonl").write_text((json.dumps(row) + "\n") * 5)
    common = ["--model", f"baseline={models['baseline']}", "--tasks", "sciq", "--offline", "--dtype", "float32"]
    common += ["--batch-size", "4", "--include", str(task[0])]
    done = run(*common, "--output", str(tmp_path / "out"), "--task-data", str(tmp_path), "--paper", "llama-350m")
    assert done.exit_code == 0, done.output
    score = read(tmp_path / "out" / "results.json")[0][0].scores["sciq"]
    assert score.questions == 5 and score.metric == "acc_norm" and score.value in (0.0, 1.0)
    page = (tmp_path / "out" / "results.md").read_text()
    assert "| paper, llama-350m: simreg | 64.40 | 64.40 |" in page and "| paper, llama-350m: creg | 64.15 |" in page
    missing = run(*common, "--output", str(tmp_path / "other"), "--task-data", str(tmp_path / "out"))
    assert missing.exit_code == 2
    assert "the data set allenai/sciq is not on this machine" in missing.output
    assert "hf download --repo-type dataset allenai/sciq" in missing.output


def test_a_damaged_copy_is_named(tmp_path: Path) -> None:
    import datasets

    (tmp_path / "allenai" / "sciq").mkdir(parents=True)
    with local_datasets(tmp_path, offline=True), pytest.raises(EvaluationError, match="cannot be read as the data set"):
        datasets.load_dataset("allenai/sciq")
    assert datasets.load_dataset.__module__.startswith("datasets"), "given back"


def test_the_papers_tasks_in_its_order_and_code_only_with_leave() -> None:
    names = ["arc_easy", "arc_challenge", "boolq", "hellaswag", "openbookqa", "piqa", "mmlu", "winogrande", "sciq"]
    assert [choice.name for choice in choose(["paper"], allow_code=False)] == names
    further = ["gsm8k", "drop", "race", "squadv2", "nq_open", "humaneval", "mbpp"]
    assert [choice.name for choice in choose(["further"], allow_code=True)] == further
    assert [choice.name for choice in choose(["further"], allow_code=False)] == further[:5]
    assert choose(["piqa:acc"], allow_code=False) == [Choice("piqa", "acc")]
    with pytest.raises(EvaluationError, match="runs the code that the model writes"):
        choose(["humaneval"], allow_code=False)
    with pytest.raises(EvaluationError, match="twice"):
        choose(["paper", "piqa:acc"], allow_code=False)


def test_every_task_is_one_of_the_harness(task) -> None:
    """Names change between its releases: what we name must be there; and the quick look at names overlooks none."""
    assert set(task_manager(task[0]).all_tasks) <= harness._mentioned(task[0])
    assert {choice.name for choice in (*PAPER, *FURTHER)} <= set(task_manager(task[0]).all_tasks)


PRINTED = {
    "llama-350m": "43.06 43.16 42.84 43.45 43.66 44.10 43.96",
    "llama-1.3b": "47.51 47.50 47.43 47.78 47.94 48.65 48.33",
    "llama-3b": "50.00 50.96 50.94",
    "llama-7b": "51.45 52.67 52.77",
    "mixtral-8x1b": "50.41 51.69 51.62",
}


@pytest.mark.parametrize("size", PRINTED)
def test_the_papers_means_are_its_own(size: str) -> None:
    """Its printed averages, from its printed cells; where it printed another one, that is known."""
    odd = {("llama-1.3b", "cpretrain"): 0.008, ("llama-7b", "baseline"): 0.006, ("llama-1.3b", "creg"): 0.111}
    arms = ["baseline", "simreg", "simreg-chunk"]
    if size in ("llama-350m", "llama-1.3b"):
        arms[1:1] = ["simcse", "cpretrain", "creg", "sce"]
    assert list(rows()[size]) == arms
    for method, printed in zip(arms, PRINTED[size].split(), strict=True):
        gap = sum(rows()[size][method].values()) / 9 - float(printed)
        assert gap == pytest.approx(odd.get((size, method), 0), abs=0.0051 if (size, method) not in odd else 0.0006)
    gains = {"simcse": 0.10, "cpretrain": -0.22, "creg": 0.39, "sce": 0.60, "simreg": 1.04}  # table 1's, at 350M
    if size == "llama-350m":
        means = {method: sum(values.values()) / 9 for method, values in rows()[size].items()}
        assert {name: round(means[name] - means["baseline"], 2) for name in gains} == gains


def test_differences_carry_both_errors(tmp_path: Path) -> None:
    first, other = Score("acc", 0.5, 0.03, 100), Score("acc", 0.6, 0.04, 100)
    apart = difference(other, first)
    assert apart.value == pytest.approx(0.1) and apart.error == pytest.approx(0.05)
    models = [ModelResults("a", "x", {"t": first}), ModelResults("b", "y", {"t": other, "u": other})]
    page = table.scores_table(models)
    assert "| b minus a | +10.00 ± 5.00 | +10.00 |" in page
    write(tmp_path / "r.json", models, {"limit": None})
    assert read(tmp_path / "r.json")[0] == models


@pytest.mark.parametrize(
    ("words", "error"),
    [
        pytest.param(("--tasks", "no_such_task"), "knows no task no_such_task", id="task"),
        pytest.param(("--tasks", "none"), "goes with --data PREFIX", id="nothing"),
        pytest.param(("--bos", "maybe"), "--bos takes none or document", id="bos"),
        pytest.param(("--dtype", "int8"), "--dtype takes", id="dtype"),
        pytest.param(("--paper", "llama-70b"), "the paper has no table of llama-70b", id="paper"),
        pytest.param(
            ("--paper", "llama-7b", "--tasks", "lambada_openai"), "none of the tasks is in the paper's", id="tables"
        ),
        pytest.param(("--task-data", "/no/such"), "there is no folder /no/such", id="task-data"),
        pytest.param(("--model", "x"), "takes NAME=PATH", id="model"),
        pytest.param(("--model", "x=/no/such"), "there is no folder /no/such", id="path"),
        pytest.param(("--features", "8"), "--features goes with --data", id="features"),
        pytest.param(("--features", "8,x", "--data", "x"), "--features takes numbers", id="feature"),
        pytest.param(("--tasks", "humaneval"), "--allow-code-execution", id="code"),
    ],
)
def test_refusals(words: tuple[str, ...], error: str, models, task, tmp_path: Path) -> None:
    common = ["--model", f"baseline={models['baseline']}", "--output", str(tmp_path), "--include", str(task[0])]
    done = run(*common, "--offline", *words)
    assert done.exit_code == 2 and error in done.output, done.output


@pytest.mark.parametrize(
    ("words", "variable", "offline"),
    [((), "0", False), (("--offline",), "0", True), ((), "1", True), ((), "", False)],
)
def test_the_network_is_left_alone_where_it_is_to_be(words, variable, offline, tmp_path: Path, monkeypatch) -> None:
    called: list[int] = []
    monkeypatch.setattr(local_data, "go_offline", lambda: called.append(1))
    command = ["evaluate", "--model", f"x={tmp_path}", "--output", str(tmp_path), "--bos", "maybe", *words]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "200", "HF_HUB_OFFLINE": variable})
    assert "--bos takes none or document" in done.output and called == [1] * offline


def test_a_metric_that_a_task_does_not_have(models, task, tmp_path: Path) -> None:
    words = ["--model", f"baseline={models['baseline']}", "--output", str(tmp_path), "--include", str(task[0])]
    done = run(*words, "--offline", "--limit", "1", "--batch-size", "1", "--tasks", f"{NAME}:bleu", "--device", "cpu")
    assert done.exit_code == 2 and "has no metric bleu: name one of acc, acc_norm" in done.output
    assert "> baseline" not in done.output, "before the model is loaded"


def test_a_set_of_another_tokenizer_is_refused(models, tmp_path: Path) -> None:
    from simreg_megatron.data.indexed import PairWriter

    pair = PairWriter(tmp_path / "other", "uint16")
    pair.append(np.full(300, 9999, dtype=np.uint16), np.array([300]))
    pair.commit()
    with pytest.raises(EvaluationError, match="made with another tokenizer"):
        measure(models["baseline"], tmp_path / "other", seq_length=64, dtype="float32")
    with pytest.raises(EvaluationError, match="less than one sequence"):
        measure(models["baseline"], tmp_path / "other", seq_length=512, dtype="float32")
    with pytest.raises(EvaluationError, match="the model has 64 features"):
        measure(models["baseline"], tmp_path / "other", seq_length=64, dtype="float32", features=[65])
