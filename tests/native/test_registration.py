"""Files and memory that the ring knows in advance: the same bytes, nothing kept longer than it may be, and never an error."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infinity.native import ffi
from infinity.task_queue import Batch, FileOp, Files, TaskQueue
from tests.support.queues import URING_REASON, Memory, alias_range, finish, opened

pytestmark = pytest.mark.skipif(bool(URING_REASON), reason=URING_REASON or "-")

PAGE = 4096
GIB = 1 << 30


@pytest.fixture
def files() -> Files:
    return Files()


@pytest.fixture
def queue(files: Files) -> Iterator[TaskQueue]:
    queue = TaskQueue(files, backend="uring", queue_depth=4, block_nbytes=16 * PAGE)
    if queue.info()[0].notes:
        pytest.skip("; ".join(queue.info()[0].notes))
    yield queue
    queue.close()


def noise(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def registered(queue: TaskQueue) -> tuple[int, int]:
    info = queue.info()[0]
    return info.files_registered, info.memory_registered_nbytes


@pytest.mark.parametrize("with_file", [False, True])
@pytest.mark.parametrize(("begin", "nbytes"), [(0, 64 * PAGE), (3, 1000), (8 * PAGE, 48 * PAGE), (16 * PAGE, 1)])
def test_transfers_in_beside_and_across_registered_memory_are_right(
    queue: TaskQueue, files: Files, tmp_path: Path, with_file: bool, begin: int, nbytes: int
) -> None:
    """Pages 16 to 47 of 64 are registered."""
    source, target = Memory(64 * PAGE, noise(64 * PAGE)), Memory(64 * PAGE)
    for memory in (source, target):
        queue.add_memory(memory.address + 16 * PAGE, 32 * PAGE)
    with opened(files, tmp_path / "file", content=bytes(64 * PAGE)) as fd:
        if with_file:
            queue.add_file(fd)
        assert registered(queue) == (with_file, 64 * PAGE)
        batch = Batch()
        written = batch.write(fd, begin, nbytes, source.address + begin)
        batch.read(fd, begin, nbytes, target.address + begin, (batch.flush(fd, (written,)),))
        assert [c.status for c in finish(queue, queue.submit(batch), 3)] == [0, 0, 0]
    assert target.bytes() == bytes(begin) + source.bytes(begin, begin + nbytes) + bytes(64 * PAGE - begin - nbytes)
    for memory in (source, target):
        queue.drop_memory(memory.address + 16 * PAGE)
    assert registered(queue) == (0, 0)


def test_memory_is_registered_in_pieces_and_a_request_across_two_is_an_ordinary_one(files: Files, tmp_path: Path) -> None:
    nbytes = GIB + (4 << 20)
    base, close = alias_range(nbytes, 2 << 20, PAGE)
    with contextlib.closing(TaskQueue(files, backend="uring")) as queue, opened(files, tmp_path / "file", content=noise(1 << 20)) as fd:
        queue.add_memory(base, nbytes)
        if registered(queue)[1] < nbytes:
            pytest.skip("; ".join(queue.info()[0].notes))
        for address in (base, base + GIB - (1 << 19), base + GIB, base + nbytes - (1 << 20) - PAGE):
            batch = Batch()
            batch.read(fd, 0, 1 << 20, address)
            assert [c.status for c in finish(queue, queue.submit(batch), 1)] == [0]
            assert bytes(ffi.buffer(ffi.cast("char *", address), 1 << 20)) == noise(1 << 20)
        queue.drop_memory(base)
        assert registered(queue) == (0, 0)
        queue.add_memory(base, nbytes)  # its places are free again
        assert registered(queue) == (0, nbytes)
    close()


def test_dropped_memory_is_not_what_was_there_before(queue: TaskQueue, files: Files, tmp_path: Path) -> None:
    """Pages that stay registered would take the bytes in place of the memory that is at the address now."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    both, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    base = libc.mmap(None, 16 * PAGE, both, flags, -1, 0)
    queue.add_memory(base, 16 * PAGE)
    queue.drop_memory(base)
    fixed = 0x10
    assert libc.mmap(base, 16 * PAGE, both, flags | fixed, -1, 0) == base
    with opened(files, tmp_path / "file", content=noise(16 * PAGE)) as fd:
        batch = Batch()
        batch.read(fd, 0, 16 * PAGE, base)
        finish(queue, queue.submit(batch), 1)
    assert bytes(ffi.buffer(ffi.cast("char *", base), 16 * PAGE)) == noise(16 * PAGE)
    libc.munmap(ctypes.c_void_p(base), ctypes.c_size_t(16 * PAGE))


def reader_sees_the_end(end: int) -> bool:
    """Whether nobody has the other end of a pipe open, the kernel included."""
    try:
        return os.read(end, 1) == b""
    except BlockingIOError:
        return False


