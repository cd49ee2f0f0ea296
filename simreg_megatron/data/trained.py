# SPDX-License-Identifier: Apache-2.0
"""A tokenizer trained on the sources of a set; beside it a record of them, by which the same command knows it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from simreg_megatron.data.indexed import DataError, sha256
from simreg_megatron.data.sample import sample_texts
from simreg_megatron.data.settings import changed_sources, read_json, write_json
from simreg_megatron.data.sources import Input
from simreg_megatron.data.tokenizer import train_tokenizer


def ensure_trained(
    inputs: Sequence[Input], path: Path, *, vocab_size: int, key: str, tell: Callable[[str], None]
) -> None:
    """The model at `path`, trained on these inputs now or by the same command before it was stopped.

    Raises:
        DataError: another one is there, or none can be trained.
    """
    record = path.with_name(f"{path.name}.made.json")
    asked: dict[str, Any] = {"sources": [one.identity() for one in inputs], "key": key, "vocab_size": vocab_size}
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        _refuse_other(path, read_json(record) or {}, asked)
        tell(f"using {path}, which was trained on these sources before")
        return
    tell(f"training a tokenizer of {vocab_size} pieces on a sample of the text")
    unfinished = path.with_name(f"{path.name}.writing")
    try:
        train_tokenizer(list(sample_texts(inputs, key)), unfinished, vocab_size=vocab_size)
    except RuntimeError as error:  # sentencepiece's own sentence stands at the end, after the line of its source
        reason = str(error).rpartition("] ")[2].strip()
        raise DataError(f"no tokenizer of {vocab_size} pieces could be trained on these sources: {reason}") from None
    write_json(record, asked | {"sha256": sha256(unfinished)})
    unfinished.replace(path)


def _refuse_other(path: Path, made: dict[str, Any], asked: dict[str, Any]) -> None:
    """Sources that were mended after the training count as the same."""
    why = "" if made.get("sha256") == sha256(path) else "nothing tells on what it was trained"
    if changed_sources(made.get("sources"), asked["sources"]) is not None:
        made = made | {"sources": asked["sources"]}
    for name in asked if not why else ():
        if made.get(name) != asked[name]:
            why = f"it was trained with other {name}" + ("" if name == "sources" else f", {made.get(name)}")
    if why:
        raise DataError(f"{path} is there, and {why}: remove it, or use it by --tokenizer {path}")
