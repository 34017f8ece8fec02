"""native/memory.cpp through the ABI: what a pool and its ranges promise, and that the kernel's mappings do not pile up."""

from __future__ import annotations

import ctypes
import errno
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest

from infinity.native import ffi, lib

GRAIN = 2 << 20


class Pool:
    """A pool of so many grains; closes what it opened."""

    def __init__(self, grains: int) -> None:
        out = ffi.new("inf_pool **")
        assert lib.inf_pool_open(grains * GRAIN, out) == 0
        self.pool = out[0]
        self.bases: list[int] = []

    def open(self, grains: int) -> int:
        out = ffi.new("void **")
        assert lib.inf_range_open(self.pool, grains * GRAIN, out) == 0
        base = int(ffi.cast("uintptr_t", out[0]))
        self.bases.append(base)
        return base

    def fill(self, base: int) -> int:
        return int(lib.inf_range_fill(self.pool, ffi.cast("void *", base)))

    def drain(self, base: int) -> int:
        return int(lib.inf_range_drain(self.pool, ffi.cast("void *", base)))

    def close_range(self, base: int) -> int:
        self.bases.remove(base)
        return int(lib.inf_range_close(self.pool, ffi.cast("void *", base)))

    @property
    def free_grains(self) -> int:
        return int(lib.inf_pool_free_nbytes(self.pool)) // GRAIN

    @property
    def warm_grains(self) -> int:
        return int(lib.inf_pool_warm_nbytes(self.pool)) // GRAIN

    def trim(self, grains: int) -> int:
        return int(lib.inf_pool_trim(self.pool, grains * GRAIN))


@pytest.fixture
def pool() -> Iterator[Pool]:
    opened = Pool(8)
    yield opened
    for base in list(opened.bases):
        opened.close_range(base)
    lib.inf_pool_close(opened.pool)


def put(base: int, value: int, grains: int = 1) -> None:
    """One byte in each grain."""
    for grain in range(grains):
        ctypes.memset(base + grain * GRAIN + 5, value, 1)


def get(base: int, grain: int = 0) -> int:
    return ctypes.string_at(base + grain * GRAIN + 5, 1)[0]


def flags(address: int) -> set[str]:
    """VmFlags of the mapping that holds the address."""
    found = False
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            first = line.split(maxsplit=1)[0]
            if "-" in first and not first.endswith(":"):
                begin, end = (int(part, 16) for part in first.split("-"))
                found = begin <= address < end
            elif found and first == "VmFlags:":
                return set(line.split()[1:])
    return set()


def mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum(1 for _ in maps)


def ends_with_segv(code: str) -> bool:
    return subprocess.run([sys.executable, "-c", code], check=False, stderr=subprocess.DEVNULL).returncode == -11


PRELUDE = f"""
import ctypes
from infinity.native import ffi, lib
pool = ffi.new("inf_pool **"); lib.inf_pool_open(4 * {GRAIN}, pool); pool = pool[0]
base = ffi.new("void **"); lib.inf_range_open(pool, {GRAIN}, base); base = base[0]
address = int(ffi.cast("uintptr_t", base))
"""


def test_an_arena_is_aligned_writable_and_not_inherited() -> None:
    out = ffi.new("void **")
    assert lib.inf_arena_open(3 << 20, 0, out) == 0
    base = int(ffi.cast("uintptr_t", out[0]))
    assert base % GRAIN == 0
    ctypes.memset(base, 7, 3 << 20)
    assert "dc" in flags(base)
    assert lib.inf_arena_close(out[0], 3 << 20) == 0


