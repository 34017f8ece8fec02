"""How slots are dealt to paths."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.tiers.stripes import deal, share_slots

ROOMY = 10**9


def alone(*slots: int) -> list[tuple[list[int], int]]:
    """Every path on a file system of its own."""
    return [([path], count) for path, count in enumerate(slots)]


def test_one_path_gets_everything_in_order() -> None:
    assert share_slots(5, [1.0], alone(5)) == [5]
    paths, index = deal([5])
    assert list(paths) == [0] * 5
    assert list(index) == [0, 1, 2, 3, 4]


def test_a_path_gets_slots_in_proportion_to_its_speed() -> None:
    assert share_slots(1000, [3e9, 1e9], alone(ROOMY, ROOMY)) == [750, 250]


def test_what_a_small_path_cannot_take_goes_to_the_others_in_proportion() -> None:
    assert share_slots(1000, [2.0, 1.0, 1.0], alone(100, ROOMY, ROOMY)) == [100, 450, 450]
    assert share_slots(1000, [2.0, 1.0, 1.0], alone(100, 300, ROOMY)) == [100, 300, 600]


def test_two_directories_of_one_file_system_share_its_room() -> None:
    assert share_slots(100, [1.0, 1.0, 1.0], [([0, 2], 20), ([1], ROOMY)]) == [10, 80, 10]


def test_paths_that_are_too_small_together_are_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        share_slots(11, [1.0, 1.0], alone(5, 5))


def test_no_slots_are_dealt_to_nobody() -> None:
    assert share_slots(0, [1.0, 2.0], alone(5, 5)) == [0, 0]
    assert [len(part) for part in deal([0, 0])] == [0, 0]


rates = st.floats(1e3, 1e11)


@st.composite
def dealings(draw: st.DrawFn) -> tuple[int, list[float], list[tuple[list[int], int]]]:
    n_paths = draw(st.integers(1, 6))
    where = [draw(st.integers(0, n_paths - 1)) for _ in range(n_paths)]
    file_systems = [[path for path in range(n_paths) if where[path] == name] for name in sorted(set(where))]
    capacities = [(paths, draw(st.integers(0, 400))) for paths in file_systems]
    n_slots = draw(st.integers(0, sum(slots for _, slots in capacities)))
    return n_slots, [draw(rates) for _ in range(n_paths)], capacities


@given(dealings())
@settings(max_examples=300, deadline=None)
def test_every_slot_is_dealt_once_and_no_file_system_is_overfilled(case: tuple[int, list[float], list[tuple[list[int], int]]]) -> None:
    n_slots, speeds, capacities = case
    counts = share_slots(n_slots, speeds, capacities)
    assert sum(counts) == n_slots
    assert min(counts) >= 0
    for paths, slots in capacities:
        assert sum(counts[path] for path in paths) <= slots
    path_of, index_of = deal(counts)
    assert sorted(zip(path_of, index_of, strict=True)) == [(path, index) for path, count in enumerate(counts) for index in range(count)]


@given(dealings())
@settings(max_examples=300, deadline=None)
def test_a_path_has_less_than_its_speed_is_worth_only_where_its_file_system_is_full(
    case: tuple[int, list[float], list[tuple[list[int], int]]],
) -> None:
    n_slots, speeds, capacities = case
    counts = share_slots(n_slots, speeds, capacities)
    for paths, slots in capacities:
        rate = sum(speeds[path] for path in paths)
        if sum(counts[path] for path in paths) < slots:  # has room left: nobody else got more for its speed than it, but for rounding
            for others, _ in capacities:
                got = sum(counts[path] for path in others)
                assert (
                    got
                    <= sum(counts[path] for path in paths) * sum(speeds[path] for path in others) / rate
                    + 1
                    + sum(speeds[path] for path in others) / rate
                )


@given(counts=st.lists(st.integers(0, 60), min_size=1, max_size=5).filter(any))
@settings(max_examples=100, deadline=None)
def test_any_run_of_slots_is_spread_in_proportion(counts: list[int]) -> None:
    path_of, _ = deal(counts)
    n_slots = len(path_of)
    for path, count in enumerate(counts):
        before = list(itertools.accumulate((int(of == path) for of in path_of), initial=0))
        for begin in range(0, n_slots, 3):
            for end in range(begin + 1, n_slots + 1):
                off = before[end] - before[begin] - Fraction((end - begin) * count, n_slots)
                assert abs(off) < 1 + len(counts)


def test_a_path_keeps_the_order_of_its_slots() -> None:
    path_of, index_of = deal([7, 3, 5])
    for path in range(3):
        indices = [index for of, index in zip(path_of, index_of, strict=True) if of == path]
        assert indices == sorted(indices)
