# SPDX-License-Identifier: Apache-2.0
"""Megatron's own training loop on a machine without a GPU: stand-ins for what it asks of CUDA.

Megatron's loop names CUDA devices, streams and tensor types throughout. `activate()` answers those names on the CPU,
one process per rank over gloo, for learning and testing: it must be asked for, before Megatron is imported.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from simreg_megatron.cpu import CpuBackendError, stand_ins
from simreg_megatron.cpu.adaptations import adapt_megatron

MEGATRON_FLAGS = (
    "--transformer-impl", "local", "--distributed-backend", "gloo", "--attention-backend", "unfused",
    "--no-gradient-accumulation-fusion", "--no-persist-layer-norm", "--no-masked-softmax-fusion", "--no-rope-fusion",
    "--no-bias-gelu-fusion", "--no-bias-swiglu-fusion", "--no-bias-dropout-fusion", "--num-workers", "0",
)  # fmt: skip
"""Megatron's flags that go with the CPU: no fused kernels, gloo between processes, no loader processes."""

_state = {"active": False}


def is_active() -> bool:
    return _state["active"]


def requested(argv: list[str]) -> str | None:
    """ "on" or "force" if the command line (--simreg-cpu) or the environment (SIMREG_CPU) asks for the CPU."""
    for word in argv:
        if word == "--simreg-cpu" or word.startswith("--simreg-cpu="):
            return word.partition("=")[2] or "on"
    value = os.environ.get("SIMREG_CPU", "")
    return {"": None, "0": None, "1": "on"}.get(value, value)


def require_gpu() -> None:
    """Raise CpuBackendError if no GPU is visible: to be called if the CPU was not requested."""
    import torch

    if not torch.cuda.is_available():
        raise CpuBackendError(
            "no GPU is here, and Megatron needs one: add --simreg-cpu (or SIMREG_CPU=1) to try it on the CPU, "
            "or see why torch.cuda.is_available() is false"
        )


def connections(flags: Sequence[str]) -> str:
    """Return the CUDA_DEVICE_MAX_CONNECTIONS Megatron demands: 1 under tensor parallelism, any other under FSDP."""
    return "32" if {"--use-torch-fsdp2", "--use-megatron-fsdp"} & set(flags) else "1"


def choose_flags(parser: Any) -> None:
    """Let Megatron's parser default to MEGATRON_FLAGS, as far as this release knows them; what is given wins."""
    chosen, _ = parser.parse_known_args(MEGATRON_FLAGS)
    dests = [action.dest for flag, action in parser._option_string_actions.items() if flag in MEGATRON_FLAGS]
    parser.set_defaults(**{dest: getattr(chosen, dest) for dest in dests})


def refuse(arguments: Any) -> None:
    """Raise ValueError for arguments of Megatron that need a GPU, if this process runs on the stand-ins."""
    needs_gpu = {
        "--distributed-backend nccl": getattr(arguments, "distributed_backend", None) == "nccl",
        "--async-save": getattr(arguments, "async_save", None),  # in a process of Megatron's own
        "--simreg-impl triton": arguments.simreg_impl == "triton" and not os.environ.get("TRITON_INTERPRET"),
    }
    if is_active() and (flags := [flag for flag, is_given in needs_gpu.items() if is_given]):
        raise ValueError(f"{flags[0]} needs a GPU, and this run is on the CPU: leave the flag out")


def activate(mode: str = "on") -> None:
    """Answer Megatron's calls to torch.cuda on the CPU, for the rest of this process; "force" leaves a GPU unused."""
    if is_active():
        return
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiled graphs would bypass the stand-ins
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", connections(sys.argv))
    import torch

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    for condition, sentence in (
        (mode not in ("on", "force"),
         f"--simreg-cpu takes no value or force (SIMREG_CPU: 1 or force), not {mode!r}"),
        ("megatron.core" in sys.modules,
         "the CPU backend must come before Megatron is imported: start the script with "
         "`python -m simreg_megatron SCRIPT ... --simreg-cpu`"),
        (gpu and mode != "force",
         f"a GPU is here ({gpu}): leave --simreg-cpu and SIMREG_CPU out to train on it, or say --simreg-cpu=force "
         "(SIMREG_CPU=force) to leave it idle"),
    ):  # fmt: skip
        if condition:
            raise CpuBackendError(sentence)
    _state["active"] = True
    # Megatron takes its norms and its Adam from Transformer Engine wherever that can be imported; they need a GPU.
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]
    # Fused layers are not needed on a CPU; Megatron warns about each one that is missing.
    warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex|transformer_engine|transformer-engine)")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    stand_ins.replace(torch)
    adapt_megatron()
    atexit.register(settle)
    if int(os.environ.get("RANK", "0")) == 0:
        print("> SimReg: no GPU in use, Megatron runs on the CPU over gloo (for trying and testing)", flush=True)


_PAUSE = 0.02  # seconds: a thread that waits for the lock has it at once while this one sleeps
_LIMIT = 5.0  # seconds: a collective that a lost peer will never finish must not keep the process


def settle() -> None:
    """Wait until gloo's threads have freed what they hold, `_LIMIT` seconds at most.

    Without it torch (seen in 2.13) may abort at the end of a process, with status 134 (PyTorch issue 190489): a thread
    of gloo that is the last holder of tensors asks for Python's lock to free them when the interpreter has begun to
    end. Destroying the groups would take them from exit handlers that need them.
    """
    end = time.monotonic() + _LIMIT
    time.sleep(_PAUSE)
    while time.monotonic() < end and any(map(_is_busy, Path("/proc/self/task").glob("*"))):  # one pause, if not Linux
        time.sleep(_PAUSE)


def _is_busy(task: Path) -> bool:
    """Return whether a thread is gloo's and runs, or waits for a core."""
    with suppress(OSError):  # it ended meanwhile
        is_gloo = (task / "comm").read_text().strip() == "pt_gloo_runloop"
        return is_gloo and (task / "stat").read_text().rpartition(")")[2].split()[0] == "R"
    return False
