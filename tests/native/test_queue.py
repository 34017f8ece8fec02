"""native/queue through task_queue.py: every backend against what pread, pwrite and a run in order would give."""

from __future__ import annotations

import errno
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infinity.native import ffi, lib
from infinity.task_queue import Batch, FileOp, Files, TaskQueue
from tests.support.queues import (
    BACKENDS,
    COPY,
    SLEEP,
    URING_REASON,
    Memory,
    alias_range,
    copy_args,
    finish,
    native_threads,
    opened,
    sleep_args,
)

OpenQueue = Callable[..., TaskQueue]


@pytest.fixture
def files() -> Files:
    return Files()


@pytest.fixture(params=BACKENDS)
def open_queue(request: pytest.FixtureRequest, files: Files) -> Iterator[OpenQueue]:
    """Opens queues of one backend over ``files`` and closes them."""
    queues: list[TaskQueue] = []

    def open_one(**arguments: Any) -> TaskQueue:
        queue = TaskQueue(files, backend=request.param, **arguments)
        assert queue.backend == request.param
        queues.append(queue)
        return queue

    yield open_one
    for queue in queues:
        queue.close()


def noise(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


# ---- transfers ----


@pytest.mark.parametrize("block_nbytes", [1 << 20, 4096, 1000, 7])
@pytest.mark.parametrize(("offset", "nbytes"), [(0, 1), (0, 4096), (1, 4095), (4097, 12289), (3, 7)])
def test_what_was_written_is_in_the_file_and_is_read_back(
    open_queue: OpenQueue, files: Files, tmp_path: Path, block_nbytes: int, offset: int, nbytes: int
) -> None:
    queue = open_queue(block_nbytes=block_nbytes)
    content = noise(nbytes)
    source, target = Memory(nbytes, content), Memory(nbytes)
    with opened(files, tmp_path / "file", content=b"\xaa" * 20000) as fd:
        batch = Batch()
        written = batch.write(fd, offset, nbytes, source.address)
        batch.read(fd, offset, nbytes, target.address, (written,))
        assert [(c.status, c.value) for c in finish(queue, queue.submit(batch), 2)] == [(0, nbytes), (0, nbytes)]
    assert target.bytes() == content
    assert (tmp_path / "file").read_bytes() == b"\xaa" * offset + content + b"\xaa" * (20000 - offset - nbytes)


def test_a_long_transfer_is_split_into_requests_of_block_nbytes(open_queue: OpenQueue, files: Files, tmp_path: Path) -> None:
    queue = open_queue(block_nbytes=4096)
    memory = Memory(10 * 4096 + 1)
    with opened(files, tmp_path / "file", content=noise(memory.nbytes)) as fd:
        batch = Batch()
        batch.read(fd, 0, memory.nbytes, memory.address)
        finish(queue, queue.submit(batch), 1)
    assert files.count(FileOp.READ) == 11
    assert memory.bytes() == noise(memory.nbytes)


def test_more_bytes_than_two_gib_are_moved_by_one_task(open_queue: OpenQueue, files: Files, tmp_path: Path) -> None:
    """Over a hole, into memory that is the same two MiB again and again but for its last page."""
    nbytes = (2 << 30) + (64 << 20)
    page, piece = 4096, 2 << 20
    base, close = alias_range(nbytes, piece, page)
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(nbytes - page)
        file.seek(nbytes - page)
        file.write(noise(page))
    try:
        direct = os.O_DIRECT
        try:
            os.close(os.open(path, os.O_RDWR | direct))
        except OSError:
            direct = 0
        queue = open_queue(block_nbytes=1 << 40)
        with opened(files, path, flags=direct) as fd:
            batch = Batch()
            batch.read(fd, 0, nbytes, base)
            completion = finish(queue, queue.submit(batch), 1)[0]
        assert (completion.status, completion.value) == (0, nbytes)
        assert bytes(ffi.buffer(ffi.cast("char *", base + nbytes - page), page)) == noise(page)
    finally:
        close()


def test_reading_behind_the_end_of_the_file_is_enodata(open_queue: OpenQueue, files: Files, tmp_path: Path) -> None:
    queue = open_queue()
    memory = Memory(4096)
    with opened(files, tmp_path / "file", content=noise(100)) as fd:
        batch = Batch()
        batch.read(fd, 0, 4096, memory.address)
        batch.read(fd, 100, 1, memory.address)
        batch.read(fd, 0, 100, memory.address)
        completions = finish(queue, queue.submit(batch), 3)
    assert [c.status for c in completions] == [-errno.ENODATA, -errno.ENODATA, 0]
    assert memory.bytes(0, 100) == noise(100)


def test_a_transfer_of_no_bytes_succeeds_without_a_request(open_queue: OpenQueue, files: Files) -> None:
    queue = open_queue()
    batch = Batch()
    handle = batch.read(-1, 0, 0, 0)
    batch.write(-1, 0, 0, 0, (handle,))
    assert [c.status for c in finish(queue, queue.submit(batch), 2)] == [0, 0]
    assert files.count(FileOp.READ) == files.count(FileOp.WRITE) == 0


def test_a_bad_descriptor_is_the_status_of_each_kind_of_task(open_queue: OpenQueue) -> None:
    queue = open_queue()
    memory = Memory(64)
    batch = Batch()
    batch.read(-1, 0, 64, memory.address)
    batch.write(-1, 0, 64, memory.address)
    batch.flush(-1)
    assert [c.status for c in finish(queue, queue.submit(batch), 3)] == [-errno.EBADF] * 3


def test_bad_memory_is_efault_and_the_process_lives(open_queue: OpenQueue, files: Files, tmp_path: Path) -> None:
    queue = open_queue()
    with opened(files, tmp_path / "file", content=noise(64)) as fd:
        batch = Batch()
        batch.read(fd, 0, 64, 8)
        batch.write(fd, 0, 64, 8)
        assert [c.status for c in finish(queue, queue.submit(batch), 2)] == [-errno.EFAULT] * 2


def test_direct_reads_and_writes_are_whole(open_queue: OpenQueue, files: Files, tmp_path: Path) -> None:
    nbytes = 64 * 4096
    queue = open_queue(block_nbytes=3 * 4096)
    source, target = Memory(nbytes, noise(nbytes)), Memory(nbytes)
    try:
        fd = files.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError as error:
        pytest.skip(f"no O_DIRECT on {tmp_path}: {error}")
    files.fallocate(fd, 0, nbytes)
    batch = Batch()
    written = batch.write(fd, 0, nbytes, source.address)
    batch.read(fd, 0, nbytes, target.address, (batch.flush(fd, (written,)),))
    assert [c.status for c in finish(queue, queue.submit(batch), 3)] == [0, 0, 0]
    files.close(fd)
    assert target.bytes() == noise(nbytes)


def test_a_direct_read_of_a_file_that_ends_inside_a_block_is_enodata(open_queue: OpenQueue, files: Files, tmp_path: Path) -> None:
    queue = open_queue()
    memory = Memory(8192)
    (tmp_path / "file").write_bytes(noise(5000))
    try:
        fd = files.open(tmp_path / "file", os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        pytest.skip(f"no O_DIRECT on {tmp_path}: {error}")
    batch = Batch()
    batch.read(fd, 0, 8192, memory.address)
    completion = finish(queue, queue.submit(batch), 1)[0]
    files.close(fd)
    assert completion.status == -errno.ENODATA
    assert memory.bytes(0, 5000) == noise(5000)


def test_a_split_task_fails_once_with_its_first_error(open_queue: OpenQueue, files: Files, tmp_path: Path) -> None:
    queue = open_queue(block_nbytes=512, queue_depth=4)
    memory = Memory(100 * 512)
    with opened(files, tmp_path / "file", content=noise(10 * 512)) as fd:
        batch = Batch()
        batch.read(fd, 0, memory.nbytes, memory.address)
        batch.read(fd, 0, 512, memory.address)
        completions = finish(queue, queue.submit(batch), 2)
    assert [c.status for c in completions] == [-errno.ENODATA, 0]
    assert files.count(FileOp.READ) < 100


@pytest.mark.skipif(bool(URING_REASON), reason=URING_REASON or "-")
def test_uring_has_at_most_depth_requests_in_flight(files: Files) -> None:
    """Reads of an empty pipe stay at the backend; what waits behind them is not counted as issued."""
    queue = TaskQueue(files, backend="uring", queue_depth=2)
    end, start = os.pipe()
    memory = Memory(5)
    batch = Batch()
    for i in range(5):
        batch.read(end, 0, 1, memory.address + i)
    first_id = queue.submit(batch)
    while files.count(FileOp.READ) < 2:
        time.sleep(0.001)
    batch.kernel(SLEEP, sleep_args(1000))
    kernel_id = queue.submit(batch)
    queue.wait([kernel_id])
    assert files.count(FileOp.READ) == 2
    os.write(start, b"abcde")
    queue.wait(range(first_id, first_id + 5))
    assert sorted(memory.bytes()) == sorted(b"abcde")
    queue.close()
    os.close(end)
    os.close(start)


@pytest.mark.parametrize(("depth", "io_threads", "expected"), [(2, 4, 2), (32, 3, 3)])
def test_the_threads_backend_has_at_most_depth_threads(files: Files, depth: int, io_threads: int, expected: int) -> None:
    before = native_threads()
    queue = TaskQueue(files, backend="threads", queue_depth=depth, io_threads=io_threads, workers=2)
    names = [(task / "comm").read_text().strip() for task in native_threads() - before]
    assert names.count("infinity-io") == expected
    assert names.count("infinity-kernel") == 2
    queue.close()


# ---- paths ----


@pytest.mark.skipif(bool(URING_REASON), reason=URING_REASON or "-")
def test_a_path_that_stands_still_holds_no_other_up(files: Files, tmp_path: Path) -> None:
    """Reads of an empty pipe, which only this backend takes, fill path 0."""
    queue = TaskQueue(files, backend="uring", n_paths=2, queue_depth=2)
    end, start = os.pipe()
    memory = Memory(64)
    batch = Batch()
    for i in range(5):
        batch.read(end, 0, 1, memory.address + i)
    first_id = queue.submit(batch)
    with opened(files, tmp_path / "file", content=noise(64)) as fd:
        queue.add_file(fd, 1)
        batch.read(fd, 0, 64, memory.address)
        other_id = queue.submit(batch)
        queue.wait([other_id], timeout_s=30)
        assert queue.stats().in_flight == 5
        queue.drop_file(fd)
    os.write(start, b"abcde")
    queue.wait(range(first_id, first_id + 5))
    queue.close()
    os.close(end)
    os.close(start)


# ---- kernels ----


def test_a_kernel_answers_its_value_and_its_status(open_queue: OpenQueue) -> None:
    queue = open_queue()
    batch = Batch()
    batch.kernel(SLEEP, sleep_args(value=17))
    batch.kernel(SLEEP, sleep_args(status=-errno.EIO))
    batch.kernel(int(lib.INF_KERNELS), b"")
    good, failed, unknown = finish(queue, queue.submit(batch), 3)
    assert (good.status, good.value) == (0, 17)
    assert failed.status == -errno.EIO
    assert unknown.status == -errno.EINVAL


def test_arguments_of_kernels_are_copied_at_submit(open_queue: OpenQueue) -> None:
    queue = open_queue()
    batch = Batch()
    held = batch.kernel(SLEEP, sleep_args(20_000))
    for value in range(200):
        batch.kernel(SLEEP, sleep_args(value=value), (held,))
    first_id = queue.submit(batch)
    for _ in range(201):
        batch.kernel(SLEEP, sleep_args(value=999))
    other_id = queue.submit(batch)
    queue.wait(range(first_id, other_id + 201))
    assert [c.value for c in sorted(queue.poll())[1:201]] == list(range(200))


# ---- dependencies ----


def test_a_chain_through_file_and_kernels_runs_in_order(open_queue: OpenQueue, files: Files, tmp_path: Path) -> None:
    """A value walks through memory and file; any task out of order would carry an older one on."""
    queue = open_queue(workers=2)
    steps = 200
    memory = Memory(8 * (steps + 1), noise(8))
    with opened(files, tmp_path / "file", content=bytes(8 * steps)) as fd:
        batch = Batch()
        last: tuple[int, ...] = ()
        for i in range(steps):
            here, there = memory.address + 8 * i, memory.address + 8 * (i + 1)
            if i % 2:
                last = (batch.kernel(COPY, copy_args(there, here, 8), last),)
            else:
                last = (batch.write(fd, 8 * i, 8, here, last),)
                last = (batch.read(fd, 8 * i, 8, there, last),)
        n = len(batch)
        completions = finish(queue, queue.submit(batch), n)
    assert all(c.status == 0 for c in completions)
    assert memory.bytes() == noise(8) * (steps + 1)


def test_a_task_may_depend_on_ids_of_earlier_batches_complete_or_not(open_queue: OpenQueue, files: Files, tmp_path: Path) -> None:
    queue = open_queue()
    source, target = Memory(64, noise(64)), Memory(64)
    with opened(files, tmp_path / "file", content=b"") as fd:
        batch = Batch()
        slow = batch.kernel(SLEEP, sleep_args(20_000))
        batch.write(fd, 0, 64, source.address, (slow,))
        first_id = queue.submit(batch)
        batch.read(fd, 0, 64, target.address, (first_id + 1,))
        read_id = queue.submit(batch)
        queue.wait([read_id])
        batch.kernel(SLEEP, sleep_args(), (first_id, first_id + 1, read_id))
        finish_id = queue.submit(batch)
        queue.wait([finish_id])
    assert all(c.status == 0 for c in queue.poll())
    assert target.bytes() == noise(64)


def test_what_depends_on_a_failed_task_is_cancelled_to_the_end_of_the_chain(open_queue: OpenQueue, files: Files, tmp_path: Path) -> None:
    queue = open_queue()
    memory = Memory(8, b"x" * 8)
    with opened(files, tmp_path / "file", content=bytes(8)) as fd:
        batch = Batch()
        bad = batch.kernel(SLEEP, sleep_args(status=-errno.EIO))
        written = batch.write(fd, 0, 8, memory.address, (bad,))
        flushed = batch.flush(fd, (written,))
        batch.kernel(SLEEP, sleep_args(), (flushed,))
        batch.kernel(SLEEP, sleep_args(value=1))
        completions = finish(queue, queue.submit(batch), 5)
    assert [c.status for c in completions] == [-errno.EIO, -errno.ECANCELED, -errno.ECANCELED, -errno.ECANCELED, 0]
    assert (tmp_path / "file").read_bytes() == bytes(8)


def test_a_chain_of_a_hundred_thousand_is_cancelled(open_queue: OpenQueue) -> None:
    queue = open_queue()
    batch = Batch()
    last = batch.kernel(SLEEP, sleep_args(status=-errno.EIO))
    for _ in range(100_000):
        last = batch.flush(-1, (last,))
    completions = finish(queue, queue.submit(batch), 100_001)
    assert {c.status for c in completions[1:]} == {-errno.ECANCELED}


def test_a_task_submitted_later_is_cancelled_too(open_queue: OpenQueue) -> None:
    queue = open_queue()
    batch = Batch()
    for i in range(1000):
        batch.kernel(SLEEP, sleep_args(status=-errno.EIO if i % 3 == 0 else 0))
    first_id = queue.submit(batch)
    finish(queue, first_id, 1000)
    for i in range(1000):
        batch.kernel(SLEEP, sleep_args(), (first_id + i,))
    second_id = queue.submit(batch)
    completions = finish(queue, second_id, 1000)
    assert [c.status for c in completions] == [-errno.ECANCELED if i % 3 == 0 else 0 for i in range(1000)]


def test_a_cancelled_task_completes_only_after_everything_it_depends_on(open_queue: OpenQueue) -> None:
    queue = open_queue(workers=2)
    batch = Batch()
    slow = batch.kernel(SLEEP, sleep_args(50_000))
    bad = batch.kernel(SLEEP, sleep_args(status=-errno.EIO))
    batch.flush(-1, (slow, bad))
    first_id = queue.submit(batch)
    queue.wait([first_id + 2])
    order = [c.id for c in queue.poll()]
    assert order.index(first_id) < order.index(first_id + 2)


def test_one_task_may_name_a_dependency_twice(open_queue: OpenQueue) -> None:
    queue = open_queue()
    batch = Batch()
    handle = batch.kernel(SLEEP, sleep_args(1000))
    batch.kernel(SLEEP, sleep_args(value=3), (handle, handle))
    assert finish(queue, queue.submit(batch), 2)[1].value == 3


def test_many_wait_for_one_and_one_for_many(open_queue: OpenQueue) -> None:
    queue = open_queue(workers=3)
    batch = Batch()
    root = batch.kernel(SLEEP, sleep_args(1000))
    middle = [batch.kernel(SLEEP, sleep_args(), (root,)) for _ in range(500)]
    batch.kernel(SLEEP, sleep_args(), middle)
    first_id = queue.submit(batch)
    queue.wait([first_id + 501])
    order = [c.id for c in queue.poll()]
    assert order[0] == first_id
    assert order[-1] == first_id + 501
    assert sorted(order) == list(range(first_id, first_id + 502))


@pytest.mark.parametrize("after", [(0,), (-1,), (-2,), (10**6,)])
def test_a_dependency_that_is_not_an_earlier_task_is_refused(open_queue: OpenQueue, after: tuple[int, ...]) -> None:
    queue = open_queue()
    batch = Batch()
    batch.kernel(SLEEP, sleep_args(), after)
    with pytest.raises(OSError, match="submit") as info:
        queue.submit(batch)
    assert info.value.errno == errno.EINVAL


def test_a_batch_with_one_bad_task_is_refused_whole(open_queue: OpenQueue, files: Files) -> None:
    queue = open_queue()
    batch = Batch()
    batch.kernel(SLEEP, sleep_args())
    batch.read(0, (1 << 63) - 1, 2, 0)
    with pytest.raises(OSError, match="submit"):
        queue.submit(batch)
    assert len(batch) == 2
    batch.clear()
    batch.kernel(SLEEP, sleep_args())
    assert queue.submit(batch) == 1
    queue.wait([1])
    assert len(queue.poll()) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"op": 9},
        {"op": -1},
        {"args_offset": 4},
        {"args_offset": 1 << 40},
        {"args_nbytes": 1 << 20},
        {"after_begin": 5},
        {"after_count": 5},
        {"op": 0, "nbytes": 1 << 63},
    ],
)
def test_a_malformed_task_is_einval(open_queue: OpenQueue, change: dict[str, int]) -> None:
    queue = open_queue()
    task = ffi.new("inf_task *", {"op": lib.INF_KERNEL, "kernel": SLEEP, "args_nbytes": 16})
    for name, value in change.items():
        setattr(task, name, value)
    first_id = ffi.new("uint64_t *")
    args = ffi.new("uint8_t[16]")
    code = lib.inf_queue_submit(queue._handle, task, 1, ffi.new("int64_t[1]"), 1, args, 16, first_id)
    assert code == -errno.EINVAL
    assert queue.stats().in_flight == 0


