"""Geometry by example; what must hold for every size is in tests/property/test_layout.py."""

from __future__ import annotations

import subprocess
import sys

import pytest

from infinity.errors import ModelError
from infinity.layout import (
    Layout,
    PageId,
    ParamSpec,
    PlaneSpec,
    UnitSpec,
    build_layout,
    choose_page_nbytes,
    minimum_frames,
    unused_fraction,
)

KIB = 1 << 10
MIB = 1 << 20


def moments(dtype: str) -> tuple[PlaneSpec, ...]:
    return (PlaneSpec("exp_avg", 4), PlaneSpec("exp_avg_sq", 4))


def param(name: str, *shape: int, dtype: str = "bf16", trainable: bool = True) -> ParamSpec:
    return ParamSpec(name, shape, dtype, {"bf16": 2, "fp32": 4, "uint8": 1, "float64": 8}[dtype], trainable)


def lay(*params: ParamSpec, page_nbytes: int = 4 * KIB, world_size: int = 1, rank: int = 0) -> Layout:
    return build_layout([UnitSpec("block", params)], moments, page_nbytes, world_size, rank)


def test_parameters_start_at_multiples_of_a_run() -> None:
    flat = lay(param("a", 3), param("b", 1025), param("c", 1024), param("d")).flats[0]
    assert [(place.elem_offset, place.numel) for place in flat.params] == [(0, 3), (1024, 1025), (3072, 1024), (4096, 1)]
    assert flat.numel == 5120


def test_a_trained_bf16_parameter_has_the_split_master_and_moments() -> None:
    flat = lay(param("a", 5000)).flats[0]
    assert [(plane.name, plane.elem_nbytes) for plane in flat.planes] == [("param", 2), ("residual", 2), ("exp_avg", 4), ("exp_avg_sq", 4)]
    assert flat.tile_numel == 2048
    assert [flat.pages_per_tile(plane) for plane in flat.grids] == [1, 1, 2, 2, 2]
    assert [flat.page_count(plane) for plane in flat.grids] == [3, 3, 5, 5, 5]


def test_a_trained_fp32_parameter_has_one_page_of_each_plane_per_tile() -> None:
    flat = lay(param("a", 5000, dtype="fp32")).flats[0]
    assert [plane.name for plane in flat.planes] == ["param", "exp_avg", "exp_avg_sq"]
    assert flat.tile_numel == 1024
    assert {flat.pages_per_tile(plane) for plane in flat.grids} == {1}


def test_a_frozen_parameter_has_only_its_own_plane() -> None:
    layout = lay(param("a", 5000, trainable=False))
    assert [space.plane for space in layout.spaces] == ["param"]


def test_the_gradient_is_the_last_space_and_no_plane_of_the_tile() -> None:
    layout = lay(param("a", 5000))
    assert [space.plane for space in layout.spaces] == ["param", "residual", "exp_avg", "exp_avg_sq", "grad"]
    assert "grad" not in [plane.name for plane in layout.flats[0].planes]


def test_wide_elements_take_several_pages_of_the_narrowest_plane() -> None:
    flat = lay(param("table", 3000, dtype="float64", trainable=False)).flats[0]
    assert (flat.tile_numel, flat.pages_per_tile("param"), flat.page_numel("param"), flat.page_count("param")) == (1024, 2, 512, 6)


def test_zero_element_parameters_take_no_place() -> None:
    flat = lay(param("empty", 0, 7), param("a", 10)).flats[0]
    assert [place.spec.name for place in flat.params] == ["a"]


@pytest.mark.parametrize("units", [[], [UnitSpec("none", ())], [UnitSpec("empty", (param("e", 0),))]])
def test_a_model_without_elements_has_an_empty_layout(units: list[UnitSpec]) -> None:
    layout = build_layout(units, moments, 4 * KIB)
    assert (layout.flats, layout.spaces, minimum_frames(layout), unused_fraction(layout)) == ((), (), 0, 0.0)


def test_a_unit_has_one_flat_parameter_per_dtype_and_trainability() -> None:
    layout = lay(param("a", 4), param("b", 4, dtype="fp32"), param("c", 4, trainable=False), param("d", 4))
    assert [(flat.name, [place.spec.name for place in flat.params]) for flat in layout.flats] == [
        ("block[bf16]", ["a", "d"]),
        ("block[fp32]", ["b"]),
        ("block[bf16,frozen]", ["c"]),
    ]
    assert [flat.index for flat in layout.flats] == [0, 1, 2]


def test_flat_parameters_follow_the_units() -> None:
    units = [UnitSpec(name, (param(f"{name}.w", 8),)) for name in ("embed", "blocks.0", "head")]
    assert [flat.unit for flat in build_layout(units, moments, 4 * KIB).flats] == ["embed", "blocks.0", "head"]


def test_shards_are_equal_multiples_of_a_run() -> None:
    flats = [lay(param("a", 1025), world_size=3, rank=rank).flats[0] for rank in range(3)]
    assert [(flat.numel, flat.shard_begin, flat.shard_numel) for flat in flats] == [(3072, 0, 1024), (3072, 1024, 1024), (3072, 2048, 1024)]


