# SPDX-License-Identifier: Apache-2.0
"""Work with what is installed: Transformer Engine and its cuDNN, Megatron's dataset helpers."""

from __future__ import annotations

import functools
import importlib
import os
import shutil
from collections.abc import Callable
from importlib import util
from pathlib import Path

_NEWER_CUBLAS = (
    "it needs a newer cuBLAS than this torch brings: pip install --no-deps 'nvidia-cublas>=13.2,<13.3', or use a "
    "container that has both"
)
_ANOTHER_CUDNN = (
    "it loaded another cuDNN than torch: set CUDNN_HOME to the folder that torch's cuDNN was installed into (python -c "
    "'import nvidia.cudnn as c; print(*c.__path__)'), and put its lib folder first in LD_LIBRARY_PATH"
)
_BUILT_FOR_ANOTHER = (
    "it was built for another torch or CUDA: pip install --no-build-isolation --no-deps --force-reinstall "
    "--no-cache-dir transformer-engine-torch, or uninstall it"
)


def broken_transformer_engine() -> str | None:
    """Import Transformer Engine where it is installed; return why that failed and the way out, None if it did not.

    Megatron catches an ImportError of it and nothing else, so a library that is missing a symbol ends Megatron too.
    """
    if util.find_spec("transformer_engine") is None:
        return None
    _use_cudnn_of_torch()
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # of another torch it may lack any attribute
        cause = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        library = cause.lower()
        cure = _NEWER_CUBLAS if "cublas" in library else _ANOTHER_CUDNN if "cudnn" in library else _BUILT_FOR_ANOTHER
        return f"Transformer Engine is installed and cannot be imported ({cause}): {cure}"
    return None


def _use_cudnn_of_torch() -> None:
    """Set CUDNN_HOME to the cuDNN of torch's wheel, unless the user names one: the system's would not load."""
    if "CUDNN_HOME" in os.environ or "CUDNN_PATH" in os.environ or util.find_spec("nvidia") is None:
        return
    cudnn = util.find_spec("nvidia.cudnn")
    if cudnn is not None and cudnn.submodule_search_locations:
        os.environ["CUDNN_HOME"] = next(iter(cudnn.submodule_search_locations))


def without_make(compile_helpers: Callable[[], None]) -> Callable[[], None]:
    """Wrap Megatron's `compile_helpers`: its wheels bring the compiled module, but no Makefile for `make`."""

    @functools.wraps(compile_helpers)
    def compile_if_needed() -> None:
        helpers = util.find_spec("megatron.core.datasets.helpers_cpp")
        can_make = shutil.which("make") and (Path(str(helpers and helpers.origin)).parent / "Makefile").exists()
        if helpers is None or can_make:
            compile_helpers()

    return compile_if_needed
