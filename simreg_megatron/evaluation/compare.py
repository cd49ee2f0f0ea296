# SPDX-License-Identifier: Apache-2.0
"""Several models in turn: scores and losses, kept as soon as they exist, and one page of them all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from simreg_megatron.evaluation import harness, paired, results, table
from simreg_megatron.evaluation.errors import EvaluationError
from simreg_megatron.evaluation.plot import draw

_console = Console(soft_wrap=True, highlight=False)


class HeldOut(NamedTuple):
    """What to measure perplexity on."""

    data: Path | None
    seq_length: int | None
    tokens: int | None
    features: tuple[int, ...]

    def shown(self) -> dict[str, Any]:
        if self.data is None:
            return {}
        own = {} if self.seq_length is None else {"sequence length": self.seq_length}
        return {"data": str(self.data), "features": list(self.features) or None, "data tokens": self.tokens, **own}


def evaluate_all(
    models: dict[str, Path],
    output: Path,
    choices: Sequence[Any],
    protocol: Any,
    *,
    tokenizer: Path | None,
    held_out: HeldOut,
    paper: dict[str, dict[str, float]] | None,
    paper_name: str,
) -> None:
    """Each model that no earlier start has finished; then results.json, .md and .png in `output`."""
    output.mkdir(parents=True, exist_ok=True)
    settings = protocol.shown() | held_out.shown()
    known = _already_found(output / "results.json", settings, choices)
    found = []
    for name, path in models.items():
        checkpoint = _checkpoint_of(path)
        done = known.get((name, str(checkpoint or path)))
        if done is None:
            folder = _exported(name, checkpoint, output, tokenizer) if checkpoint else path
            _console.print(f"> {name}: {folder}")
            scores, questions = _scores(folder, choices, protocol)
            losses, documents = _losses(folder, held_out, protocol)
            paired.keep(_questions(output, name), questions, documents)
            done = results.ModelResults(name, str(checkpoint or path), scores, losses)
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
    if not path.exists():
        return {}
    models, before = results.read(path)
    if before != settings:
        other = sorted(name for name in before.keys() | settings.keys() if before.get(name) != settings.get(name))
        raise EvaluationError(f"{path} was made with another {', '.join(other)}: give another --output, or remove it")
    names = {choice.name for choice in choices}
    return {(model.name, model.path): model for model in models if set(model.scores) == names}


def _checkpoint_of(path: Path) -> Path | None:
    """The folder of the step that would be exported now: a run goes on, and its later steps are other models."""
    if (path / "config.json").is_file():
        return None
    from simreg_megatron.checkpoint.errors import CheckpointError
    from simreg_megatron.checkpoint.source import step_folder

    try:
        return step_folder(path, None)
    except CheckpointError as error:
        raise EvaluationError(str(error)) from None


def _exported(name: str, checkpoint: Path, output: Path, tokenizer: Path | None) -> Path:
    """The export of a Megatron checkpoint as a Hugging Face folder, made once."""
    from simreg_megatron.checkpoint.errors import CheckpointError
    from simreg_megatron.checkpoint.export import export, plan_export
    from simreg_megatron.checkpoint.source import open_checkpoint
    from simreg_megatron.checkpoint.tokenizer import open_tokenizer

    folder = output / "models" / f"{name}-{checkpoint.name}"
    if folder.exists():
        return folder
    if tokenizer is None:
        raise EvaluationError(f"--model {name} is a Megatron checkpoint: give the --tokenizer of its training")
    try:
        plan = plan_export(open_checkpoint(checkpoint, None), tokenizer=open_tokenizer(tokenizer))
        folder.parent.mkdir(parents=True, exist_ok=True)
        export(plan, folder)
    except CheckpointError as error:
        raise EvaluationError(str(error)) from None
    return folder


def _questions(output: Path, name: str) -> Path:
    """Where the scores by question and the losses by document of a model are kept."""
    return output / "questions" / f"{name}.npz"


def _scores(folder: Path, choices: Sequence[Any], protocol: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return harness.evaluate(folder, choices, protocol) if choices else ({}, {})


def _losses(folder: Path, held_out: HeldOut, protocol: Any) -> tuple[list[Any], dict[str, Any]]:
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
