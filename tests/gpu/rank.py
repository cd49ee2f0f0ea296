# SPDX-License-Identifier: Apache-2.0
"""One rank of a run on GPUs: `python -m tests.gpu.rank OUT MODE SCRIPT FLAGS`, started by torchrun.

MODE is "plain" (the plugin is left out), "plugin", or "compare": then the last step sets SimReg's gradient at the
hidden states that the model computed there against an autograd reference. What was observed goes to OUT/rank<r>.json.
With SIMREG_CPU=force in the environment it runs on the CPU, for what a GPU's values are compared with.
"""

import hashlib
import json
import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from simreg_megatron.cpu import backend as cpu_backend


@dataclass(frozen=True)
class Comparison:
    """SimReg's gradient, as the plugin adds it, against the reference, both for random weights of the tokens."""

    value: float  # largest difference that the plugin makes to the per-token loss; it must make none
    gradient: float  # norm of the difference from the reference, relative to the reference
    share: float  # norm of SimReg's gradient, relative to that of loss and SimReg together


@dataclass
class Observer:
    out: Path
    num_steps: int
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    logged: list[dict[str, float]] = field(default_factory=list)
    comparison: Comparison | None = None
    model: Any = None

    @property
    def compares_now(self) -> bool:
        return len(self.norms) == self.num_steps - 1 and self.comparison is None

    def around_step(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        def observed(forward_step: Any, data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            self.model = model
            result = train_step(forward_step, data_iterator, model, *args, **kwargs)
            if "lm loss" in result[0]:
                self.losses.append(float(result[0]["lm loss"]))
            self.norms.append(float(result[5] or 0.0))
            return result

        return observed

    def around_log(self, add_to_console: Callable[..., None]) -> Callable[..., None]:
        def observed(means: dict[str, Tensor], *args: Any, **kwargs: Any) -> None:
            self.logged.append({name: float(value) for name, value in means.items()})
            add_to_console(means, *args, **kwargs)

        return observed

    def save(self) -> None:
        record = {
            "losses": self.losses,
            "norms": self.norms,
            "logged": self.logged,
            "digest": _digest(self.model) if self.model is not None else "",
            "comparison": asdict(self.comparison) if self.comparison else None,
        }
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(record))


def _digest(model_chunks: list[Any]) -> str:
    bits = hashlib.sha256()
    for chunk in model_chunks:
        for _, parameter in sorted(chunk.named_parameters()):
            held = parameter.detach()
            held = held.to_local() if hasattr(held, "to_local") else held  # of a parameter that FSDP shards
            bits.update(held.float().cpu().contiguous().numpy().tobytes())
    return bits.hexdigest()


def _compare(observer: Observer, with_plugin: Callable[..., Tensor], without: Callable[..., Tensor]) -> Any:
    def postprocess(model: Any, *args: Any, **kwargs: Any) -> Tensor:
        loss = with_plugin(model, *args, **kwargs)
        if observer.compares_now and model.training and torch.is_grad_enabled() and kwargs.get("labels") is not None:
            hidden = kwargs["hidden_states"].detach().requires_grad_()
            again = {**kwargs, "hidden_states": hidden}
            losses = (with_plugin(model, *args, **again), without(model, *args, **again))
            observer.comparison = _comparison(hidden, losses, kwargs)
        return loss

    return postprocess


def _comparison(hidden_SBD: Tensor, losses_BS: tuple[Tensor, Tensor], given: dict[str, Any]) -> Comparison:
    generator = torch.Generator(hidden_SBD.device).manual_seed(1)  # Megatron's own random numbers stay untouched
    weights_BS = torch.rand(losses_BS[0].shape, device=hidden_SBD.device, generator=generator)
    both, lm = (torch.autograd.grad((loss.float() * weights_BS).sum(), hidden_SBD)[0].float() for loss in losses_BS)
    expected = _reference_gradient(hidden_SBD, weights_BS, given)
    simreg = both - lm
    return Comparison(
        value=(losses_BS[0] - losses_BS[1]).abs().max().item(),
        gradient=((simreg - expected).norm() / expected.norm()).item(),
        share=(simreg.norm() / both.norm()).item(),
    )


def _reference_gradient(hidden_SBD: Tensor, weights_BS: Tensor, given: dict[str, Any]) -> Tensor:
    """Gradient of lambda * sum(weights * R) at the hidden states, in float32, sequence by sequence."""
    from megatron.training import get_args

    from simreg_megatron.config.flags import config_from_args
    from simreg_megatron.losses import simreg_loss

    config = config_from_args(get_args())
    packed = given.get("packed_seq_params")
    length = packed.tokens_per_sample if packed is not None else hidden_SBD.shape[0]
    rows_BSD = hidden_SBD.detach().float().transpose(0, 1).requires_grad_()
    terms = simreg_loss(
        rows_BSD.reshape(-1, length, rows_BSD.shape[-1]),
        given["labels"].reshape(-1, length),
        valid=given["loss_mask"].reshape(-1, length) > 0,
        temperature=config.temperature,
        chunk_size=config.chunk_size,
        reduction="none",
        impl="reference",
    )
    weighted = config.weight(hidden_SBD.shape[-1]) * (terms * weights_BS.view_as(terms)).sum()
    return torch.autograd.grad(weighted, rows_BSD)[0].transpose(0, 1)


def main() -> None:
    out, mode, script, *flags = sys.argv[1:]
    asked = cpu_backend.requested([])
    if asked:
        cpu_backend.activate(asked)
    import megatron.training.training as training
    from megatron.core.datasets import utils as dataset_utils
    from megatron.core.models.gpt.gpt_model import GPTModel

    from simreg_megatron import install
    from simreg_megatron.cpu.installed import without_make
    from simreg_megatron.plugin import log

    without = GPTModel._postprocess
    observer = Observer(Path(out), int(flags[flags.index("--train-iters") + 1]))
    if mode != "plain":
        log.add_to_console = observer.around_log(log.add_to_console)
        install()
    else:  # Megatron's wheel lacks the Makefile that its first step on a GPU asks for
        dataset_utils.compile_helpers = without_make(dataset_utils.compile_helpers)
    training.train_step = observer.around_step(training.train_step)
    if mode == "compare":
        GPTModel._postprocess = _compare(observer, GPTModel._postprocess, without)
    sys.argv = [script, *flags]
    runpy.run_path(script, run_name="__main__")
    observer.save()


if __name__ == "__main__":
    main()
