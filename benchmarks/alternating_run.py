# SPDX-License-Identifier: Apache-2.0
"""One run of launch/pretrain_llama.sh in which Megatron's own functions come back for every other step.

Started by `benchmarks.step_pairs`. In a plain step each function that SimReg wraps is the original one again, so both
kinds of step see the same weights, the same data and the same moment of the machine. A step lasts until the next one
begins, its log line included; of two neighbouring log steps one is plain.
"""

from __future__ import annotations

import contextlib
import csv
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from launch.launcher import main  # noqa: E402  (the root is on the path first)
from simreg_megatron.plugin import hooks, installation  # noqa: E402

LOG_INTERVAL = 10
TIMES = "SIMREG_STEP_TIMES"  # the file to write


def is_plain(step: int) -> bool:
    return (step + step // LOG_INTERVAL) % 2 == 0


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
    """In the place of `train_step`.

    Args:
        seams: what SimReg wraps: holder, name, Megatron's function and SimReg's.
    """

    def __init__(self, seams: list[tuple[Any, str, Any, Any]], file: Any) -> None:
        self._others = [seam for seam in seams if seam[1] != "train_step"]
        ((self._plain, self._with_simreg),) = [seam[2:] for seam in seams if seam[1] == "train_step"]
        self._writer = csv.writer(file)
        self._originals = contextlib.ExitStack()
        self._step, self._begun = 0, (0.0, 0.0)
        self._writer.writerow(("step", "plain", "seconds", "processor_seconds"))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._originals.close()  # the log of the step before was that step's, too
        torch.cuda.synchronize()  # so are its last kernels; without a GPU its stand-in does nothing
        now = time.perf_counter(), time.process_time()
        if self._step:
            taken = (f"{end - begin:.6f}" for begin, end in zip(self._begun, now, strict=True))
            self._writer.writerow((self._step - 1, int(is_plain(self._step - 1)), *taken))
        self._begun, number, self._step = now, self._step, self._step + 1
        if not is_plain(number):
            return self._with_simreg(*args, **kwargs)
        self._originals.enter_context(_given_back(self._others))
        return self._plain(*args, **kwargs)


def _install_and_alternate(install: Callable[..., None], file: Any) -> Callable[..., None]:
    def installed(*args: Any, **kwargs: Any) -> None:
        install(*args, **kwargs)
        from megatron.training import training

        training.train_step = Alternating(installation.current()._originals, file)

    return installed


if __name__ == "__main__":
    with open(os.environ[TIMES], "w", encoding="utf-8", newline="") as file:
        hooks.install = _install_and_alternate(hooks.install, file)
        main("llama")
