# SPDX-License-Identifier: Apache-2.0
"""AdaGC between Megatron's finished gradients and its optimizer step, in every layout the same.

Each rank adds the squares of the gradients it holds to one vector with an entry for every parameter of the model; one
all-reduce makes the norms whole, so all ranks find the same coefficients.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from simreg_megatron.adagc import AdaGC, ClipResult, gradients
from simreg_megatron.config import AdaGCConfig
from simreg_megatron.notices import log_once

_OF_LAYER = ".layers."
_NO_STEPS: tuple[int, Any, Any, Any] = (0, 0.0, math.inf, 0.0)
"""Of a log interval: steps, sum of the shares of clipped parameters, smallest coefficient, sum of the norms."""


class Target(NamedTuple):
    """A tensor whose gradient is clipped: a `MainParameter`, by the slot of its model parameter."""

    tensor: Any
    slot: int
    is_counted: bool


@functools.lru_cache(maxsize=8)
def _on_device(slots: tuple[int, ...], device: torch.device) -> Tensor:
    """Return these slots as a tensor; most steps have the same."""
    return torch.tensor(slots, dtype=torch.int64, device=device)


class Clipping:
    """Clips the gradients of one optimizer by AdaGC."""

    def __init__(self, config: AdaGCConfig) -> None:
        self.config = config
        self._loaded: dict[str, Any] | None = None
        self._names: list[str] = []  # of the parameters, by slot
        self._targets: list[Target] = []
        self._adagc: Any = None  # an AdaGC, from `attach` on
        self._norms: tuple[Any, ...] = ()  # Megatron's, of this step
        self._sums = _NO_STEPS
        self._undo = contextlib.ExitStack()

    def attach(self, optimizer: Any, models: list[Any], args: Any) -> None:
        """Clip before every step of this optimizer, in the place of Megatron's global clip. A collective.

        `models` are the parts of the model on this rank, without Megatron's wrappers; `args` Megatron's arguments.
        """
        gradients.refuse_hidden(args)
        optimizers = list(gradients.single_optimizers(optimizer))
        named = {id(entry.parameter): entry for entry in gradients.model_parameters(models)}
        gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, [entry.name for entry in named.values()])
        self._names = sorted(set().union(*gathered))
        slots = {name: slot for slot, name in enumerate(self._names)}
        for single, owns in optimizers:
            for tensor, parameter, is_counted in gradients.main_parameters(single, owns):
                entry = named[id(parameter)]
                self._targets.append(Target(tensor, slots[entry.name], entry.is_counted and is_counted))
        device = torch.device(torch.cuda.current_device())
        refuse_miscounted(self._names, self._targets, {entry.name: entry.whole for entry in named.values()}, device)
        separate = _separate_group(named.values(), slots, self.config.variant, device)
        self._adagc = AdaGC(len(self._names), **asdict(self.config), separate=separate, device=device)
        for single, _ in optimizers:
            settings = single.config
            self._undo.callback(setattr, settings, "clip_grad", settings.clip_grad)
            settings.clip_grad = 0.0
        self._restore()
        if self._loaded is None and getattr(args, "no_load_optim", None) and getattr(args, "load", None):
            log_once("AdaGC: --no-load-optim leaves the checkpoint's averages out, so its warm-up starts now")
        self._wrap(optimizer)
        log_once(
            f"AdaGC ({self.config.variant}): {len(self._names)} parameters, lambda-rel {self.config.lambda_rel:g}, "
            f"beta {self.config.beta:g}, {self.config.warmup_iters} warm-up steps below a global norm of "
            f"{self.config.lambda_abs:g}, instead of --clip-grad"
        )
        if self.config.lambda_rel <= 1:
            log_once("AdaGC: warning: with lambda-rel 1 or below no average ever rises, and gradients shrink for good")

    def _wrap(self, optimizer: Any) -> None:
        get_grad_norm, step_with_ready_grads = optimizer.get_grad_norm, optimizer.step_with_ready_grads
        # From 0.19 on the norm of detached prediction heads is another one, computed while Megatron clips.
        norms_by_group = getattr(optimizer, "_compute_grad_norms_by_group", dict)

        def get_and_keep_norm() -> Any:
            norm = get_grad_norm()
            self._norms = norm, *norms_by_group().values()
            return norm

        def clip_and_step() -> Any:
            result = self.clip()
            # The first host sync of the step; the clipping kernels are queued already.
            if not all(math.isfinite(norm) for norm in self._norms):
                self._adagc.steps -= 1  # nothing is stepped, and no average has moved
                return False
            steps, share, smallest, norm = self._sums
            share = share + (result.coefficients < 1).double().mean()
            smallest = result.coefficients.min().double().clamp(max=smallest)
            self._sums = steps + 1, share, smallest, norm + result.global_norm.double()
            return step_with_ready_grads()

        optimizer.get_grad_norm, optimizer.step_with_ready_grads = get_and_keep_norm, clip_and_step
        for name, before in (("get_grad_norm", get_grad_norm), ("step_with_ready_grads", step_with_ready_grads)):
            self._undo.callback(setattr, optimizer, name, before)

    def detach(self) -> None:
        """Let Megatron clip as it would without AdaGC."""
        self._undo.close()

    @torch.no_grad()
    def clip(self) -> ClipResult:
        """Scale every gradient by its coefficient. A collective; nothing waits for the device."""
        grads = [(each, grad) for each in self._targets if (grad := gradients.gradient_of(each.tensor)) is not None]
        squares = torch.zeros(len(self._names), dtype=torch.float64, device=self._adagc.gammas.device)
        counted = [(target.slot, grad) for target, grad in grads if target.is_counted and grad.numel()]
        if counted:
            norms = torch.stack(torch._foreach_norm([grad for _, grad in counted], 2, dtype=torch.float32))
            slots = _on_device(tuple(slot for slot, _ in counted), squares.device)
            squares.index_add_(0, slots, norms.double().square())
        dist.all_reduce(squares)
        result: ClipResult = self._adagc.step(squares)
        if grads:
            slots = _on_device(tuple(target.slot for target, _ in grads), squares.device)
            torch._foreach_mul_([grad for _, grad in grads], result.coefficients.float()[slots].unbind())
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return numbers by parameter name, which any layout can read; before `attach`, the loaded checkpoint's."""
        if self._adagc is None:
            return self._loaded or {}
        names = ["global"] if self.config.variant == "global" else self._names
        gammas = dict(zip(names, self._adagc.gammas.tolist(), strict=True))
        return {"variant": self.config.variant, "steps": self._adagc.steps, "gammas": gammas}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Take the state of a checkpoint, or note that it has none; `attach` puts it in place."""
        if state is None:
            log_once("AdaGC: the checkpoint has no state of it, so its warm-up starts now")
        elif state["variant"] != self.config.variant:
            log_once(
                f"AdaGC: the checkpoint's averages are of variant {state['variant']}, not {self.config.variant}, "
                "so the warm-up starts now"
            )
        else:
            self._loaded = state
            self._restore()

    def _restore(self) -> None:
        if self._loaded is None or self._adagc is None:
            return
        names, gammas = ["global"] if self.config.variant == "global" else self._names, self._loaded["gammas"]
        unknown, missing = sorted(gammas.keys() - set(names)), [name for name in names if name not in gammas]
        for what, some in (("has parameters that are not in the model", unknown), ("lacks", missing)):
            if some:
                log_once(f"AdaGC: the checkpoint {what}: {', '.join(some[:3])}{' ...' if len(some) > 3 else ''}")
        if all(any(_OF_LAYER in name for name in some) for some in (unknown, missing)):
            log_once(
                "AdaGC: the layers of the checkpoint are built otherwise, so its averages may be of other parameters: "
                "the warm-up starts now"
            )
            return
        values = [gammas.get(name, math.inf) for name in names]
        self._adagc.gammas = torch.tensor(values, dtype=torch.float32, device=self._adagc.gammas.device)
        self._adagc.steps = int(self._loaded["steps"])

    def means(self, *, reset: bool) -> dict[str, Tensor]:
        """Return means for the log over the steps since the last reset, the same on every rank."""
        steps, share, smallest, norm = self._sums
        if reset:
            self._sums = _NO_STEPS
        if not steps:
            return {}
        return {
            "adagc clipped share": share.float() / steps,
            "adagc smallest coefficient": smallest.float(),
            "adagc norm before clipping": norm.float() / steps,
        }


def refuse_miscounted(names: list[str], targets: list[Target], sizes: dict[str, int], device: torch.device) -> None:
    """Check that every element of every parameter counts on exactly one rank, else its norm is wrong. A collective."""
    counted, expected = [0] * len(names), [sizes.get(name, 0) for name in names]
    for target in targets:
        counted[target.slot] += target.tensor.numel() if target.is_counted else 0
    counted, expected = torch.tensor([counted, expected], dtype=torch.int64, device=device)
    dist.all_reduce(counted)
    dist.all_reduce(expected, op=dist.ReduceOp.MAX)
    for slot in (counted != expected).nonzero().flatten().tolist():
        raise NotImplementedError(
            f"--adagc would count {counted[slot]} elements of {names[slot]}, which has {expected[slot]}: it does not "
            "know how this optimizer spreads gradients over ranks, so use another optimizer, or drop --adagc"
        )


def _separate_group(named: Iterable[Any], slots: dict[str, int], variant: str, device: torch.device) -> Tensor | None:
    """Find the parameters of detached prediction heads, which Megatron puts into a grad-norm group of their own: bool
    [N], or None. A collective."""
    members = {entry.name for entry in named if getattr(entry.parameter, "grad_norm_group", None) is not None}
    is_separate = torch.tensor([name in members for name in slots], dtype=torch.int64, device=device)
    dist.all_reduce(is_separate, op=dist.ReduceOp.MAX)
    if not is_separate.any():
        return None
    if variant == "global":
        raise NotImplementedError(
            "--adagc-variant global has one norm, and --mtp-detach-heads asks for a second one: drop one of them"
        )
    return is_separate.bool()