# ---- completions ----


def test_every_completion_is_given_once(open_queue: OpenQueue) -> None:
    queue = open_queue(workers=2)
    taken = []
    for _ in range(20):
        batch = Batch()
        for _ in range(500):
            batch.kernel(SLEEP, sleep_args())
        queue.submit(batch)
        taken += queue.poll()
    queue.wait(range(1, 10_001))
    taken += queue.poll()
    assert sorted(c.id for c in taken) == list(range(1, 10_001))
    assert queue.poll() == []


def test_counters_say_what_finished(open_queue: OpenQueue, files: Files, tmp_path: Path) -> None:
    queue = open_queue(block_nbytes=100)
    memory = Memory(1000)
    with opened(files, tmp_path / "file", content=b"") as fd:
        batch = Batch()
        written = batch.write(fd, 0, 1000, memory.address)
        batch.read(fd, 0, 500, memory.address, (batch.flush(fd, (written,)),))
        batch.kernel(SLEEP, sleep_args())
        finish(queue, queue.submit(batch), 4)
    stats = queue.stats()
    assert (stats.write_nbytes, stats.read_nbytes) == (1000, 500)
    assert (stats.reads, stats.writes, stats.flushes, stats.kernels) == (1, 1, 1, 1)
    assert (stats.in_flight, stats.shorts, stats.retries) == (0, 0, 0)
    assert stats.io_busy_s > 0


