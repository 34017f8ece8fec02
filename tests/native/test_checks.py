"""Kernels that check pages while they work: the checksums are the table's, the work is the same, and no flipped bit gets through."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import pytest

from infinity.kernel_args import (
    CHECKS_MAX,
    AccumulateSegment,
    Check,
    Kernel,
    Segment,
    Simd,
    SumsqSegment,
    pack_accumulate,
    pack_adamw,
    pack_check,
    pack_copy,
    pack_sumsq,
)
from infinity.native import lib
from infinity.optim.adamw import AdamW
from tests.support.kernels import Array, address, at_odd_offset, run, table_crc

VARIANTS = [Simd.SCALAR, *([Simd.AVX2] if lib.inf_simd_best() == Simd.AVX2 else [])]
NUMELS = [1, 15, 127, 129, 1024, 4095, 4096, 4097, 8192, 8192 + 17, 20_000]
"""About the sizes of a strip and of a piece."""
BEFORE, AFTER, BOTH = Check.BEFORE, Check.AFTER, Check.BEFORE | Check.AFTER


class Case(NamedTuple):
    """A kernel on memory of its own. ``pages`` are what it reads and writes, all bytes of each; ``output`` what else it writes."""

    kernel: Kernel
    args: bytes
    pages: dict[str, Array]
    output: Array
    keep: tuple[object, ...] = ()


Make = Callable[[int, Simd, int], Case]
"""(elements, variant, elements of each page beyond the last that the kernel touches)"""


def floats(numel: int, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(numel).astype(np.float32)


def halves(numel: int, seed: int) -> Array:
    return (floats(numel, seed).view(np.uint32) >> 16).astype(np.uint16)


def scalars() -> bytes:
    return AdamW().scalars({"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}, 3, 0.7)


NOTHING = np.zeros(0, np.float32)


def copy(numel: int, variant: Simd, padding: int) -> Case:
    nbytes = numel * 7  # any number: a copy knows no elements
    source, to = (np.random.default_rng(seed).integers(0, 256, nbytes + padding, np.uint8) for seed in (0, 1))
    return Case(Kernel.COPY, pack_copy(address(to), address(source), nbytes), {"from": source, "to": to}, NOTHING)


def adamw(numel: int, variant: Simd, padding: int, *, bf16: bool, grad_bf16: bool, pieces: int, gap: int = 0) -> Case:
    """Two segments with ``gap`` elements between them that have no gradient."""
    n = numel + padding
    piece = -(-n // pieces)
    param = halves(n, 0) if bf16 else floats(n, 0)
    residual = halves(n, 1) if bf16 else None
    grad = halves(numel, 4) if grad_bf16 else floats(numel, 4)
    exp_avg = [floats(n, 2)[begin : begin + piece].copy() for begin in range(0, n, piece)]
    exp_avg_sq = [np.abs(floats(n, 3))[begin : begin + piece].copy() for begin in range(0, n, piece)]
    middle = numel // 2
    segments = [
        Segment(address(grad), 0, middle, grad_bf16, scalars()),
        Segment(address(grad[middle:]), min(middle + gap, numel), numel, grad_bf16, scalars()),
    ]
    args = pack_adamw(
        address(param),
        0 if residual is None else address(residual),
        [address(part) for part in exp_avg],
        [address(part) for part in exp_avg_sq],
        piece,
        segments,
        variant,
    )
    pages = {"param": param, **({} if residual is None else {"residual": residual})}
    pages |= {f"exp_avg {i}": part for i, part in enumerate(exp_avg)} | {f"exp_avg_sq {i}": part for i, part in enumerate(exp_avg_sq)}
    return Case(Kernel.ADAMW, args, pages, NOTHING, (grad,))


def accumulate(numel: int, variant: Simd, padding: int, *, add: bool, bf16: bool) -> Case:
    to = floats(numel + padding, 0)
    source = at_odd_offset(halves(numel + padding, 1) if bf16 else floats(numel + padding, 1), 3)
    middle = numel // 3
    segments = [
        AccumulateSegment(address(to), address(source), middle, bf16, add),
        AccumulateSegment(address(to[middle:]), address(source[middle:]), numel - middle, bf16, not add),
    ]
    return Case(Kernel.ACCUMULATE, pack_accumulate(segments, variant), {"to": to, "from": source}, NOTHING)


def sumsq(numel: int, variant: Simd, padding: int, *, bf16: bool) -> Case:
    source = halves(numel + padding, 0) if bf16 else floats(numel + padding, 0)
    sums = np.zeros(-(-numel // 1024) + 1)
    middle = numel // 2 // 1024 * 1024
    segments = [
        SumsqSegment(address(source), address(sums), middle, bf16),
        SumsqSegment(address(source[middle:]), address(sums[middle // 1024 :]), numel - middle, bf16),
    ]
    return Case(Kernel.SUMSQ, pack_sumsq(segments, variant), {"from": source}, sums)


CASES: Mapping[str, Make] = {
    "copy": copy,
    "adamw bf16": lambda *how: adamw(*how, bf16=True, grad_bf16=True, pieces=2),
    "adamw bf16, fp32 gradient": lambda *how: adamw(*how, bf16=True, grad_bf16=False, pieces=1),
    "adamw bf16, a gap": lambda *how: adamw(*how, bf16=True, grad_bf16=True, pieces=2, gap=5000),
    "adamw fp32": lambda *how: adamw(*how, bf16=False, grad_bf16=False, pieces=1),
    "adamw fp32, bf16 gradient": lambda *how: adamw(*how, bf16=False, grad_bf16=True, pieces=2),
    "accumulate fp32": lambda *how: accumulate(*how, add=True, bf16=False),
    "accumulate bf16": lambda *how: accumulate(*how, add=False, bf16=True),
    "sumsq fp32": lambda *how: sumsq(*how, bf16=False),
    "sumsq bf16": lambda *how: sumsq(*how, bf16=True),
}


def checked(case: Case, flags: int, results: Array) -> bytes:
    """The arguments of a case with a check of each page: its tag is its number, its result goes there in ``results``."""
    return case.args + b"".join(
        pack_check(address(page), page.nbytes, flags, table_crc(page), address(results[tag:]), tag + 1)
        for tag, page in enumerate(case.pages.values())
    )


def new_results() -> Array:
    return np.full(CHECKS_MAX, 0xAAAAAAAA, np.uint32)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("flags", [BEFORE, AFTER, BOTH])
def test_a_kernel_that_checks_does_the_same_and_its_checksums_are_those_of_the_table(name: str, variant: Simd, flags: Check) -> None:
    for numel in NUMELS:
        for padding in (0, 1, 3, 10_000):
            plain, case = CASES[name](numel, variant, padding), CASES[name](numel, variant, padding)
            results = new_results()
            assert run(plain.kernel, plain.args)[0] == 0
            assert run(case.kernel, checked(case, flags, results)) == (0, 0)
            assert np.array_equal(plain.output, case.output)
            for tag, page in enumerate(case.pages):
                assert np.array_equal(plain.pages[page].view(np.uint8), case.pages[page].view(np.uint8)), (numel, padding, page)
                found = table_crc(plain.pages[page]) if flags & AFTER else 0xAAAAAAAA
                assert results[tag] == found, (numel, padding, page)
            assert (results[len(case.pages) :] == 0xAAAAAAAA).all()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("padding", [0, 3000])
def test_a_flipped_bit_anywhere_in_any_page_is_found_and_named(name: str, variant: Simd, padding: int) -> None:
    for numel in (1, 1024, 20_000):
        for page in CASES[name](numel, variant, padding).pages:
            nbytes = CASES[name](numel, variant, padding).pages[page].nbytes
            for byte in {0, nbytes // 2, nbytes - 1}:
                case = CASES[name](numel, variant, padding)
                results = new_results()
                args = checked(case, BOTH, results)
                case.pages[page].view(np.uint8)[byte] ^= 1 << (byte % 8)
                found = table_crc(case.pages[page])
                tag = list(case.pages).index(page) + 1
                assert run(case.kernel, args) == (-errno.EBADMSG, tag << 32 | found), (numel, page, byte)
                assert (results == 0xAAAAAAAA).all()


def test_a_page_without_bytes_has_the_checksum_of_nothing() -> None:
    results = new_results()
    args = pack_copy(0, 0, 0) + pack_check(4096, 0, BOTH, 0, address(results), 1)
    assert run(Kernel.COPY, args) == (0, 0)
    assert results[0] == 0
    assert run(Kernel.COPY, pack_copy(0, 0, 0) + pack_check(4096, 0, BEFORE, 5, 0, 9)) == (-errno.EBADMSG, 9 << 32)


def test_pages_that_the_kernel_does_not_touch_are_checked_too() -> None:
    source, to, other = (np.random.default_rng(seed).integers(0, 256, 70_000, np.uint8) for seed in range(3))
    results = new_results()
    args = pack_copy(address(to), address(source), 1000)
    assert run(Kernel.COPY, args + pack_check(address(other), other.nbytes, BOTH, table_crc(other), address(results), 1)) == (0, 0)
    assert results[0] == table_crc(other)
    assert run(Kernel.COPY, args + pack_check(address(other), other.nbytes, BEFORE, 1, 0, 7)) == (
        -errno.EBADMSG,
        7 << 32 | table_crc(other),
    )


PAGE = np.zeros(4096, np.uint8)


@pytest.mark.parametrize(
    "checks",
    [
        pack_check(address(PAGE), 4096, 0, 0, 0, 0),
        pack_check(address(PAGE), 4096, 4, 0, 0, 0),
        pack_check(address(PAGE), 4096, AFTER, 0, 0, 0),
        pack_check(2**64 - 8, 4096, BEFORE, 0, 0, 0),
        pack_check(address(PAGE), 4096, BEFORE, 0, 0, 0) + pack_check(address(PAGE) + 4095, 1, BEFORE, 0, 0, 0),
        pack_check(address(PAGE), 4096, BEFORE, 0, 0, 0) + pack_check(address(PAGE) - 1, 2, BEFORE, 0, 0, 0),
        pack_check(address(PAGE), 4096, BEFORE, 0, 0, 0)[:-8],
        b"".join(pack_check(address(PAGE) + 8 * i, 8, BEFORE, lib.inf_crc32c(b"\0" * 8, 8, 0), 0, 0) for i in range(CHECKS_MAX + 1)),
    ],
    ids=["no flags", "unknown flags", "no place", "wraps", "overlap", "overlap before", "cut", "too many"],
)
@pytest.mark.parametrize("kernel", [Kernel.COPY, Kernel.ADAMW, Kernel.ACCUMULATE, Kernel.SUMSQ])
def test_checks_that_cannot_be_right_are_refused(kernel: Kernel, checks: bytes) -> None:
    args = {
        Kernel.COPY: pack_copy(0, 0, 0),
        Kernel.ADAMW: pack_adamw(0, 0, [0], [0], 1, []),
        Kernel.ACCUMULATE: pack_accumulate([]),
        Kernel.SUMSQ: pack_sumsq([]),
    }[kernel]
    assert run(kernel, args)[0] == 0
    assert run(kernel, args + checks)[0] == -errno.EINVAL


def test_as_many_checks_as_there_may_be_are_made() -> None:
    checks = [pack_check(address(PAGE) + 8 * i, 8, BEFORE, lib.inf_crc32c(b"\0" * 8, 8, 0), 0, 0) for i in range(CHECKS_MAX)]
    assert run(Kernel.COPY, pack_copy(0, 0, 0) + b"".join(checks)) == (0, 0)


@pytest.mark.parametrize("shift", [-100, 0, 100])
def test_a_copy_with_checks_whose_ranges_overlap_is_refused(shift: int) -> None:
    data = np.zeros(4096, np.uint8)
    check = pack_check(address(data) + 1000, 1000, BEFORE, table_crc(data[1000:2000]), 0, 0)
    assert run(Kernel.COPY, pack_copy(address(data) + 1000 + shift, address(data) + 1000, 1000) + check)[0] == -errno.EINVAL


def descending(to: Array, source: Array) -> list[AccumulateSegment]:
    """The end of ``to``, then its begin, then the middle twice: the order in which gradients fire."""
    cuts = [(12_000, 20_000), (0, 3000), (5000, 9000), (5000, 9000)]
    return [AccumulateSegment(address(to[begin:]), address(source[begin:]), end - begin, False, True) for begin, end in cuts]


def test_segments_in_any_order_are_checked_before_the_first_change() -> None:
    plain, to, source = floats(20_000, 0), floats(20_000, 0), floats(20_000, 1)
    assert run(Kernel.ACCUMULATE, pack_accumulate(descending(plain, source))) == (0, 0)
    check = pack_check(address(to), to.nbytes, BEFORE, table_crc(to), 0, 3)
    assert run(Kernel.ACCUMULATE, pack_accumulate(descending(to, source)) + check) == (0, 0)
    assert np.array_equal(plain, to)
    for byte in (0, 4 * 4000, 4 * 5000, 4 * 10_000, to.nbytes - 1):
        flipped = to.copy()
        flipped.view(np.uint8)[byte] ^= 1
        check = pack_check(address(flipped), flipped.nbytes, BEFORE, table_crc(to), 0, 3)
        found = table_crc(flipped)
        assert run(Kernel.ACCUMULATE, pack_accumulate(descending(flipped, source)) + check) == (-errno.EBADMSG, 3 << 32 | found)


def test_segments_that_go_back_are_refused_where_a_checksum_is_wanted_afterwards() -> None:
    to, source = floats(20_000, 0), floats(20_000, 1)
    check = pack_check(address(to), to.nbytes, AFTER, 0, address(new_results()), 0)
    assert run(Kernel.ACCUMULATE, pack_accumulate(descending(to, source)) + check)[0] == -errno.EINVAL


@pytest.mark.parametrize("inside", [slice(0, -1), slice(1, None), slice(9000, 9001)])
def test_a_segment_that_leaves_its_page_is_refused(inside: slice) -> None:
    to, source = floats(20_000, 0), floats(20_000, 1)
    args = pack_accumulate([AccumulateSegment(address(to), address(source), 20_000, False, True)])
    page = to[inside]
    check = pack_check(address(page), page.nbytes, BEFORE, table_crc(page), 0, 0)
    assert run(Kernel.ACCUMULATE, args + check)[0] == -errno.EINVAL
