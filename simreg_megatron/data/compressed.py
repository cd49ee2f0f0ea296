# SPDX-License-Identifier: Apache-2.0
"""Compressed files as a stream of bytes; one that was cut off is an error, never a shorter file."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from simreg_megatron.data.indexed import DataError

# Bytes at a time: each may stand for 1032 in gzip, and four of them in zstandard for 128 KiB, if those are zeros.
_READ = {".gz": 1 << 14, ".zst": 1 << 8}
_BUFFER = 1 << 18
_WINDOW = 1 << 31  # as of zstd --long=31; only what a file uses of it takes memory


def decompressed(path: Path) -> Iterator[tuple[bytes, int]]:
    """The content of a .gz or .zst file piece by piece, and how many bytes of the file were read for it.

    Raises:
        DataError: the file is damaged or cut off.
    """
    open_frame = _gzip_frame if path.suffix == ".gz" else _zstd_frame(path)
    frame, position, begun = None, 0, False
    with path.open("rb", buffering=_BUFFER) as stream:
        while data := stream.read(_READ[".gz" if path.suffix == ".gz" else ".zst"]):
            position += len(data)
            while data := data if frame or not begun else data.lstrip(b"\0"):  # gzip files may be padded with zeros
                frame, begun = frame or open_frame(), True
                try:
                    yield frame.decompress(data), position
                except Exception as error:  # zlib's and zstandard's own
                    raise DataError(f"{path} is damaged near byte {position} ({error}): copy it again") from None
                data = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    if frame is not None or not begun:
        raise DataError(f"{path} ends too early, at byte {position}: it was cut off, copy it again")


def _gzip_frame() -> Any:
    return zlib.decompressobj(wbits=31)


def _zstd_frame(path: Path) -> Any:
    try:
        import zstandard
    except ImportError:
        raise DataError(f"{path} needs the zstandard library: pip install zstandard") from None
    return zstandard.ZstdDecompressor(max_window_size=_WINDOW).decompressobj
