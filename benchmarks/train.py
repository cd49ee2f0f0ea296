# SPDX-License-Identifier: Apache-2.0
"""One run of launch/pretrain_llama.sh for `benchmarks.step_pairs`: every other pair of steps is plain Megatron's.

Both kinds of step see the same weights, the same data and the same moment of the machine. A step lasts until the next
one begins, its log line included; of two neighbouring log steps one is plain. Each kind follows itself as often as the
other: what a step leaves to the next one shows in the second of a pair. With SIMREG_STEP_PROFILE the last steps are
profiled, and have no times.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.step_profile import profiled
from launch.launcher import main
from simreg_megatron.plugin import hooks, installation

TIMES, PROFILE = "SIMREG_STEP_TIMES", "SIMREG_STEP_PROFILE"  # files to write
LOG_INTERVAL = 10
PROFILED = 8  # four of each kind: the first, a plain one, starts the profiler


def is_plain(step: int) -> bool:
    return step // 2 % 2 == 0


@contextlib.contextmanager
def _given_back(seams: list[tuple[Any, str, Any, Any]]) -> Iterator[None]:
    for holder, name, original, _ in seams:
        setattr(holder, name, original)
    installation.current().paused = True  # or a model that passes nothing of SimReg would be refused
    yield
    installation.current().paused = False
    for holder, name, _, wrapped in seams:
        setattr(holder, name, wrapped)


class Alternating:
    """Train steps with SimReg and without, in the place of `train_step`.

    Args:
        seams: what SimReg wraps: holder, name, Megatron's function and SimReg's.
        times: the CSV file of the steps.
        profile: the JSON file of the PROFILED last ones; None for none.
    """

    def __init__(self, seams: list[tuple[Any, str, Any, Any]], times: Any, profile: Path | None) -> None:
        self._others = [seam for seam in seams if seam[1] != "train_step"]
        ((self._plain, self._with_simreg),) = [seam[2:] for seam in seams if seam[1] == "train_step"]
        self._writer, self._profile = csv.writer(times), profile
        self._originals = contextlib.ExitStack()
        self._step, self._begun = 0, (0.0, 0.0)
        self._profiles: list[dict[str, Any]] = []
        self._writer.writerow(("step", "plain", "seconds", "processor_seconds"))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        self._originals.close()  # the log of the step before was that step's, too
        torch.cuda.synchronize()  # so are its last kernels; without a GPU its stand-in does nothing
        now = time.perf_counter(), time.process_time()
        if self._step and not self._profiles:
            taken = (f"{end - begin:.6f}" for begin, end in zip(self._begun, now, strict=True))
            self._writer.writerow((self._step - 1, int(is_plain(self._step - 1)), *taken))
        self._begun, number, self._step = now, self._step, self._step + 1
        if is_plain(number):
            self._originals.enter_context(_given_back(self._others))
        step = self._plain if is_plain(number) else self._with_simreg
        if self._profile is None or number < get_args().train_iters - PROFILED:
            return step(*args, **kwargs)
        result, measured = profiled(lambda: step(*args, **kwargs))
        self._profiles.append({"step": number, "plain": is_plain(number), **measured})
        self._profile.write_text(json.dumps(self._profiles, indent=1), encoding="utf-8")
        return result


def _install_and_change(install: Callable[..., None], times: Any) -> Callable[..., None]:
    def installed(*args: Any, **kwargs: Any) -> None:
        install(*args, **kwargs)
        from megatron.training import training

        profile = Path(os.environ[PROFILE]) if PROFILE in os.environ else None
        training.train_step = Alternating(installation.current()._originals, times, profile)

    return installed


if __name__ == "__main__":
    with open(os.environ[TIMES], "w", encoding="utf-8", newline="", buffering=1) as times:
        hooks.install = _install_and_change(hooks.install, times)
        main("llama")
