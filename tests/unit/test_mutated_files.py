# SPDX-License-Identifier: Apache-2.0
"""Files from elsewhere, changed at random: readers end with their own error, no pickle names anything unseen."""

from __future__ import annotations

import io
import pickle
import zipfile
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simreg_megatron.tools import safe_load
from tests.helpers.checkpoints import dist_checkpoint

PICKLE_WORDS = (
    b"cposix\nsystem\n(S'id'\ntR.", b"\x8c\x08builtins\x8c\x04eval\x93", b"cos\nsystem\n", b"(lp0\n", b"ctorch\nSize\n",
    b"cargparse\nNamespace\n", b"\x80\x04", b"h\x00", b"q\x00", b"\x94", b"0", b"2", b"\x93", b"i", b"\x82\x01",
    b"cio\nBytesIO\n", b"\x8c\x05posix\x94\x8c\x06system\x94", b"}(", b"u.", b")\x81", b"b.", b"R", b".",
)  # fmt: skip

fixtures = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def edits(words: tuple[bytes, ...]) -> st.SearchStrategy[list[tuple[float, int, bytes]]]:
    """Draw edits: place (a share of the file), number of bytes removed, and their replacement."""
    inserted = st.sampled_from(words) | st.binary(max_size=4)
    return st.lists(st.tuples(st.floats(0, 1), st.integers(0, 6), inserted), min_size=1, max_size=5)


def edited(data: bytes, changes: list[tuple[float, int, bytes]]) -> bytes:
    for share, gone, word in changes:
        place = int(share * len(data))
        data = data[:place] + word + data[place + gone :]
    return data


class Ghost:
    """Stands for what a pickle names."""

    def __init__(self, *arguments: Any) -> None: ...

    def _ignore(self, *values: Any) -> None: ...

    __setitem__ = __setstate__ = append = extend = add = _ignore


class Follower(pickle._Unpickler):
    """Executes a pickle with ghosts in place of all that it names."""

    def find_class(self, module: str, name: str) -> Any:
        assert safe_load._ALLOWED.fullmatch(f"{module}.{name}"), f"{module}.{name} was not seen"
        return Ghost

    def persistent_load(self, pid: Any) -> Ghost:
        return Ghost()


@pytest.fixture(scope="module")
def common(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The pickle of a checkpoint's common.pt."""
    archive = (dist_checkpoint(tmp_path_factory.mktemp("made") / "c") / "common.pt").read_bytes()
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        return opened.read(next(name for name in opened.namelist() if name.endswith("data.pkl")))


@settings(fixtures, max_examples=500)
@given(changes=edits(PICKLE_WORDS))
def test_a_pickle_that_passes_names_nothing_else(common: bytes, changes: list[tuple[float, int, bytes]]) -> None:
    data = edited(common, changes)
    try:
        safe_load.check_pickle(data, "it")
    except Exception:  # refused, or damaged
        return
    try:
        Follower(io.BytesIO(data)).load()
    except AssertionError:
        raise
    except Exception:  # damaged in a way that only execution shows
        return


def test_the_follower_sees_what_a_check_misses() -> None:
    with pytest.raises(AssertionError, match=r"posix\.system was not seen"):
        Follower(io.BytesIO(b"cposix\nsystem\n(S'id'\ntR.")).load()
