# SPDX-License-Identifier: Apache-2.0
"""What --model names: a Hugging Face folder as it is, or a Megatron checkpoint, exported once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Set
from pathlib import Path
from typing import NamedTuple

from simreg_megatron.checkpoint.errors import CheckpointError
from simreg_megatron.data.indexed import DataError
from simreg_megatron.evaluation.errors import EvaluationError

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_OF_A_MODEL = {".safetensors", ".bin", ".pt", ".distcp", ".metadata", ".json", ".model"}


class Source(NamedTuple):
    """Where a model lies, and a digest of its files' names, sizes and times of writing."""

    path: Path
    is_checkpoint: bool
    state: str


def find(name: str, path: Path) -> Source:
    """Of a run the step that would be exported now: it goes on, and its later steps are other models.

    Raises:
        EvaluationError: there is no model, or none that can be read.
    """
    is_checkpoint = not (path / "config.json").is_file()
    if is_checkpoint:
        from simreg_megatron.checkpoint.source import step_folder

        try:
            path = step_folder(path, None)
        except CheckpointError as error:
            raise EvaluationError(str(error)) from None
    else:
        _refuse_unreadable(name, path)
    return Source(path, is_checkpoint, state_of(path, _OF_A_MODEL))


def _refuse_unreadable(name: str, folder: Path) -> None:
    """Before another model answers for hours."""
    from transformers import AutoConfig

    if not any((folder / known).is_file() for known in _WEIGHTS):
        raise EvaluationError(
            f"--model {name}: {folder} has a config.json and no {_WEIGHTS[0]} (pickled weights are not "
            "read): copy it completely, or save it again with safetensors"
        )
    try:
        AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # whichever of a dozen: all mean that transformers cannot load it
        raise EvaluationError(
            f"--model {name}: transformers cannot read {folder}/config.json ({error}): copy the folder again"
        ) from None


def state_of(folder: Path, only: Set[str] | None = None) -> str:
    """Of its files, or of those of these names or endings: to read all weights would take minutes."""
    files = sorted(path for path in folder.rglob("*") if only is None or only & {path.suffix, path.name})
    told = [(str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return _digest(told)


def _digest(told: object) -> str:
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def hash_of(tokenizer: Path) -> str:
    """What tells later whether another tokenizer is this one.

    Raises:
        EvaluationError: it is no tokenizer.
    """
    from simreg_megatron.checkpoint.tokenizer import open_tokenizer
    from simreg_megatron.data.encoding import describe_tokenizer

    try:
        return describe_tokenizer(str(open_tokenizer(tokenizer).path)).sha256
    except (CheckpointError, DataError) as error:
        raise EvaluationError(f"--tokenizer: {error}") from None


def exported(
    name: str, source: Source, output: Path, tokenizer: Path | None, *, bos_is_said: bool
) -> tuple[Path, list[str]]:
    """The export of a Megatron checkpoint as a Hugging Face folder, and what the user must know of it.

    Made once: its name holds a digest of the checkpoint and of the tokenizer, so that no other is taken for it.

    Raises:
        EvaluationError: it cannot be exported, or whether its texts began with BOS must be said first.
    """
    from simreg_megatron.checkpoint.export import export, plan_export
    from simreg_megatron.checkpoint.source import open_checkpoint
    from simreg_megatron.checkpoint.tokenizer import open_tokenizer

    checkpoint = source.path
    if tokenizer is None:
        raise EvaluationError(f"--model {name} is a Megatron checkpoint: give the --tokenizer of its training")
    digest = _digest([str(checkpoint.resolve()), source.state, hash_of(tokenizer)])
    folder = output / "models" / f"{name}-{checkpoint.name}-{digest[:12]}"
    try:
        plan = plan_export(open_checkpoint(checkpoint, None), tokenizer=open_tokenizer(tokenizer))
        if plan.checkpoint.args.get("tokenizer_type") == "Llama2Tokenizer" and not bos_is_said:
            raise EvaluationError(
                f"--model {name} was trained with Llama2Tokenizer, which began every document with BOS up to Megatron "
                "0.14 and not since: say --bos document or --bos none, as in its training"
            )
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            export(plan, folder)
    except CheckpointError as error:
        raise EvaluationError(str(error)) from None
    return folder, plan.notes


def refuse_without_bos(folder: Path) -> None:
    """The harness adds no begin-of-text token, and says nothing, where the tokenizer has none, or is one that the
    releases 4 of transformers do not tell to add it.

    Raises:
        EvaluationError: none is added.
    """
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, add_bos_token=True, trust_remote_code=False)
    ids = tokenizer("a", add_special_tokens=True)["input_ids"]
    if tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]:
        return
    mend = "name its bos_token in tokenizer_config.json"
    if tokenizer.bos_token_id is not None:
        mend = f"install transformers 5 or later, which can be told to (here is {transformers.__version__})"
    raise EvaluationError(
        f"--bos document: the tokenizer of {folder} puts no begin-of-text token before a text: {mend}, or give "
        "--bos none"
    )
