# SPDX-License-Identifier: Apache-2.0
"""Iterate over all pairs, tile by tile and each tile once: shared by the forms tiled and gemm.

A form says how one tile is computed, by a subclass of `Tiles`. Three backward passes, by what fits into the `BUDGET`:

* the forward kept its exponentials P: the backward multiplies them by H's coefficients, and nothing is computed twice;
* the gradient of a chunk fits next to its tiles in its summing type: each tile serves both of its sides;
* else panel by panel: every tile of a panel is computed for that panel alone, and a panel is all that is summed.

Shapes: b sequences of c chunks of k tokens with d features; p anchors of each chunk; m chunks worked on together;
tiles of r rows and s columns.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from simreg_megatron.kernels.form import FORMS, Form, Kept, Span, Tokens, cut
from simreg_megatron.kernels.precision import full_float32

Slab = tuple[slice, slice]  # of sequences and of chunks; one of the two has length 1, or all chunks are in it


class Budget(NamedTuple):
    """Bytes in addition to the rows, their gradient and some numbers a token."""

    kept: int  # exponentials, from the forward of a loss to its backward
    work: int  # tiles and a gradient in its summing type, while one of the two runs


BUDGET = {"cpu": Budget(kept=16 << 20, work=32 << 20), "cuda": Budget(kept=48 << 20, work=176 << 20)}
"""All that the fast forms allow themselves. 256 MiB is the limit; 32 of them are left to the numbers a token has."""


class Given(NamedTuple):
    """What the pairs are made of, as `contrast` prepares it."""

    rows: Tensor  # [b, c, k, d], of any strides; those that are not usable may hold anything
    names: Tensor  # [b, c, k]: equal where labels are, -1 where not usable
    scale: Tensor  # [b, c, k]: 1 / |row|, in the type that sums are taken in
    documents: Tensor | None  # [b, c, k]


class Tiles(ABC):
    """The pairs of the chunks in one slab, tile by tile; every tile may be written over the one before."""

    compares_labels = False
    """Whether `names` may be the labels themselves, as integers; else they are small numbers, exact in float32."""

    def __init__(self, given: Given, slab: Slab, temperature: float, side: int) -> None:
        self.rows = given.rows[slab]  # [b, c, k, d]: chunks are merged tile by tile, which costs no copy of all of them
        self.names, self.scale = _merged(given.names, slab), _merged(given.scale, slab)
        self.documents = None if given.documents is None else _merged(given.documents, slab)
        self.temperature = temperature
        self.side = min(side, self.rows.shape[2])
        self.one: Span = (0, 0)

    @classmethod
    @abstractmethod
    def sides(cls, rows: Tensor) -> Sequence[int]:
        """Sides that a tile may have, the best first, which is also the longest."""

    @staticmethod
    @abstractmethod
    def bytes_per_chunk(given: Given, side: int) -> int:
        """What the tiles of one chunk take."""

    @staticmethod
    @abstractmethod
    def kept_dtype(rows: Tensor, length: int, by_document: bool) -> torch.dtype | None:
        """Return the type of exponentials that stay for the backward; None if they are better computed again.

        Args:
            rows: [..., d] of their type and on their device.
            length: of a chunk.
            by_document: whether tokens meet those of their document only.
        """

    @staticmethod
    def kept_numbers(rows: Tensor, one: Span, other: Span) -> int:
        """How many numbers of that type a tile of one chunk keeps."""
        return (one[1] - one[0]) * (other[1] - other[0])

    @classmethod
    def inverse_norms(cls, rows: Tensor, names: Tensor) -> Tensor:
        """1 / |e| [b, c, k], in the type to sum in, 1 where not usable; NaN or 0 for a row that is not finite."""
        dtype = sum_dtype(rows)
        scale = torch.empty(names.shape, dtype=dtype, device=rows.device)
        step = max(1, limits(rows).work // max(1, 32 * rows.shape[0] * rows.shape[1] * rows.shape[3]))
        for first, last in cut((0, rows.shape[2]), step):
            given = rows[:, :, first:last]
            # Squares of float32 neither overflow nor vanish in float64; those of float64 must be scaled first. One
            # rounding at the end: at tau 0.01 each error of a norm is a hundred times as large in the exponent.
            if dtype == torch.float64:
                largest = given.abs().amax(dim=-1, keepdim=True)
                norms = torch.linalg.vector_norm(given / largest, dim=-1) * largest.squeeze(-1)
            else:
                norms = torch.linalg.vector_norm(given, dim=-1, dtype=torch.float64)
            scale[:, :, first:last] = norms.reciprocal_()
        return scale.masked_fill_(names < 0, 1.0)

    @classmethod
    def ratio_of(cls, sums: Tensor, names: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """(S_pos, S_neg / S_pos) [b, c, p] from the sums [2, b, c, p] over all other tokens; 0 where not usable."""
        positive, negative = (sums[0] + 1.0).to(scale.dtype), sums[1].to(scale.dtype)  # the token itself is a positive
        ratio = negative / positive
        # NaN for a row that is not finite, whose scale is NaN or 0: without pairs it would pass as a 0.
        ratio.addcdiv_(scale, scale, value=0.0)
        return positive, ratio.masked_fill_(names < 0, 0.0)

    @classmethod
    def anchor_pull(cls, grad: Tensor, total: Tensor, ratio: Tensor, temperature: float) -> Tensor:
        """(a, b) of anchors [b, c, p], from the gradient of their ratio: [2, b, c, p]."""
        pull = total.new_empty(2, *total.shape)
        of_negatives = torch.div(grad, total * temperature, out=pull[0])
        of_negatives.masked_fill_(ratio == 0, 0.0)
        torch.mul(of_negatives, ratio, out=pull[1])
        return pull

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
        self, other: Span, pull: Tensor, kept: Tensor | None, to_one: Tensor, to_other: Tensor | None, fresh: bool
    ) -> None:
        """Add H_ij e^_j to `to_one` [m, r, d] and, where given, H_ji e^_i to `to_other` [m, s, d]; pull is [2, m, k].

        Where `to_other` is missing, every pair of the tile is another tile's too, and only this side is wanted.
        `fresh`: nothing was written to `to_one` before, and what memory holds there does not count.
        """

    @abstractmethod
    def project(self, of_unit: Tensor, span: Span, grad: Tensor | None) -> None:
        """From the gradient of the unit rows [m, r, d] to that of the rows, into `grad` [b, c, r, d]; None: in place.

        0 for rows that are not usable.
        """


class Way(NamedTuple):
    """How a walk goes: the same one forward and backward."""

    side: int  # of a tile, at most
    together: int  # chunks that are worked on together
    shares: bool  # whether each tile serves both of its sides on the way back
    measured: int  # as many forward, where no gradient takes room and what is kept does not depend on it


def way_through(tiles: type[Tiles], given: Given) -> Way:
    """The longest tiles, and as many chunks together, as the budget has room for; at least one chunk.

    Tiles of half the best side that serve both of their sides go before longer ones that serve one.
    """
    length, width = given.rows.shape[2:]
    # Where no copy is needed to merge sequences with their chunks, the returned gradient itself is summed in.
    in_place = given.rows.dtype == given.scale.dtype and 1 in given.rows.shape[:2]
    summed_row = 0 if in_place else width * given.scale.dtype.itemsize
    sides = tiles.sides(given.rows)

    def together(side: int, summed_rows: int) -> int:
        takes = tiles.bytes_per_chunk(given, min(side, length)) + summed_rows * summed_row
        return limits(given.rows).work // max(1, takes)

    def way(side: int, count: int, shares: bool) -> Way:
        return Way(side, count, shares, together(side, 0) if side >= length else count)

    for side in sides:
        if (in_place or 2 * side >= min(sides[0], length)) and (count := together(side, length)):
            return way(side, count, True)
    for side in sides:
        if count := together(side, min(side, length)):
            return way(side, count, in_place)
    return Way(sides[-1], 1, in_place, 1)


def anchor_sums(
    tiles: type[Tiles], given: Given, anchors: Span, temperature: float, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(S_pos, S_neg / S_pos) of the anchors, both [b, c, p], and the exponentials that were kept, flat or empty."""
    way = way_through(tiles, given)
    shelf = _Shelf.new(tiles, given, anchors, way) if keep else _Shelf(given.rows.new_empty(0))
    steps = [
        (one, [(other, one != other and anchors[0] <= other[0] < anchors[1]) for other in others])
        for one, others in panels(anchors, given.rows.shape[2], way.side)
    ]
    sums = _sums(tiles, given, way, steps, temperature, shelf)
    own = slice(*anchors)
    return *tiles.ratio_of(sums[..., own], given.names[..., own], given.scale[..., own]), shelf.flat


