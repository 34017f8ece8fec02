"""infinity/tiers/frames.py and mapped.py: frames are lent to one borrower, and memory stays mapped while anything sees it."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

from infinity.errors import BudgetError
from infinity.tiers.frames import FramePool
from infinity.tiers.mapped import MappedMemory


@pytest.fixture
def frames() -> FramePool:
    return FramePool(5 * 8192, 8192)


def test_a_pool_has_as_many_frames_as_fit_whole() -> None:
    assert FramePool(5 * 4096 + 4095, 4096).n_frames == 5


def test_a_budget_below_one_frame_names_the_knob_and_the_bytes() -> None:
    with pytest.raises(BudgetError) as caught:
        FramePool(4095, 4096)
    assert (caught.value.knob, caught.value.needed_bytes, caught.value.given_bytes) == ("memory.host", 4096, 4095)


@pytest.mark.parametrize("frame_nbytes", [0, -4096, 1000, 6000])
def test_a_frame_must_be_aligned_for_direct_io(frame_nbytes: int) -> None:
    with pytest.raises(ValueError, match="multiple of 4096"):
        FramePool(1 << 20, frame_nbytes)


def test_frames_are_aligned_and_do_not_overlap(frames: FramePool) -> None:
    addresses = [frames.address(frame) for frame in range(frames.n_frames)]
    assert all(address % 4096 == 0 for address in addresses)
    assert all(after - before == frames.frame_nbytes for before, after in pairwise(addresses))


def test_every_frame_is_lent_once_and_then_none(frames: FramePool) -> None:
    assert {frames.lend() for _ in range(5)} == {0, 1, 2, 3, 4}
    assert frames.lend() is None
    assert frames.free == 0


def test_the_frame_given_back_last_is_lent_first(frames: FramePool) -> None:
    lent = [frames.lend() for _ in range(3)]
    assert lent[1] is not None
    frames.give_back(lent[1])
    assert frames.lend() == lent[1]


def test_giving_a_frame_back_twice_is_refused(frames: FramePool) -> None:
    frame = frames.lend()
    assert frame is not None
    frames.give_back(frame)
    with pytest.raises(ValueError, match="is not lent"):
        frames.give_back(frame)
    assert frames.free == 5


def test_memory_is_the_frame_at_its_address(frames: FramePool) -> None:
    memory = frames.memory(3, 100)
    memory[:] = np.arange(100, dtype=np.uint8)
    assert memory.ctypes.data == frames.address(3)
    assert bytes(frames.memory(3)[:100]) == bytes(range(100))


@pytest.mark.parametrize(("frame", "nbytes"), [(5, 1), (-1, 1), (0, 8193), (0, -1)])
def test_memory_outside_the_frames_is_refused(frames: FramePool, frame: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="there are 5 frames"):
        frames.memory(frame, nbytes)


def test_closed_frames_lend_nothing(frames: FramePool) -> None:
    frames.close()
    frames.close()
    assert frames.lend() is None
    with pytest.raises(ValueError, match="closed"):
        frames.memory(0)


def test_an_array_keeps_the_arena_mapped_after_close(frames: FramePool) -> None:
    memory = frames.memory(0)
    frames.close()
    memory[:] = 5
    assert memory.sum() == 5 * 8192


def test_the_arena_is_unmapped_by_close_when_nothing_sees_it(frames: FramePool) -> None:
    address = frames.base_address
    memory = frames.memory(0)
    del memory
    frames.close()
    with open("/proc/self/maps") as maps:
        assert not any(line.startswith(f"{address:x}-") for line in maps)


def test_mapped_memory_is_unmapped_once_with_the_last_array_over_it() -> None:
    backing = np.zeros(64, dtype=np.uint8)
    calls: list[str] = []
    memory = MappedMemory(backing.ctypes.data, 64, lambda: calls.append("unmap"))
    part = memory.array()[8:16]
    del memory
    part[:] = 1
    assert calls == []
    del part
    assert calls == ["unmap"]


def test_a_forked_child_unmaps_nothing() -> None:
    read, write = os.pipe()
    backing = np.zeros(64, dtype=np.uint8)
    memory = MappedMemory(backing.ctypes.data, 64, partial(os.write, write, b"unmapped"))
    child = os.fork()
    if child == 0:
        del memory
        os.write(write, b"child ")
        os._exit(0)
    os.waitpid(child, 0)
    del memory
    assert os.read(read, 100) == b"child unmapped"
    os.close(read)
    os.close(write)


def test_frames_do_not_import_torch() -> None:
    code = "import sys, infinity.tiers.frames; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
