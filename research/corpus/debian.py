# SPDX-License-Identifier: Apache-2.0
"""Debian packages as pinned inputs: fetched by apt-get, checked against a lock, read without unpacking or installing.

A lock says of each package its version, file name, size, SHA-256 and which of its files are read: those in the form
with the least markup. Its first packages have the longest running text: of a paragraph that stands in several, the
first keeps it. A file that is in the cache already is used if its hash is right, so a machine without a network, or an
archive that has moved on, can be given the files.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from simreg_megatron.tools.tokens import DataError, sha256


@dataclass(frozen=True)
class Package:
    """One entry of a lock; `read` is a pattern of names of files."""

    name: str
    version: str
    file: str
    bytes: int
    sha256: str
    read: str


def read_lock(path: Path) -> list[Package]:
    return [Package(**entry) for entry in json.loads(path.read_text())["packages"]]


def fetch(package: Package, cache: Path) -> Path:
    """Return the file of a pinned package, from the cache or by apt-get.

    Raises:
        DataError: it cannot be had, or is not the one that the lock names.
    """
    path = cache / package.file
    if not path.exists():
        _download(f"{package.name}={package.version}", cache)
    if not path.exists() or sha256(path) != package.sha256:
        raise DataError(
            f"{path} is not {package.file} as the lock names it (its SHA-256 differs): remove it and give the same "
            "command again"
        )
    return path


def _download(what: str, cache: Path) -> None:
    """Have apt-get fetch `name=version`; the file is in the cache when it is whole."""
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        done = subprocess.run(["apt-get", "download", what], cwd=folder, capture_output=True, text=True)
        path = next(Path(folder).glob("*.deb"), None)
        if done.returncode or path is None:
            reason = next((line[3:] for line in done.stderr.splitlines() if line.startswith("E: ")), "apt-get failed")
            raise DataError(
                f"{what.replace('=', ' ')} cannot be fetched ({reason}): run `apt-get update` first; if the archive "
                f"has moved on, put that version's file from snapshot.debian.org into {cache}"
            )
        path.replace(cache / path.name)


def read_files(path: Path, pattern: str) -> Iterator[tuple[str, bytes]]:
    """Name and content of the package's files whose name matches, decompressed, in the order of the archive."""
    wanted = re.compile(pattern)
    with path.open("rb") as stream:
        _seek_data(stream)
        with tarfile.open(fileobj=stream, mode="r|*") as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isfile() and wanted.search(member.name) else None
                if content is not None:
                    yield member.name, _plain(content.read())


def _seek_data(stream: BinaryIO) -> None:
    """Go to the files of a package: an `ar` archive of the format's version, the package's control data, and these."""
    stream.seek(len("!<arch>\n"))
    while header := stream.read(60):  # name, time, owner, group, mode, size in decimal, an end mark
        if header.startswith(b"data.tar"):
            return
        size = int(header[48:58])
        stream.seek(size + size % 2, os.SEEK_CUR)
    raise ValueError("it holds no files")


def _plain(data: bytes) -> bytes:
    return gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
