# SPDX-License-Identifier: Apache-2.0
"""An error with text from a file stays one printable line."""

from __future__ import annotations

import pickle

import pytest

from simreg_megatron.sentences import one_line
from simreg_megatron.tools.indexed import DataError


@pytest.mark.parametrize(
    "text", ["a\nb", "a\x1b[2Jb", "a\ud800b", "a\u2028b"], ids=["line", "escape", "half", "separator"]
)
def test_terminal_codes_are_removed(text: str) -> None:
    line = one_line(text)
    assert line[0] + line[-1] == "ab" and line.isprintable() and line.encode()


def test_the_beginning_and_the_end_of_a_long_one_stay() -> None:
    line = one_line("begins " + "x" * 100_000 + " ends")
    assert line.startswith("begins ") and line.endswith(" ends") and len(line) < 1100


def test_an_error_travels_between_processes() -> None:
    assert str(pickle.loads(pickle.dumps(DataError("a\nb")))) == "a?b"