def shared_sums(
    tiles: type[Tiles], given: Given, anchors: Span, rectangles: Sequence[tuple[Span, Span]], temperature: float
) -> Tensor:
    """Sums of P over positives and negatives, [2, b, c, k], from a part of the pairs: each adds to both of its tokens.

    Args:
        anchors: pairs of two of these are all counted.
        rectangles: and pairs of a token in the first span with one in the second, which share no token.
    """
    way = way_through(tiles, given)
    own = cut(anchors, way.side)
    steps = [(one, [(other, one != other) for other in own[number:]]) for number, one in enumerate(own)]
    for rows, columns in rectangles:
        steps += [(one, [(other, True) for other in cut(columns, way.side)]) for one in cut(rows, way.side)]
    return _sums(tiles, given, way, steps, temperature, _Shelf(given.rows.new_empty(0)))


def _sums(
    tiles: type[Tiles],
    given: Given,
    way: Way,
    steps: Sequence[tuple[Span, Sequence[tuple[Span, bool]]]],
    temperature: float,
    shelf: _Shelf,
) -> Tensor:
    """[2, b, c, k], float64 as many tiles are added up; `steps`: rows, and columns with whether theirs count, too."""
    num_sequences, num_chunks, length = given.names.shape
    sums = torch.zeros(2, num_sequences * num_chunks, length, dtype=torch.float64, device=given.names.device)
    first = 0
    # Exponentials lie chunk by chunk where a chunk is one tile; else by slab and tile, and the way back must agree.
    by_slab = shelf.holds and sum(len(others) for _, others in steps) > 1
    for slab in _slabs(given.rows, way.together if by_slab else way.measured):
        pairs = tiles(given, slab, temperature, way.side)
        of_slab = sums[:, first : first + len(pairs.names)]
        first += len(pairs.names)
        for one, others in steps:
            pairs.hold(one)
            for other, has_both in others:
                of_rows, of_columns = pairs.sums(other, shelf.next(pairs, other))
                of_slab[:, :, slice(*one)].add_(of_rows)
                if has_both:
                    of_slab[:, :, slice(*other)].add_(of_columns)
    return sums.view(2, *given.names.shape)


