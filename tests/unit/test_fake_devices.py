# SPDX-License-Identifier: Apache-2.0
"""Every objective goes forward and backward on CUDA tensors without memory: nothing waits, nothing touches the host.

The rank is one of four that share a sequence, two by tensor and two by context parallelism.
"""

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.fake_autograd import backward
from benchmarks.fake_ranks import Layout, as_rank
from benchmarks.launches import Trace, _kernels_launched_by
from simreg_megatron import objectives
from simreg_megatron.config import SimRegConfig
from simreg_megatron.contrib import dispersion, placebo, sigreg
from simreg_megatron.objectives import IMPLEMENTATIONS
from simreg_megatron.parallel import learnable
from simreg_megatron.plugin.term import Regularizer

LAYOUT, RANK = Layout(tensor=2, context=2, sequence_parallel=True), (1, 0)
BATCH, WIDTH, VOCABULARY = 2, 64, 600
RAGGED, EVEN = 2500, 4096  # tokens of a sequence: its last chunk of 1024 has 452 tokens, or all of them
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

NEED_A_DRIVER = {"sigreg": (sigreg, "random_directions"), "dispersion": (dispersion, "random_numbers")}
NEED_A_DRIVER["placebo"] = placebo, "random_numbers"
"""Objectives that draw from a generator of the device, which is none without its driver: what draws is replaced."""
NEED_MEMORY = [impl for impl in IMPLEMENTATIONS if impl not in ("auto", "reference", "tiled")]
"""Forms with kernels in Triton, whose launcher asks each tensor where its memory is: each launch is counted instead."""


class HostTensors(TorchDispatchMode):
    """Names of operators that read or make a tensor of the host: its numbers would have to cross to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, found))
        if any(isinstance(leaf, Tensor) and leaf.device.type == "cpu" for leaf in leaves):
            self.names.append(str(func))
        return found


@dataclass(frozen=True)
class Case:
    objective: str
    impl: str = "tiled"
    dtype: str = "bf16"
    chunk: int = 1024
    length: int = RAGGED
    scope: str = "exact"
    logs: bool = False

    def __str__(self) -> str:
        parts = [self.objective, self.dtype, f"{self.length} in {self.chunk or 'one'}", self.scope]
        return " ".join([*parts, *([self.impl] if self.objective == "simreg" else []), *(["log"] if self.logs else [])])

    @property
    def config(self) -> SimRegConfig:
        given: dict[str, Any] = {"lambda_": 0.0 if self.objective == "none" else 1.0, "objective": self.objective}
        if self.objective == "simreg":
            given["impl"] = self.impl
        idle, wanted = SimRegConfig(**given).idle_settings, {"chunk_size": self.chunk, "scope": self.scope}
        return SimRegConfig(**given, **{name: value for name, value in wanted.items() if name not in idle})


@dataclass(frozen=True)
class Found:
    gradients: list[tuple[Tensor, Tensor]]
    hidden: Tensor
    host: list[str]
    syncs: int
    launches: int


def step(case: Case) -> Found:
    config, dtype = case.config, DTYPES[case.dtype]
    tokens = case.length // LAYOUT.context
    counted = Trace()
    with _kernels_launched_by(counted), as_rank(LAYOUT, RANK) as groups, FakeTensorMode():
        with torch.device("cuda"):  # for what Megatron brings, and not in the step itself
            head = torch.empty(VOCABULARY // LAYOUT.tensor, WIDTH, dtype=dtype, requires_grad=True)
            model = SimpleNamespace(
                config=SimpleNamespace(sequence_parallel=True, hidden_size=WIDTH),
                pg_collection=groups,
                output_layer=SimpleNamespace(weight=head),
            )
            learnable.add_to(model, learnable.wanted(config))
            hidden = torch.empty(tokens // LAYOUT.tensor, BATCH, WIDTH, dtype=dtype, requires_grad=True)
            labels, mask = torch.empty(BATCH, tokens, dtype=torch.int64), torch.empty(BATCH, tokens)
            loss = torch.empty(BATCH, tokens, requires_grad=True)
        regularizer = Regularizer(config)
        regularizer.metrics.wants_geometry = case.logs
        regularizer.strength.set_iteration(3, 10)
        with HostTensors() as host, counted:
            result = regularizer.add_to(loss, regularizer.terms(model, hidden, labels, mask))
            gradients = backward(result, torch.ones_like(result)) if config.trains else []
    return Found(gradients, hidden, host.names, counted.syncs, counted.launches)


@contextlib.contextmanager
def drawn_elsewhere(objective: str) -> Iterator[None]:
    def drawn(*shape: int, seed: int, iteration: int, device: torch.device) -> Tensor:
        return torch.empty(shape, device=device)

    needs = objective in NEED_A_DRIVER
    with mock.patch.object(*NEED_A_DRIVER[objective], drawn) if needs else contextlib.nullcontext():
        yield


def check(case: Case) -> None:
    with drawn_elsewhere(case.objective):
        found = step(case)
    assert found.host == [] and found.syncs == 0
    assert case.objective == "none" or found.launches > 0
    for tensor, gradient in found.gradients:
        assert (gradient.shape, gradient.dtype, gradient.device) == (tensor.shape, tensor.dtype, tensor.device)
    assert (case.objective != "none") == any(tensor is found.hidden for tensor, _ in found.gradients)


FORMS = [*(Case("simreg", impl) for impl in ("reference", *NEED_MEMORY)), *map(Case, objectives.BUILT_IN)]


def distinct(cases: Iterable[Case]) -> list[Case]:
    """Without those that differ from earlier ones only in what their objective does not know."""
    found: dict[Any, Case] = {}
    for case in cases:
        found.setdefault((case.config, case.dtype, case.length, case.logs), case)
    return list(found.values())


QUICK = distinct([*(replace(case, logs=True) for case in FORMS), replace(FORMS[1], chunk=0, length=EVEN)])
ALL = distinct([
    *QUICK,
    *(Case(case.objective, case.impl, *rest)
      for case in FORMS
      for rest in itertools.product(DTYPES, (1024, 0), (RAGGED, EVEN), ("exact", "local"), (False, True))
      if (case.impl, rest[0]) != ("triton", "fp16")),
])  # fmt: skip


CASES = [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in ALL[len(QUICK) :])]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_micro_batch_stays_on_the_device(case: Case) -> None:
    check(case)
