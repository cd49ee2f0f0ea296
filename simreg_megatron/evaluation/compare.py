# SPDX-License-Identifier: Apache-2.0
"""Several models in turn: scores and losses, kept as soon as they exist, and one page of them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from simreg_megatron.evaluation import harness, paired, results, table
from simreg_megatron.evaluation import models as sources
from simreg_megatron.evaluation.errors import EvaluationError
from simreg_megatron.evaluation.plot import draw
from simreg_megatron.evaluation.tasks import Choice
from simreg_megatron.terminal import console


class HeldOut(NamedTuple):
    """What to measure perplexity on."""

    data: Path | None
    seq_length: int | None
    tokens: int | None
    features: tuple[int, ...]

    def shown(self) -> dict[str, Any]:
        if self.data is None:
            return {}
        own: dict[str, Any] = {} if self.seq_length is None else {"sequence length": self.seq_length}
        own |= {"data": str(self.data), "data files": _state_of_data(self.data)}
        return {"features": list(self.features) or None, "data tokens": self.tokens, **own}

    def refuse_unfit(self, folder: Path) -> list[str]:
        """Before the tasks, which take hours; lines for the user."""
        from simreg_megatron.evaluation.perplexity import refuse_unfit

        return [] if self.data is None else self._asked(refuse_unfit, folder)

    def measure(self, folder: Path, protocol: Any) -> Any:
        from simreg_megatron.evaluation.perplexity import measure

        own = {"batch_size": int(protocol.batch_size)} if protocol.batch_size.isdecimal() else {}
        return self._asked(measure, folder, dtype=protocol.dtype, device=protocol.device, **own)

    def _asked(self, what: Callable[..., Any], folder: Path, **more: Any) -> Any:
        from simreg_megatron.data import DataError

        length = self.seq_length or _positions_of(folder)
        try:
            return what(folder, self.data, seq_length=length, features=self.features, max_tokens=self.tokens, **more)
        except DataError as error:
            raise EvaluationError(str(error)) from None


def _state_of_data(prefix: Path) -> str:
    """Another set may be prepared under the same name between two models."""
    from simreg_megatron.data.check import manifest_of

    text = Path(f"{prefix}.bin")
    if not text.is_file():
        return ""  # which is told where it is opened
    digest = ((manifest_of(text) or {}).get("files", {}).get(text.name) or {}).get("sha256")
    return f"sha256 {digest}" if digest else sources.state_of(text.parent, {text.name, f"{prefix.name}.idx"})


def _positions_of(folder: Path) -> int:
    from transformers import AutoConfig

    positions = getattr(AutoConfig.from_pretrained(folder, trust_remote_code=False), "max_position_embeddings", None)
    if not isinstance(positions, int):
        raise EvaluationError(f"{folder} does not say how many positions the model has: give --seq-length")
    return positions


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
    """What no earlier start has finished of each model; then results.json, .md and .png in `output`."""
    from filelock import FileLock

    settings = protocol.shown() | _shown_files(protocol) | held_out.shown()
    if tokenizer is not None:
        settings["tokenizer"] = f"sha256 {sources.hash_of(tokenizer)}"
    output.mkdir(parents=True, exist_ok=True)
    known = _already_found(output / "results.json", settings)

    def store(done: results.ModelResults) -> None:
        with FileLock(output / ".results.lock"):  # others may add their models meanwhile
            known.update(_already_found(output / "results.json", settings) | {done.name: done})
            results.write(output / "results.json", list(known.values()), settings)

    for name, source in {name: sources.find(name, path) for name, path in models.items()}.items():
        done = _finished(known.get(name), source, choices)
        if done is not None and (done.perplexities or held_out.data is None):
            continue
        harness.refuse_unknown_metrics(choices, protocol)
        folder, notes = _prepared(name, source, output, tokenizer, protocol, bool(choices))
        notes += held_out.refuse_unfit(folder)
        console.print(f"> {name}: {folder}", *(f"note: {note}" for note in notes), sep="\n", markup=False)
        if done is None:
            scores, questions = harness.evaluate(folder, choices, protocol) if choices else ({}, {})
            done = results.ModelResults(name, str(source.path), scores, [], source.state, notes)
            paired.keep(_questions(output, name), questions)
            store(done)
        if held_out.data is not None:
            losses, documents = held_out.measure(folder, protocol)
            paired.keep(_questions(output, name), paired.kept(_questions(output, name)) | documents)
            store(replace(done, perplexities=losses))
    _report([known[name] for name in models], output, settings, paper=paper, name=f"paper, {paper_name}")


def _shown_files(protocol: Any) -> dict[str, str]:
    """Which definitions and data of tasks were used, if the user brought some."""
    given = {"task definitions": protocol.include, "task data": protocol.task_data}
    return {name: f"{folder}, {sources.state_of(folder)}" for name, folder in given.items() if folder is not None}


def _prepared(
    name: str, source: sources.Source, output: Path, tokenizer: Path | None, protocol: Any, is_asked: bool
) -> tuple[Path, list[str]]:
    """The folder to load, and lines for the user."""
    folder, notes = source.path, list[str]()
    if source.is_checkpoint:
        is_said = protocol.add_bos is not None or not is_asked
        folder, notes = sources.exported(name, source, output, tokenizer, bos_is_said=is_said)
    if protocol.add_bos and is_asked:
        sources.refuse_without_bos(folder)
    return folder, notes


def _report(found: list[results.ModelResults], output: Path, settings: dict[str, Any], **of_paper: Any) -> None:
    first, *others = (paired.kept(_questions(output, model.name)) for model in found)
    pairs = {model.name: paired.pairs_of(other, first) for model, other in zip(found[1:], others, strict=True)}
    page = table.report(found, settings, pairs=pairs, **of_paper)
    (output / "results.md").write_text(page)
    has_figure = draw(found, output / "results.png")
    console.print(page, markup=False)
    console.print(f"{output}/results.md, .json" + (", .png" if has_figure else ""), markup=False)


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
    found: results.ModelResults | None, source: sources.Source, choices: Sequence[Choice]
) -> results.ModelResults | None:
    """What an earlier start found of this model; None of another one by this name, such as a later step.

    Raises:
        EvaluationError: it was asked other tasks, or the files there are others than then.
    """
    if found is None or found.path != str(source.path):
        return None
    metrics = {name: score.metric.partition(" ")[0] for name, score in found.scores.items()}
    if found.state and found.state != source.state:
        other = f"{source.path} holds other files than when it was evaluated"
    elif metrics != {choice.name: choice.metric for choice in choices}:
        other = f"it was asked other tasks before ({', '.join(f'{name}:{metric}' for name, metric in metrics.items())})"
    else:
        return found
    raise EvaluationError(f"--model {found.name}: {other}: give another --output, which keeps these results")


def _questions(output: Path, name: str) -> Path:
    """Where the scores by question and the losses by document of a model are kept."""
    return output / "questions" / f"{name}.npz"