def pair_gradient(
    tiles: type[Tiles],
    given: Given,
    kept: Tensor,
    pull: Tensor,
    anchors: Span,
    temperature: float,
    grad: Tensor,
) -> None:
    """Gradient of the anchors' rows, into `grad` [b, c, p, d] of their type.

    Args:
        kept: from `anchor_sums`.
        pull: (a, b) of all tokens, [2, b, c, k]; tokens that are anchors on other ranks have theirs, too.
    """
    way = way_through(tiles, given)
    shelf = _Shelf(kept)
    for slab in _slabs(given.rows, way.together):
        pairs = tiles(given, slab, temperature, way.side)
        of_both = (slice(None), *slab)
        of_slab = pull[of_both].flatten(1, 2)
        if way.shares:
            _both_sides(pairs, grad[slab], of_slab, shelf, anchors)
        else:
            _panel_by_panel(pairs, grad[slab], of_slab, anchors)


def _both_sides(pairs: Tiles, grad: Tensor, pull: Tensor, shelf: _Shelf, anchors: Span) -> None:
    steps = panels(anchors, pairs.rows.shape[2], pairs.side)
    fresh = len(steps) == len(steps[0][1]) == 1 and steps[0][0] == anchors  # one tile is all there is
    of_unit, in_place = _room_for(grad, pairs.scale.dtype, zeros=not fresh)

    def at(span: Span) -> Tensor:
        return of_unit[:, span[0] - anchors[0] : span[1] - anchors[0]]

    for one, others in steps:
        pairs.hold(one)
        for other in others:
            inside = one != other and anchors[0] <= other[0] < anchors[1]
            kept, to_other = shelf.next(pairs, other), at(other) if inside else None
            pairs.add_gradient(other, pull, kept, at(one), to_other, fresh)
    pairs.project(of_unit, anchors, None if in_place else grad)


