# SPDX-License-Identifier: Apache-2.0
"""Find the folder of a checkpoint, and make folders that appear only when they are complete."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from simreg_megatron.tools.safe_load import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"


def checkpoint_folder(load: Path, step: int | None = None) -> Path:
    """Find the checkpoint that Megatron's --load and --ckpt-step name; the newest one if `step` is None."""
    if not load.is_dir():
        raise CheckpointError(f"there is no folder {load}: give the folder that Megatron's --save named")
    name = f"iter_{step:07d}" if step is not None else ""
    if step is None and (load / TRACKER).is_file():
        text = (load / TRACKER).read_text().strip()
        name = f"iter_{int(text):07d}" if text.isdecimal() else "release"
    elif step is None and (load / "checkpoints" / TRACKER).is_file():
        raise CheckpointError(f"{load} is the folder of a run: give its checkpoints, {load / 'checkpoints'}")
    if not (load / name).is_dir() or (not name and any(load.glob("iter_*"))):
        there = ", ".join(sorted(path.name for path in load.glob("iter_*"))[-5:]) or "none"
        raise CheckpointError(f"{load} has no {name or TRACKER}: name the step with --ckpt-step; there: {there}")
    return load / name


def refuse_taken(save: Path) -> None:
    """Refuse to write over what is there."""
    if save.exists() and (not save.is_dir() or any(save.iterdir())):
        raise CheckpointError(f"{save} already exists: name a new folder, or remove it first")


@contextmanager
def new_folder(save: Path) -> Iterator[Path]:
    """Yield a folder that becomes `save` at the end; after an error or a stop nothing is left of it."""
    save = save.resolve()
    refuse_taken(save)
    save.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{save.name}.", dir=save.parent) as temporary:
        made = Path(temporary, save.name)
        made.mkdir()
        yield made
        umask = os.umask(0)
        os.umask(umask)
        for path in made.rglob("*"):  # safetensors makes its files unreadable to others
            path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)
        made.replace(save)
