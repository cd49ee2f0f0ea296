# SPDX-License-Identifier: Apache-2.0
"""The way through all pairs, tile by tile and each tile once: what every fast form of `contrast` shares.

A form says how one tile is computed, by a subclass of `Tiles`. Three ways back, by what fits into memory:

* the forward kept its exponentials P: the backward multiplies them by H's coefficients, and nothing is computed twice;
* the gradient of all rows fits beside them in its summing type: each tile serves both of its sides;
* else panel by panel: every tile of a panel is computed for that panel alone, and a panel is all that is summed.

Shapes: b sequences of c chunks of k tokens with d features; p anchors of each chunk; m chunks worked on together;
tiles of r rows and s columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Span = tuple[int, int]
Slab = tuple[slice, slice]  # of sequences and of chunks; one of the two has length 1, or all chunks are in it

WORKSPACE = {"cpu": 32 << 20, "cuda": 192 << 20}
"""Bytes that the tiles of one step may take: as many chunks go together as fit, but at least one."""
KEPT = {"cpu": 16 << 20, "cuda": 128 << 20}
"""Bytes of exponentials that may stay between forward and backward; beyond it all are computed again."""
SUMMED = {"cpu": 256 << 20, "cuda": 256 << 20}
"""Bytes that a gradient may take in its summing type where that is not the type it is returned in."""


class Given(NamedTuple):
    """What the pairs are made of, as `contrast` prepares it."""

    rows: Tensor  # [b, c, k, d], of any strides; those that are not usable may hold anything
    names: Tensor  # [b, c, k]: equal where labels are, -1 where not usable
    scale: Tensor  # [b, c, k]: 1 / |row|, in the type that sums are taken in
    documents: Tensor | None  # [b, c, k]


class Tiles(ABC):
    """The pairs of the chunks in one slab, tile by tile; every tile may be written over the one before."""

    def __init__(self, given: Given, slab: Slab, temperature: float) -> None:
        self.rows = given.rows[slab]  # [b, c, k, d]: chunks are merged tile by tile, which costs no copy of all of them
        self.names, self.scale = _merged(given.names, slab), _merged(given.scale, slab)
        self.documents = None if given.documents is None else _merged(given.documents, slab)
        self.temperature = temperature
        self.one: Span = (0, 0)

    @staticmethod
    @abstractmethod
    def side(rows: Tensor) -> int:
        """Longest side of a tile."""

    @staticmethod
    @abstractmethod
    def bytes_per_chunk(rows: Tensor, side: int) -> int:
        """What the workspace must hold for one chunk."""

    @staticmethod
    @abstractmethod
    def kept_dtype(rows: Tensor) -> torch.dtype | None:
        """Of exponentials that stay between forward and backward; None where they are better computed again."""

    @staticmethod
    def kept_numbers(rows: Tensor, one: Span, other: Span) -> int:
        """How many numbers of that type a tile of one chunk keeps."""
        return (one[1] - one[0]) * (other[1] - other[0])

    @staticmethod
    @abstractmethod
    def inverse_norms(rows: Tensor, names: Tensor) -> Tensor:
        """1 / |e| [b, c, k], in the type to sum in, 1 where not usable; NaN for a row that is not finite."""

    def hold(self, one: Span) -> None:
        """Choose the rows of the next tiles."""
        self.one = one

    @abstractmethod
    def sums(self, other: Span, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Of P_ij, j != i, over positives and over negatives: of the tile's rows [2, m, r], of its columns [2, m, s].

        A tile of a span with itself counts each of its pairs once for either side, so only its row sums are used.
        `keep` takes the exponentials, [m * kept_numbers].
        """

    @abstractmethod
    def add_gradient(
        self, other: Span, pull: Tensor, kept: Tensor | None, to_one: Tensor, to_other: Tensor | None
    ) -> None:
        """Add H_ij e^_j to `to_one` [m, r, d] and, where given, H_ji e^_i to `to_other` [m, s, d]; pull is [2, m, k].

        Where `to_other` is missing, every pair of the tile is another tile's too, and only this side is wanted.
        """

    @abstractmethod
    def project(self, of_unit: Tensor, span: Span, grad: Tensor) -> None:
        """From the gradient of the unit rows [m, r, d] to that of the rows, into `grad` [b, c, r, d].

        0 for rows that are not usable. The two may share their memory.
        """


