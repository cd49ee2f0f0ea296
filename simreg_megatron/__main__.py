# SPDX-License-Identifier: Apache-2.0
"""`torchrun ... -m simreg_megatron SCRIPT ARGS`: install SimReg, then run a Megatron script unchanged."""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections.abc import Callable
from typing import Any

from simreg_megatron.cpu import CpuBackendError
from simreg_megatron.cpu import backend as cpu_backend
from simreg_megatron.cpu.installed import without_make
from simreg_megatron.plugin.compat import MegatronSeamError, has_training_loop, megatron_version

USAGE = "usage: torchrun ... -m simreg_megatron [--plain] SCRIPT.py [MEGATRON FLAGS] [--simreg-lambda 10 ...]"
PLAIN = "--plain"  # before the script: leave the plugin out, to compare with Megatron alone


def run(argv: list[str], *, plain: bool = False) -> None:
    """Run `argv[0]` as __main__ with `argv[1:]`, with SimReg in Megatron, or with Megatron alone where `plain`.

    Megatron is that of the script's folder, if it has one, as under `python SCRIPT`. The CPU backend comes first if
    `--simreg-cpu` or SIMREG_CPU asks for it: it must precede Megatron's import.
    """
    from simreg_megatron.plugin import hooks  # which imports torch

    script = argv[0]
    folder = os.path.dirname(os.path.realpath(script))
    if folder != os.path.dirname(os.path.realpath(__file__)):  # pretrain.py imports nothing from its folder
        sys.path.insert(0, folder)  # runpy does not; before Megatron is imported
    try:
        mode = cpu_backend.requested(argv[1:])
        if mode is not None:
            cpu_backend.activate(mode)
        elif not {"-h", "--help"} & set(argv):
            cpu_backend.require_gpu()
        if not plain:
            hooks.install()
        elif mode is not None:  # no parser of ours is there, which knows the flag and has the defaults that go with it
            rest = [word for word in argv[1:] if word.partition("=")[0] != "--simreg-cpu"]
            argv = [script, *cpu_backend.MEGATRON_FLAGS, *rest]
        else:
            from megatron.core.datasets import utils

            utils.compile_helpers = without_make(utils.compile_helpers)
        if has_training_loop():
            from megatron.training import initialize

            if warm_up := getattr(initialize, "_warmup_jit_function", None):
                initialize._warmup_jit_function = _without_odd_warm_up(warm_up)
        _check_place_of_megatron(folder)
    except (CpuBackendError, MegatronSeamError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    sys.argv = argv
    try:
        runpy.run_path(os.path.abspath(script), run_name="__main__")
    finally:  # Megatron itself flushes TensorBoard before the last validation, and finishes W&B after it
        megatron = sys.modules.get("megatron.training.global_vars")
        if megatron and (writer := megatron.get_tensorboard_writer()):
            writer.flush()


def _without_odd_warm_up(warm_up: Callable[..., None]) -> Callable[..., None]:
    """Wrap Megatron's `_warmup_jit_function`: skip it if SwiGLU's FFN has an odd width, as the paper's 2371 and 5461.

    It compiles SwiGLU with a tensor of that width, which SwiGLU must halve. Without it the first step compiles.
    """

    @functools.wraps(warm_up)
    def warm_up_if_even(*args: Any, **kwargs: Any) -> None:
        from megatron.training import get_args

        megatron = get_args()
        if not (megatron.swiglu and megatron.ffn_hidden_size // megatron.tensor_model_parallel_size % 2):
            warm_up(*args, **kwargs)

    return warm_up_if_even


def _check_place_of_megatron(folder: str) -> None:
    """Print which Megatron was imported; MegatronSeamError if it is not that of the script's folder, which has one."""
    import megatron.core

    place = os.path.abspath(os.path.join(megatron.core.__path__[0], os.pardir, os.pardir))
    if os.path.isdir(os.path.join(folder, "megatron", "core")) and not os.path.samefile(place, folder):
        raise MegatronSeamError(
            f"expected Megatron from the script's folder {folder}, but the one in {place} was imported first: remove "
            "what imports it when Python starts (a .pth file, sitecustomize)"
        )
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"> Megatron {megatron_version()} from {place}", flush=True)


def main() -> None:
    argv = sys.argv[1:]
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        raise SystemExit(0 if argv else 2)
    plain = argv[0] == PLAIN
    argv = argv[1:] if plain else argv
    if not getattr(sys.flags, "safe_path", False):  # it came with Python 3.11
        del sys.path[0]  # the working directory, which `-m` put there and `python SCRIPT` would not
    if not argv or not os.path.isfile(argv[0]):
        cause = f"there is no script {argv[0]}" if argv else f"{PLAIN} needs a script"
        print(f"error: {cause}\n{USAGE}", file=sys.stderr)
        raise SystemExit(2)
    run(argv, plain=plain)


if __name__ == "__main__":
    main()
