# SPDX-License-Identifier: Apache-2.0
"""Find which checkpoints of a folder are whole: what a run resumes from, and what may be deleted.

Megatron writes `metadata.json` when all else of a `torch_dist` checkpoint is on the disk, so a save that was killed
shows without loading it. In other formats the tracker file decides, and nothing is deleted.

Only absence is evidence: any other error of the file system ends the start in one sentence, since taking it for "no
checkpoint" would delete one or begin again at step 0.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from launch.flags import LaunchError

TRACKER = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"iter_(\d{7,})")
_DELETED = ".deleting"


def iterations(folder: Path) -> list[int]:
    """List the iterations that `folder` has a checkpoint folder of, oldest first, whole or not."""
    with _if_there(folder):
        matches = (_ITERATION.fullmatch(name) for name in os.listdir(folder))
        return sorted(int(match[1]) for match in matches if match)
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
        backend = json.loads((checkpoint / "metadata.json").read_text()).get("sharded_backend")
        return backend != "torch_dist" or _has_index(checkpoint)
    return False


def is_torn(checkpoint: Path) -> bool:
    """Return whether a save stopped half-way; formats that are unknown here are neither whole nor torn."""
    with _if_there(checkpoint):
        is_legacy = any(name.startswith("mp_rank_") for name in os.listdir(checkpoint))
        return not (is_legacy or is_whole(checkpoint) or _has_index(checkpoint))
    return False


def _has_index(checkpoint: Path) -> bool:
    """Return whether torch's index is there, which it writes after the tensors."""
    with _if_there(checkpoint):
        return (checkpoint / ".metadata").stat().st_size > 0
    return False


def newest_whole(folder: Path) -> int | None:
    """Return the iteration of the newest complete checkpoint in `folder`."""
    tracked_iteration = tracked(folder)
    for number in reversed(iterations(folder)):
        checkpoint = path_of(folder, number)
        if number == tracked_iteration and not is_torn(checkpoint):
            return number
        if is_whole(checkpoint) and not _is_abandoned(folder, number):
            return number
    return None


def _is_abandoned(folder: Path, iteration: int) -> bool:
    """Return whether the run went back to before this checkpoint, by --ckpt-step or another number in the tracker."""
    tracked_iteration, metadata = tracked(folder), path_of(folder, iteration) / "metadata.json"
    is_later = tracked_iteration is not None and iteration > tracked_iteration and is_there(metadata)
    return is_later and metadata.stat().st_mtime < (folder / TRACKER).stat().st_mtime  # the tracker decides


def tracked(folder: Path) -> int | None:
    """Return the iteration that Megatron would load; None if its tracker file is missing or damaged."""
    with _if_there(folder), suppress(ValueError):
        return int((folder / TRACKER).read_text().strip())
    return None


def is_loadable(folder: Path) -> bool:
    """Return whether Megatron finds something there to begin from."""
    return newest_whole(folder) is not None or ((folder / TRACKER).is_file() and _names_release(folder))


def repair(folder: Path) -> list[str]:
    """Delete torn checkpoints and correct the tracker; return a sentence for each thing done.

    Only for the process that holds the run's lock: what looks torn may be another run's save.
    """
    done = []
    _finish_deletions(folder)
    for number in iterations(folder):
        if is_torn(path_of(folder, number)) and _delete(folder, number):
            done.append(f"{path_of(folder, number)} was never finished: deleted")
    newest, tracked_iteration = newest_whole(folder), tracked(folder)
    if newest is not None and newest != tracked_iteration:
        _write_whole(folder / TRACKER, str(newest))
        was = "was missing or damaged" if tracked_iteration is None else f"named {tracked_iteration}"
        done.append(f"{folder / TRACKER} {was}: it names {newest}, the newest complete checkpoint")
    elif newest is None and (folder / TRACKER).is_file() and not _names_release(folder):
        if iterations(folder):  # FSDP's formats do not show which are complete
            raise LaunchError(f"{folder / TRACKER} is damaged: write the number of the newest complete one into it")
        (folder / TRACKER).unlink(missing_ok=True)
        done.append(f"{folder / TRACKER} named a checkpoint, but none is complete: the run starts from scratch")
    return done


def _names_release(folder: Path) -> bool:
    """Return whether the tracker names a checkpoint to start from (`release`), not one of a run."""
    return (folder / TRACKER).read_text(errors="replace").strip() == "release"


def prune(folder: Path, keep: int) -> list[Path]:
    """Delete whole checkpoints but for the newest `keep`, and return what was deleted; torn ones may be in a save."""
    _finish_deletions(folder)
    whole = [each for each in iterations(folder) if is_whole(path_of(folder, each)) and not _is_abandoned(folder, each)]
    to_keep = {*whole[-max(keep, 1) :], tracked(folder)}
    return [path_of(folder, number) for number in whole if number not in to_keep and _delete(folder, number)]


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
    """Write all of it or nothing."""
    new = path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}")
    new.write_text(text)
    new.replace(path)