def anchor_sums(
    tiles: type[Tiles], given: Given, anchors: Span, temperature: float, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(S_pos, S_neg / S_pos) of the anchors, both [b, c, p], and the exponentials that were kept, flat or empty."""
    shelf = _Shelf.new(tiles, given.rows, anchors) if keep else _Shelf(given.rows.new_empty(0))
    steps = [
        (one, [(other, one != other and anchors[0] <= other[0] < anchors[1]) for other in others])
        for one, others in panels(anchors, given.rows, tiles.side(given.rows))
    ]
    sums = _sums(tiles, given, steps, temperature, shelf)
    return *ratio_of(sums[..., slice(*anchors)], given, anchors), shelf.flat


def shared_sums(
    tiles: type[Tiles], given: Given, anchors: Span, rectangles: Sequence[tuple[Span, Span]], temperature: float
) -> Tensor:
    """Sums of P over positives and negatives, [2, b, c, k], from a part of the pairs: each adds to both of its tokens.

    Args:
        anchors: pairs of two of these are all counted.
        rectangles: and pairs of a token in the first span with one in the second, which share no token.
    """
    side = tiles.side(given.rows)
    own = list(cut(anchors, side))
    steps = [(one, [(other, one != other) for other in own[number:]]) for number, one in enumerate(own)]
    for rows, columns in rectangles:
        steps += [(one, [(other, True) for other in cut(columns, side)]) for one in cut(rows, side)]
    return _sums(tiles, given, steps, temperature, _Shelf(given.rows.new_empty(0)))


def ratio_of(sums: Tensor, given: Given, anchors: Span) -> tuple[Tensor, Tensor]:
    """(S_pos, S_neg / S_pos) [b, c, p] from the sums [2, b, c, p] over all other tokens."""
    scale, own = given.scale, slice(*anchors)
    positive, negative = (sums[0] + 1.0).to(scale.dtype), sums[1].to(scale.dtype)  # the token itself is a positive
    doubt = scale[..., own] * 0.0  # NaN for a row that is not finite: one that meets nobody would pass as a 0
    return positive, torch.where(given.names[..., own] >= 0, negative / positive + doubt, 0.0)


def _sums(
    tiles: type[Tiles],
    given: Given,
    steps: Sequence[tuple[Span, Sequence[tuple[Span, bool]]]],
    temperature: float,
    shelf: _Shelf,
) -> Tensor:
    """[2, b, c, k], float64 as many tiles are added up; `steps`: rows, and columns with whether theirs count, too."""
    sums = torch.zeros(2, *given.names.shape, dtype=torch.float64, device=given.names.device)
    for slab in _slabs(tiles, given.rows):
        pairs = tiles(given, slab, temperature)
        of_slab = sums[(slice(None), *slab)].flatten(1, 2)
        for one, others in steps:
            pairs.hold(one)
            for other, has_both in others:
                of_rows, of_columns = pairs.sums(other, shelf.next(pairs, other))
                of_slab[:, :, slice(*one)] += of_rows
                if has_both:
                    of_slab[:, :, slice(*other)] += of_columns
        sums[(slice(None), *slab)] = of_slab.view_as(sums[(slice(None), *slab)])
    return sums


def pair_gradient(
    tiles: type[Tiles], given: Given, kept: Tensor, pull: Tensor, anchors: Span, reach: Span, temperature: float
) -> Tensor:
    """Gradient of the rows in reach, [b, c, reach, d] in their type, from pairs that hold an anchor.

    Args:
        kept: from `anchor_sums`.
        pull: (a, b) of all tokens, [2, b, c, k]; tokens that are anchors on other ranks have theirs, too.
        anchors: of this call, inside the reach.
        reach: all rows, or the anchors alone, whose gradient is then complete if all tokens that they meet have
            their pull.
    """
    grad = torch.empty_like(given.rows[:, :, slice(*reach)], memory_format=torch.contiguous_format)
    shelf = _Shelf(kept)
    for slab in _slabs(tiles, given.rows):
        pairs = tiles(given, slab, temperature)
        of_slab = pull[(slice(None), *slab)].flatten(1, 2)
        if shelf.holds or _fits(grad[slab], given.scale.dtype):
            _both_sides(pairs, grad[slab], of_slab, shelf, anchors, reach)
        else:
            _panel_by_panel(pairs, grad[slab], of_slab, reach)
    return grad


def _both_sides(pairs: Tiles, grad: Tensor, pull: Tensor, shelf: _Shelf, anchors: Span, reach: Span) -> None:
    of_unit = _zeros_for(grad, pairs.scale.dtype)

    def at(span: Span) -> Tensor:
        return of_unit[:, span[0] - reach[0] : span[1] - reach[0]]

    side = pairs.side(pairs.rows)
    for one, others in panels(anchors, pairs.rows, side):
        pairs.hold(one)
        for other in others:
            inside = one != other and reach[0] <= other[0] < reach[1]
            pairs.add_gradient(other, pull, shelf.next(pairs, other), at(one), at(other) if inside else None)
    for span in cut(reach, side):
        part = slice(span[0] - reach[0], span[1] - reach[0])
        pairs.project(at(span), span, grad[:, :, part])


def _panel_by_panel(pairs: Tiles, grad: Tensor, pull: Tensor, reach: Span) -> None:
    side, length = pairs.side(pairs.rows), pairs.rows.shape[2]
    for one in cut(reach, side):
        part = grad[:, :, one[0] - reach[0] : one[1] - reach[0]]
        of_unit = _zeros_for(part, pairs.scale.dtype)
        pairs.hold(one)
        for other in (one, *cut((0, one[0]), side), *cut((one[1], length), side)):
            pairs.add_gradient(other, pull, None, of_unit, None)
        pairs.project(of_unit, one, part)


def keeps_pairs(tiles: type[Tiles], rows: Tensor, anchors: Span) -> bool:
    """Whether the exponentials of all tiles stay between forward and backward."""
    dtype = tiles.kept_dtype(rows)
    return dtype is not None and _kept_numbers(tiles, rows, anchors) * dtype.itemsize <= limit(KEPT, rows)


def _kept_numbers(tiles: type[Tiles], rows: Tensor, anchors: Span) -> int:
    of_chunk = sum(
        tiles.kept_numbers(rows, one, other)
        for one, others in panels(anchors, rows, tiles.side(rows))
        for other in others
    )
    return rows.shape[0] * rows.shape[1] * of_chunk


class _Shelf:
    """Exponentials of tile after tile in one flat tensor, written and read in the same order."""

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat
        self._position = 0

    @classmethod
    def new(cls, tiles: type[Tiles], rows: Tensor, anchors: Span) -> _Shelf:
        """Room for every tile of the walk, or none where that would be too much."""
        if not keeps_pairs(tiles, rows, anchors):
            return cls(rows.new_empty(0))
        return cls(rows.new_empty(_kept_numbers(tiles, rows, anchors), dtype=tiles.kept_dtype(rows)))

    @property
    def holds(self) -> bool:
        return self.flat.numel() > 0

    def next(self, pairs: Tiles, other: Span) -> Tensor | None:
        """The place of the next tile, [m * kept_numbers], or None where nothing is kept."""
        if not self.holds:
            return None
        numbers = pairs.kept_numbers(pairs.rows, pairs.one, other)
        place = self.flat.narrow(0, self._position, pairs.names.shape[0] * numbers)
        self._position += place.numel()
        return place


def _merged(per_token: Tensor, slab: Slab) -> Tensor:
    """[b, c, k] -> [m, k], contiguous."""
    return per_token[slab].flatten(0, 1).contiguous()


def _zeros_for(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros [m, r, d] to sum in: the memory of `grad` [b, c, r, d] itself where its type and strides allow it."""
    if grad.dtype == dtype and (grad.is_contiguous() or 1 in grad.shape[:2]):
        return grad.zero_().flatten(0, 1)
    return grad.new_zeros(grad.shape[0] * grad.shape[1], *grad.shape[2:], dtype=dtype)


def _fits(grad: Tensor, dtype: torch.dtype) -> bool:
    return grad.dtype == dtype or grad.numel() * dtype.itemsize <= limit(SUMMED, grad)


def _slabs(tiles: type[Tiles], rows: Tensor) -> Iterator[Slab]:
    """Chunks that are worked on together: several sequences, or several chunks of one."""
    num_sequences, num_chunks, length, _ = rows.shape
    per_chunk = tiles.bytes_per_chunk(rows, min(tiles.side(rows), length))
    count = max(1, limit(WORKSPACE, rows) // max(1, per_chunk))
    together = max(1, count // max(1, num_chunks))
    count = min(count, max(1, num_chunks))
    for sequence in range(0, num_sequences, together):
        for chunk in range(0, num_chunks, count):
            yield slice(sequence, sequence + together), slice(chunk, chunk + count)


def panels(anchors: Span, rows: Tensor, side: int) -> Iterator[tuple[Span, list[Span]]]:
    """Each span of anchors with those it meets: anchors in the upper triangle, then all other tokens."""
    own = list(cut(anchors, side))
    others = [*cut((0, anchors[0]), side), *cut((anchors[1], rows.shape[2]), side)]
    for number, one in enumerate(own):
        yield one, [*own[number:], *others]


def cut(span: Span, size: int) -> Iterator[Span]:
    for first in range(span[0], span[1], size):
        yield first, min(first + size, span[1])


def limit(limits: dict[str, int], tensor: Tensor) -> int:
    return limits.get(tensor.device.type, limits["cuda"])


# Forms --------------------------------------------------------------------------------------------------------------


class Form(NamedTuple):
    """The two walks over some tiles as operators of their own: torch.compile keeps each whole and unrolls no tile."""

    tiles: type[Tiles]
    anchor_sums: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]  # 1 / |e|, and what `anchor_sums` returns
    pair_gradient: Callable[..., Tensor]


FORMS: dict[str, Form] = {}
"""Those whose modules were imported, by name."""


def add_form(name: str, tiles: type[Tiles]) -> None:
    """Put the two walks over `tiles` into FORMS, registered as simreg_megatron::NAME_sums and ::NAME_gradient."""

    @torch.library.custom_op(f"simreg_megatron::{name}_sums", mutates_args=())
    def sums(
        rows: Tensor, names: Tensor, documents: Tensor | None, first: int, last: int, temperature: float, keep: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        scale = tiles.inverse_norms(rows, names)
        given = Given(rows, names, scale, documents)
        return scale, *anchor_sums(tiles, given, (first, last), temperature, keep)

    @sums.register_fake
    def _(
        rows: Tensor, names: Tensor, documents: Tensor | None, first: int, last: int, temperature: float, keep: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        scale = names.new_empty(names.shape, dtype=torch.promote_types(rows.dtype, torch.float32))
        found = scale.new_empty(*scale.shape[:2], last - first)
        shelf = _Shelf.new(tiles, rows, (first, last)) if keep else _Shelf(rows.new_empty(0))
        return scale, found, torch.empty_like(found), shelf.flat

    @torch.library.custom_op(f"simreg_megatron::{name}_gradient", mutates_args=())
    def gradient(
        rows: Tensor,
        names: Tensor,
        scale: Tensor,
        documents: Tensor | None,
        kept: Tensor,
        pull: Tensor,
        first: int,
        last: int,
        reach_first: int,
        reach_last: int,
        temperature: float,
    ) -> Tensor:
        given, reach = Given(rows, names, scale, documents), (reach_first, reach_last)
        return pair_gradient(tiles, given, kept, pull, (first, last), reach, temperature)

    @gradient.register_fake
    def _(
        rows: Tensor,
        names: Tensor,
        scale: Tensor,
        documents: Tensor | None,
        kept: Tensor,
        pull: Tensor,
        first: int,
        last: int,
        reach_first: int,
        reach_last: int,
        temperature: float,
    ) -> Tensor:
        return torch.empty_like(rows[:, :, reach_first:reach_last], memory_format=torch.contiguous_format)

    FORMS[name] = Form(tiles, sums, gradient)