def test_waiting_for_an_id_never_given_is_einval(open_queue: OpenQueue) -> None:
    queue = open_queue()
    for bad in (0, 1):
        with pytest.raises(OSError, match="wait") as info:
            queue.wait([bad])
        assert info.value.errno == errno.EINVAL


def test_a_counter_kept_by_files_counts_requests(open_queue: OpenQueue, files: Files, tmp_path: Path) -> None:
    queue = open_queue()
    memory = Memory(10)
    with opened(files, tmp_path / "file", content=b"") as fd:
        batch = Batch()
        batch.flush(fd, (batch.write(fd, 0, 10, memory.address),))
        finish(queue, queue.submit(batch), 2)
    assert (files.count(FileOp.WRITE), files.count(FileOp.DATASYNC)) == (1, 1)


# ---- threads, descriptors, processes ----


def blocked_signals(task: Path) -> int:
    status = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
    return int(status["SigBlk"], 16)


def blocks(mask: int, name: signal.Signals) -> bool:
    return bool(mask >> (name - 1) & 1)


def test_queue_threads_take_no_signals_but_their_own_faults(open_queue: OpenQueue) -> None:
    before = native_threads()
    open_queue()
    threads = native_threads() - before
    assert threads
    for task in threads:
        while blocks(blocked_signals(task), signal.SIGSEGV):  # libc starts a thread with everything blocked
            time.sleep(0.001)
        mask = blocked_signals(task)
        for name in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD, signal.SIGUSR1):
            assert blocks(mask, name), name


