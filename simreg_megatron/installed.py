# SPDX-License-Identifier: Apache-2.0
"""Whether what is installed beside Megatron can be used: a package that is found may still fail to import."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from importlib import util
from pathlib import Path

_NEWER_CUBLAS = (
    "it needs a newer cuBLAS than this torch brings: pip install --no-deps 'nvidia-cublas>=13.2,<13.3', or use a "
    "container that has both"
)
_BUILT_FOR_ANOTHER = (
    "it was built for another torch or CUDA: pip install --no-build-isolation --no-deps --force-reinstall "
    "'transformer-engine[pytorch]', or uninstall it"
)


def broken_transformer_engine() -> str | None:
    """Why Transformer Engine, which is there, cannot be imported, and the way out; None where nothing is wrong.

    Megatron expects an ImportError of it and nothing else, so a library that is missing a symbol ends Megatron too.
    """
    if util.find_spec("transformer_engine") is None:
        return None
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError) as error:
        cause = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        cure = _NEWER_CUBLAS if "cublas" in cause.lower() else _BUILT_FOR_ANOTHER
        return f"Transformer Engine is installed and cannot be imported ({cause}): {cure}"
    return None


def python_path(*folders: Path | str, environ: Mapping[str, str] = os.environ) -> str:
    """A PYTHONPATH with the folders in front of what it names already: packages may be installed there alone."""
    return os.pathsep.join([*map(str, folders), *filter(None, [environ.get("PYTHONPATH")])])
