# SPDX-License-Identifier: Apache-2.0
"""The scalars that some settings train, as parameters of the model that computes the loss.

Megatron's optimizer steps on them (without weight decay, as on every vector), its data parallelism averages their
gradients, its checkpoints keep them; every rank holds the same ones. In bfloat16 a model holds them rounded, as all of
its parameters; the optimizer keeps them in float32, so no small step is lost, and computations are in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from simreg_megatron.config import SimRegConfig
from simreg_megatron.parallel.collectives import share_work

PREFIX = "simreg_"
_SHOWN: dict[str, Callable[[Tensor], Tensor]] = {"exp": torch.exp, "sigmoid": torch.sigmoid, "": torch.clone}
_SIMILARITY = {"query": 0.0, "key": 0.0}  # half a power of each norm is divided out


def wanted(config: SimRegConfig) -> dict[str, dict[str, float]]:
    """Return the modules that the settings ask for: the scalars of each and their initial values."""
    if config.combines:
        return {name: start for part in config.parts for name, start in wanted(part).items()}
    modules = {"similarity": _SIMILARITY} if config.similarity == "learnable" else {}
    if scalars := config.scalars:
        modules[config.objective] = {name: scalar.start for name, scalar in scalars.items()}
    return modules


class Scalars(nn.Module):
    """Parameters of one number each, read by calling the module, as `--overlap-param-gather` waits in its pre-hook."""

    def __init__(self, start: dict[str, float]) -> None:
        super().__init__()
        self._start = start
        for name, value in start.items():
            self.register_parameter(name, nn.Parameter(torch.full((1,), value)))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the initial values; Megatron's FSDP calls this after `--init-model-with-meta-device`."""
        for name, value in self._start.items():
            self.get_parameter(name).fill_(value)

    def forward(self) -> dict[str, Tensor]:
        return dict(self.named_parameters())


def add_to(model: Any, modules: dict[str, dict[str, float]]) -> None:
    """Give a model of the last pipeline stage its scalars."""
    for name, start in modules.items():
        if getattr(model, "post_process", True) and not hasattr(model, PREFIX + name):
            setattr(model, PREFIX + name, Scalars(start))


def refuse_without(config: SimRegConfig, model: Any) -> None:
    """Raise RuntimeError if a model of the last pipeline stage lacks scalars that the settings train."""
    for module, start in wanted(config).items():
        if getattr(model, "post_process", True) and not hasattr(model, PREFIX + module):
            raise RuntimeError(
                f"SimReg's {module} trains {' and '.join(start)}, but the model was built before SimReg was installed: "
                "call install() earlier, or choose settings that train no scalars"
            )


def learned_scalars(config: SimRegConfig, model: Any, tensor_group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Return the scalars by name, in float32. Gradients are summed over tensor ranks, whose anchors differ."""
    refuse_without(config, model)
    modules = [(start, getattr(model, PREFIX + module)()) for module, start in wanted(config).items()]
    named = {name: scalars[name] for start, scalars in modules for name in start}
    return {name: one.float() if tensor_group is None else share_work(one, tensor_group) for name, one in named.items()}


def as_logged(parts: tuple[SimRegConfig, ...], learned: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Name the quantities that each part's scalars parametrise: gammas of the norms, scale and bias of the cosines."""
    shown: dict[str, Tensor] = {}
    for part, scalars in zip(parts, learned, strict=True):
        shown |= {f"simreg gamma {name}": torch.sigmoid(scalars[name]) for name in _SIMILARITY if name in scalars}
        for name, scalar in part.scalars.items():
            if name in scalars:
                shown[scalar.shown_as] = _SHOWN[scalar.by](scalars[name]).clamp(max=scalar.most)
    return {name: value.detach().squeeze().clone() for name, value in shown.items()}
