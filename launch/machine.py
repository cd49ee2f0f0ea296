# SPDX-License-Identifier: Apache-2.0
"""The hardware that a run is planned for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import util

from launch.flags import LaunchError
from simreg_megatron.installed import broken_transformer_engine


@dataclass(frozen=True)
class Machine:
    """The facts of a machine that choose flags."""

    gpus: int = 0
    transformer_engine: bool = False
    apex_gradient_kernel: bool = False  # fuses gradient accumulation; built with NVIDIA's Apex only
    world_size: int = 1
    local_world_size: int = 1
    whole_nodes: bool = False  # submitted to SLURM: the number of ranks is set by --nodes


def look_at_machine() -> Machine:
    """Find what this process runs on; a LaunchError if it has a GPU and a broken Transformer Engine."""
    import torch

    from simreg_megatron.cpu import backend as cpu_backend

    gpus = 0 if cpu_backend.is_active() else torch.cuda.device_count()  # its stand-ins would count as GPUs
    if gpus and (broken := broken_transformer_engine()):  # a run on CPUs does without it
        raise LaunchError(broken)
    return Machine(
        gpus=gpus,
        transformer_engine=util.find_spec("transformer_engine") is not None,
        apex_gradient_kernel=util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
        world_size=int(os.environ["WORLD_SIZE"]),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    )
