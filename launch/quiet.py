# SPDX-License-Identifier: Apache-2.0
"""Filter Megatron's start-up output when the tiny model trains; `--verbose` shows all.

Lines are dropped between the process and its output, so printed, logged and warned ones alike.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

_BEFORE_ARGUMENTS = "- arguments ------------------------"
_AFTER_ARGUMENTS = "- end of arguments ---------------------"
_BUCKET = re.compile(r"Params for bucket \d+ |\t\S+ \(param\.main_grad\.dtype=")
_NOISE = re.compile(
    r"CPU RNG state changed within GPU RNG context"
    r"|one_logger package is required"
    r"|GPTModel IS DEPRECATED"
    r"|Setting up (DistributedDataParallel|optimizer) with config "
    r"|Building GPTDataset splits with sizes"
    r"|(site-packages|dist-packages)/\S+\.py:\d+: (User|Future|Deprecation)Warning: "
)
_AFTER_WARNING = re.compile(r"^  \S")  # the line of source that Python prints below a warning


class QuietStream:
    """A text stream that passes whole lines on to another one, without Megatron's start-up noise."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._rest = stream, ""
        self._arguments: int | None = None  # lines of the table so far
        self._warned = False

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if (shown := self._shown(line)) is not None:
                self._stream.write(f"{shown}\n")
        return len(text)

    def _shown(self, line: str) -> str | None:
        after_warning, self._warned = self._warned, False
        if self._arguments is not None:
            count, self._arguments = self._arguments, self._arguments + 1
            if _AFTER_ARGUMENTS not in line:
                return None
            self._arguments = None
            return f"(Megatron lists {count} arguments here: --verbose shows them)"
        if line.endswith(_BEFORE_ARGUMENTS):
            self._arguments = 0
            return None
        if _NOISE.search(line):
            self._warned = "Warning: " in line
            return None
        return None if _BUCKET.match(line) or (after_warning and _AFTER_WARNING.match(line)) else line

    def close_line(self) -> None:
        """Write what has no line end, at the end."""
        self._stream.write(self._rest)
        self._rest = ""
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def quiet_output(*, verbose: bool) -> Iterator[None]:
    """Filter this process's output until the block ends, unless `verbose`."""
    if verbose:
        yield
        return
    before = sys.stdout, sys.stderr
    streams = QuietStream(sys.stdout), QuietStream(sys.stderr)
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        for stream in streams:
            stream.close_line()
        sys.stdout, sys.stderr = before
