# SPDX-License-Identifier: Apache-2.0
"""What `launch.plan` decides, one run with its script, flags and environment, and the machine that it is for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import util
from pathlib import Path

from launch.flags import Flag, LaunchError, flag_names, flag_value, flatten, without

ROOT = Path(__file__).resolve().parent.parent
OWN_SCRIPT = ROOT / "simreg_megatron" / "pretrain.py"
OF_A_START = {  # where a run's first weights come from; each resume would begin there again
    "--load", "--ckpt-step", "--finetune", "--no-load-optim", "--no-load-rng", "--pretrained-checkpoint",
    "--override-ckpt-iteration", "--load-main-params-from-ckpt", "--moe-use-upcycling",
}  # fmt: skip
OR_NOT_AT_ALL = "--exit-on-missing-checkpoint"  # Megatron would start from step 0 if the checkpoint has gone meanwhile


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
    from simreg_megatron.cpu.installed import broken_transformer_engine

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


@dataclass(frozen=True)
class Plan:
    """A planned run: the script, its flags, its environment, and notes for the user."""

    family: str
    model: str
    script: Path
    flags: tuple[Flag, ...]
    environment: dict[str, str]
    on_cpu: bool
    builtin_corpus: bool
    output: Path
    notes: tuple[str, ...]
    plain: bool = False

    @property
    def arguments(self) -> list[str]:
        """Megatron's command line, word by word."""
        return flatten(self.flags)

    @property
    def number_type(self) -> str:
        return next((name for name in ("bf16", "fp16") if f"--{name}" in flag_names(self.flags)), "fp32")

    @property
    def tree(self) -> Path | None:
        """The source tree of Megatron-LM whose script runs; None for ours, with the installed Megatron."""
        return None if self.script == OWN_SCRIPT else self.script.parent

    @property
    def save(self) -> Path | None:
        """The folder of the run's checkpoints."""
        folder = flag_value(self.flags, "--save")
        return Path(folder) if folder else None


def resumed(plan: Plan) -> Plan:
    """Return the plan of a run that resumes from its own checkpoints, and never from step 0."""
    flags = without(plan.flags, {*OF_A_START, OR_NOT_AT_ALL})
    flags += [(f"--no-load-{part}",) for part in ("optim", "rng") if f"--no-save-{part}" in flag_names(plan.flags)]
    return replace(plan, flags=(*flags, ("--load", str(plan.save or "")), (OR_NOT_AT_ALL,)))


def python_path(*folders: Path | str, environ: Mapping[str, str] | None = None) -> str:
    """Return a PYTHONPATH with the folders in front of its present ones, where packages may be installed."""
    return os.pathsep.join([*map(str, folders), *filter(None, [(environ or os.environ).get("PYTHONPATH")])])
