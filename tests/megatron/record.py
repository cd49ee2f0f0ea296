# SPDX-License-Identifier: Apache-2.0
"""Run a Megatron script on this rank and record, at full precision, what it computed, in OUT/rank<r>.pt.

Losses, norms and SimReg's log of every step, the first step's gradients as Megatron finished them, before clipping, and
the parameters after the last step, with the part of each that this rank holds.
"""

import functools
import importlib
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.megatron.parameters import gradients, named_parameters, shard_of, whole_of


class Recorder:
    def __init__(self, out: Path) -> None:
        self.path = out / f"rank{os.environ.get('RANK', '0')}.pt"
        self.record: dict[str, Any] = {"losses": [], "norms": [], "logged": []}
        self.record |= {"grads": {}, "params": {}, "shards": {}}
        self.model: Any = None

    def wrap_finalize(self, finalize: Any) -> Any:
        def recorded(model: Any, *args: Any, **kwargs: Any) -> Any:
            result = finalize(model, *args, **kwargs)
            if not self.record["grads"]:
                self.record["grads"] = {name: grad.clone() for name, grad in gradients(model).items()}
            return result

        return recorded

    def wrap_step(self, train_step: Any) -> Any:
        @functools.wraps(train_step)
        def recorded(forward_step: Any, data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            self.model = model
            result = train_step(forward_step, data_iterator, model, *args, **kwargs)
            loss_dict, skipped, norm = result[0], result[1], result[5]
            if "lm loss" in loss_dict:
                self.record["losses"].append(loss_dict["lm loss"].double().item())
            self.record["norms"].append(float("nan") if skipped else float(norm))
            return result

        return recorded

    def wrap_log(self, add_to_console: Any) -> Any:
        def recorded(means: Any, *args: Any, **kwargs: Any) -> None:
            self.record["logged"].append({name: value.double().item() for name, value in means.items()})
            add_to_console(means, *args, **kwargs)

        return recorded

    def save(self) -> None:
        if self.record["grads"]:  # else it failed before
            for name, parameter in named_parameters(self.model):
                self.record["params"][name] = whole_of(parameter.detach()).clone()
                self.record["shards"][name] = shard_of(name, parameter)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(self.record, self.path)


def record(out: Path, script: Path, flags: Sequence[str], *, plain: bool = False, patch: str = "") -> None:
    """Run `script FLAGS` as __main__ on this rank, after `patch`, a `module:function`; write the record in any case."""
    import megatron.training.training as training

    from simreg_megatron import install
    from simreg_megatron.cpu.backend import connections
    from simreg_megatron.plugin import log

    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = connections(flags)
    os.environ["RECORD_OUT"] = str(out)  # for patches that record more
    recorder = Recorder(out)
    training.finalize_model_grads = recorder.wrap_finalize(training.finalize_model_grads)
    training.train_step = recorder.wrap_step(training.train_step)
    if not plain:
        log.add_to_console = recorder.wrap_log(log.add_to_console)
        install()  # above the recorder, so that a patch may uninstall it
    if patch:
        module, function = patch.split(":")
        getattr(importlib.import_module(module), function)()
    sys.argv = [str(script), *flags]
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        recorder.save()
