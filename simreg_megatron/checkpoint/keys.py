# SPDX-License-Identifier: Apache-2.0
"""A reader of pickles that refuses tuples which would take forever to hash, or end the process.

Tuples can share their elements: forty times `t = (t, t)` makes a key whose hash takes 2^40 steps. They can also be
nested so deep that Python, which hashes them by recursion, runs out of stack and dies. So every tuple is weighed when
it is made, by the number of elements that its hash visits and by its depth, and keys are charged before a table or a
set hashes them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

_VISITS_PER_BYTE = 16
"""Far more than a checkpoint needs: its keys are names, or names with a few numbers."""
_DEPTH = 50

_Load = Callable[[Any], None]


class WeighingUnpickler(pickle._Unpickler):
    """Python's own form of the reader, which can be told what to do before and after it follows an instruction.

    Raises:
        pickle.UnpicklingError: the tuples are nested too deep, or hashing the keys would visit more elements than is
            allowed to a pickle of this length.
    """

    stack: list[Any]  # since the last mark
    dispatch: ClassVar[dict[int, _Load]] = dict(pickle._Unpickler.dispatch)

    def __init__(self, file: Any, *, length: int) -> None:
        super().__init__(file)
        self._most = self._left = _VISITS_PER_BYTE * (length + 100)
        self._weights: dict[int, tuple[int, int, Any]] = {}  # by id: visits, depth, and the tuple, so that it stays

    def weigh(self, made: tuple[Any, ...]) -> None:
        """Note a new tuple's visits and depth, from those of its elements, which are older."""
        weights = [self._weight(element) for element in made]
        visits, depth = 1 + sum(visits for visits, _ in weights), 1 + max((depth for _, depth in weights), default=0)
        if depth > _DEPTH or visits > self._most:
            raise pickle.UnpicklingError("its tuples are nested too deep, or too many times over")
        if depth > 1 or visits > 1 + len(made):
            self._weights[id(made)] = visits, depth, made

    def charge(self, keys: Iterable[Any]) -> None:
        """Take from what is left what hashing the keys will visit."""
        for key in keys:
            self._left -= self._weight(key)[0]
            if self._left < 0:
                raise pickle.UnpicklingError("its keys would take too long to hash")

    def _weight(self, value: Any) -> tuple[int, int]:
        if isinstance(value, tuple):
            visits, depth, _ = self._weights.get(id(value), (1 + len(value), 1, None))
            return visits, depth
        return (1 + value.bit_length() // 64 if isinstance(value, int) else 1), 0


def _hashable(arguments: Any) -> Iterator[Any]:
    """Of a call's arguments, what a table or a set made from them would hash: elements, keys, or keys of pairs."""
    for argument in arguments:
        yield argument
        for element in argument if isinstance(argument, list | set | dict) else ():
            yield from element if isinstance(element, list) else (element,)


def _weighed_after(load: _Load) -> _Load:
    def followed(reader: WeighingUnpickler) -> None:
        load(reader)
        reader.weigh(reader.stack[-1])

    return followed


def _charged_before(load: _Load, keys: Callable[[list[Any]], Iterable[Any]]) -> _Load:
    def followed(reader: WeighingUnpickler) -> None:
        reader.charge(keys(reader.stack))
        load(reader)

    return followed


_MAKE_TUPLES = (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)
_HASH: dict[bytes, Callable[[list[Any]], Iterable[Any]]] = {  # what of the stack
    pickle.SETITEM: lambda stack: stack[-2:-1],
    pickle.SETITEMS: lambda stack: stack[::2],
    pickle.DICT: lambda stack: stack[::2],
    pickle.ADDITEMS: lambda stack: stack,
    pickle.FROZENSET: lambda stack: stack,
    pickle.REDUCE: lambda stack: _hashable(stack[-1]),
    pickle.NEWOBJ: lambda stack: _hashable(stack[-1]),
    pickle.NEWOBJ_EX: lambda stack: _hashable(stack[-2]),
    pickle.OBJ: _hashable,
    pickle.INST: _hashable,
    pickle.BINPERSID: lambda stack: _hashable(stack[-1:]),
}
for _code in _MAKE_TUPLES:
    WeighingUnpickler.dispatch[_code[0]] = _weighed_after(WeighingUnpickler.dispatch[_code[0]])
for _code, _keys in _HASH.items():
    WeighingUnpickler.dispatch[_code[0]] = _charged_before(WeighingUnpickler.dispatch[_code[0]], _keys)
