# SPDX-License-Identifier: Apache-2.0
"""Run a Megatron script and record, at full precision, what it computed: `-m tests.megatron.record OUT SCRIPT FLAGS`.

Each rank writes OUT/rank<r>.pt: the loss of every step (last pipeline stage), the gradients of the first step after
Megatron finished them (reduced and scaled, before clipping), and the parameters after the last step.
SIMREG_RECORD_PLAIN=1 leaves the plugin out altogether. SIMREG_RECORD_PATCH names a function `module:function` to call
once Megatron is imported, to break something on purpose.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from simreg_megatron import install
from simreg_megatron.plugin import cpu_backend


def named_parameters(model: list[Any]) -> Iterator[tuple[str, Any]]:
    """Parameters under pipeline-global names: `decoder.layers.3...` is the fourth layer on every rank."""
    from megatron.core.utils import unwrap_model

    for chunk in unwrap_model(model):
        offsets = {f"decoder.layers.{i}.": layer.layer_number - 1 for i, layer in enumerate(chunk.decoder.layers)}
        for name, parameter in chunk.named_parameters():
            for local, number in offsets.items():
                if name.startswith(local):
                    name = f"decoder.layers.{number}.{name.removeprefix(local)}"
                    break
            yield name, parameter


def shard_info(parameter: Any) -> int:
    """The dimension tensor parallelism splits, or -1."""
    return parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else -1


class Recorder:
    def __init__(self, out: Path) -> None:
        self.path = out / f"rank{os.environ.get('RANK', '0')}.pt"
        self.record: dict[str, Any] = {"losses": [], "grads": {}, "params": {}, "partition": {}}
        self.model: Any = None

    def wrap_finalize(self, finalize: Any) -> Any:
        def recorded(model: Any, *args: Any, **kwargs: Any) -> Any:
            result = finalize(model, *args, **kwargs)
            scattered = "--use-distributed-optimizer" in sys.argv  # then no rank holds whole gradients
            if not self.record["grads"] and not scattered:
                for name, parameter in named_parameters(model):
                    self.record["grads"][name] = parameter.main_grad.detach().clone()
                    self.record["partition"][name] = shard_info(parameter)
            return result

        return recorded

    def wrap_step(self, train_step: Any) -> Any:
        def recorded(forward_step: Any, data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            self.model = model
            result = train_step(forward_step, data_iterator, model, *args, **kwargs)
            loss_dict = result[0]
            if "lm loss" in loss_dict:
                self.record["losses"].append(loss_dict["lm loss"].double().item())
            return result

        return recorded

    def save(self) -> None:
        if self.model is not None:
            self.record["params"] = {name: p.detach().clone() for name, p in named_parameters(self.model)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(self.record, self.path)


def main() -> None:
    out, script = Path(sys.argv[1]), sys.argv[2]
    if not torch.cuda.is_available():
        cpu_backend.activate()
    if os.environ.get("SIMREG_RECORD_PLAIN") != "1":
        install()
    import megatron.training.training as training

    recorder = Recorder(out)
    training.finalize_model_grads = recorder.wrap_finalize(training.finalize_model_grads)
    training.train_step = recorder.wrap_step(training.train_step)
    if patch := os.environ.get("SIMREG_RECORD_PATCH"):
        module, function = patch.split(":")
        getattr(importlib.import_module(module), function)()
    sys.argv = sys.argv[2:]
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        recorder.save()


if __name__ == "__main__":
    main()