def test_an_arena_above_the_lock_limit_is_refused_and_leaves_nothing() -> None:
    code = """
import errno, resource
from infinity.native import ffi, lib
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
before = sum(1 for _ in open("/proc/self/maps"))
out = ffi.new("void **")
code = lib.inf_arena_open(64 << 20, 1, out)
after = sum(1 for _ in open("/proc/self/maps"))
privileged = code == 0
raise SystemExit(0 if privileged or (code in (-errno.ENOMEM, -errno.EPERM) and after <= before) else 1)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_pool_must_be_whole_grains() -> None:
    out = ffi.new("inf_pool **")
    assert lib.inf_pool_open(GRAIN + 4096, out) == -errno.EINVAL
    assert lib.inf_pool_open(0, out) == -errno.EINVAL


def test_a_range_must_be_whole_grains(pool: Pool) -> None:
    out = ffi.new("void **")
    assert lib.inf_range_open(pool.pool, 4096, out) == -errno.EINVAL


def test_a_filled_range_can_be_written_and_read(pool: Pool) -> None:
    base = pool.open(3)
    assert pool.fill(base) == 0
    ctypes.memset(base, 9, 3 * GRAIN)
    assert ctypes.string_at(base, 3 * GRAIN) == bytes([9]) * (3 * GRAIN)


def test_fill_takes_from_the_pool_and_drain_gives_back(pool: Pool) -> None:
    base = pool.open(3)
    assert pool.free_grains == 8
    pool.fill(base)
    assert pool.free_grains == 5
    pool.drain(base)
    assert pool.free_grains == 8


def test_a_fill_above_what_is_left_is_refused_and_changes_nothing(pool: Pool) -> None:
    first, second = pool.open(5), pool.open(4)
    assert pool.fill(first) == 0
    assert pool.fill(second) == -errno.ENOMEM
    assert pool.free_grains == 3
    pool.drain(first)
    assert pool.fill(second) == 0


def test_filling_or_draining_twice_is_refused(pool: Pool) -> None:
    base = pool.open(1)
    assert pool.drain(base) == -errno.EALREADY
    pool.fill(base)
    assert pool.fill(base) == -errno.EALREADY


def test_an_unknown_range_is_refused(pool: Pool) -> None:
    assert pool.fill(12345) == -errno.EINVAL
    assert pool.drain(12345) == -errno.EINVAL


def test_the_same_pages_move_from_range_to_range(pool: Pool) -> None:
    first, second = pool.open(8), pool.open(8)
    pool.fill(first)
    put(first, 42, 8)
    pool.drain(first)
    pool.fill(second)
    assert [get(second, grain) for grain in range(8)] == [42] * 8


def test_a_range_never_filled_faults_on_touch() -> None:
    assert ends_with_segv(PRELUDE + "ctypes.string_at(address, 1)")


def test_a_drained_range_faults_on_touch() -> None:
    fill_and_drain = "lib.inf_range_fill(pool, base); ctypes.memset(address, 1, 10); lib.inf_range_drain(pool, base)\n"
    assert ends_with_segv(PRELUDE + fill_and_drain + "ctypes.string_at(address, 1)")
    assert not ends_with_segv(PRELUDE + fill_and_drain + "lib.inf_range_fill(pool, base); ctypes.string_at(address, 1)")


def test_a_range_is_filled_from_several_extents_when_no_single_one_is_large_enough(pool: Pool) -> None:
    ones = [pool.open(1) for _ in range(8)]
    for base in ones:
        pool.fill(base)
    for base in ones[::2]:
        pool.drain(base)
    whole = pool.open(4)
    assert pool.fill(whole) == 0
    put(whole, 3, 4)
    assert [get(whole, grain) for grain in range(4)] == [3] * 4
    for base in ones[1::2]:
        put(base, 4)
    assert [get(whole, grain) for grain in range(4)] == [3] * 4


def test_extents_that_came_home_are_moved_together_again(pool: Pool) -> None:
    ones = [pool.open(1) for _ in range(8)]
    for value, base in enumerate(ones):
        pool.fill(base)
        put(base, value)
    for base in ones:
        pool.drain(base)
    whole = pool.open(8)
    before = mappings()
    pool.fill(whole)
    assert mappings() <= before + 2
    assert sorted(get(whole, grain) for grain in range(8)) == list(range(8))


def test_random_fills_and_drains_keep_every_range_its_own_bytes() -> None:
    rng = random.Random(5)
    pool = Pool(32)
    ranges = [(pool.open(grains), grains) for grains in rng.choices([1, 2, 3, 5, 7, 11], k=20)]
    filled: dict[int, tuple[int, int]] = {}
    before = mappings()
    for step in range(2000):
        base, grains = rng.choice(ranges)
        if base in filled:
            value, count = filled.pop(base)
            assert [get(base, grain) for grain in range(count)] == [value] * count
            assert pool.drain(base) == 0
        elif grains <= pool.free_grains:
            assert pool.fill(base) == 0
            filled[base] = (step % 251, grains)
            put(base, step % 251, grains)
    for base in filled:
        assert pool.drain(base) == 0
    assert pool.free_grains == 32
    assert mappings() <= before + 4
    for base, _ in ranges:
        assert pool.close_range(base) == 0
    lib.inf_pool_close(pool.pool)


def test_memory_is_not_inherited_by_a_fork_whatever_moved(pool: Pool) -> None:
    base, other = pool.open(2), pool.open(1)
    assert "dc" in flags(base)
    pool.fill(base)
    assert "dc" in flags(base)
    assert "dc" in flags(base + GRAIN)
    pool.drain(base)
    assert "dc" in flags(base)
    pool.fill(other)
    assert "dc" in flags(other)


def test_closing_a_filled_range_gives_its_memory_back(pool: Pool) -> None:
    base = pool.open(8)
    pool.fill(base)
    assert pool.close_range(base) == 0
    assert pool.free_grains == 8
    assert flags(base) == set()


def test_a_range_outlives_its_pool() -> None:
    pool = Pool(4)
    base = pool.open(2)
    pool.fill(base)
    put(base, 6, 2)
    lib.inf_pool_close(pool.pool)
    assert get(base, 1) == 6
    assert pool.drain(base) == 0
    assert pool.fill(base) == -errno.EBADF
    assert pool.close_range(base) == 0


def test_warm_memory_is_what_was_used_at_most(pool: Pool) -> None:
    base = pool.open(5)
    pool.fill(base)
    pool.drain(base)
    assert pool.warm_grains == 5


def test_trim_gives_free_memory_back_and_leaves_what_is_used(pool: Pool) -> None:
    kept, left = pool.open(3), pool.open(4)
    pool.fill(kept)
    put(kept, 8, 3)
    pool.fill(left)
    put(left, 9, 4)
    pool.drain(left)
    assert pool.trim(5) == 0
    assert pool.warm_grains == 5
    assert pool.trim(0) == 0
    assert pool.warm_grains == 3
    assert [get(kept, grain) for grain in range(3)] == [8] * 3
    pool.fill(left)
    assert [get(left, grain) for grain in range(4)] == [0] * 4


# Makes every mremap of the process fail with EINVAL, as a kernel before 5.7 does with MREMAP_DONTUNMAP.
FORBID_MREMAP = f"""
import ctypes, os, platform, struct
number = {{"x86_64": 25, "aarch64": 216}}[platform.machine()]
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | {errno.EINVAL}), (0x06, 0, 0, 0x7FFF0000)]
program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(program)))
prctl = ctypes.CDLL(None, use_errno=True).prctl
prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
if prctl(38, 1, 0, 0, 0) or prctl(22, 2, ctypes.addressof(header), 0, 0):
    raise SystemExit(77)
