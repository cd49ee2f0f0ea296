# SPDX-License-Identifier: Apache-2.0
"""Find which checkpoints of a folder are whole: what a run resumes from, and what may be deleted.

Megatron writes `metadata.json` when all else of a `torch_dist` checkpoint is on the disk, and a file of the older
`torch` format ends with its table of contents, so a save that was killed shows without loading it.

Only absence is evidence: any other error of the file system ends the start in one sentence, since taking it for "no
checkpoint" would delete one or begin again at step 0.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from launch.flags import LaunchError

TRACKER = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"iter_(\d{7,})")
_DELETED = ".deleting"
_SUMS = "integrity.json"  # of all files, which --verify-integrity writes last


def iterations(folder: Path) -> list[int]:
    """List the iterations that `folder` has a checkpoint folder of, oldest first, whole or not."""
    with _if_there(folder):
        found = (_ITERATION.fullmatch(name) for name in os.listdir(folder))
        return sorted(int(match[1]) for match in found if match)
    return []


@contextmanager
def _if_there(path: Path) -> Iterator[None]:
    """End the block if something is missing; a LaunchError if that cannot be seen."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise LaunchError(
            f"{error.filename or path} cannot be read ({error.strerror}): see that its disk is there, then start again"
        ) from None


def is_there(path: Path) -> bool:
    """Return whether there is such a file; a LaunchError if that cannot be seen."""
    with _if_there(path):
        return bool(path.stat())
    return False


def path_of(folder: Path, iteration: int) -> Path:
    return folder / f"iter_{iteration:07d}"


def is_whole(checkpoint: Path) -> bool:
    """Return whether a checkpoint was written to its end; its content is not checked."""
    with _if_there(checkpoint), suppress(ValueError, AttributeError):  # damaged
        if (checkpoint / "metadata.json").is_file():
            backend = json.loads((checkpoint / "metadata.json").read_text()).get("sharded_backend")
            return backend != "torch_dist" or _has_index(checkpoint)
        return _is_whole_legacy(checkpoint)
    return False


def is_torn(checkpoint: Path) -> bool:
    """Return whether a save stopped half-way; formats that are unknown here are neither whole nor torn."""
    return not is_whole(checkpoint) and not _has_index(checkpoint)


def _has_index(checkpoint: Path) -> bool:
    """Return whether torch's index is there, which it writes after the tensors."""
    with _if_there(checkpoint):
        return (checkpoint / ".metadata").stat().st_size > 0
    return False


def _is_whole_legacy(checkpoint: Path) -> bool:
    names = [name for name in os.listdir(checkpoint) if name.startswith("mp_rank_")]
    ranks = [checkpoint / name for name in names if (checkpoint / name).is_dir()]
    files = [[rank / name for name in os.listdir(rank) if name.endswith(".pt")] for rank in ranks]
    return bool(ranks) and all(found and all(map(_has_contents, found)) for found in files)


def _has_contents(path: Path) -> bool:
    """Return whether a file has its table of contents; read first, as `zipfile` takes read errors for "no"."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            file.read(1)
        return zipfile.is_zipfile(file)


def newest_whole(folder: Path) -> int | None:
    """Return the iteration of the newest complete checkpoint in `folder`."""
    known = tracked(folder)
    has_sums = known is not None and is_there(path_of(folder, known) / _SUMS)
    for number in reversed(iterations(folder)):
        checkpoint = path_of(folder, number)
        if number == known and not is_torn(checkpoint):
            return number
        is_later, metadata = known is not None and number > known, checkpoint / "metadata.json"
        # In the older format, without metadata, a rank may have yet to begin its file: there the tracker decides. It
        # decides too where it is newer: the run went back, by --ckpt-step or by another number in the tracker.
        if is_later and not (metadata.is_file() and metadata.stat().st_mtime >= (folder / TRACKER).stat().st_mtime):
            continue
        lacks_sums = is_later and has_sums and not is_there(checkpoint / _SUMS)
        if is_whole(checkpoint) and not lacks_sums:
            return number
    return None


def size(folder: Path) -> int:
    """Return the bytes of the newest complete checkpoint; 0 without one."""
    with suppress(OSError, LaunchError):
        newest = newest_whole(folder)
        return 0 if newest is None else sum(path.stat().st_size for path in path_of(folder, newest).rglob("*"))
    return 0


def tracked(folder: Path) -> int | None:
    """Return the iteration that Megatron would load; None if its tracker file is missing or damaged."""
    with _if_there(folder), suppress(ValueError):
        return int((folder / TRACKER).read_text().strip())
    return None


def is_loadable(folder: Path) -> bool:
    """Return whether Megatron finds something there to begin from."""
    return newest_whole(folder) is not None or ((folder / TRACKER).is_file() and not _is_no_release(folder))


def repair(folder: Path) -> list[str]:
    """Delete torn checkpoints and correct the tracker; return a sentence for each thing done.

    Only for the process that holds the run's lock: what looks torn may be another run's save.
    """
    done = []
    _finish_deletions(folder)
    for number in iterations(folder):
        if is_torn(path_of(folder, number)) and _delete(folder, number):
            done.append(f"{path_of(folder, number)} was never finished: deleted")
    newest, known = newest_whole(folder), tracked(folder)
    if newest is not None and newest != known:
        _write_whole(folder / TRACKER, str(newest))
        found = "was missing or damaged" if known is None else f"named {known}"
        done.append(f"{folder / TRACKER} {found}: it names {newest}, the newest complete checkpoint")
    elif newest is None and (folder / TRACKER).is_file() and _is_no_release(folder):
        if iterations(folder):  # FSDP's formats do not show which are complete
            raise LaunchError(f"{folder / TRACKER} is damaged: write the number of the newest complete one into it")
        (folder / TRACKER).unlink(missing_ok=True)
        done.append(f"{folder / TRACKER} named a checkpoint, but none is complete: the run starts from scratch")
    return done


def _is_no_release(folder: Path) -> bool:
    """Return whether the tracker is of a run: that of a checkpoint for a new start says `release`."""
    return (folder / TRACKER).read_text(errors="replace").strip() != "release"


def prune(folder: Path, keep: int) -> list[Path]:
    """Delete all but the newest `keep` whole checkpoints, and return those; torn ones may be in a save and stay."""
    if keep < 1:
        raise ValueError(f"at least one checkpoint must be kept, not {keep}")
    _finish_deletions(folder)
    whole = [number for number in iterations(folder) if is_whole(path_of(folder, number))]
    kept = {*whole[-keep:], tracked(folder)}
    return [path_of(folder, number) for number in whole if number not in kept and _delete(folder, number)]


def _delete(folder: Path, iteration: int) -> bool:
    """Rename, then delete, so that no half-deleted checkpoint looks whole; False if another process was faster."""
    doomed = path_of(folder, iteration)
    target = doomed.with_name(doomed.name + _DELETED)
    try:
        doomed.rename(target)
    except FileNotFoundError:
        return False
    shutil.rmtree(target, ignore_errors=True)
    return True


def _finish_deletions(folder: Path) -> None:
    for path in folder.glob(f"iter_*{_DELETED}"):
        shutil.rmtree(path, ignore_errors=True)


def _write_whole(path: Path, text: str) -> None:
    """Write all of it or nothing, even if the machine stops."""
    new = path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}")
    try:
        with new.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
