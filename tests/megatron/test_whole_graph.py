# SPDX-License-Identifier: Apache-2.0
"""Full-iteration CUDA graphs, in Megatron's own loop and wrapper on an emulated graph (below): six steps,
the second of which is captured and the last four are replays, come to the bits of six steps without a graph."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.distributed_c10d import Work
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from simreg_megatron import objectives
from tests.helpers.quick import quick
from tests.megatron import runs
from tests.megatron.parity.cells import neighbour
from tests.megatron.runs import SIMREG

EAGER = ("--train-iters", "6", "--eval-iters", "0", "--no-check-for-nan-in-loss-and-grad")
GRAPH = ("--cuda-graph-impl", "full_iteration", "--cuda-graph-warmup-steps", "1")

EACH = {one.name: one.example for one in map(objectives.find, objectives.BUILT_IN) if one.trains and not one.draws}
SETTINGS = {
    "plain": (),
    "ramp": (*SIMREG, "--simreg-warmup-iters", "4"),
    "off in the end": (*SIMREG, "--simreg-off-after", "0.5"),
    "document mask": (*SIMREG, "--simreg-document-mask", "--simreg-chunk-size", "16"),
    "TP2 with SP": (*SIMREG, "--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "AdaGC": (*SIMREG, "--adagc"),
    **{name: neighbour(name, f"{one.weight:g}", one.chunk_size, one.options).flags for name, one in EACH.items()},
}


QUICK = ("ramp", "TP2 with SP", "AdaGC")


@pytest.mark.parametrize("name", quick(SETTINGS, lambda name: name in QUICK))
def test_replays_compute_the_same(name: str, data_flags: tuple[str, ...], tmp_path: Path) -> None:
    flags = (*data_flags, *EAGER, *SETTINGS[name])
    processes = 2 if name.startswith("TP2") else 1
    eager = runs.train(tmp_path / "eager", flags, processes=processes)
    graph = runs.train(tmp_path / "graph", (*flags, *GRAPH), processes=processes, patch="test_whole_graph:activate")
    assert eager.losses == graph.losses and eager.norms == graph.norms and runs.same_bits(eager, graph)
    log = (tmp_path / "graph" / "log").read_text()
    assert "replay 4" in log and "replay 5" not in log
    kept = [{name: line[name] for name in found} for line, found in zip(eager.logged, graph.logged, strict=True)]
    assert kept == graph.logged
    if name != "plain":
        assert len(graph.logged) == 6 and "no geometry is measured" in log
        assert not any("cosine" in value for line in graph.logged for value in line)


@pytest.mark.parametrize("patch", ["frozen_lambda", "waits"])
def test_what_a_graph_cannot_repeat_is_seen(patch: str, data_flags: tuple[str, ...], tmp_path: Path) -> None:
    flags = (*data_flags, *EAGER, *SETTINGS["ramp"])
    done = runs.attempt(tmp_path / "graph", (*flags, *GRAPH), patch=f"test_whole_graph:{patch}")
    if patch == "waits":
        assert done.status != 0 and "while a graph was captured" in done.output
    else:
        eager, graph = runs.train(tmp_path / "eager", flags), runs.read(tmp_path / "graph")
        assert eager.losses[:3] == graph.losses[:3], "its own value, until the first replay"
        assert eager.losses[3] != graph.losses[3] and not runs.same_bits(eager, graph)


# torch.cuda.graph on the CPU: what was computed in the capture is computed again, in the same memory ------------------

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
    from simreg_megatron.plugin.term import Strength

    activate()
    weights = Strength.weights
    Strength.weights = lambda strength: _unseen(lambda: list(map(float, weights(strength))))


def waits() -> None:
    """The host asks whether there is a token."""
    from simreg_megatron.plugin.term import Regularizer

    activate()
    compute = Regularizer._compute
    Regularizer._compute = lambda *args: compute(*args) if args[3].valid.any() else None
