# SPDX-License-Identifier: Apache-2.0
"""Runs of one Megatron's training loop, one after another: `python -m tests.versions.record FOLDER RUNS.json`.

FOLDER holds the `megatron` to use; every rank of every `Run` is a fork of this process. OUT/rank<r>.pt has of every
step the loss, the norm, what entered the output layer, and each gradient's norm before and after clipping; OUT/log what
was printed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import multiprocessing
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.helpers.jobs import HungError
from tests.megatron import forks
from tests.versions import tiny
from tests.versions.driver import use_only

_TIMEOUT = 300.0  # seconds a run


class Run(NamedTuple):
    out: str
    processes: int
    installed: bool
    script: str
    flags: Sequence[str]


class Recorder:
    def __init__(self, out: Path) -> None:
        self.path = out / f"rank{os.environ['RANK']}.pt"
        self.record: dict[str, Any] = {"losses": [], "norms": [], "states": [], "clipped": [], "shards": {}}
        self.chunks: Any = []
        self.before: dict[str, float] = {}

    def wrap_step(self, train_step: Any) -> Any:
        @functools.wraps(train_step)
        def recorded(forward_step: Any, data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.chunks:
                self.chunks = model
                self.watch_output_layer()
            self.record["states"].append([])
            result = train_step(forward_step, data_iterator, model, *args, **kwargs)
            if "lm loss" in result[0]:
                self.record["losses"].append(_number(result[0]["lm loss"]))
            self.record["norms"].append(float(result[5]))
            return result

        return recorded

    def watch_output_layer(self) -> None:
        """Keep what it is given for every micro-batch [S, B, D], with the labels and the mask [B, S] of the model."""
        model = self.chunks[0].module
        given: dict[str, Any] = {}

        def of_model(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            given.update(labels=kwargs["labels"].clone(), mask=kwargs["loss_mask"].clone())

        def of_layer(module: Any, args: Any) -> None:
            self.record["states"][-1].append({"hidden": args[0].detach().clone(), **given})

        model.register_forward_pre_hook(of_model, with_kwargs=True)
        model.output_layer.register_forward_pre_hook(of_layer)

    def watch_optimizer(self, optimizer: Any) -> None:
        """Keep the norms of the gradients between their preparation and the step: clipping lies in between."""
        prepare_grads, step_with_ready_grads = optimizer.prepare_grads, optimizer.step_with_ready_grads

        def prepared(*args: Any) -> Any:
            result = prepare_grads(*args)
            self.before = self.norms()
            return result

        def stepped(*args: Any) -> Any:
            after = self.norms()
            self.record["clipped"].append({name: (norm, after[name]) for name, norm in self.before.items()})
            return step_with_ready_grads(*args)

        optimizer.prepare_grads, optimizer.step_with_ready_grads = prepared, stepped

    def norms(self) -> dict[str, float]:
        """Return the norm of this rank's part of every parameter's gradient."""
        parameters = tiny.named_parameters(self.chunks)
        return {name: float(torch.linalg.vector_norm(p.main_grad, dtype=torch.float64)) for name, p in parameters}

    def save(self) -> None:
        digest = hashlib.sha256()
        for name, parameter in tiny.named_parameters(self.chunks):
            digest.update(name.encode())
            digest.update(parameter.detach().contiguous().numpy().tobytes())
            self.record["shards"][name] = tiny.shard_of(parameter)
        self.record["params"] = digest.hexdigest()
        torch.save(self.record, self.path)


def _number(loss: Any) -> float:
    """0.12 reports a sum and a count."""
    total, count = loss if isinstance(loss, tuple | list) else (loss, 1)
    return float(total) / float(count)


def _record(run: Run) -> None:
    """On each rank."""
    import megatron.training.training as training
    from megatron.core.optimizer.optimizer import FP32Optimizer

    if run.installed:
        from simreg_megatron import install

        install()
    recorder = Recorder(Path(run.out))
    recorder.watch_optimizer(FP32Optimizer)
    training.train_step = recorder.wrap_step(training.train_step)
    sys.argv = [run.script, *run.flags]
    sys.path.insert(0, str(Path(run.script).resolve().parent))
    runpy.run_path(run.script, run_name="__main__")
    recorder.save()


def main() -> None:
    folder, runs = sys.argv[1:]
    use_only(Path(folder))
    from simreg_megatron.cpu import backend as cpu_backend

    cpu_backend.activate()
    for module in ("megatron.training.training", "torch._dynamo", "simreg_megatron.plugin.hooks"):
        importlib.import_module(module)
    for words in json.loads(Path(runs).read_text()):
        run = Run(*words)
        with contextlib.suppress(HungError):  # its log says so
            forks.run_ranks(
                _record,
                run,
                processes=run.processes,
                log=Path(run.out) / "log",
                timeout=_TIMEOUT,
                context=multiprocessing.get_context("fork"),
            )


if __name__ == "__main__":
    main()
