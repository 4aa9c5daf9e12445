"""Pieces, and the copy plan of one group: which byte runs go where, good for every layer.

A plan is a product. Its *runs* are maximal stretches of blocks whose ids ascend by one in the source and step by one,
up or down, in the target; its *columns* say, for one layer, which byte ranges of a block move. A window of layers
merges the columns that touch on both sides, then spreads them over the runs: a column as long as both block strides
makes one long piece of an ascending run, any other one strided run. Descending runs matter because allocators hand out
blocks in the order in which they were freed, which is often last first.
Does not know devices, gates or requests.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from layercast.errors import BadBlocks, LayoutMismatch
from layercast.plan.columns import Columns, columns_of, merged_columns, shifts_of
from layercast.plan.runs import BlockRuns, checked_ids, runs_of, single_run
from layercast.plan.segments import matched_segments
from layercast.spec.groups import Group

Ints = npt.NDArray[np.int64]
Side = Literal["source", "target"]


class Pieces(msgspec.Struct, frozen=True, eq=False):
    """Copies: `count` times `length` bytes, each step `*_stride` further.

    table: int64 [6, pieces], a row for each of COLUMNS, with addresses before they are shifted. A plain piece has count
    1 (its strides are 0). A target stride may be negative; what is copied never overlaps. shift: bytes to add to the
    addresses, so that the layers of a plan can share their table.
    """

    table: Ints
    shift: tuple[int, int] = (0, 0)

    def __len__(self) -> int:
        return int(self.table.shape[1])

    @property
    def source(self) -> Ints:
        """Where each piece begins on the source."""
        return self._row(0) + self.shift[0]

    @property
    def target(self) -> Ints:
        """Where each piece begins on the target."""
        return self._row(1) + self.shift[1]

    @property
    def length(self) -> Ints:
        """Bytes of each copy of a piece."""
        return self._row(2)

    @property
    def count(self) -> Ints:
        """Copies of each piece."""
        return self._row(3)

    @property
    def source_stride(self) -> Ints:
        """Bytes from one copy to the next on the source."""
        return self._row(4)

    @property
    def target_stride(self) -> Ints:
        """Bytes from one copy to the next on the target."""
        return self._row(5)

    @property
    def nbytes(self) -> int:
        """Bytes that all pieces copy."""
        return int(np.dot(self.table[2], self.table[3]))

    @property
    def size(self) -> tuple[int, int]:
        """(bytes, copies) of all pieces."""
        return self.nbytes, int(self.table[3].sum())

    def take(self, index: "slice | Ints") -> "Pieces":
        """The chosen pieces."""
        return Pieces(self.table[:, index], self.shift)

    @staticmethod
    def join(parts: Sequence["Pieces"]) -> "Pieces":
        """All pieces of several lists, in order."""
        if len(parts) == 1:
            return parts[0]
        return Pieces(np.concatenate([_NONE, *(part.placed for part in parts)], axis=1))

    @property
    def placed(self) -> Ints:
        """The table with addresses as they are."""
        return self.table + np.array([*self.shift, 0, 0, 0, 0])[:, None] if any(self.shift) else self.table

    @staticmethod
    def plain(source: Ints, target: Ints, length: Ints) -> "Pieces":
        """Copies without runs."""
        one = np.ones_like(length)
        return Pieces.of(source, target, length, one, one * 0, one * 0)

    @staticmethod
    def of(*columns: Ints) -> "Pieces":
        """Pieces of arrays in the order of COLUMNS, not shifted."""
        return Pieces(np.stack(columns))

    def _row(self, nth: int) -> Ints:
        row: Ints = self.table[nth]
        return row


class Series(msgspec.Struct, frozen=True, eq=False):
    """The same pieces at several places, as in layers that are alike but for where they lie: a part for each place.

    shifts: int64 [parts, 2], bytes to add to the addresses of each part, on the source and on the target. turns:
    ascending; of several series those parts move first whose turns are lowest.
    """

    pieces: Pieces
    shifts: Ints = msgspec.field(default_factory=lambda: np.zeros((1, 2), np.int64))
    turns: tuple[int, ...] = (0,)

    def __len__(self) -> int:
        return len(self.shifts)

    def __getitem__(self, nth: int) -> Pieces:
        """A part by itself. Raises IndexError."""
        source, target = self.shifts[nth].tolist()
        return msgspec.structs.replace(self.pieces, shift=(source, target))

    def __iter__(self) -> Iterator[Pieces]:
        return map(self.__getitem__, range(len(self)))

    @property
    def size(self) -> tuple[int, int]:
        """(bytes, copies) of all parts."""
        nbytes, copies = self.pieces.size
        return len(self) * nbytes, len(self) * copies


COLUMNS = ("source", "target", "length", "count", "source_stride", "target_stride")
"""What there is one of for each piece."""
_UNMOVED = (0, 0)
_NONE = np.zeros((len(COLUMNS), 0), np.int64)


class DigestRanges(msgspec.Struct, frozen=True, eq=False):
    """Byte ranges to hash together, one row a block: addresses [blocks, ranges], lengths [ranges].

    shift: bytes to add to the addresses, so that the layers of a plan can share both arrays.
    """

    addresses: Ints
    length: Ints
    shift: int = 0

    @property
    def address(self) -> Ints:
        """Where each range begins."""
        return self.addresses + self.shift if self.shift else self.addresses


class Window(NamedTuple):
    """What a route moves of a window: its layers, their columns, and how far they lie from these on both sides."""

    layers: tuple[int, ...]
    columns: Columns
    shift: tuple[int, int]


class Alike(NamedTuple):
    """Windows that a route moves alike: the layers of each, what they move of a block, and how far apart they lie.

    columns, shifts: as in `Window` and `Series`. part_of: of all layers, the number of the window. turns: the first
    layer of each.
    """

    windows: tuple[tuple[int, ...], ...]
    columns: Columns
    shifts: Ints
    part_of: dict[int, int]
    turns: tuple[int, ...]

    @staticmethod
    def of(windows: Sequence[Window]) -> "Alike":
        """Windows that share their columns."""
        layers = tuple(window.layers for window in windows)
        shifts = np.array([window.shift for window in windows], np.int64)
        part_of = {layer: nth for nth, ours in enumerate(layers) for layer in ours}
        return Alike(layers, windows[0].columns, shifts, part_of, tuple(ours[0] for ours in layers))


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """The copies of one group's blocks from one side to the other, layer by layer or window by window."""

    route: "Route"
    runs: BlockRuns
    _spread: dict[int, Pieces] = field(default_factory=dict, compare=False, repr=False)
    """By the id of columns, which the route keeps: their pieces."""
    _hashed: dict[tuple[int, Side, Side], DigestRanges] = field(default_factory=dict, compare=False, repr=False)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers this plan can move, ascending."""
        return tuple(self.route.columns)

    @property
    def blocks(self) -> int:
        """Blocks that move in each layer."""
        return self.runs.blocks

    def layer(self, layer: int) -> Pieces:
        """The pieces of one layer."""
        return self.window((layer,))

    def window(self, layers: Sequence[int]) -> Pieces:
        """The pieces of several layers at once, merged where both sides are adjacent."""
        return Pieces.join([series[0] for _, series, _ in self.series((tuple(layers),))])

    def series(self, windows: tuple[tuple[int, ...], ...]) -> Iterator[tuple[Alike, Series, int]]:
        """Each kind of windows in which it moves anything, their pieces, and bytes of these."""
        for alike in self.route.alike(windows):
            columns = alike.columns
            if (pieces := self._spread.get(id(columns))) is None:
                pieces = self._spread[id(columns)] = _spread(columns, self.runs)
            yield alike, Series(pieces, alike.shifts, alike.turns), len(alike.windows) * self.blocks * columns.nbytes

    def nbytes(self, layers: Sequence[int]) -> int:
        """Bytes that those layers move."""
        return self.blocks * sum(self.route.columns[layer].nbytes for layer in layers)

    def pairs(self) -> tuple[Ints, Ints]:
        """(source block, target block) of every block, in the order of the runs."""
        return self.runs.pairs

    def digest_ranges(self, layer: int, *, read: Side, order: Side) -> DigestRanges:
        """Where one layer of each block lies on side `read`, ranges ordered as they lie on side `order`.

        Both ends of a save and of the load after it name the slab as `order`, so that they hash the same byte string.
        """
        _, columns, shift = self.route.window((layer,))
        if (found := self._hashed.get((id(columns), read, order))) is None:
            found = self._hashed[id(columns), read, order] = self._digest_ranges(columns, read, order)
        return DigestRanges(found.addresses, found.length, shift[0 if read == "source" else 1])

    def _digest_ranges(self, columns: Columns, read: Side, order: Side) -> DigestRanges:
        rank = np.argsort(columns.source if order == "source" else columns.target, kind="stable")
        source, target = self.pairs()
        if read == "source":
            address = columns.source[rank] + source[:, None] * columns.source_stride[rank]
        else:
            address = columns.target[rank] + target[:, None] * columns.target_stride[rank]
        return DigestRanges(address, columns.length[rank])

    def part(self, first: int, last: int) -> "CopyPlan":
        """The same plan for the blocks [first, last) in the order of its runs."""
        ends = np.cumsum(self.runs.blocks_each)
        starts = ends - self.runs.blocks_each
        low, high = np.maximum(starts, first), np.minimum(ends, last)
        keep = low < high
        skip = (low - starts)[keep]
        step = self.runs.step[keep]
        source, target = self.runs.source[keep] + skip, self.runs.target[keep] + skip * step
        runs = BlockRuns(source, target, (high - low)[keep], step, self.runs.joined[first:last])
        return CopyPlan(self.route, runs)


@dataclass(frozen=True, slots=True)
class Route:
    """The way from one group's memory to another's: columns of every layer, made once for a pair of sides.

    shifts: for each layer how far its columns lie from those of the first, on the source and on the target; empty where
    layers are not alike but for that.
    """

    name: str
    source_blocks: int
    target_blocks: int
    columns: dict[int, Columns]
    shifts: dict[int, tuple[int, int]] = field(default_factory=dict)
    _windows: dict[tuple[int, ...], Window] = field(default_factory=dict, compare=False, repr=False)
    _kinds: dict[tuple[tuple[int, ...], ...], list[Alike]] = field(default_factory=dict, compare=False, repr=False)
    _alike: dict[tuple[object, ...], tuple[Columns, int]] = field(default_factory=dict, compare=False, repr=False)
    """By how far the layers of a window lie from its first: the first such window's columns, and its first layer."""

    def alike(self, windows: tuple[tuple[int, ...], ...]) -> list[Alike]:
        """What it moves of these windows, the ones that are alike together."""
        if (found := self._kinds.get(windows)) is None:
            kinds: dict[int, list[Window]] = {}
            for window in map(self.window, windows):
                if window.layers:
                    kinds.setdefault(id(window.columns), []).append(window)
            found = self._kinds[windows] = list(map(Alike.of, kinds.values()))
        return found

    def window(self, layers: tuple[int, ...]) -> Window:
        """What it moves of these layers. Windows that are alike share their columns."""
        if (found := self._windows.get(layers)) is None:
            found = self._windows[layers] = self._window(layers)
        return found

    def joins(self, layers: Sequence[int]) -> bool:
        """Whether what it moves of different ones of these layers lies side by side, so that together it is less."""
        window = self.window(tuple(layers))
        return len(window.columns.length) < sum(len(self.columns[layer].length) for layer in window.layers)

    def _window(self, layers: tuple[int, ...]) -> Window:
        layers = tuple(layer for layer in layers if layer in self.columns)
        chosen, shifts = [self.columns[layer] for layer in layers], self.shifts
        columns = chosen[0] if len(chosen) == 1 else merged_columns(chosen)
        if not shifts or not layers:
            return Window(layers, columns, _UNMOVED)
        source, target = shifts[layers[0]]
        apart = tuple((shifts[layer][0] - source, shifts[layer][1] - target) for layer in layers)
        columns, first = self._alike.setdefault(apart, (columns, layers[0]))
        return Window(layers, columns, (source - shifts[first][0], target - shifts[first][1]))

    def plan(self, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> CopyPlan:
        """The plan that copies `source_blocks[i]` of one side onto `target_blocks[i]` of the other.

        The order of the pairs is free. Raises BadBlocks for ids out of range, repeated targets or unequal counts.
        """
        if len(source_blocks) != len(target_blocks):
            raise BadBlocks(f"{self.name}: {len(source_blocks)} source blocks for {len(target_blocks)} target blocks")
        ids = checked_ids((source_blocks, target_blocks), (self.source_blocks, self.target_blocks), self.name)
        runs = single_run(ids)
        if runs is None:  # else no two targets are alike
            named = np.zeros(self.target_blocks, np.bool_)
            named[ids[1]] = True
            if np.count_nonzero(named) != ids.shape[1]:
                raise BadBlocks(f"{self.name}: a target block is named twice, so its content would be undefined")
            runs = runs_of(ids)
        return CopyPlan(self, runs)


def route_between(source: Group, target: Group) -> Route:
    """The route that copies whole blocks of one group onto blocks of the other.

    Raises LayoutMismatch where the two do not hold the same planes.
    """
    if source.layers != target.layers:
        raise LayoutMismatch(f"{source.name}: layers {source.layers} against {target.layers}")
    columns = {layer: _layer_columns(source, target, layer) for layer in source.layers}
    return Route(source.name, source.blocks, target.blocks, columns, shifts_of(columns))


def _layer_columns(source: Group, target: Group, layer: int) -> Columns:
    ours, theirs = source.planes_of(layer), target.planes_of(layer)
    if [plane.content for plane in ours] != [plane.content for plane in theirs]:
        raise LayoutMismatch(f"{source.name}, layer {layer}: the two sides hold different planes: {ours} / {theirs}")
    parts = []
    for mine, other in zip(ours, theirs, strict=True):
        from_, to, length = matched_segments(mine, other)
        parts.append(columns_of(mine.base + from_, other.base + to, length, mine.block_stride, other.block_stride))
    return merged_columns(parts)


def _spread(columns: Columns, runs: BlockRuns) -> Pieces:
    """Every column over every run; a column that fills its block stride on both sides is one long piece."""
    (at, strides, nbytes, fills), each = columns.stacked, runs.blocks_each
    table = np.empty((len(COLUMNS), len(nbytes), len(each)), np.int64)
    np.multiply(strides[0], runs.source, out=table[0])
    np.multiply(strides[1], runs.target, out=table[1])
    table[:2] += at
    long = np.where(fills & (runs.step > 0), each, 1)  # blocks in each copy
    np.multiply(nbytes, long, out=table[2])
    np.floor_divide(each, long, out=table[3])
    several = table[3] > 1
    np.multiply(strides[0], several, out=table[4])
    np.multiply(strides[1], several, out=table[5])
    table[5] *= runs.step
    return Pieces(table.reshape(len(COLUMNS), -1))
