# SPDX-License-Identifier: Apache-2.0
"""`simreg-megatron evaluate`. Heavy imports stay inside, so that `--help` is quick."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console

from simreg_megatron.evaluation.errors import EvaluationError

_console = Console(soft_wrap=True, highlight=False)


def register(app: typer.Typer) -> None:
    """Add the command of this room to the program."""
    app.command("evaluate")(evaluate)


def evaluate(
    model: Annotated[
        list[str],
        typer.Option(
            help="NAME=PATH, once for each: a Hugging Face model folder, or a Megatron checkpoint, which is exported "
            "first. The others are compared with the first"
        ),
    ],
    output: Annotated[Path, typer.Option(help="folder for results.json, results.md and results.png")],
    tasks: Annotated[
        str,
        typer.Option(
            help="comma-separated: names of lm-evaluation-harness, NAME:METRIC, or the groups paper (its nine tasks) "
            "and further (its seven others); none: only --data"
        ),
    ] = "paper",
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="the tokenizer of training, for Megatron checkpoints: a Hugging Face folder or a .model file"
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="prefix of a prepared set, to measure validation loss and perplexity on")
    ] = None,
    seq_length: Annotated[
        int, typer.Option(show_default=False, help="length of the windows of --data (default: the model's positions)")
    ] = 0,
    features: Annotated[
        str,
        typer.Option(show_default=False, help="with --data: also from only so many first features, such as 64,128,256"),
    ] = "",
    data_tokens: Annotated[int, typer.Option(show_default=False, help="at most so many tokens of --data")] = 0,
    bos: Annotated[
        str, typer.Option(help="begin-of-text token: none or document, as in training (manifest.json of the data)")
    ] = "none",
    dtype: Annotated[str, typer.Option(help="number type of the weights: bfloat16, float16 or float32")] = "bfloat16",
    batch_size: Annotated[str, typer.Option(help="requests at a time, or auto")] = "auto",
    device: Annotated[
        str, typer.Option(show_default=False, help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    ] = "",
    limit: Annotated[
        int, typer.Option(show_default=False, help="only the first so many questions of each task: for a trial")
    ] = 0,
    include: Annotated[Path | None, typer.Option(help="folder with more task definitions for the harness")] = None,
    task_data: Annotated[
        Path | None, typer.Option(help="folder with copies of data sets, DIR/OWNER/NAME, used before the network")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="never use the network")] = False,
    paper: Annotated[
        str, typer.Option(show_default=False, help="add the paper's rows, such as llama-350m or mixtral-8x1b")
    ] = "",
    allow_code_execution: Annotated[
        bool, typer.Option("--allow-code-execution", help="run what the model writes: humaneval and mbpp need it")
    ] = False,
) -> None:
    """Run the paper's zero-shot tasks and tabulate scores, differences, errors and the paper's rows.

    The results of each model are kept as soon as they exist; the same command resumes after a stop.
    """
    with _one_sentence():
        _need_packages()
        from simreg_megatron.evaluation.harness import refuse_unknown
        from simreg_megatron.evaluation.local_data import go_offline
        from simreg_megatron.evaluation.tasks import choose

        offline = offline or os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
        if offline:
            go_offline()
        if bos not in ("none", "document"):
            raise EvaluationError(f"--bos takes none or document, not {bos!r}")
        choices = [] if tasks == "none" else choose(tasks.split(","), allow_code=allow_code_execution)
        protocol = _protocol(bos, dtype, device, batch_size, limit, include, task_data, offline, allow_code_execution)
        models = _named(model)
        refuse_unknown(choices, include)
        if not choices and data is None:
            raise EvaluationError("--tasks none goes with --data PREFIX: otherwise there is nothing to measure")
        _run(
            models,
            output,
            choices,
            protocol,
            tokenizer=tokenizer,
            held_out=_HeldOut(data, seq_length or None, data_tokens or None, _numbers(features, data)),
            paper=_paper_rows(paper, [choice.name for choice in choices]),
            paper_name=paper,
        )


class _HeldOut(NamedTuple):
    """What to measure perplexity on."""

    data: Path | None
    seq_length: int | None
    tokens: int | None
    features: tuple[int, ...]

    def shown(self) -> dict[str, Any]:
        if self.data is None:
            return {}
        return {"data": str(self.data), "features": list(self.features) or None, "data tokens": self.tokens}


def _numbers(text: str, data: Path | None) -> tuple[int, ...]:
    if not text:
        return ()
    if data is None:
        raise EvaluationError("--features goes with --data PREFIX: they are of the validation loss")
    words = text.replace("/", ",").split(",")
    if not all(word.isdecimal() for word in words):
        raise EvaluationError(f"--features takes numbers such as 64,128,256, not {text!r}")
    return tuple(int(word) for word in words)


def _protocol(
    bos: str,
    dtype: str,
    device: str,
    batch_size: str,
    limit: int,
    include: Path | None,
    task_data: Path | None,
    offline: bool,
    allow_code: bool,
) -> Any:
    from simreg_megatron.evaluation.harness import Protocol

    if dtype not in ("bfloat16", "float16", "float32"):
        raise EvaluationError(f"--dtype takes bfloat16, float16 or float32, not {dtype!r}")
    for name, folder in (("--include", include), ("--task-data", task_data)):
        if folder is not None and not folder.is_dir():
            raise EvaluationError(f"{name}: there is no folder {folder}")
    _check_device(device)
    return Protocol(
        add_bos=bos == "document",
        dtype=dtype,
        device=device or None,
        batch_size=batch_size,
        limit=limit or None,
        include=include,
        task_data=task_data,
        offline=offline,
        allow_code=allow_code,
    )


def _check_device(name: str) -> None:
    """Before minutes go into loading a model."""
    import torch

    try:
        kind = torch.device(name or "cpu").type
    except RuntimeError:
        raise EvaluationError(f"--device takes cpu, cuda or cuda:N, not {name!r}") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise EvaluationError(f"--device {name}: torch finds no GPU here, so leave it out to run on the CPU")


def _named(words: Sequence[str]) -> dict[str, Path]:
    models: dict[str, Path] = {}
    for word in words:
        name, equal, path = word.partition("=")
        if not equal or not name or not path:
            raise EvaluationError(f"--model takes NAME=PATH, such as baseline=runs/baseline/checkpoints, not {word!r}")
        if name in models or "/" in name:
            raise EvaluationError(f"--model {name}: a name is used once, and holds no slash")
        if not Path(path).is_dir():
            raise EvaluationError(f"--model {name}: there is no folder {path}")
        models[name] = Path(path)
    return models


def _paper_rows(size: str, tasks: Sequence[str]) -> dict[str, dict[str, float]] | None:
    from simreg_megatron.evaluation.paper import rows
    from simreg_megatron.evaluation.tasks import PAPER

    if not size:
        return None
    if size not in rows():
        raise EvaluationError(f"--paper: the paper has no table of {size}: it is one of {', '.join(rows())}")
    known = [choice.name for choice in PAPER]
    if not set(tasks) & set(known):
        raise EvaluationError(f"--paper: none of the tasks is in the paper's tables: take one of {', '.join(known)}")
    return rows()[size]


def _run(
    models: dict[str, Path],
    output: Path,
    choices: Sequence[Any],
    protocol: Any,
    *,
    tokenizer: Path | None,
    held_out: _HeldOut,
    paper: dict[str, dict[str, float]] | None,
    paper_name: str,
) -> None:
    from simreg_megatron.evaluation import paired, results, table
    from simreg_megatron.evaluation.plot import draw

    output.mkdir(parents=True, exist_ok=True)
    settings = protocol.shown() | held_out.shown()
    known = _already_found(output / "results.json", settings, choices)
    found = []
    for name, path in models.items():
        done = known.get((name, str(path)))
        if done is None:
            folder = _as_model(name, path, output, tokenizer)
            _console.print(f"> {name}: {folder}")
            scores, questions = _scores(folder, choices, protocol)
            losses, documents = _losses(folder, held_out, protocol)
            paired.keep(_questions(output, name), questions, documents)
            done = results.ModelResults(name, str(path), scores, losses)
        found.append(done)
        results.write(output / "results.json", found, settings)
    first, *others = (paired.kept(_questions(output, name)) for name in models)
    pairs = {model.name: paired.pairs_of(other, first) for model, other in zip(found[1:], others, strict=True)}
    page = table.report(found, settings, paper=paper, name=f"paper, {paper_name}", pairs=pairs)
    (output / "results.md").write_text(page)
    if choices:
        draw(found, output / "results.png")
    _console.print(page, markup=False)
    _console.print(f"{output}/results.md, .json" + (", .png" if choices else ""))


def _already_found(path: Path, settings: dict[str, Any], choices: Sequence[Any]) -> dict[tuple[str, str], Any]:
    """Models of an earlier start with the same settings and tasks."""
    from simreg_megatron.evaluation import results

    if not path.exists():
        return {}
    models, before = results.read(path)
    if before != settings:
        other = sorted(name for name in before.keys() | settings.keys() if before.get(name) != settings.get(name))
        raise EvaluationError(f"{path} was made with another {', '.join(other)}: give another --output, or remove it")
    names = {choice.name for choice in choices}
    return {(model.name, model.path): model for model in models if set(model.scores) == names}


def _as_model(name: str, path: Path, output: Path, tokenizer: Path | None) -> Path:
    """A Hugging Face folder: itself, or the export of a Megatron checkpoint, made once."""
    if (path / "config.json").is_file():
        return path
    from simreg_megatron.checkpoint.errors import CheckpointError
    from simreg_megatron.checkpoint.export import export, plan_export
    from simreg_megatron.checkpoint.source import open_checkpoint
    from simreg_megatron.checkpoint.tokenizer import open_tokenizer

    folder = output / "models" / name
    if folder.exists():
        return folder
    if tokenizer is None:
        raise EvaluationError(f"--model {name} is a Megatron checkpoint: give the --tokenizer of its training")
    try:
        plan = plan_export(open_checkpoint(path, None), tokenizer=open_tokenizer(tokenizer))
        folder.parent.mkdir(parents=True, exist_ok=True)
        export(plan, folder)
    except CheckpointError as error:
        raise EvaluationError(str(error)) from None
    return folder


def _questions(output: Path, name: str) -> Path:
    """Where the scores by question and the losses by document of a model are kept."""
    return output / "questions" / f"{name}.npz"


def _scores(folder: Path, choices: Sequence[Any], protocol: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    from simreg_megatron.evaluation import harness

    return harness.evaluate(folder, choices, protocol) if choices else ({}, {})


def _losses(folder: Path, held_out: _HeldOut, protocol: Any) -> tuple[list[Any], dict[str, Any]]:
    if held_out.data is None:
        return [], {}
    from transformers import AutoConfig

    from simreg_megatron.data import DataError
    from simreg_megatron.evaluation.perplexity import measure

    try:
        return measure(
            folder,
            held_out.data,
            seq_length=held_out.seq_length or AutoConfig.from_pretrained(folder).max_position_embeddings,
            features=held_out.features,
            max_tokens=held_out.tokens,
            dtype=protocol.dtype,
            device=protocol.device,
        )
    except DataError as error:
        raise EvaluationError(str(error)) from None


def _need_packages() -> None:
    packages = {"lm_eval": "'lm-eval[hf]>=0.4.12'", "transformers": "transformers"}
    missing = [package for module, package in packages.items() if find_spec(module) is None]
    if missing:
        raise EvaluationError(f"packages are missing: pip install {' '.join(missing)}")


@contextmanager
def _one_sentence() -> Iterator[None]:
    """An error of ours is a sentence on stderr and exit status 2, not a traceback."""
    try:
        yield
    except EvaluationError as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"error: {error}", markup=False)
        raise typer.Exit(2) from None