"""


def run_without_mremap(code: str) -> int:
    done = subprocess.run([sys.executable, "-c", FORBID_MREMAP + PRELUDE + code], check=False, stderr=subprocess.DEVNULL)
    if done.returncode == 77:
        pytest.skip("this system does not let a process install a seccomp filter, so mremap cannot be made to fail")
    return done.returncode


def test_where_memory_cannot_be_moved_a_range_gets_pages_of_its_own() -> None:
    code = f"""
for value in range(3):
    ok = lib.inf_range_fill(pool, base) == 0 and lib.inf_pool_free_nbytes(pool) == 3 * {GRAIN}
    ok = ok and ctypes.string_at(address, {GRAIN}) == bytes({GRAIN}) and lib.inf_pool_warm_nbytes(pool) == {GRAIN}
    ctypes.memset(address, value + 1, {GRAIN})
    ok = ok and lib.inf_range_drain(pool, base) == 0 and lib.inf_pool_free_nbytes(pool) == 4 * {GRAIN}
    if not ok or lib.inf_pool_warm_nbytes(pool) != 0:
        raise SystemExit(1)
"""
    assert run_without_mremap(code) == 0


def test_where_memory_cannot_be_moved_a_drained_range_faults_on_touch_too() -> None:
    code = "lib.inf_range_fill(pool, base); ctypes.memset(address, 1, 10); lib.inf_range_drain(pool, base); ctypes.string_at(address, 1)"
    assert run_without_mremap(code) == -11
