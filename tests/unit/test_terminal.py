# SPDX-License-Identifier: Apache-2.0
"""However a command ends, the user reads one sentence on standard error, and a script reads the exit status."""

from __future__ import annotations

import errno
import os

import pytest
import typer

from simreg_megatron.sentences import SentenceError
from simreg_megatron.terminal import one_sentence


def no_space(*path: str) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *path)


@pytest.mark.parametrize(
    ("error", "status", "sentence"),
    [
        (SentenceError("the [bold] flag: drop it"), 2, "error: the [bold] flag: drop it"),
        (no_space("/a/b"), 2, "error: /a/b: No space left on device: make room"),
        (no_space(), 2, "error: No space left on device: make room"),
        (OSError("of a library"), 2, "error: of a library: make room"),
        (KeyboardInterrupt(), 130, "go on with [this] command"),
    ],
)
def test_an_end(error: BaseException, status: int, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as end, one_sentence(mend="make room", stopped="go on with [this] command"):
        raise error
    assert end.value.exit_code == status and end.value.__suppress_context__
    assert capsys.readouterr() == ("", f"{sentence}\n")


@pytest.mark.parametrize("error", [BrokenPipeError(), ValueError("a fault of the program's own")])
def test_an_error_that_no_sentence_mends_passes(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(type(error)), one_sentence():
        raise error
    assert capsys.readouterr() == ("", "")


def test_a_package_of_an_extra_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), one_sentence():
        raise ModuleNotFoundError("No module named 'scipy.stats'", name="scipy.stats")
    assert "scipy is not installed: in the clone's folder, pip install '.[reproduce]'" in capsys.readouterr().err
    with pytest.raises(ModuleNotFoundError), one_sentence():
        raise ModuleNotFoundError("No module named 'own'", name="own")
