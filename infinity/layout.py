"""Where every element lives: parameters -> flat parameters -> shards -> tiles -> pages.

Pure geometry: numbers in, numbers out. It knows no torch, no file, no memory and no policy.

::

    flat parameter   |p0........|pad|p1..|pad|p2...............|pad......|      each parameter starts at a multiple of RUN elements
    shards           |---- rank 0 ----------|---- rank 1 ---------------|      equal cuts, multiples of RUN
    tiles of a shard |tile 0  |tile 1  |tile 2|                                updated together
    pages of a plane |0   |1   |2   |3   |4  |                                 w pages per tile (here w = 2); only the last may be short

Kept here:

* L1  a page belongs to exactly one tile, and a tile is a whole number of pages of every plane;
* L2  the elements of a shard and the pairs (page, offset in it) of a plane correspond one to one;
* L3  parameters start, shards are cut and tiles are cut at multiples of ``RUN`` elements, so no run straddles a tile;
* L4  no page is empty.

Elements are counted within this rank's shard unless a name says ``flat``; offsets of parameters count within the flat parameter.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from infinity.errors import ModelError

RUN = 1024
"""Elements: parameters, shards and tiles start at multiples of it; sums of squares are taken over runs of it."""

PARAM = "param"
RESIDUAL = "residual"
GRAD = "grad"

PAGE_NBYTES_MIN = 4 << 10
PAGE_NBYTES_MAX = 8 << 20
UNUSED_FRACTION_MAX = 0.03
"""`page: auto` leaves at most this part of the pages' bytes unused."""
FRAMES_MIN = 3
"""Frames that an engine has at least, also where nothing is paged: a gradient's on the way to the host, and one more."""
HOST_FRACTION_MAX = 0.25
"""`page: auto` keeps the minimum of frames below this part of the host budget."""


@dataclass(frozen=True, slots=True)
class PlaneSpec:
    """One array stored over a flat parameter."""

    name: str
    elem_nbytes: int


GRAD_PLANE = PlaneSpec(GRAD, 4)
"""The fp32 running sum of gradients; it is a space of its own and does not count for the size of a tile."""

TRAINED_PLANES: Mapping[str, tuple[PlaneSpec, ...]] = {
    "bf16": (PlaneSpec(PARAM, 2), PlaneSpec(RESIDUAL, 2)),
    "fp32": (PlaneSpec(PARAM, 4),),
}
"""dtype of a trained parameter -> the planes that together are its fp32 master; an optimizer's planes follow them."""

StatePlanes = Callable[[str], tuple[PlaneSpec, ...]]
"""dtype -> the planes that an optimizer adds for each trained parameter of that dtype."""


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """A parameter as plain data; ``dtype`` is "bf16", "fp32", or torch's name of another one."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    elem_nbytes: int
    trainable: bool

    @property
    def numel(self) -> int:
        """Elements; 1 for a scalar."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """The parameters that a unit owns, in registration order; borrowed ones are listed by their owner only."""

    name: str
    params: tuple[ParamSpec, ...]


@dataclass(frozen=True, slots=True)
class ParamPlace:
    """A parameter's place: elements [elem_offset, elem_end) of the flat parameter."""

    spec: ParamSpec
    elem_offset: int
    numel: int

    @property
    def elem_end(self) -> int:
        """One past its last element, padding not counted."""
        return self.elem_offset + self.numel


class Segment(NamedTuple):
    """The part of a range that belongs to one parameter: elements [begin, end) of the shard."""

    place: ParamPlace
    begin: int
    end: int


class PageId(NamedTuple):
    """A page: the number of its space and its index there."""

    space: int
    index: int  # type: ignore[assignment]  # the word for it, though tuples have a method of that name


@dataclass(frozen=True, slots=True)
class PlaneGrid:
    """How one plane of one shard is cut into pages."""

    plane: PlaneSpec
    pages_per_tile: int
    page_numel: int
    page_count: int


