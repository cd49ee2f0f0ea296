# SPDX-License-Identifier: Apache-2.0
"""One process as any rank of a run of any size: its process groups, its collectives, and the memory that it takes.

torch's fake process group answers at once and moves nothing; with tensors that have a device and no memory around it,
a rank's whole micro-batch is gone through without its GPU and without its partners.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from simreg_megatron.parallel.layout import Rank


@dataclass(frozen=True)
class Layout:
    """How a run lies over its ranks, numbered as Megatron numbers them: tensor, context, data, pipeline."""

    tensor: int = 1
    context: int = 1
    data: int = 1
    pipeline: int = 1
    sequence_parallel: bool = False

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.context * self.data * self.pipeline

    @property
    def ranks_of_a_sequence(self) -> list[Rank]:
        """(context rank, tensor rank) of those that share the sequences of a micro-batch."""
        return list(itertools.product(range(self.context), range(self.tensor)))

    def number(self, rank: Rank, data: int = 0) -> int:
        """The rank of the whole run, on the last pipeline stage, where the loss is."""
        return rank[1] + self.tensor * (rank[0] + self.context * (data + self.data * (self.pipeline - 1)))

    def __str__(self) -> str:
        sizes = {"CP": self.context, "PP": self.pipeline, "DP": self.data}
        first = [f"TP{self.tensor}{' SP' if self.sequence_parallel else ''}"] if self.tensor > 1 else []
        return " x ".join([*first, *(f"{name}{size}" for name, size in sizes.items() if size > 1)])


@contextlib.contextmanager
def as_rank(layout: Layout, rank: Rank) -> Iterator[SimpleNamespace]:
    """The groups of one rank of the last pipeline stage, as Megatron's models carry them: tp, cp, tp_cp, dp_cp."""

    def group_of(members: list[Rank]) -> dist.ProcessGroup:
        return dist.new_group([layout.number(member) for member in members])

    context, tensor = rank
    dist.init_process_group("fake", rank=layout.number(rank), world_size=layout.num_ranks, store=FakeStore())
    try:
        replicas = itertools.product(range(layout.context), range(layout.data))
        yield SimpleNamespace(
            tp=group_of([(context, other) for other in range(layout.tensor)]),
            cp=group_of([(other, tensor) for other in range(layout.context)]),
            tp_cp=group_of(layout.ranks_of_a_sequence),
            dp_cp=dist.new_group(sorted(layout.number((other, tensor), replica) for other, replica in replicas)),
        )
    finally:
        dist.destroy_process_group()


class Call(NamedTuple):
    """A collective as one rank makes it: its kind, the ranks of its group, and the bytes that come from other ranks."""

    kind: str
    ranks: tuple[int, ...]
    received: int


class Collectives(TorchDispatchMode):
    """Records every collective made inside, by any route into torch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.calls.append(_call(func, args))
        return func(*args, **(kwargs or {}))


def _call(func: Any, args: Any) -> Call:
    """Describe a collective; each part of it is sent once, as in a ring."""
    name = func.overloadpacket.__name__
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
    ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(given["process_group"])))
    number = len(ranks)
    if name == "allreduce_":
        return Call("all-reduce", ranks, 2 * _bytes(given["tensors"]) * (number - 1) // number)
    if name == "_allgather_base_":
        return Call("all-gather", ranks, _bytes(given["input_tensor"]) * (number - 1))
    if name == "_reduce_scatter_base_":
        return Call("reduce-scatter", ranks, _bytes(given["input_tensor"]) * (number - 1) // number)
    if name == "alltoall_base_":
        sizes = list(given["output_split_sizes"])
        del sizes[ranks.index(dist.get_rank())]
        return Call("all-to-all", ranks, sum(sizes) * given["output"][:1].nbytes)
    raise NotImplementedError(f"the collective {name} is new here: say in {__name__} what it sends")


def _bytes(tensors: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor))


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors made inside, as long as they live; not those that an operator makes for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf.untyped_storage() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            storage = leaf.untyped_storage() if isinstance(leaf, Tensor) else None
            if storage is not None and storage not in self._known and not any(storage is one for one in given):
                self._grow(storage)
        return result

    def _grow(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self._known.add(storage)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._shrink, size)

    def _shrink(self, size: int) -> None:
        self.now -= size