def test_segments_count_from_the_start_of_the_shard() -> None:
    flat = lay(param("a", 1500), param("b", 700), world_size=2, rank=1).flats[0]
    assert flat.shard_begin == 2048
    assert [(segment.place.spec.name, segment.begin, segment.end) for segment in flat.segments(0, 2048)] == [("b", 0, 700)]


def test_segments_skip_padding_and_cut_at_the_range() -> None:
    flat = lay(param("a", 1000), param("b", 2000), param("c", 5)).flats[0]
    found = [(segment.place.spec.name, segment.begin, segment.end) for segment in flat.segments(900, 3073)]
    assert found == [("a", 900, 1000), ("b", 1024, 3024), ("c", 3072, 3073)]
    assert flat.segments(1000, 1024) == []


def test_only_the_used_bytes_of_the_tail_page_count() -> None:
    layout = lay(param("a", 2049))
    flat = layout.flats[0]
    assert flat.page_elems("param", 1) == (2048, 3072)
    assert flat.page_used_nbytes("param", 0) == 4096
    assert flat.page_used_nbytes("param", 1) == 2048
    assert layout.space_of(0, "param").tail_used_nbytes == 2048
    assert layout.space_of(0, "param").used_total_nbytes == 6144


def test_the_last_tile_has_only_the_pages_that_hold_elements() -> None:
    flat = lay(param("a", 2049)).flats[0]
    assert flat.tile_range(1) == (2048, 3072)
    assert flat.tile_pages("exp_avg", 0) == range(2)
    assert flat.tile_pages("exp_avg", 1) == range(2, 3)


@pytest.mark.parametrize("index", [-1, 2])
def test_a_page_outside_the_shard_is_an_index_error(index: int) -> None:
    flat = lay(param("a", 2049)).flats[0]
    with pytest.raises(IndexError, match="page"):
        flat.page_elems("param", index)


def test_a_page_is_named_by_unit_plane_and_index() -> None:
    layout = lay(param("a", 50000))
    assert layout.page_id(0, "exp_avg", 12) == PageId(2, 12)
    assert layout.page_name(PageId(2, 12)) == "block/exp_avg page 12"


def test_the_minimum_is_the_largest_tile_its_gradient_and_one_more() -> None:
    assert minimum_frames(lay(param("a", 5000))) == 6 + 2 + 1
    assert minimum_frames(lay(param("a", 5000, dtype="fp32"))) == 3 + 1 + 1
    assert minimum_frames(lay(param("a", 5000, trainable=False))) == 1 + 1


def test_the_minimum_does_not_grow_with_the_model() -> None:
    assert minimum_frames(lay(param("a", 1 << 14))) == minimum_frames(lay(param("a", 1 << 30)))


def test_planes_that_live_elsewhere_need_no_frames() -> None:
    layout = lay(param("a", 5000))
    assert minimum_frames(layout, without=("param", "residual")) == 4 + 2 + 1
    assert minimum_frames(layout, without=("param", "residual", "exp_avg", "exp_avg_sq", "grad")) == 0


def test_auto_takes_the_largest_page_that_wastes_little() -> None:
    units = [UnitSpec(f"blocks.{i}", (param("w", 3 * MIB),)) for i in range(4)]
    assert choose_page_nbytes(units, moments, host_bytes=1 << 40) == 2 * MIB
    assert unused_fraction(build_layout(units, moments, 2 * MIB)) == 0
    assert unused_fraction(build_layout(units, moments, 4 * MIB)) > 0.03


def test_auto_keeps_the_minimum_of_frames_below_a_quarter_of_the_budget() -> None:
    units = [UnitSpec("w", (param("w", 1 << 30),))]
    assert choose_page_nbytes(units, moments, host_bytes=9 * 4 * MIB) == MIB
    assert choose_page_nbytes(units, moments, host_bytes=9 * 4 * MIB - 1) == MIB // 2


def test_auto_ends_at_four_kib() -> None:
    assert choose_page_nbytes([UnitSpec("w", (param("w", 1),))], moments, host_bytes=1) == 4 * KIB


@pytest.mark.parametrize("page_nbytes", [0, 2048, 4097, 12288, -4096])
def test_a_page_that_is_no_power_of_two_is_refused(page_nbytes: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        lay(param("a", 1), page_nbytes=page_nbytes)


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_outside_the_world_is_refused(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match="rank"):
        lay(param("a", 1), world_size=world_size, rank=rank)


def test_training_an_unknown_dtype_is_refused_by_parameter_name() -> None:
    with pytest.raises(ModelError, match=r"'table' is float64.*bf16 and fp32"):
        lay(param("table", 4, dtype="float64"))


def test_planes_of_the_same_name_are_refused() -> None:
    with pytest.raises(ValueError, match="own name"):
        build_layout([UnitSpec("u", (param("a", 1),))], lambda dtype: (PlaneSpec("grad", 4),), 4 * KIB)


def test_layout_needs_no_torch() -> None:
    code = "import sys, infinity.layout; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
