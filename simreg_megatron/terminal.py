# SPDX-License-Identifier: Apache-2.0
"""Where the program's commands print, and how they end: an error of the user's is one sentence and exit status 2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer
from rich.console import Console

from simreg_megatron.sentences import SentenceError

console = Console(soft_wrap=True, highlight=False)
errors = Console(stderr=True, soft_wrap=True, highlight=False)

# What a command needs beyond the package itself, and the extra of setup.py that brings it.
_EXTRAS = {
    "matplotlib": "report", "tensorboard": "report", "scipy": "reproduce", "yaml": "reproduce", "lm_eval": "eval",
    "transformers": "hf", "safetensors": "hf", "sentencepiece": "data", "datasets": "data", "pyarrow": "data",
    "zstandard": "data", "filelock": "data", "lxml": "data",
}  # fmt: skip


@contextmanager
def one_sentence(
    *, mend: str = "see that it is there, and can be read and written", stopped: str = "Stopped."
) -> Iterator[None]:
    """End the command with one sentence, not a traceback, where it meets an error that is no fault of the program.

    Args:
        mend: what to do where a file or a disk refuses.
        stopped: what to say after Ctrl-C.
    """
    try:
        yield
    except SentenceError as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in _EXTRAS:
            raise
        _fail(f"{name} is not installed: in the clone's folder, pip install '.[{_EXTRAS[name]}]'")
    except BrokenPipeError:  # of `| head`, which nobody needs to be told of
        raise
    except OSError as error:
        told = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
        _fail(f"{told}: {mend}")
    except KeyboardInterrupt:
        errors.print(stopped, markup=False)
        raise typer.Exit(130) from None


def print_error(sentence: str) -> None:
    """On standard error, so that what a command prints can go into a file."""
    errors.print(f"error: {sentence}", style="bold red", markup=False)


def _fail(sentence: str) -> NoReturn:
    print_error(sentence)
    raise typer.Exit(2) from None
