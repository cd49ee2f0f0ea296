# SPDX-License-Identifier: Apache-2.0
"""Task data from a folder instead of the network.

`FOLDER/OWNER/NAME` is a copy of the data set OWNER/NAME of the Hugging Face Hub, as
`hf download --repo-type dataset OWNER/NAME --local-dir FOLDER/OWNER/NAME` makes it, or any folder that
`datasets.load_dataset` reads.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from simreg_megatron.evaluation.errors import EvaluationError

_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")


def go_offline() -> None:
    """Before transformers, datasets and the hub's client are imported: they read it then."""
    for name in _OFFLINE:
        os.environ[name] = "1"


@contextmanager
def local_datasets(folder: Path | None, *, offline: bool) -> Iterator[None]:
    """While it lasts, `datasets.load_dataset` looks into `folder` first, and misses are explained.

    Raises:
        EvaluationError: inside, where a data set is neither in the folder, nor in the cache, nor to be had.
    """
    import datasets

    datasets.config.HF_DATASETS_TRUST_REMOTE_CODE = False  # releases before 4 would ask whether to run a set's code
    original = datasets.load_dataset

    @functools.wraps(original)
    def load(path: str, *args: Any, **kwargs: Any) -> Any:
        copy = folder / path if folder is not None else None
        found = copy is not None and copy.is_dir()
        try:
            return original(str(copy) if found else path, *args, **kwargs)
        except Exception as error:  # whichever of a dozen: all mean that there is no such data here
            raise EvaluationError(_explanation(path, copy, found, offline, error)) from error

    datasets.load_dataset = load
    try:
        yield
    finally:
        datasets.load_dataset = original


def _explanation(path: str, copy: Path | None, found: bool, offline: bool, error: Exception) -> str:
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    if found:
        return f"the data in {copy} cannot be read as the data set {path} ({reason}): copy it again"
    place = copy if copy is not None else f"DIR/{path}, and give --task-data DIR"
    how = f"hf download --repo-type dataset {path} --local-dir"
    if offline:
        return (
            f"the data set {path} is not on this machine, and --offline forbids downloading it: where there is a "
            f"network, `{how} {path}`, then copy that folder to {place}"
        )
    return f"the data set {path} could not be fetched ({reason}): `{how} ...` elsewhere and copy it to {place}"
