# SPDX-License-Identifier: Apache-2.0
"""A reader as the fuzzer sees it: a folder that is made once, and one file of it that changes with each input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
CORPUS, REGRESSIONS = HERE / "corpus", HERE / "regressions"


@dataclass(frozen=True)
class Target:
    """One reader.

    Attributes:
        read: puts the bytes where the reader looks for them, in the folder, and has it read all of them.
        errors: what the reader may raise; each must be one sentence.
        begin: makes what lies beside the bytes.
        words: of the format, for mutations to put in.
        mutations: how many the quick test tries; fewer where the reader is a slow library.
    """

    name: str
    read: Callable[[Path, bytes], object]
    errors: tuple[type[Exception], ...]
    begin: Callable[[Path], object] = lambda folder: None
    words: Sequence[bytes] = ()
    mutations: int = 120

    def seeds(self) -> list[bytes]:
        """Valid inputs, then every input that ever broke the reader; in the order of their names."""
        return [path.read_bytes() for path in (*_files(CORPUS / self.name), *_files(REGRESSIONS / self.name))]


def _files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []
