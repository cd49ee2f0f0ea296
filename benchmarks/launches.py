# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.launches`: what SimReg adds to a micro-batch on a GPU, without one.

The plugin's own code runs forward and backward on tensors that have a device (CUDA) and no memory; every operator that
reaches the device is counted, with the bytes that it reads and writes and the multiplications that it makes. Operators
that only look at memory differently, or reserve it, are left out; one that launches several kernels (a sort, say)
counts as one. A kernel in Triton counts as one, and reads and writes each of its tensors once. From that follows a
time, by a model and not by a clock:

    time = sum over operators of max(bytes / BANDWIDTH, FLOPs / RATE) + LAUNCH for each

and its share of the micro-batch's own time, 6 FLOPs a weight and token at SHARE_OF_PEAK. Real kernels are slower than
these limits and launches overlap: the shares are for comparing one version with another.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks import records
from benchmarks.fake_autograd import backward
from benchmarks.records import Record
from launch import sizes
from launch.dry_run import ASSUMED_VOCABULARY
from launch.flags import flag_number, read_preset
from launch.options import LAYOUTS, PRESETS
from launch.sizes import PEAK, SHARE_OF_PEAK
from simreg_megatron.config import SimRegConfig
from simreg_megatron.kernels import triton as triton_kernels
from simreg_megatron.plugin.term import Regularizer