@dataclass(frozen=True, slots=True)
class FlatSpec:
    """A unit's parameters of one dtype and trainability as one array, and how this rank's shard of it is cut.

    ``planes`` are the stored ones, "param" first. Methods take a plane's name; "grad" is one where the flat parameter is trainable.
    """

    index: int
    unit: str
    name: str
    """Unique in the layout: the unit's name, with dtype and use added where the unit has several flat parameters."""
    dtype: str
    trainable: bool
    params: tuple[ParamPlace, ...]
    numel: int
    """Of the whole flat parameter, a multiple of ``world_size * RUN``."""
    shard_begin: int
    """Where this rank's shard starts in the flat parameter."""
    shard_numel: int
    planes: tuple[PlaneSpec, ...]
    page_nbytes: int
    tile_numel: int
    n_tiles: int
    grids: Mapping[str, PlaneGrid] = field(repr=False)
    _elem_offsets: tuple[int, ...] = field(repr=False, compare=False)

    def pages_per_tile(self, plane: str) -> int:
        """Pages of ``plane`` in a whole tile; the last tile may have fewer."""
        return self.grids[plane].pages_per_tile

    def page_count(self, plane: str) -> int:
        """Pages of ``plane`` in the shard."""
        return self.grids[plane].page_count

    def page_numel(self, plane: str) -> int:
        """Elements of ``plane`` in a full page."""
        return self.grids[plane].page_numel

    def tile_range(self, tile: int) -> tuple[int, int]:
        """The elements [begin, end) of a tile, padding included."""
        self._check_tile(tile)
        begin = tile * self.tile_numel
        return begin, min(begin + self.tile_numel, self.shard_numel)

    def tile_pages(self, plane: str, tile: int) -> range:
        """The pages of ``plane`` that hold a tile."""
        self._check_tile(tile)
        grid = self.grids[plane]
        begin = tile * grid.pages_per_tile
        return range(begin, min(begin + grid.pages_per_tile, grid.page_count))

    def tile_of_page(self, plane: str, index: int) -> int:
        """The one tile that a page belongs to."""
        return index // self._grid_of(plane, index).pages_per_tile

    def page_elems(self, plane: str, index: int) -> tuple[int, int]:
        """The elements [begin, end) that a page holds, padding included."""
        grid = self._grid_of(plane, index)
        begin = index * grid.page_numel
        return begin, min(begin + grid.page_numel, self.shard_numel)

    def page_used_nbytes(self, plane: str, index: int) -> int:
        """Bytes of a page that hold elements: all that is ever moved of it."""
        begin, end = self.page_elems(plane, index)
        return (end - begin) * self.grids[plane].plane.elem_nbytes

    def locate(self, plane: str, elem: int) -> tuple[int, int]:
        """(page, byte offset in it) of an element of the shard."""
        if not 0 <= elem < self.shard_numel:
            raise IndexError(f"{self.name}: element {elem} of a shard of {self.shard_numel}")
        grid = self.grids[plane]
        index, within = divmod(elem, grid.page_numel)
        return index, within * grid.plane.elem_nbytes

    def segments(self, begin: int, end: int) -> list[Segment]:
        """The parts of elements [begin, end) of the shard that belong to parameters, in order; padding belongs to none."""
        begin, end = begin + self.shard_begin, end + self.shard_begin
        found = []
        for place in self.params[max(bisect_right(self._elem_offsets, begin) - 1, 0) :]:
            if place.elem_offset >= end:
                break
            overlap_begin, overlap_end = max(begin, place.elem_offset), min(end, place.elem_end)
            if overlap_begin < overlap_end:
                found.append(Segment(place, overlap_begin - self.shard_begin, overlap_end - self.shard_begin))
        return found

    def _grid_of(self, plane: str, index: int) -> PlaneGrid:
        grid = self.grids[plane]
        if not 0 <= index < grid.page_count:
            raise IndexError(f"{self.name}/{plane}: page {index} of {grid.page_count}")
        return grid

    def _check_tile(self, tile: int) -> None:
        if not 0 <= tile < self.n_tiles:
            raise IndexError(f"{self.name}: tile {tile} of {self.n_tiles}")


@dataclass(frozen=True, slots=True)
class Space:
    """The pages of one plane of one flat parameter; elements fill every page but the last, which may be short."""

    id: int
    flat: int
    plane: str
    page_count: int
    page_nbytes: int
    tail_used_nbytes: int
    name: str = ""

    def used_nbytes(self, index: int) -> int:
        """Bytes of page ``index`` that hold elements."""
        if not 0 <= index < self.page_count:
            raise IndexError(f"{self.name or self.plane}: page {index} of {self.page_count}")
        return self.tail_used_nbytes if index == self.page_count - 1 else self.page_nbytes

    @property
    def used_total_nbytes(self) -> int:
        """Bytes that hold elements, over all pages."""
        return (self.page_count - 1) * self.page_nbytes + self.tail_used_nbytes


