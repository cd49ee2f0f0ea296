# SPDX-License-Identifier: Apache-2.0
"""What is asked of `data prepare`, the inputs behind its words, and who is told how it goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from simreg_megatron.data.assemble import SETTINGS
from simreg_megatron.data.budget import Reckoning
from simreg_megatron.data.indexed import DataError
from simreg_megatron.data.sources import Input, find_inputs
from simreg_megatron.data.work import BOS_POLICIES, ERROR_POLICIES

BLOCK_BYTES = 32 << 20


@dataclass(frozen=True)
class Task:
    """What is asked for.

    Args:
        sources: words as on the command line: files, folders, `hf:NAME[:CONFIGURATION][@REVISION]`, `c4`.
        output: folder of the set.
        tokenizer: a sentencepiece .model file, or a Hugging Face folder or name.
        valid_sources: for the validation set alone; without them it is `valid_share` of the documents.
        tokens, valid_tokens: the sets end with the document that reaches them; None takes all.
        shard: (i, n): make only the parts of machine i of n, counted from 0.
        block_bytes: about so much text a part.
    """

    sources: Sequence[str]
    output: Path
    tokenizer: str
    valid_sources: Sequence[str] = ()
    valid_share: float = 0.0
    tokens: int | None = None
    valid_tokens: int | None = None
    key: str = "text"
    bos: str = "none"
    on_error: str = "stop"
    workers: int = 1
    shard: tuple[int, int] = (0, 1)
    block_bytes: int = BLOCK_BYTES

    def __post_init__(self) -> None:
        for name, value, known in (("bos", self.bos, BOS_POLICIES), ("on-error", self.on_error, ERROR_POLICIES)):
            if value not in known:
                raise DataError(f"--{name} takes {' or '.join(known)}, not {value!r}")
        if not 0 <= self.valid_share < 1:
            raise DataError(f"--valid-share takes a share of the documents from 0 to below 1, not {self.valid_share}")
        if self.valid_share and self.valid_sources:
            raise DataError("--valid and --valid-share both make the validation set: give one")
        index, count = self.shard
        if not 0 <= index < count:
            raise DataError(f"--shard takes i/n with i from 1 to n, not {index + 1}/{count}")
        for name, number in (("workers", self.workers), ("tokens", self.tokens), ("valid-tokens", self.valid_tokens)):
            if number is not None and number < 1:
                raise DataError(f"--{name} takes a positive number, not {number}")
        if self.valid_tokens and not self.valid_sources:
            raise DataError("--valid-tokens goes with --valid: otherwise --valid-share sets the size of the set")

    @property
    def budget(self) -> dict[str, int | None]:
        return {"train": self.tokens, "valid": self.valid_tokens}


class Progress(Protocol):
    """Told of what is there and what comes."""

    def begin(self, name: str, reckoning: Reckoning) -> None: ...

    def update(self) -> None: ...

    def tell(self, sentence: str) -> None: ...


class Silent:
    def begin(self, name: str, reckoning: Reckoning) -> None:
        pass

    def update(self) -> None:
        pass

    def tell(self, sentence: str) -> None:
        pass


def inputs_of(task: Task, tell: Callable[[str], None]) -> dict[str, list[Input]]:
    """The inputs of both sets of sources; what is for validation stands in no training text.

    Raises:
        DataError: a source cannot be read, or lies among the parts of the set.
    """
    valid = find_inputs(task.valid_sources, split="validation")
    apart = {path.resolve() for one in valid for path in one.files}
    left: list[Path] = []

    def is_apart(path: Path) -> bool:
        if apart and path.resolve() in apart:
            left.append(path)
            return True
        return False

    inputs = {"train": find_inputs(task.sources, leave_out=is_apart), "valid": valid}
    if left:
        more = f" and {len(left) - 1} more" if left[1:] else ""
        tell(f"{left[0]}{more} is for validation, so it is left out of the training text")
    parts = (task.output / SETTINGS).parent.resolve()
    found = [path for side in inputs.values() for one in side for path in one.files]
    for path in found if parts.exists() else ():
        if path.resolve().is_relative_to(parts):
            raise DataError(f"{path} lies in {parts}, where the parts of the set are made: give another --out")
    return inputs
