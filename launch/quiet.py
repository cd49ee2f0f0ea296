# SPDX-License-Identifier: Apache-2.0
"""Less on the screen when the tiny model trains: what Megatron says of itself at every start, which nobody reads there.

Lines are left out between the process and its output, so that it does not matter whether Megatron prints, logs or
warns. Nothing that could be about this run is among them; `--verbose` shows all.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

_BEFORE_ARGUMENTS = "- arguments ------------------------"
_AFTER_ARGUMENTS = "- end of arguments ---------------------"
_BUCKET = re.compile(r"^Params for bucket \d+ ")
_OF_A_BUCKET = re.compile(r"^\t\S+ \(param\.main_grad\.dtype=")
_NOISE = re.compile(
    r"CPU RNG state changed within GPU RNG context"
    r"|one_logger package is required"
    r"|GPTModel IS DEPRECATED"
    r"|Setting up (DistributedDataParallel|optimizer) with config "
    r"|Building GPTDataset splits with sizes"
    r"|(site-packages|dist-packages)/\S+\.py:\d+: (User|Future|Deprecation)Warning: "
)
_AFTER_WARNING = re.compile(r"^  \S")  # the line of source that Python prints below a warning


class Quiet:
    """Says of each line, in order, what is to be shown of it."""

    def __init__(self) -> None:
        self._arguments: int | None = None  # lines of the table so far
        self._warned = False

    def shown(self, line: str) -> Iterator[str]:
        after_warning, self._warned = self._warned, False
        if self._arguments is not None:
            if _AFTER_ARGUMENTS in line:
                yield f"(Megatron lists {self._arguments} arguments here: --verbose shows them)"
                self._arguments = None
            else:
                self._arguments += 1
        elif line.endswith(_BEFORE_ARGUMENTS):
            self._arguments = 0
        elif _NOISE.search(line):
            self._warned = "Warning: " in line
        elif not (_BUCKET.match(line) or _OF_A_BUCKET.match(line) or (after_warning and _AFTER_WARNING.match(line))):
            yield line


class QuietStream:
    """A text stream that passes whole lines on to another one, less what `Quiet` leaves out."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._quiet, self._rest = stream, Quiet(), ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            for shown in self._quiet.shown(line):
                self._stream.write(f"{shown}\n")
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def close_line(self) -> None:
        """What was written without a line end, at the end."""
        self._stream.write(self._rest)
        self._rest = ""
        self.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def quiet_output(*, verbose: bool) -> Iterator[None]:
    """While it lasts, this process's output has no such lines; with `verbose` it is left alone."""
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
