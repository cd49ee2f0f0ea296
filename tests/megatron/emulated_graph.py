# SPDX-License-Identifier: Apache-2.0
"""torch.cuda.graph on the CPU: what was computed while it captured is computed again, in the same memory.

As on a GPU, Python runs in the capture alone: a replay sees new numbers only where they are in the memory of tensors
that were there before, and what the host knew (the number of the step, a decision) stays what it was. A number that
the host asks for while it captures is an error, too. Otherwise than on a GPU the capture itself computes, so
Megatron's first replay, which follows it at once, is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.distributed.distributed_c10d import Work
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

_WAITS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}
_NO_NUMBERS = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty_strided")


class CapturedError(RuntimeError):
    """The host waited for a number, which a graph cannot give."""


class Graph(TorchDispatchMode):
    """In the place of torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self._is_fresh = True
        self._replays = 0

    def register_generator_state(self, state: Any) -> None:
        """Nothing random is drawn in tests of it."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator in _WAITS:
            raise CapturedError(f"{operator} while a graph was captured")
        result = operator(*args, **(kwargs or {}))
        if operator._schema.name not in _NO_NUMBERS and operator.namespace != "profiler":
            self._calls.append((operator, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        if self._is_fresh:
            self._is_fresh = False
            return
        self._replays += 1
        print(f"replay {self._replays}", flush=True)
        for operator, args, kwargs, result in self._calls:
            again = operator(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.ScriptObject):  # a collective, which goes on in a thread of its own
                    Work.unbox(new).wait()
                elif isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


_capturing: list[Graph] = []


@contextmanager
def _capture(graph: Graph, **_: Any) -> Iterator[None]:
    _capturing.append(graph)
    with graph:
        yield
    _capturing.pop()


def _unseen(function: Callable[..., Any], *args: Any) -> Any:
    with _disable_current_modes():
        return function(*args)


def activate() -> None:
    """Before Megatron's training begins."""
    from megatron.core.tensor_parallel import random

    initialize, fork = random.initialize_rng_tracker, random.CudaRNGStatesTracker.fork
    # The CPU's generator has no states that graphs share, and nothing is drawn in a step of these tests.
    random.initialize_rng_tracker = lambda *args, **_: initialize(args[0], args[1])
    random.CudaRNGStatesTracker.fork = lambda *args, **given: nullcontext() if _capturing else fork(*args, **given)
    wait = Work.wait
    Work.wait = lambda *args: _unseen(wait, *args)  # gloo copies then what it will have received again in a replay
    torch.cuda.CUDAGraph = Graph
    torch.cuda.graph = _capture


def frozen_lambda() -> None:
    """Lambda as a number of the host: that of the captured step."""
    from simreg_megatron.strength import Strength

    activate()
    weight = Strength.weight
    Strength.weight = lambda *args: _unseen(lambda: float(weight(*args)))


def waits() -> None:
    """The host asks whether there is a token."""
    from simreg_megatron.plugin.term import Regularizer

    activate()
    parts = Regularizer._parts
    Regularizer._parts = lambda *args: parts(*args) if args[2].valid.any() else []