def nonblocking_pipe() -> tuple[int, int]:
    end, start = os.pipe()
    os.set_blocking(end, False)
    return end, start


def test_the_kernel_has_let_go_of_a_file_when_drop_returns(queue: TaskQueue) -> None:
    end, start = nonblocking_pipe()
    queue.add_file(start)
    assert registered(queue)[0] == 1
    os.close(start)
    assert not reader_sees_the_end(end)
    queue.drop_file(start)
    assert reader_sees_the_end(end)
    os.close(end)


def test_the_kernel_has_let_go_of_every_file_when_the_queue_is_closed(queue: TaskQueue) -> None:
    pipes = [nonblocking_pipe() for _ in range(20)]
    for _, start in pipes:
        queue.add_file(start)
        os.close(start)
    assert not any(reader_sees_the_end(end) for end, _ in pipes)
    queue.close()
    assert all(reader_sees_the_end(end) for end, _ in pipes)
    for end, _ in pipes:
        os.close(end)


def test_drop_waits_for_the_requests_that_use_the_file(queue: TaskQueue, files: Files) -> None:
    end, start = os.pipe()
    memory = Memory(1)
    queue.add_file(end)
    batch = Batch()
    batch.read(end, 0, 1, memory.address)
    first_id = queue.submit(batch)
    while files.count(FileOp.READ) < 1:
        time.sleep(0.001)
    dropping = threading.Thread(target=queue.drop_file, args=(end,))
    dropping.start()
    dropping.join(0.05)
    assert dropping.is_alive()
    os.write(start, b"x")
    dropping.join(30)
    assert not dropping.is_alive()
    queue.wait([first_id])
    os.close(end)
    os.close(start)


def test_files_come_and_go_while_transfers_run(queue: TaskQueue, files: Files, tmp_path: Path) -> None:
    memory = Memory(256 * PAGE)
    contents = [noise(256 * PAGE, seed) for seed in range(2)]
    with opened(files, tmp_path / "a", content=contents[0]) as a, opened(files, tmp_path / "b", content=contents[1]) as b:
        for turn in range(50):
            batch = Batch()
            batch.read(a, 0, memory.nbytes, memory.address)
            first_id = queue.submit(batch)
            if turn % 2:
                queue.add_memory(memory.address, memory.nbytes)
            queue.add_file(b)
            queue.drop_file(b)
            if turn % 3 == 0:
                queue.add_file(a)
            assert [c.status for c in finish(queue, first_id, 1)] == [0]
            assert memory.bytes() == contents[0]
            queue.drop_memory(memory.address)
            queue.drop_file(a)
    assert registered(queue) == (0, 0)


def test_a_descriptor_above_the_table_is_an_ordinary_one(queue: TaskQueue, files: Files, tmp_path: Path) -> None:
    number = 1024
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= number:
        pytest.skip(f"RLIMIT_NOFILE allows no descriptor {number}")
    memory = Memory(PAGE)
    with opened(files, tmp_path / "file", content=noise(PAGE)) as fd:
        os.dup2(fd, number)
        queue.add_file(number)
        assert registered(queue)[0] == 0
        batch = Batch()
        batch.read(number, 0, PAGE, memory.address)
        assert [c.status for c in finish(queue, queue.submit(batch), 1)] == [0]
        queue.drop_file(number)
        os.close(number)
    assert memory.bytes() == noise(PAGE)


def test_what_cannot_be_registered_is_left_and_nothing_is_said(
    queue: TaskQueue, files: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = Memory(PAGE)
    queue.add_memory(8, PAGE)
    queue.add_memory(memory.address, 0)
    queue.add_file(999)
    assert registered(queue) == (0, 0)
    assert len(queue.info()[0].notes) == 2
    assert caplog.records == []
    with opened(files, tmp_path / "file", content=noise(PAGE)) as fd:
        batch = Batch()
        batch.read(fd, 0, PAGE, memory.address)
        assert [c.status for c in finish(queue, queue.submit(batch), 1)] == [0]


def test_as_much_memory_is_registered_as_may_be_locked() -> None:
    done = in_child("""
from tests.support.limits import *
from tests.support.queues import *
try:
    forbid_locked_memory(64 << 10)
except Impossible:
    sys.exit(77)
queue = TaskQueue(Files(), backend="uring")
small, large = Memory(32 << 10), Memory(128 << 10)
queue.add_memory(small.address, small.nbytes)
queue.add_memory(large.address, large.nbytes)
info = queue.info()[0]
assert info.memory_registered_nbytes == small.nbytes, info
assert "RLIMIT_MEMLOCK" in info.notes[0], info
queue.close()
""")
    if done.returncode == 77:
        pytest.skip("the capability to lock memory cannot be given up here")
    assert (done.returncode, done.stderr) == (0, "")


def in_child(code: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    return subprocess.run([sys.executable, "-c", "import sys" + code], capture_output=True, text=True, timeout=60, check=False, cwd=root)