def switches(threads: set[Path]) -> dict[Path, list[str]]:
    return {task: [line for line in (task / "status").read_text().splitlines() if "ctxt_switches" in line] for task in threads}


def test_an_idle_queue_does_not_run(open_queue: OpenQueue) -> None:
    others = native_threads()
    queue = open_queue(workers=2)
    batch = Batch()
    batch.kernel(SLEEP, sleep_args())
    finish(queue, queue.submit(batch), 1)
    threads = native_threads() - others
    time.sleep(0.05)
    before = switches(threads)
    time.sleep(0.1)
    assert switches(threads) == before


def test_close_waits_for_what_is_in_flight(open_queue: OpenQueue, files: Files, tmp_path: Path) -> None:
    queue = open_queue()
    memory = Memory(64, noise(64))
    with opened(files, tmp_path / "file", content=b"") as fd:
        batch = Batch()
        batch.write(fd, 0, 64, memory.address, (batch.kernel(SLEEP, sleep_args(20_000)),))
        queue.submit(batch)
        queue.close()
    assert (tmp_path / "file").read_bytes() == noise(64)


def test_close_leaves_no_thread_and_no_descriptor(open_queue: OpenQueue) -> None:
    before, descriptors = native_threads(), sorted(os.listdir("/proc/self/fd"))
    queue = open_queue(workers=3)
    threads = native_threads() - before
    assert threads
    queue.close()
    assert not threads & native_threads()
    assert sorted(os.listdir("/proc/self/fd")) == descriptors


def test_a_queue_dropped_without_close_is_closed(files: Files) -> None:
    before = native_threads()
    queue = TaskQueue(files, backend="threads")
    threads = native_threads() - before
    assert threads
    del queue
    assert not threads & native_threads()


def test_many_queues_live_side_by_side(open_queue: OpenQueue) -> None:
    queues = [open_queue() for _ in range(8)]
    batch = Batch()
    for queue in queues:
        for _ in range(100):
            batch.kernel(SLEEP, sleep_args())
        assert queue.submit(batch) == 1
    for queue in queues:
        assert len(finish(queue, 1, 100)) == 100


@pytest.mark.parametrize(
    "arguments",
    [
        {"queue_depth": 0},
        {"block_nbytes": 0},
        {"workers": 0},
        {"io_threads": 0},
        {"queue_depth": 1 << 20},
        {"n_paths": 0},
        {"n_paths": 17},
        {"in_flight_nbytes": 0},
    ],
)
def test_arguments_out_of_range_are_refused(files: Files, arguments: dict[str, int]) -> None:
    with pytest.raises(OSError, match="task queue") as info:
        TaskQueue(files, backend="threads", **arguments)  # type: ignore[arg-type]
    assert info.value.errno == errno.EINVAL
