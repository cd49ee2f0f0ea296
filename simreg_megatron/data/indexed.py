# SPDX-License-Identifier: Apache-2.0
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from simreg_megatron.tools.indexed import DataError, sha256

__all__ = ["DataError", "sha256", "whole_file"]


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    unfinished = path.with_name(f"{path.name}.writing-{secrets.token_hex(8)}")
    try:
        with unfinished.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
