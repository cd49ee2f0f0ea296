# SPDX-License-Identifier: Apache-2.0
"""Say things to the user: log messages once, on one rank, and errors of one printable line."""

from __future__ import annotations

import warnings

_said: set[str] = set()


def log_once(message: str) -> None:
    """Log a message once in a run, on the rank whose console Megatron's training log uses."""
    if message in _said:
        return
    _said.add(message)
    say(message)


def forget() -> None:
    """Forget what was logged, since a new run begins in this process, or SimReg was uninstalled."""
    _said.clear()


def say(message: str) -> None:
    """Log on the rank whose console Megatron's training log uses."""
    import torch.distributed as dist

    ready = dist.is_available() and dist.is_initialized()
    if not ready or dist.get_rank() == dist.get_world_size() - 1:
        print(f"> {message}", flush=True)


def warn(message: str) -> None:
    """Warn on the first rank."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_rank() == 0:
        warnings.warn(message, stacklevel=3)


def refuse(*rows: tuple[object, str], error: type[Exception] = ValueError) -> None:
    """Raise the error with the sentence of the first row whose condition is true."""
    for condition, sentence in rows:
        if condition:
            raise error(sentence)


_LONGEST, _TAIL = 1000, 300


class SentenceError(ValueError):
    """The base of each package's own error: its message is one line, printable, and never longer than a screen."""

    def __init__(self, sentence: object = "") -> None:
        super().__init__(one_line(sentence))


def one_line(text: object) -> str:
    """Replace what ends a line, moves a cursor or cannot be encoded by ?, and leave out the middle of a long text."""
    line = "".join(letter if letter.isprintable() else "?" for letter in str(text))
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - _TAIL]} ... {line[-_TAIL:]}"
