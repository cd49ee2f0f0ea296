# SPDX-License-Identifier: Apache-2.0
"""Folders that are there whole or not at all."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from simreg_megatron.checkpoint.errors import CheckpointError

_YOUNG = 60  # seconds; another export may have made its folder just now and not hold it yet


@contextmanager
def appearing(save: Path) -> Iterator[Path]:
    """A folder beside `save` that takes its name at the end; however the way there ends, no half of it stays.

    Raises:
        CheckpointError: the name is taken.
    """
    save = save.resolve()  # what a link leads to: the folder must appear beside that
    if os.path.ismount(save):
        raise CheckpointError(f"{save} is a mount point, which no folder can replace: name a folder below it")
    if save.exists() and (not save.is_dir() or any(save.iterdir())):
        raise CheckpointError(f"{save} already exists: name a new folder, or remove it first")
    save.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{save.name}.partial-"
    for left in save.parent.glob(f"{glob.escape(prefix)}*"):
        with suppress(OSError), _held(left) as is_left:
            is_young = time.time() - left.stat().st_mtime < _YOUNG
            if is_left and not is_young:  # of an export that was killed, since nobody holds it
                shutil.rmtree(left)
    partial = Path(tempfile.mkdtemp(prefix=prefix, dir=save.parent))
    try:
        with _held(partial):
            yield partial
            _open_to_others(partial)
            _put_on_disk(partial)
            os.replace(partial, save)
        _put_on_disk(save.parent, inside=False)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Whether it is locked now, until the process ends, however it does: some shared file systems have no locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_locked = True
    except OSError:
        is_locked = False
    try:
        yield is_locked
    finally:
        os.close(descriptor)


def _open_to_others(folder: Path) -> None:
    """The modes of the user's umask: what made the folder, and what writes tensors, choose the owner's alone."""
    hidden = os.umask(0o077)
    os.umask(hidden)
    for path in (folder, *folder.rglob("*")):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~hidden)


def _put_on_disk(folder: Path, *, inside: bool = True) -> None:
    """Before the name appears, what it stands for: else a machine that stops may leave empty files behind it."""
    for path in (folder, *(folder.rglob("*") if inside else ())):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
