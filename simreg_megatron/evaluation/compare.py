# SPDX-License-Identifier: Apache-2.0
"""Several models in turn: scores and losses, kept as soon as they exist, and one page of them all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from simreg_megatron.evaluation import harness, paired, results, table
from simreg_megatron.evaluation.errors import EvaluationError
from simreg_megatron.evaluation.plot import draw
from simreg_megatron.evaluation.tasks import Choice

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
    choices: Sequence[Choice],
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
    known = _already_found(output / "results.json", settings)
    found = []
    for name, path in models.items():
        checkpoint = _checkpoint_of(path)
        state = _state_of(checkpoint or path)
        done = _finished(known.get(name), checkpoint or path, state, choices)
        if done is None:
            harness.refuse_unknown_metrics(choices, protocol)
            folder = _exported(name, checkpoint, output, tokenizer) if checkpoint else path
            _console.print(f"> {name}: {folder}")
            scores, questions = _scores(folder, choices, protocol)
            losses, documents = _losses(folder, held_out, protocol)
            paired.keep(_questions(output, name), questions, documents)
            done = results.ModelResults(name, str(checkpoint or path), scores, losses, state)
        found.append(done)
        known[name] = done
        results.write(output / "results.json", list(known.values()), settings)
    first, *others = (paired.kept(_questions(output, name)) for name in models)
    pairs = {model.name: paired.pairs_of(other, first) for model, other in zip(found[1:], others, strict=True)}
    page = table.report(found, settings, paper=paper, name=f"paper, {paper_name}", pairs=pairs)
    (output / "results.md").write_text(page)
    if choices:
        draw(found, output / "results.png")
    _console.print(page, markup=False)
    _console.print(f"{output}/results.md, .json" + (", .png" if choices else ""))


def _already_found(path: Path, settings: dict[str, Any]) -> dict[str, results.ModelResults]:
    """Models of an earlier start with the same settings, by name."""
    if not path.exists():
        return {}
    models, before = results.read(path)
    if before != settings:
        other = sorted(name for name in before.keys() | settings.keys() if before.get(name) != settings.get(name))
        raise EvaluationError(f"{path} was made with another {', '.join(other)}: give another --output, or remove it")
    return {model.name: model for model in models}


def _finished(
    found: results.ModelResults | None, path: Path, state: str, choices: Sequence[Choice]
) -> results.ModelResults | None:
    """What an earlier start found of this model; None of another one by this name, such as a later step.

    Raises:
        EvaluationError: it was asked other tasks, or the files at `path` are others than then.
    """
    if found is None or found.path != str(path):
        return None
    metrics = {name: score.metric.partition(" ")[0] for name, score in found.scores.items()}
    if found.state and found.state != state:
        other = f"{path} holds other files than when it was evaluated"
    elif metrics != {choice.name: choice.metric for choice in choices}:
        other = f"it was asked other tasks before ({', '.join(f'{name}:{metric}' for name, metric in metrics.items())})"
    else:
        return found
    raise EvaluationError(f"--model {found.name}: {other}: give another --output, which keeps these results")


_OF_A_MODEL = {".safetensors", ".bin", ".pt", ".distcp", ".metadata", ".json", ".model"}


def _state_of(folder: Path) -> str:
    """A digest of its files' names, sizes and times of writing: to read all weights would take minutes."""
    files = sorted(path for path in folder.rglob("*") if {path.suffix, path.name} & _OF_A_MODEL)
    told = [(str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


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


def _scores(folder: Path, choices: Sequence[Choice], protocol: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return harness.evaluate(folder, choices, protocol) if choices else ({}, {})


def _losses(folder: Path, held_out: HeldOut, protocol: Any) -> tuple[list[Any], dict[str, Any]]:
    if held_out.data is None:
        return [], {}
    from simreg_megatron.data import DataError
    from simreg_megatron.evaluation.perplexity import measure

    try:
        return measure(
            folder,
            held_out.data,
            seq_length=held_out.seq_length or _positions_of(folder),
            features=held_out.features,
            max_tokens=held_out.tokens,
            dtype=protocol.dtype,
            device=protocol.device,
        )
    except DataError as error:
        raise EvaluationError(str(error)) from None


def _positions_of(folder: Path) -> int:
    from transformers import AutoConfig

    positions = getattr(AutoConfig.from_pretrained(folder), "max_position_embeddings", None)
    if not isinstance(positions, int):
        raise EvaluationError(f"{folder} does not say how many positions the model has: give --seq-length")
    return positions
