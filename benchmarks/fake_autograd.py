# SPDX-License-Identifier: Apache-2.0
"""Backward passes on a device that is not here: autograd's own engine refuses it, its nodes do not."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction


@torch.no_grad()
def backward(result: Tensor, grad: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Every tensor that `result` was computed from and that wants a gradient, with its gradient.

    As the engine does: a node runs once all who use it have; a gradient is summed over what was broadcast, brought to
    the type of the tensor that it is of, and shown to that tensor's hooks.
    """
    root: Any = result.grad_fn
    assert root is not None
    users = _users(root)
    arrived: dict[Any, dict[int, Tensor]] = {root: {result.output_nr: grad}}
    ready, leaves = [root], []
    while ready:
        node = ready.pop()
        grads = {number: _as_wanted(value, node, number) for number, value in arrived.pop(node, {}).items()}
        if node.name().endswith("AccumulateGrad"):
            leaves += [(node.variable, _after_hooks(node.variable, value)) for value in grads.values()]
            continue
        for (after, number), value in zip(node.next_functions, _run(node, grads), strict=False):
            if after is None:
                continue
            if value is not None:
                own = arrived.setdefault(after, {})
                own[number] = own[number] + value if number in own else value
            users[after] -= 1
            if not users[after]:
                ready.append(after)
    return leaves


def _users(root: Any) -> Counter[Any]:
    """How often each node below `root` is used."""
    users: Counter[Any] = Counter()
    waiting, seen = [root], {root}
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None:
                users[node] += 1
                if node not in seen:
                    seen.add(node)
                    waiting.append(node)
    return users


def _run(node: Any, grads: dict[int, Tensor]) -> tuple[Tensor | None, ...]:
    if not grads:  # nothing came from above, and nothing goes on
        return (None,) * len(node.next_functions)
    run = node.apply if isinstance(node, BackwardCFunction) else node
    result = run(*(grads.get(number) for number in range(len(node._input_metadata))))
    return result if isinstance(result, tuple) else (result,)


def _as_wanted(grad: Tensor, node: Any, number: int) -> Tensor:
    wanted = node._input_metadata[number]
    if grad.shape != wanted.shape:
        grad = grad.sum_to_size(wanted.shape)
    return grad.to(wanted.dtype)


def _after_hooks(variable: Tensor, grad: Tensor) -> Tensor:
    for hook in (variable._backward_hooks or {}).values():
        changed = hook(grad)
        grad = grad if changed is None else changed
    return grad