@dataclass(frozen=True, slots=True)
class Layout:
    """Every flat parameter of a model and every space of pages, for one rank; ``spaces[i].id == i`` and ``flats[i].index == i``."""

    flats: tuple[FlatSpec, ...]
    spaces: tuple[Space, ...]
    page_nbytes: int
    world_size: int
    rank: int
    _space_ids: Mapping[tuple[int, str], int] = field(repr=False, compare=False)

    def space_of(self, flat_index: int, plane: str) -> Space:
        """The space of a plane of a flat parameter."""
        return self.spaces[self._space_ids[flat_index, plane]]

    def page_id(self, flat_index: int, plane: str, index: int) -> PageId:
        """The id of a page of a plane."""
        return PageId(self._space_ids[flat_index, plane], index)

    def page_name(self, page: PageId) -> str:
        """A page in words, as errors and reports name it."""
        return f"{self.spaces[page.space].name} page {page.index}"


def build_layout(units: Sequence[UnitSpec], state_planes: StatePlanes, page_nbytes: int, world_size: int = 1, rank: int = 0) -> Layout:
    """Lay out a model.

    Order: flat parameters follow the units; within a unit, the first parameter of each (dtype, trainable). Spaces follow the flat
    parameters, planes in their order, "grad" last.
    Errors: ModelError names a parameter that cannot be trained in its dtype; ValueError for arguments that no model could have.
    """
    _check_page_nbytes(page_nbytes)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of world_size {world_size}: it must be at least 0 and below world_size")
    flats: list[FlatSpec] = []
    for unit in units:
        kinds: dict[tuple[str, bool], list[ParamSpec]] = {}
        for spec in unit.params:
            if spec.numel:
                kinds.setdefault((spec.dtype, spec.trainable), []).append(spec)
        for (dtype, trainable), specs in kinds.items():
            name = unit.name if len(kinds) == 1 else f"{unit.name}[{dtype}{'' if trainable else ',frozen'}]"
            planes = _planes(specs, state_planes)
            flats.append(_build_flat(len(flats), unit.name, name, specs, planes, page_nbytes, world_size, rank))
    spaces: list[Space] = []
    space_ids: dict[tuple[int, str], int] = {}
    for flat in flats:
        for plane, grid in flat.grids.items():
            space_ids[flat.index, plane] = len(spaces)
            spaces.append(
                Space(
                    id=len(spaces),
                    flat=flat.index,
                    plane=plane,
                    page_count=grid.page_count,
                    page_nbytes=page_nbytes,
                    tail_used_nbytes=flat.page_used_nbytes(plane, grid.page_count - 1),
                    name=f"{flat.name}/{plane}",
                )
            )
    return Layout(tuple(flats), tuple(spaces), page_nbytes, world_size, rank, space_ids)


def minimum_frames(layout: Layout, without: Collection[str] = ()) -> int:
    """Frames without which no step is possible: those of the largest tile's planes and gradient, and one more.

    ``without`` names planes that need none: they are device memory, or have frames of their own for good. 0 where no plane does.
    """
    largest = max((sum(len(flat.tile_pages(plane, 0)) for plane in flat.grids if plane not in without) for flat in layout.flats), default=0)
    return largest + 1 if largest else 0


def unused_fraction(layout: Layout, without: Collection[str] = ()) -> float:
    """The part of the pages' bytes that holds no element, over the stored planes."""
    spaces = [space for space in layout.spaces if space.plane != GRAD and space.plane not in without]
    total_nbytes = sum(space.page_count for space in spaces) * layout.page_nbytes
    return 1 - sum(space.used_total_nbytes for space in spaces) / total_nbytes if total_nbytes else 0.0


def choose_page_nbytes(
    units: Sequence[UnitSpec],
    state_planes: StatePlanes,
    host_bytes: int,
    world_size: int = 1,
    rank: int = 0,
    without: Collection[str] = (),
    resting: Collection[str] = (),
) -> int:
    """What `page: auto` means: the largest power of two, 8 MiB at most, that wastes little and needs few frames.

    Little is ``UNUSED_FRACTION_MAX`` of the pages' bytes, few is ``HOST_FRACTION_MAX`` of ``host_bytes``. Where no size does both,
    the smallest. ``without`` names planes that have no frames at all, ``resting`` those that have frames of their own for good.
    """
    page_nbytes = PAGE_NBYTES_MAX
    while page_nbytes > PAGE_NBYTES_MIN:
        layout = build_layout(units, state_planes, page_nbytes, world_size, rank)
        frames_nbytes = max(minimum_frames(layout, (*without, *resting)), FRAMES_MIN) * page_nbytes
        if unused_fraction(layout, without) <= UNUSED_FRACTION_MAX and frames_nbytes <= host_bytes * HOST_FRACTION_MAX:
            return page_nbytes
        page_nbytes //= 2
    return PAGE_NBYTES_MIN