FORMS = ("tiled", "triton")
BANDWIDTH, RATE, LAUNCH = 2.5e12, 600e12, 3e-6  # bytes/s, FLOP/s and seconds a kernel, of an H800 in bf16
_RESERVES = ("empty", "new_empty", "_local_scalar_dense")
_LOOKS = (
    "profiler.", "prim.", "aten.promote_types", "aten.detach", "aten.lift_fresh", "aten._unsafe_view", "aten.alias",
    "aten._reshape_alias",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A micro-batch of a preset on one GPU."""

    name: str
    batch: int
    length: int
    width: int
    chunk: int
    weights: int = 0  # active per token, for a preset
    logs: bool = False
    form: str = "tiled"

    def __str__(self) -> str:
        return f"{self.name}, {self.chunk}, {self.form}{', logged' if self.logs else ''}"


@dataclass
class Trace(TorchDispatchMode):
    """Operators that reach the device."""

    names: Counter[str] = field(default_factory=Counter)
    moved: int = 0  # bytes
    multiplied: int = 0  # FLOPs
    seconds: float = 0.0
    syncs: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = str(func)
        if "_local_scalar_dense" in name or name.startswith("aten.nonzero"):
            self.syncs += 1
        if not _reaches_the_device(func, name):
            return result
        tensors = {id(leaf): leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)}
        moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        count = flop_registry.get(func.overloadpacket)
        is_new = kwargs.get("out") is None
        flops = int(count(*args, **kwargs, out_val=result)) if count and is_new else _flops_of_product(args, name)
        self._count(name, moved, flops)
        return result

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        """Count a kernel in Triton, in the place of `run`."""
        tensors = {id(given): given for given in arguments if isinstance(given, Tensor)}
        moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        self._count(kernel.__name__, moved, _flops_of_kernel(kernel, arguments, constants))

    def _count(self, name: str, moved: int, flops: int) -> None:
        self.names[name] += 1
        self.moved += moved
        self.multiplied += flops
        self.seconds += max(moved / BANDWIDTH, flops / RATE) + LAUNCH

    @property
    def launches(self) -> int:
        return self.names.total()


def _reaches_the_device(func: Any, name: str) -> bool:
    if any(word in name for word in _RESERVES) or name.startswith(_LOOKS):
        return False
    aliases = [value.alias_info for value in func._schema.returns if value.alias_info is not None]
    return not aliases or any(alias.is_write for alias in aliases)


def _flops_of_product(args: Any, name: str) -> int:
    """Count the FLOPs of a product into a given tensor, which torch's own table does not know."""
    if not name.startswith(("aten.bmm", "aten.mm", "aten.baddbmm", "aten.addmm")):
        return 0
    left, right = [leaf for leaf in args if isinstance(leaf, Tensor)][-2:]
    return 2 * left.numel() * right.shape[-1]


def _flops_of_kernel(kernel: Any, arguments: Sequence[Any], constants: dict[str, Any]) -> int:
    """Count the FLOPs of the two kernels that multiply."""
    given = dict(zip(kernel.arg_names, arguments, strict=False))
    if kernel is triton_kernels._pairs:
        height, breadth = given["last_i"] - given["first_i"], given["last_j"] - given["first_j"]
        pairs = height * (height + 1) // 2 if constants["UPPER"] else height * breadth
    elif kernel is triton_kernels._product:
        pairs = given["height"] * given["length"]
    else:
        return 0
    return 2 * given["num_chunks"] * pairs * given["width"]


def trace(case: Case) -> Trace:
    """One micro-batch, forward and backward, with the default settings but for the form."""
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    groups = SimpleNamespace(tp=group, cp=group, dp_cp=group)
    config = SimRegConfig(lambda_="auto", chunk_size=case.chunk, impl=case.form)
    trace = Trace()
    with FakeTensorMode(), _kernels_launched_by(trace):
        shape = case.length, case.batch, case.width
        step = step_of(config, groups, shape, case.length, ASSUMED_VOCABULARY, case.logs)
        with trace as counted:
            result = step()
            backward(result, torch.ones_like(result))
        counted.names["aten.ones_like.default"] -= 1  # the gradient that Megatron brings
    return counted


def step_of(
    config: SimRegConfig, groups: SimpleNamespace, shape: tuple[int, int, int], tokens: int, vocabulary: int, logs: bool
) -> Callable[[], Tensor]:
    """Prepare the plugin's step of hidden states [rows, b, width] and labels [b, tokens]."""
    rows, batch, width = shape
    with torch.device("cuda"):
        hidden = torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
        labels, mask = torch.empty(batch, tokens, dtype=torch.int64), torch.empty(batch, tokens)
        loss = torch.empty(batch, tokens, requires_grad=True)
        head = torch.empty(vocabulary, width, dtype=torch.bfloat16)
    model = SimpleNamespace(
        config=SimpleNamespace(sequence_parallel=rows < tokens, hidden_size=width),
        pg_collection=groups,
        share_embeddings_and_output_weights=False,
        output_layer=SimpleNamespace(weight=head),
    )
    regularizer = Regularizer(config)
    regularizer.metrics.wants_geometry = logs
    regularizer.metrics._sums = regularizer.metrics._nothing(hidden.device)  # made once a run
    return lambda: regularizer.add_to(loss, regularizer.terms(model, hidden, labels, mask))


@contextlib.contextmanager
def _kernels_launched_by(trace: Trace) -> Iterator[None]:
    """Triton's own launcher wants a GPU."""
    with (
        mock.patch.object(triton_kernels, "run", trace.launch),
        mock.patch.object(triton_kernels, "_gpu", lambda _: (132, 9)),
    ):
        yield


def cases() -> Iterator[Case]:
    """The paper's sizes, the micro-batch of their layouts on 8 H800, and two sizes beyond."""
    for name in ("llama-350m", "llama-1.3b", "llama-3b", "llama-7b", "mixtral-8x1b"):
        flags = [*read_preset(PRESETS / f"{name}.args"), *read_preset(LAYOUTS / "h800" / f"{name}.args")]
        length, width = flag_number(flags, "--seq-length", 1), flag_number(flags, "--hidden-size", 1)
        weights = sizes.count_parameters(flags, vocabulary=ASSUMED_VOCABULARY, active=True)
        own = name, flag_number(flags, "--micro-batch-size", 1), length, width
        for form in FORMS:
            yield Case(*own, chunk=1024, weights=weights, form=form)
            yield Case(*own, chunk=0, weights=weights, form=form)
        yield Case(*own, chunk=1024, weights=weights, logs=True)
    for form in FORMS:
        yield Case("longer sequences", 4, 4096, 4096, chunk=1024, form=form)
        yield Case("one long sequence", 1, 32768, 4096, chunk=1024, form=form)


def rows() -> Iterator[dict[str, Any]]:
    for case in cases():
        traced = trace(case)
        own_seconds = 6 * case.weights * case.batch * case.length / (PEAK * SHARE_OF_PEAK)  # of the micro-batch
        yield {
            "preset": case.name, "batch": case.batch, "tokens": case.length, "width": case.width,
            "chunk": case.chunk or "whole", "impl": case.form, "log_step": "yes" if case.logs else "no",
            "launches": traced.launches, "moved_mib": f"{traced.moved / 2**20:.0f}",
            "gflop": f"{traced.multiplied / 1e9:.1f}", "syncs": traced.syncs, "model_ms": f"{traced.seconds * 1e3:.3f}",
            "share": f"{traced.seconds / own_seconds:.4f}" if case.weights else "",
        }  # fmt: skip


def table(lines: list[Record]) -> Iterator[str]:
    yield f"{records.described(lines)}. `python -m benchmarks.launches`"
    yield ""
    yield "| preset | micro-batch | chunk | impl | log step | launches | MiB moved | GFLOP | model, ms | share |"
    yield "| --- " * 10 + "|"
    for line in lines:
        size = f"{line['batch']} x {line['tokens']} x {line['width']}"
        part = f"{100 * float(line['share']):.2f} %" if line["share"] else ""
        counts = (line[name] for name in ("chunk", "impl", "log_step", "launches", "moved_mib", "gflop", "model_ms"))
        yield f"| {' | '.join((line['preset'], size, *counts, part))} |"


if __name__ == "__main__":
    records.command("launches", __doc__, rows, table)
