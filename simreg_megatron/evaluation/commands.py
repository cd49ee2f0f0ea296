# SPDX-License-Identifier: Apache-2.0
"""`simreg-megatron evaluate`. Heavy imports stay inside, so that `--help` is quick."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from simreg_megatron.evaluation.errors import EvaluationError
from simreg_megatron.terminal import one_sentence


def register(app: typer.Typer) -> None:
    """Add the command of this package to the program."""
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
        int,
        typer.Option(
            min=0, show_default=False, help="length of the windows of --data (default: the model's positions)"
        ),
    ] = 0,
    features: Annotated[
        str,
        typer.Option(show_default=False, help="with --data: also from only so many first features, such as 64,128,256"),
    ] = "",
    data_tokens: Annotated[int, typer.Option(min=0, show_default=False, help="at most so many tokens of --data")] = 0,
    bos: Annotated[
        str | None,
        typer.Option(
            show_default="none",
            help="begin-of-text token: none or document, as in training (manifest.json of the data)",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="number type of the weights: bfloat16, float16 or float32")] = "bfloat16",
    batch_size: Annotated[str, typer.Option(help="requests at a time, or auto")] = "auto",
    device: Annotated[
        str, typer.Option(show_default=False, help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    ] = "",
    limit: Annotated[
        int, typer.Option(min=0, show_default=False, help="only the first so many questions of each task: for a trial")
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
    with one_sentence():
        _need_packages()
        from simreg_megatron.evaluation.compare import HeldOut, evaluate_all
        from simreg_megatron.evaluation.harness import refuse_unknown
        from simreg_megatron.evaluation.local_data import go_offline
        from simreg_megatron.evaluation.tasks import choose

        offline = offline or os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
        if offline:
            go_offline()
        if bos not in (None, "none", "document"):
            raise EvaluationError(f"--bos takes none or document, not {bos!r}")
        choices = [] if tasks == "none" else choose(tasks.split(","), allow_code=allow_code_execution)
        protocol = _protocol(bos, dtype, device, batch_size, limit, include, task_data, offline, allow_code_execution)
        models = _named(model)
        refuse_unknown(choices, include)
        if not choices and data is None:
            raise EvaluationError("--tasks none goes with --data PREFIX: otherwise there is nothing to measure")
        evaluate_all(
            models,
            output,
            choices,
            protocol,
            tokenizer=tokenizer,
            held_out=HeldOut(data, seq_length or None, data_tokens or None, _numbers(features, data)),
            paper=_paper_rows(paper, [choice.name for choice in choices]),
            paper_name=paper,
        )


def _numbers(text: str, data: Path | None) -> tuple[int, ...]:
    if not text:
        return ()
    if data is None:
        raise EvaluationError("--features goes with --data PREFIX, as it measures validation loss")
    words = text.replace("/", ",").split(",")
    if not all(word.isdecimal() for word in words):
        raise EvaluationError(f"--features takes numbers such as 64,128,256, not {text!r}")
    return tuple(int(word) for word in words)


def _protocol(
    bos: str | None,
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
    if not re.fullmatch(r"auto(:\d+)?|0*[1-9]\d*", batch_size):
        raise EvaluationError(f"--batch-size takes a number above 0, or auto, not {batch_size!r}")
    _check_device(device)
    return Protocol(
        add_bos=None if bos is None else bos == "document",
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


def _need_packages() -> None:
    packages = {"lm_eval": "'lm-eval[hf]>=0.4.13'", "transformers": "transformers"}
    missing = [package for module, package in packages.items() if find_spec(module) is None]
    if missing:
        raise EvaluationError(f"packages are missing: pip install {' '.join(missing)}")
