"""What must hold of a layout whatever the sizes, dtypes, page sizes and number of ranks."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.layout import RUN, FlatSpec, Layout, ParamSpec, PlaneSpec, UnitSpec, build_layout

ODD_SIZES = (0, 1, 127, 513, 4095, 4097, 1048577)
ELEM_NBYTES = {"bf16": 2, "fp32": 4, "uint8": 1, "float64": 8}

examples = settings(deadline=None, max_examples=60)


def moments(dtype: str) -> tuple[PlaneSpec, ...]:
    return (PlaneSpec("exp_avg", 4), PlaneSpec("exp_avg_sq", 4))


def narrow_moments(dtype: str) -> tuple[PlaneSpec, ...]:
    return (PlaneSpec("exp_avg", 1), PlaneSpec("exp_avg_sq", 2))


numels = st.one_of(st.sampled_from(ODD_SIZES), st.integers(0, 40_000))
params = st.builds(
    lambda numel, kind: ParamSpec(f"w{numel}", (numel,), kind[0], ELEM_NBYTES[kind[0]], kind[1]),
    numels,
    st.sampled_from([("bf16", True), ("fp32", True), ("bf16", False), ("fp32", False), ("uint8", False), ("float64", False)]),
)
units = st.lists(st.lists(params, max_size=5).map(lambda found: UnitSpec("u", tuple(found))), max_size=3)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    world_size = draw(st.integers(1, 5))
    return build_layout(
        draw(units),
        draw(st.sampled_from([moments, narrow_moments])),
        draw(st.sampled_from([4 << 10, 16 << 10, 1 << 20])),
        world_size,
        draw(st.integers(0, world_size - 1)),
    )


def page_runs(flat: FlatSpec, plane: str) -> list[tuple[int, int]]:
    return [flat.page_elems(plane, index) for index in range(flat.page_count(plane))]


@examples
@given(layouts())
def test_pages_cover_every_element_of_the_shard_once_and_none_is_empty(layout: Layout) -> None:
    for flat in layout.flats:
        for plane in flat.grids:
            runs = page_runs(flat, plane)
            assert runs[0][0] == 0
            assert runs[-1][1] == flat.shard_numel
            assert all(left[1] == right[0] for left, right in pairwise(runs))
            assert all(begin < end for begin, end in runs)


@examples
@given(layouts(), st.data())
def test_an_element_and_its_page_and_offset_correspond_one_to_one(layout: Layout, data: st.DataObject) -> None:
    for flat in layout.flats:
        elem = data.draw(st.integers(0, flat.shard_numel - 1))
        for plane, grid in flat.grids.items():
            index, offset = flat.locate(plane, elem)
            assert flat.page_elems(plane, index)[0] + offset // grid.plane.elem_nbytes == elem
            assert offset % grid.plane.elem_nbytes == 0
            assert offset + grid.plane.elem_nbytes <= flat.page_used_nbytes(plane, index) <= layout.page_nbytes


@pytest.mark.parametrize("numel", ODD_SIZES)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_every_element_of_an_odd_sized_parameter_has_its_own_place(numel: int, dtype: str) -> None:
    layout = build_layout([UnitSpec("u", (ParamSpec("w", (numel,), dtype, ELEM_NBYTES[dtype], True),))], moments, 16 << 10)
    for flat in layout.flats:
        for plane in flat.grids:
            elems = {*range(min(numel, 5000)), *range(max(numel - 5000, 0), numel)}
            assert len({flat.locate(plane, elem) for elem in elems}) == len(elems)
    assert (numel == 0) == (not layout.flats)


@examples
@given(layouts())
def test_every_page_belongs_to_exactly_one_tile(layout: Layout) -> None:
    for flat in layout.flats:
        for plane in flat.grids:
            owners = [(index, tile) for tile in range(flat.n_tiles) for index in flat.tile_pages(plane, tile)]
            assert owners == [(index, flat.tile_of_page(plane, index)) for index in range(flat.page_count(plane))]


@examples
@given(layouts())
def test_a_tile_is_whole_pages_of_every_plane(layout: Layout) -> None:
    for flat in layout.flats:
        for tile in range(flat.n_tiles):
            for plane in flat.grids:
                pages = flat.tile_pages(plane, tile)
                assert (flat.page_elems(plane, pages[0])[0], flat.page_elems(plane, pages[-1])[1]) == flat.tile_range(tile)


@examples
@given(layouts())
def test_parameters_shards_and_tiles_start_at_multiples_of_a_run(layout: Layout) -> None:
    for flat in layout.flats:
        cuts = [place.elem_offset for place in flat.params] + [flat.shard_begin, flat.shard_numel, flat.tile_numel, flat.numel]
        assert all(cut % RUN == 0 for cut in cuts)


@examples
@given(layouts())
def test_a_full_tile_fits_its_pages_and_fills_them(layout: Layout) -> None:
    for flat in layout.flats:
        for grid in flat.grids.values():
            assert grid.page_numel * grid.plane.elem_nbytes == layout.page_nbytes
            assert grid.page_numel * grid.pages_per_tile == flat.tile_numel


@examples
@given(st.lists(params, max_size=5), st.integers(1, 5), st.sampled_from([4 << 10, 64 << 10]))
def test_tiles_of_all_ranks_give_every_element_of_every_parameter_once(specs: list[ParamSpec], world_size: int, page_nbytes: int) -> None:
    covered: dict[tuple[int, int], list[tuple[int, int]]] = {}
    wanted: dict[tuple[int, int], int] = {}
    for rank in range(world_size):
        for flat in build_layout([UnitSpec("u", tuple(specs))], moments, page_nbytes, world_size, rank).flats:
            wanted |= {(flat.index, place.elem_offset): place.numel for place in flat.params}
            for tile in range(flat.n_tiles):
                for place, begin, end in flat.segments(*flat.tile_range(tile)):
                    start = flat.shard_begin - place.elem_offset
                    covered.setdefault((flat.index, place.elem_offset), []).append((begin + start, end + start))
    assert sum(wanted.values()) == sum(spec.numel for spec in specs)
    assert covered.keys() == wanted.keys()
    for key, runs in covered.items():
        assert runs[0][0] == 0
        assert runs[-1][1] == wanted[key]
        assert all(left[1] == right[0] for left, right in pairwise(runs))


@examples
@given(layouts(), st.data())
def test_segments_of_any_range_equal_a_search_over_all_parameters(layout: Layout, data: st.DataObject) -> None:
    for flat in layout.flats:
        begin = data.draw(st.integers(0, flat.shard_numel))
        end = data.draw(st.integers(begin, flat.shard_numel))
        overlaps = [
            (place, max(begin, place.elem_offset - flat.shard_begin), min(end, place.elem_end - flat.shard_begin)) for place in flat.params
        ]
        assert flat.segments(begin, end) == [overlap for overlap in overlaps if overlap[1] < overlap[2]]


@examples
@given(layouts())
def test_spaces_agree_with_their_flat_parameters(layout: Layout) -> None:
    assert [space.id for space in layout.spaces] == list(range(len(layout.spaces)))
    assert [(space.flat, space.plane) for space in layout.spaces] == [(flat.index, plane) for flat in layout.flats for plane in flat.grids]
    for space in layout.spaces:
        flat = layout.flats[space.flat]
        assert layout.space_of(space.flat, space.plane) is space
        used = [flat.page_used_nbytes(space.plane, index) for index in range(space.page_count)]
        assert used == [space.used_nbytes(index) for index in range(space.page_count)]
        assert sum(used) == space.used_total_nbytes == flat.shard_numel * flat.grids[space.plane].plane.elem_nbytes
