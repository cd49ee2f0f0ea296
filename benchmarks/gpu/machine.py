# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.gpu.machine FILE.json`: what this machine has."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.records import surroundings

_PACKAGES = ("triton", "transformer-engine", "apex")


def facts() -> dict[str, Any]:
    """Describe this machine by name and value; `doctor` describes what can be imported."""
    installed = {found.name.replace("_", "-"): found.version for found in metadata.distributions()}
    query = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    try:
        gpus = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        gpus = f"unknown: {type(error).__name__}"
    return {
        **surroundings(), "GPUs, memory, driver": gpus, "CUDA": torch.version.cuda,
        "cuDNN": torch.backends.cudnn.version(), **{name: installed.get(name, "not installed") for name in _PACKAGES},
    }  # fmt: skip


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(facts(), indent=1), encoding="utf-8")
