# SPDX-License-Identifier: Apache-2.0
"""What a file puts into an error stays one printable line; ids beyond any vocabulary are not counted."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from simreg_megatron.data.histogram import count_labels
from simreg_megatron.data.indexed import DataError, PairWriter
from simreg_megatron.sentences import one_line


@pytest.mark.parametrize(
    "text", ["a\nb", "a\x1b[2Jb", "a\ud800b", "a\u2028b"], ids=["line", "escape", "half", "separator"]
)
def test_nothing_that_a_terminal_obeys(text: str) -> None:
    line = one_line(text)
    assert line[0] + line[-1] == "ab" and line.isprintable() and line.encode()


def test_the_beginning_and_the_end_of_a_long_one_stay() -> None:
    line = one_line("begins " + "x" * 100_000 + " ends")
    assert line.startswith("begins ") and line.endswith(" ends") and len(line) < 1100


def test_an_error_travels_between_processes() -> None:
    assert str(pickle.loads(pickle.dumps(DataError("a\nb")))) == "a?b"


def test_an_id_beyond_any_vocabulary(tmp_path: Path) -> None:
    writer = PairWriter(tmp_path / "train", "int32")
    writer.append(np.array([1, 2**31 - 1], np.int32), np.array([2], np.int32))
    writer.commit()
    with pytest.raises(DataError, match="no token ids, 1 to 2147483647"):
        count_labels(tmp_path / "train")
