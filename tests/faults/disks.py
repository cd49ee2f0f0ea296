# SPDX-License-Identifier: Apache-2.0
"""File systems of their own for a run's output or its checkpoints: small ones that fill up, and read-only ones."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOM = 256 << 20


def are_allowed() -> bool:
    return os.geteuid() == 0


@contextmanager
def small(folder: Path, size: int = ROOM) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def resize(folder: Path, size: int = ROOM) -> None:
    """More room; what was read-only can be written again."""
    _mount("-o", f"remount,rw,size={size}", folder)


def make_read_only(folder: Path, seconds: float = 30) -> None:
    """As soon as no file there is open for writing."""
    end = time.monotonic() + seconds
    while subprocess.run(["mount", "-o", "remount,ro", folder], capture_output=True).returncode:
        if time.monotonic() > end:
            raise TimeoutError(f"{folder} stays in use")
        time.sleep(0.05)


def _mount(*words: str | Path) -> None:
    subprocess.run(["mount", *words], check=True, capture_output=True)
