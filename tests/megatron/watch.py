# SPDX-License-Identifier: Apache-2.0
"""Things to count inside a run, each a function to call before it starts."""

import os
from pathlib import Path
from typing import Any

import torch

from tests.fixtures import snapshot

SPIKED = "decoder.layers.1.mlp.linear_fc2.weight"


def evaluation() -> None:
    """Print every bit of each evaluation's loss, and how often SimReg was computed in it and in training."""
    import megatron.training.training as training

    from simreg_megatron.plugin import term

    compute, evaluate, calls = term.simreg_over_ranks, training.evaluate, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return compute(*args, **kwargs)

    def watched(*args: Any, **kwargs: Any) -> Any:
        before = len(calls)
        result = evaluate(*args, **kwargs)
        loss = result[0]["lm loss"].double().item()
        print(f"evaluated: {loss.hex()}, SimReg calls: {len(calls) - before}")
        print(f"SimReg calls in training: {before}")
        return result

    term.simreg_over_ranks = counted
    training.evaluate = watched


def adagc() -> None:
    """Write what AdaGC did in every step to RECORD_OUT/adagc<rank>.pt: its coefficients and averages, by name."""
    from simreg_megatron.adagc.clipping import Clipping, ClipResult

    steps: list[dict[str, Any]] = []
    clip = Clipping.clip

    def watched(self: Clipping) -> ClipResult:
        given = [None if target.tensor.grad is None else target.tensor.grad.clone() for target in self._targets]
        done = clip(self)
        found = {
            self._names[target.slot]: (target.tensor.grad.norm() / before.norm()).item()
            for target, before in zip(self._targets, given, strict=True)
            if before is not None and before.numel() and before.any()
        }
        steps.append({"coefficients": found, "state": self.state_dict()})
        torch.save(steps, Path(os.environ["RECORD_OUT"]) / f"adagc{os.environ['RANK']}.pt")
        return done

    Clipping.clip = watched


def adagc_and_layout() -> None:
    """As `adagc`, with the layer-wise optimizer that Megatron makes where a script brings a model provider.

    It takes Muon's matrices alone, in buffers laid out for it; a distributed optimizer takes the others.
    """
    from megatron.core.optimizer.layer_wise_optimizer import (
        LayerWiseDistributedOptimizer,
        tag_params_for_buffer_routing,
    )
    from megatron.training.models import dist_utils

    adagc()
    wrap = dist_utils._ddp_wrap

    def laid_out(model: Any, random_init: bool, ddp_config: Any, *args: Any, **kwargs: Any) -> Any:
        ddp_config.use_distributed_optimizer = True
        tag_params_for_buffer_routing(model)
        return wrap(model, random_init, ddp_config, *args, **kwargs)

    dist_utils._ddp_wrap, dist_utils.DistributedOptimizer = laid_out, LayerWiseDistributedOptimizer


def adagc_and_weights() -> None:
    """As `adagc`, and the parameters after every step go to RECORD_OUT/weights<rank>.pt."""
    import megatron.training.training as training

    from tests.megatron.parameters import named_parameters

    adagc()
    train_step, steps = training.train_step, []

    def watched(forward_step: Any, data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        result = train_step(forward_step, data_iterator, model, *args, **kwargs)
        steps.append({name: parameter.detach().clone() for name, parameter in named_parameters(model)})
        torch.save(steps, Path(os.environ["RECORD_OUT"]) / f"weights{os.environ['RANK']}.pt")
        return result

    training.train_step = watched


def at_given_scales() -> None:
    """As `adagc_and_weights`, and each step that trains has the next loss scale of RECORD_OUT/scales.pt."""
    import megatron.training.training as training

    adagc_and_weights()
    train_step, scales = training.train_step, iter(torch.load(Path(os.environ["RECORD_OUT"]) / "scales.pt"))

    def scaled(forward_step: Any, data_iterator: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        scale = next(scales)
        for member in getattr(optimizer, "chained_optimizers", [optimizer]):
            member.grad_scaler._scale.fill_(scale)
        return train_step(forward_step, data_iterator, model, optimizer, *args, **kwargs)

    training.train_step = scaled


def adagc_spike() -> None:
    """As `adagc`, but the gradient of one parameter is 1000 times as large in the sixth step."""
    from simreg_megatron.adagc.clipping import Clipping, ClipResult

    adagc()
    watched, calls = Clipping.clip, []

    def spiked(self: Clipping) -> ClipResult:
        calls.append(None)
        for target in self._targets if len(calls) == 6 else ():
            if self._names[target.slot] == SPIKED and target.tensor.grad is not None:
                target.tensor.grad.mul_(1000.0)
        return watched(self)

    Clipping.clip = spiked


def state() -> None:
    """Write all that each rank holds before the first step and after the last one, see `tests.fixtures.snapshot`."""
    snapshot.watch(Path(os.environ["RECORD_OUT"]))