def _build_flat(
    index: int,
    unit: str,
    name: str,
    specs: Sequence[ParamSpec],
    planes: tuple[PlaneSpec, ...],
    page_nbytes: int,
    world_size: int,
    rank: int,
) -> FlatSpec:
    places: list[ParamPlace] = []
    elem_offset = 0
    for spec in specs:
        places.append(ParamPlace(spec, elem_offset, spec.numel))
        elem_offset = _padded(elem_offset + spec.numel, RUN)
    numel = _padded(elem_offset, world_size * RUN)
    shard_numel = numel // world_size
    smallest_nbytes = min(plane.elem_nbytes for plane in planes)
    # Elements so wide that a page holds less than a run take several pages of the narrowest plane per tile. Pages and elements are
    # powers of two of bytes, so tiles are whole runs and leave no byte of a page unused.
    smallest_pages = max(1, RUN * smallest_nbytes // page_nbytes)
    tile_numel = smallest_pages * page_nbytes // smallest_nbytes
    trainable = specs[0].trainable
    grids = {}
    for plane in (*planes, GRAD_PLANE) if trainable else planes:
        pages_per_tile = smallest_pages * plane.elem_nbytes // smallest_nbytes
        page_numel = tile_numel // pages_per_tile
        grids[plane.name] = PlaneGrid(plane, pages_per_tile, page_numel, -(-shard_numel // page_numel))
    return FlatSpec(
        index=index,
        unit=unit,
        name=name,
        dtype=specs[0].dtype,
        trainable=trainable,
        params=tuple(places),
        numel=numel,
        shard_begin=rank * shard_numel,
        shard_numel=shard_numel,
        planes=planes,
        page_nbytes=page_nbytes,
        tile_numel=tile_numel,
        n_tiles=-(-shard_numel // tile_numel),
        grids=grids,
        _elem_offsets=tuple(place.elem_offset for place in places),
    )


def _planes(specs: Sequence[ParamSpec], state_planes: StatePlanes) -> tuple[PlaneSpec, ...]:
    first = specs[0]
    for spec in specs:
        if spec.elem_nbytes != first.elem_nbytes:
            raise ValueError(f"{spec.name} and {first.name} are both {spec.dtype}, of {spec.elem_nbytes} and {first.elem_nbytes} bytes")
    if first.trainable:
        if first.dtype not in TRAINED_PLANES:
            raise ModelError(
                f"parameter {first.name!r} is {first.dtype} and requires a gradient; {' and '.join(TRAINED_PLANES)} can be trained. "
                "Cast it, or freeze it with requires_grad_(False)."
            )
        planes = TRAINED_PLANES[first.dtype] + tuple(state_planes(first.dtype))
    else:
        planes = (PlaneSpec(PARAM, first.elem_nbytes),)
    names = [plane.name for plane in planes]
    if len({*names, GRAD}) != len(names) + 1:
        raise ValueError(f"planes {', '.join(names)}: each needs its own name, and {GRAD!r} is taken")
    if planes[0].elem_nbytes != first.elem_nbytes:
        raise ValueError(f"{first.name}: {first.dtype} has {planes[0].elem_nbytes} bytes per element, not {first.elem_nbytes}")
    for plane in planes:
        if not _is_power_of_two(plane.elem_nbytes) or plane.elem_nbytes > PAGE_NBYTES_MIN:
            raise ValueError(f"plane {plane.name!r} has {plane.elem_nbytes} bytes per element; a power of two is needed")
    return planes


def _check_page_nbytes(page_nbytes: int) -> None:
    if page_nbytes < PAGE_NBYTES_MIN or not _is_power_of_two(page_nbytes):
        raise ValueError(f"page of {page_nbytes} bytes: a power of two of at least {PAGE_NBYTES_MIN} is needed")


def _is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def _padded(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