def _panel_by_panel(pairs: Tiles, grad: Tensor, pull: Tensor, anchors: Span) -> None:
    side, length = pairs.side, pairs.rows.shape[2]
    for one in cut(anchors, side):
        part = grad[:, :, one[0] - anchors[0] : one[1] - anchors[0]]
        of_unit, in_place = _room_for(part, pairs.scale.dtype, zeros=False)
        pairs.hold(one)
        for other in (one, *cut((0, one[0]), side), *cut((one[1], length), side)):
            pairs.add_gradient(other, pull, None, of_unit, None, fresh=other == one)
        pairs.project(of_unit, one, None if in_place else part)


def _kept(tiles: type[Tiles], given: Given, anchors: Span, way: Way) -> tuple[int, torch.dtype]:
    """The bytes of all exponentials, and their type."""
    dtype = tiles.kept_dtype(given.rows, given.rows.shape[2], given.documents is not None)
    if dtype is None or not way.shares:
        return 0, torch.float32
    of_chunk = sum(
        tiles.kept_numbers(given.rows, one, other)
        for one, others in panels(anchors, given.rows.shape[2], way.side)
        for other in others
    )
    return given.rows.shape[0] * given.rows.shape[1] * of_chunk * dtype.itemsize, dtype


class _Shelf:
    """Exponentials of tile after tile in one flat tensor, written and read in the same order."""

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat
        self._position = 0

    @classmethod
    def new(cls, tiles: type[Tiles], given: Given, anchors: Span, way: Way) -> _Shelf:
        """Room for every tile of the walk, or none where that would be too much."""
        takes, dtype = _kept(tiles, given, anchors, way)
        fits = takes <= limits(given.rows).kept
        return cls(given.rows.new_empty(takes // dtype.itemsize if fits else 0, dtype=dtype))

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


def _room_for(grad: Tensor, dtype: torch.dtype, *, zeros: bool) -> tuple[Tensor, bool]:
    """[m, r, d] to sum in, and whether it is the memory of `grad` [b, c, r, d]: type and strides must fit."""
    in_place = grad.dtype == dtype and (grad.is_contiguous() or 1 in grad.shape[:2])
    shape = grad.shape[0] * grad.shape[1], *grad.shape[2:]
    room = grad.flatten(0, 1) if in_place else grad.new_empty(shape, dtype=dtype)
    return room.zero_() if zeros else room, in_place


def _slabs(rows: Tensor, together: int) -> Iterator[Slab]:
    """Chunks that are worked on together: several sequences, or several chunks of one."""
    num_sequences, num_chunks = rows.shape[:2]
    sequences = max(1, together // max(1, num_chunks))
    chunks = min(together, max(1, num_chunks))
    for sequence in range(0, num_sequences, sequences):
        for chunk in range(0, num_chunks, chunks):
            yield slice(sequence, sequence + sequences), slice(chunk, chunk + chunks)


@functools.lru_cache(maxsize=256)
def panels(anchors: Span, length: int, side: int) -> list[tuple[Span, list[Span]]]:
    """Each span of anchors with those it meets: anchors in the upper triangle, then all other tokens."""
    own = cut(anchors, side)
    others = [*cut((0, anchors[0]), side), *cut((anchors[1], length), side)]
    return [(one, [*own[number:], *others]) for number, one in enumerate(own)]


def sum_dtype(rows: Tensor) -> torch.dtype:
    """float32, or float64 for float64."""
    return torch.promote_types(rows.dtype, torch.float32)


def limits(tensor: Tensor) -> Budget:
    return BUDGET.get(tensor.device.type, BUDGET["cuda"])


class Walks(NamedTuple):
    """The two walks over some tiles, as functions of plain arguments."""

    sums: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]  # 1 / |e|, and what `anchor_sums` returns
    gradient: Callable[..., None]


def walks_over(tiles: type[Tiles]) -> Walks:
    """The walks as they are, which can be looked into."""

    def sums(
        rows: Tensor, names: Tensor, documents: Tensor | None, first: int, last: int, temperature: float, keep: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with full_float32():
            scale = tiles.inverse_norms(rows, names)
            given = Given(rows, names, scale, documents)
            return scale, *anchor_sums(tiles, given, (first, last), temperature, keep)

    def gradient(
        rows: Tensor,
        names: Tensor,
        scale: Tensor,
        documents: Tensor | None,
        kept: Tensor,
        pull: Tensor,
        first: int,
        last: int,
        temperature: float,
        grad: Tensor,
    ) -> None:
        with full_float32():
            pair_gradient(tiles, Given(rows, names, scale, documents), kept, pull, (first, last), temperature, grad)

    return Walks(sums, gradient)


def operators_over(name: str, tiles: type[Tiles]) -> Walks:
    """The walks as operators simreg_megatron::NAME_sums and ::NAME_gradient: torch.compile keeps each whole."""
    plain = walks_over(tiles)
    sums = torch.library.custom_op(f"simreg_megatron::{name}_sums", plain.sums, mutates_args=())
    gradient = torch.library.custom_op(f"simreg_megatron::{name}_gradient", plain.gradient, mutates_args=("grad",))

    @sums.register_fake
    def _(
        rows: Tensor, names: Tensor, documents: Tensor | None, first: int, last: int, temperature: float, keep: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        scale = names.new_empty(names.shape, dtype=torch.promote_types(rows.dtype, torch.float32))
        found = scale.new_empty(*scale.shape[:2], last - first)
        given = Given(rows, names, scale, documents)
        shelf = (
            _Shelf.new(tiles, given, (first, last), way_through(tiles, given)) if keep else _Shelf(rows.new_empty(0))
        )
        return scale, found, torch.empty_like(found), shelf.flat

    @gradient.register_fake
    def _(*_: object) -> None: ...

    return Walks(sums, gradient)


class WalkForm(Form):
    """A form by walks over its tiles. Eager code calls them directly, as an operator costs the host 0.1 ms a call."""

    def __init__(self, name: str, tiles: type[Tiles]) -> None:
        self.tiles = tiles
        self.plain, self.compiled = walks_over(tiles), operators_over(name, tiles)

    @property
    def walks(self) -> Walks:
        return self.compiled if torch.compiler.is_compiling() else self.plain

    def measure(self, tokens: Tokens, anchors: Span, temperature: float, *, keep: bool) -> Kept:
        names = token_names(tokens.labels, tokens.usable, as_labels=self.tiles.compares_labels)
        found = self.walks.sums(tokens.rows, names, tokens.documents, *anchors, temperature, keep)
        return Kept(tokens.documents, names, *found)

    def measure_part(
        self, tokens: Tokens, anchors: Span, rectangles: Sequence[tuple[Span, Span]], temperature: float
    ) -> tuple[Kept, Tensor]:
        names = token_names(tokens.labels, tokens.usable, as_labels=self.tiles.compares_labels)
        given = Given(tokens.rows, names, self.tiles.inverse_norms(tokens.rows, names), tokens.documents)
        nothing = tokens.rows.new_empty(0)
        with full_float32():
            sums = shared_sums(self.tiles, given, anchors, rectangles, temperature)
        return Kept(tokens.documents, names, given.scale, nothing, nothing, nothing), sums

    def finish(self, part: Kept, sums: Tensor, anchors: Span) -> Kept:
        own = slice(*anchors)
        total, ratio = self.tiles.ratio_of(sums, part.names[..., own], part.scale[..., own])
        return part._replace(total=total, ratio=ratio)

    def anchor_pull(self, grad_ratio: Tensor, kept: Kept, temperature: float) -> Tensor:
        return self.tiles.anchor_pull(grad_ratio, kept.total, kept.ratio, temperature)

    def pull_back(
        self, rows: Tensor, kept: Kept, pull: Tensor, anchors: Span, temperature: float, grad: Tensor
    ) -> None:
        given = rows, kept.names, kept.scale, kept.documents
        self.walks.gradient(*given, kept.pairs, pull, *anchors, temperature, grad)

    def keeps(self, rows: Tensor, num_pairs: int, chunk: int, *, by_document: bool) -> bool:
        dtype = self.tiles.kept_dtype(rows, chunk, by_document)
        return dtype is not None and num_pairs * dtype.itemsize <= limits(rows).kept


def add_form(name: str, tiles: type[Tiles]) -> None:
    FORMS[name] = WalkForm(name, tiles)


def token_names(labels: Tensor, usable: Tensor, *, as_labels: bool = False) -> Tensor:
    """Labels [..., k] as small numbers, equal where labels are, exact in float32; -1 for tokens not usable.

    Args:
        as_labels: the labels themselves will do, which needs no sort.
    """
    signed = labels if labels.dtype.is_signed else labels.long()  # bytes of a text would make 255 of -1
    known = torch.where(usable, signed, -1).contiguous()
    if as_labels:
        return known
    ranks = torch.searchsorted(known.sort(dim=-1).values, known)
    return ranks.float().masked_fill_(~usable, -1.0)
