# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.gpu.machine FILE.json`: what this machine has, as its report begins.

In a process of its own, as an extension that was built for another torch may end the process that imports it.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from importlib import metadata, util
from pathlib import Path

import torch

from benchmarks.records import surroundings
from simreg_megatron.installed import broken_transformer_engine

NO_GPU = "no GPU"


def facts() -> dict[str, str]:
    """By name, in the order of the report; what is missing says so."""
    where = surroundings()
    return {
        "GPUs": gpus(),
        "driver": driver(),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}",
        "cuDNN": str(torch.backends.cudnn.version() or "none"),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "not asked",
        "Triton": version("triton"),
        "Transformer Engine": transformer_engine(),
        "Apex": apex(),
        "megatron-core": where["megatron_core"],
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}, {where['cores']} cores",
        "commit": where["commit"],
        "date": where["date"],
    }


def gpus() -> str:
    if not torch.cuda.is_available():
        return NO_GPU
    found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return ", ".join(f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor})" for gpu in found)


def driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown (nvidia-smi: {type(error).__name__})"
    return ", ".join(sorted(set(said.split()))) or "unknown"


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def transformer_engine() -> str:
    broken = broken_transformer_engine()
    if broken or util.find_spec("transformer_engine") is None:
        return broken or "not installed"
    return f"{version('transformer-engine')}, imported"


def apex() -> str:
    """Only NVIDIA's has these; the package of that name in the public index is another one."""
    if util.find_spec("apex") is None:
        return "not installed"
    try:
        is_nvidias = util.find_spec("apex.optimizers") is not None
    except Exception as error:  # it imports the package, which may have been built for another torch
        return f"installed and cannot be imported: {error}"
    if not is_nvidias:
        return "not NVIDIA's: another package of that name"
    fused = util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    return f"NVIDIA's, {'with' if fused else 'without'} the kernel that adds weight gradients in place"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(facts(), indent=1), encoding="utf-8")
