# SPDX-License-Identifier: Apache-2.0
"""`simreg-megatron evaluate`: zero-shot scores by lm-evaluation-harness, and differences from the first model."""

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from simreg_megatron.notices import SentenceError
from simreg_megatron.tools.checkpoints import checkpoint_folder, refuse_taken
from simreg_megatron.tools.export_hf import export
from simreg_megatron.tools.prepare_data import count

# The paper does not name its metrics. Its scores look like acc_norm where a task has one (36.5 on HellaSwag at 350M).
PAPER = {
    "arc_easy": "acc_norm", "arc_challenge": "acc_norm", "boolq": "acc", "hellaswag": "acc_norm",
    "openbookqa": "acc_norm", "piqa": "acc_norm", "mmlu": "acc", "winogrande": "acc", "sciq": "acc_norm",
}  # fmt: skip


class Score(NamedTuple):
    """A task's score, its standard error (NaN if unknown), and its values by question if it is their mean."""

    value: float
    error: float
    questions: Mapping[tuple[str, int], float] = {}


def add_command(commands: Any) -> None:
    text = "score models on the paper's zero-shot tasks, and compare them with the first one"
    parser = commands.add_parser("evaluate", help=text, description=text)
    add = parser.add_argument
    add("--model", action="append", required=True, metavar="NAME=PATH", help="a Hugging Face folder, or a Megatron "
        "checkpoint, which is exported first; give it once per model")  # fmt: skip
    add("--output", type=Path, required=True, help="a new folder for results and exported models")
    add("--tokenizer", type=Path, help="that of training, for Megatron checkpoints")
    add("--tasks", default="paper", help="comma-separated: tasks of lm-evaluation-harness, NAME:METRIC, or paper, "
        "for its nine (default)")  # fmt: skip
    add("--bos", choices=("none", "document"), default="none", help="begin texts with BOS; as in training")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    add("--batch-size", default="auto", help="requests at a time (default: auto)")
    add("--device", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    add("--limit", type=count, help="only the first questions of each task: for a trial")
    add("--include", type=Path, help="folder with more task definitions (YAML of the harness)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    import lm_eval
    import torch
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import handle_non_serializable, make_table
    from transformers import AutoTokenizer

    if options.include and not options.include.is_dir():
        raise SentenceError(f"--include {options.include} is no folder")
    metrics = chosen_tasks(options.tasks)
    task_manager = TaskManager(include_path=str(options.include.resolve()) if options.include else None)
    if unknown := [task for task in metrics if task not in task_manager.all_tasks]:
        raise SentenceError(f"lm-evaluation-harness has no task {unknown[0]}: `lm_eval ls tasks` lists them")
    folders = {name: Path(path or "?") for name, _, path in (word.partition("=") for word in options.model)}
    if len(folders) < len(options.model) or "/" in "".join(folders) or not all(map(Path.is_dir, folders.values())):
        raise SentenceError(f"each --model must be NAME=FOLDER, a folder and another name without /: {options.model}")
    refuse_taken(options.output)
    adds_bos = options.bos == "document"
    options.output.mkdir(parents=True, exist_ok=True)
    for name, path in folders.items():
        if not (path / "config.json").is_file():
            if options.tokenizer is None:
                raise SentenceError(f"--model {name} is a Megatron checkpoint: give the --tokenizer of its training")
            folders[name] = options.output / "models" / name
            export(checkpoint_folder(path), folders[name], options.tokenizer)
        elif not {*path.glob("tokenizer*"), *path.glob("vocab*")}:
            raise SentenceError(f"--model {name} has no tokenizer in {path}: export it again with --tokenizer")
        if adds_bos:  # release 4 of transformers adds none, silently
            tokenizer = AutoTokenizer.from_pretrained(
                folders[name], local_files_only=True, trust_remote_code=False, add_bos_token=True
            )
            if tokenizer("a")["input_ids"][0] != tokenizer.bos_token_id:
                raise SentenceError(f"--bos document: the tokenizer of {path} puts no BOS before a text: --bos none")
        if (index := folders[name] / "model.safetensors.index.json").is_file():
            weights = {Path(file) for file in json.loads(index.read_text())["weight_map"].values()}
            if any(file.suffix != ".safetensors" or len(file.parts) > 1 for file in weights):
                raise SentenceError(f"--model {name}: {index} names other files than .safetensors in its folder")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    scores: dict[str, dict[str, Score]] = {}
    for name, folder in folders.items():
        model = {"pretrained": str(folder), "dtype": options.dtype, "add_bos_token": adds_bos, "use_safetensors": True}
        results: dict[str, Any] = lm_eval.simple_evaluate(
            model="hf", model_args=model, tasks=list(metrics), num_fewshot=0, batch_size=options.batch_size,
            limit=options.limit, task_manager=task_manager, device=device,
        )  # fmt: skip
        (options.output / f"{name}.json").write_text(json.dumps(results, default=handle_non_serializable))
        print(f"{name}: {folder}", make_table(results), sep="\n")
        scores[name] = {task: score_of(results, task, metric) for task, metric in metrics.items()}
    page = "\n".join(table(scores))
    (options.output / "results.md").write_text(page + "\n")
    print(page)


def chosen_tasks(text: str) -> dict[str, str]:
    """Return metrics by task, "" for the task's first one."""
    chosen: dict[str, str] = {}
    for word in text.split(","):
        name, _, metric = word.partition(":")
        chosen |= PAPER if word == "paper" else {name: metric or PAPER.get(name, "")}
    return chosen


def score_of(results: Mapping[str, Any], task: str, metric: str) -> Score:
    """Read a task's (or group's) score; per cent if every question counts from 0 to 1."""
    values = results["results"].get(task, {})
    keys = [key.split(",", 1) for key in values if "," in key and "_stderr," not in key]  # metric,filter
    if (found := next((key for key in keys if metric in ("", key[0])), None)) is None:
        known = " ".join(name for name, _ in keys)
        raise SentenceError(f"{task} has no metric {metric}: give --tasks {task}:METRIC with one of {known}")
    metric, kind = found
    value, error = float(values[f"{metric},{kind}"]), values.get(f"{metric}_stderr,{kind}")  # which may be "N/A"
    samples = ((part, each) for part in parts_of(results, task) for each in results.get("samples", {}).get(part, ()))
    questions = {(part, each["doc_id"]): each[metric] for part, each in samples
                 if each.get("filter", kind) == kind and isinstance(each.get(metric), int | float)}  # fmt: skip
    scale = 100 if questions and all(0 <= each <= 1 for each in questions.values()) else 1
    if questions and abs(fmean(questions.values()) - value) > 1e-9:  # such as squadv2's f1
        questions = {}
    error = scale * error if isinstance(error, float) else math.nan
    return Score(scale * value, error, {question: scale * each for question, each in questions.items()})


def parts_of(results: Mapping[str, Any], task: str) -> list[str]:
    """Return the tasks of a group at any depth; of a task, itself."""
    parts = results.get("group_subtasks", {}).get(task, ())
    return [each for part in parts for each in parts_of(results, part)] or [task]


def difference(score: Score, first: Score) -> Score:
    """Return the difference and its standard error: paired by question where possible, as both answer the same ones."""
    value = score.value - first.value
    if len(score.questions) > 1 and score.questions.keys() == first.questions.keys():
        differences = [each - first.questions[question] for question, each in score.questions.items()]
        return Score(value, stdev(differences) / len(differences) ** 0.5)
    return Score(value, math.hypot(score.error, first.error))


def table(scores: Mapping[str, Mapping[str, Score]]) -> Iterator[str]:
    """Yield Markdown tables of the scores and of the differences from the first model, with standard errors."""
    first, *others = scores
    tasks = list(scores[first])
    has_mean = set(tasks) <= set(PAPER)  # of other tasks a score may be a perplexity
    header = f"| | {' | '.join([*tasks, *(['mean'] if has_mean else [])])} |\n{'| --- ' * (len(tasks) + 1 + has_mean)}|"

    def row(name: str, values: list[Score]) -> str:
        if has_mean:
            error = math.hypot(*(score.error for score in values)) / len(values)
            values = [*values, Score(fmean(score.value for score in values), error)]
        return f"| {name} | {' | '.join(f'{score.value:.2f} ± {score.error:.2f}' for score in values)} |"

    yield header
    yield from (row(name, list(values.values())) for name, values in scores.items())
    if others:
        yield f"\nDifference from {first} (± a standard error, paired by question if the score is a mean over them):\n"
        yield header
    for name in others:
        yield row(name, [difference(scores[name][task], scores[first][task]) for task in tasks])
