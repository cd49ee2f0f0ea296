# SPDX-License-Identifier: Apache-2.0
"""How memory grows on a GPU, without one."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.fake_autograd import backward
from simreg_megatron.losses import simreg_loss


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors made inside, as long as they live; not those that an operator makes for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf.untyped_storage() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            storage = leaf.untyped_storage() if isinstance(leaf, Tensor) else None
            if storage is not None and storage not in self._known and not any(storage is one for one in given):
                self._grow(storage)
        return found

    def _grow(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self._known.add(storage)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._shrink, size)

    def _shrink(self, size: int) -> None:
        self.now -= size


def predicted_bytes(
    batch: int, length: int, width: int, *, chunk_size: int, dtype: torch.dtype, device: str, impl: str = "tiled"
) -> int:
    """Return the peak memory, without inputs and gradient, of a forward and backward of the loss, without computing it.

    Every tile is gone through with tensors that have no memory, so this counts what the code asks for.
    """
    with FakeTensorMode():
        rows = torch.empty(batch, length, width, dtype=dtype, device=device, requires_grad=True)
        labels = torch.empty(batch, length, dtype=torch.int64, device=device)
        with LiveBytes() as live:
            loss = simreg_loss(rows, labels, chunk_size=chunk_size, impl=impl)
            backward(loss, torch.ones_like(loss))
    return live.most - rows.nbytes
