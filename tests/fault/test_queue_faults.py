"""Transfers that fail, come short, are interrupted or refused: a right result or an errno, once, and nothing of it left behind."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infinity.task_queue import Batch, Completion, FileOp, Files, TaskQueue
from tests.support.queues import BACKENDS, COPY, Memory, copy_args, finish, opened

OpenQueue = Callable[..., TaskQueue]
BLOCK = 4096
NBYTES = 5 * BLOCK


@pytest.fixture
def files() -> Files:
    return Files()


@pytest.fixture(params=BACKENDS)
def open_queue(request: pytest.FixtureRequest, files: Files) -> Iterator[OpenQueue]:
    queues: list[TaskQueue] = []

    def open_one(**arguments: Any) -> TaskQueue:
        queues.append(TaskQueue(files, backend=request.param, **arguments))
        return queues[-1]

    yield open_one
    for queue in queues:
        queue.close()


def noise(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


class Job:
    """write -> flush -> read -> copy, five requests to a transfer, each task into memory of its own."""

    def __init__(self, queue: TaskQueue, files: Files, path: Path) -> None:
        self.source, self.read, self.copy = Memory(NBYTES, noise(NBYTES)), Memory(NBYTES), Memory(NBYTES)
        with opened(files, path, content=b"") as fd:
            batch = Batch()
            written = batch.write(fd, 0, NBYTES, self.source.address)
            flushed = batch.flush(fd, (written,))
            read = batch.read(fd, 0, NBYTES, self.read.address, (flushed,))
            batch.kernel(COPY, copy_args(self.copy.address, self.read.address, NBYTES), (read,))
            self.completions: list[Completion] = finish(queue, queue.submit(batch), 4)
        self.statuses = [c.status for c in self.completions]
        self.right = self.copy.bytes() == noise(NBYTES) and path.read_bytes() == noise(NBYTES)


STATUSES = {FileOp.WRITE: 0, FileOp.DATASYNC: 1, FileOp.READ: 2}  # which task an operation belongs to


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("op", list(STATUSES))
def test_each_call_in_turn_fails_its_task_and_cancels_the_rest(
    open_queue: OpenQueue, files: Files, tmp_path: Path, op: FileOp, code: int
) -> None:
    queue = open_queue(block_nbytes=BLOCK)
    failures = 0
    for nth in range(1, 100):
        files.fault(op, nth, 1, -code)
        job = Job(queue, files, tmp_path / "file")
        files.fault(op, 1, 0, 0)
        if job.statuses == [0] * 4:
            assert job.right
            break
        failures += 1
        expected = [-errno.ECANCELED] * 4
        expected[STATUSES[op]] = -code
        expected[: STATUSES[op]] = [0] * STATUSES[op]
        assert job.statuses == expected
    assert failures == (1 if op is FileOp.DATASYNC else 5)


@pytest.mark.parametrize("short", [1, 7, 4095])
@pytest.mark.parametrize("op", [FileOp.READ, FileOp.WRITE])
def test_each_call_in_turn_comes_short_and_is_continued(
    open_queue: OpenQueue, files: Files, tmp_path: Path, op: FileOp, short: int
) -> None:
    queue = open_queue(block_nbytes=BLOCK)
    for nth in range(1, 6):
        files.fault(op, nth, 1, short)
        job = Job(queue, files, tmp_path / "file")
        assert job.statuses == [0] * 4
        assert job.right
        assert [c.retries for c in job.completions] == [int(STATUSES[op] == i) for i in range(4)]
        files.fault(op, 1, 0, 0)


@pytest.mark.parametrize("op", [FileOp.READ, FileOp.WRITE])
def test_every_call_comes_short_and_the_bytes_are_right(open_queue: OpenQueue, files: Files, tmp_path: Path, op: FileOp) -> None:
    queue = open_queue(block_nbytes=BLOCK)
    files.fault(op, 1, 10**6, 97)
    job = Job(queue, files, tmp_path / "file")
    assert job.statuses == [0] * 4
    assert job.right
    assert queue.stats().shorts > NBYTES // 97 - 10


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN])
@pytest.mark.parametrize("op", list(STATUSES))
def test_interrupted_calls_are_made_again(open_queue: OpenQueue, files: Files, tmp_path: Path, op: FileOp, code: int) -> None:
    queue = open_queue(block_nbytes=BLOCK)
    files.fault(op, 1, 10, -code)
    job = Job(queue, files, tmp_path / "file")
    assert job.statuses == [0] * 4
    assert job.right
    assert [c.retries for c in job.completions] == [10 if STATUSES[op] == i else 0 for i in range(4)]
    assert queue.stats().retries == 10


def test_a_call_that_is_refused_for_ever_ends_with_its_errno(open_queue: OpenQueue, files: Files, tmp_path: Path) -> None:
    queue = open_queue()
    memory = Memory(64)
    files.fault(FileOp.READ, 1, 10**9, -errno.EAGAIN)
    with opened(files, tmp_path / "file", content=noise(64)) as fd:
        batch = Batch()
        batch.flush(fd, (batch.read(fd, 0, 64, memory.address),))
        batch.write(fd, 64, 64, memory.address)
        completions = finish(queue, queue.submit(batch), 3)
    assert [c.status for c in completions] == [-errno.EAGAIN, -errno.ECANCELED, 0]


def test_a_read_that_moves_nothing_is_the_end_of_the_file(open_queue: OpenQueue, files: Files, tmp_path: Path) -> None:
    queue = open_queue(block_nbytes=BLOCK)
    files.fault(FileOp.READ, 3, 1, 0)
    assert Job(queue, files, tmp_path / "file").statuses == [0, 0, -errno.ENODATA, -errno.ECANCELED]


def test_a_write_that_moves_nothing_is_made_again(open_queue: OpenQueue, files: Files, tmp_path: Path) -> None:
    queue = open_queue(block_nbytes=BLOCK)
    files.fault(FileOp.WRITE, 2, 3, 0)
    job = Job(queue, files, tmp_path / "file")
    assert job.statuses == [0] * 4
    assert job.right


@pytest.mark.parametrize("op", [FileOp.READ, FileOp.WRITE])
@pytest.mark.parametrize("short", [512, 1000, 4096])
def test_a_direct_transfer_that_comes_short_inside_a_block_is_whole(
    open_queue: OpenQueue, files: Files, tmp_path: Path, op: FileOp, short: int
) -> None:
    nbytes = 8 * 4096
    queue = open_queue()
    source, target = Memory(nbytes, noise(nbytes)), Memory(nbytes)
    try:
        fd = files.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError as error:
        pytest.skip(f"no O_DIRECT on {tmp_path}: {error}")
    files.fallocate(fd, 0, nbytes)
    files.fault(op, 1, 1, short)
    batch = Batch()
    batch.read(fd, 0, nbytes, target.address, (batch.write(fd, 0, nbytes, source.address),))
    completions = finish(queue, queue.submit(batch), 2)
    files.close(fd)
    assert [(c.status, c.value) for c in completions] == [(0, nbytes), (0, nbytes)]
    assert target.bytes() == noise(nbytes)


def test_a_failed_transfer_leaves_no_request_behind(open_queue: OpenQueue, files: Files, tmp_path: Path) -> None:
    """When the task is complete its memory is the caller's again: the queue has issued nothing more."""
    queue = open_queue(block_nbytes=64, queue_depth=2)
    memory = Memory(64 * 1000)
    with opened(files, tmp_path / "file", content=noise(memory.nbytes)) as fd:
        files.fault(FileOp.READ, 3, 1, -errno.EIO)
        batch = Batch()
        batch.read(fd, 0, memory.nbytes, memory.address)
        assert finish(queue, queue.submit(batch), 1)[0].status == -errno.EIO
        issued = files.count(FileOp.READ)
        batch.flush(fd)
        finish(queue, queue.submit(batch), 1)
        assert files.count(FileOp.READ) == issued < 1000


def test_faults_are_counted_from_now_on_and_can_be_taken_away(open_queue: OpenQueue, files: Files, tmp_path: Path) -> None:
    queue = open_queue(block_nbytes=BLOCK)
    assert Job(queue, files, tmp_path / "file").right
    files.fault(FileOp.WRITE, 1, 1, -errno.EIO)
    files.fault(FileOp.WRITE, 1, 0, 0)
    assert Job(queue, files, tmp_path / "file").right
    files.fault(FileOp.WRITE, 1, 1, -errno.EIO)
    assert Job(queue, files, tmp_path / "file").statuses[0] == -errno.EIO
    assert Job(queue, files, tmp_path / "file").right


@pytest.mark.parametrize(
    ("op", "call"),
    [
        (FileOp.OPEN, lambda files, path, fd: files.open(path, os.O_RDONLY)),
        (FileOp.CLOSE, lambda files, path, fd: files.close(fd)),
        (FileOp.FALLOCATE, lambda files, path, fd: files.fallocate(fd, 0, 4096)),
        (FileOp.DATASYNC, lambda files, path, fd: files.datasync(fd)),
        (FileOp.SYNC, lambda files, path, fd: files.sync(fd)),
        (FileOp.RENAME, lambda files, path, fd: files.rename(path, str(path) + "2")),
        (FileOp.UNLINK, lambda files, path, fd: files.unlink(path)),
    ],
)
def test_each_row_of_the_table_fails_with_errno_and_file_name(
    files: Files, tmp_path: Path, op: FileOp, call: Callable[[Files, Path, int], object]
) -> None:
    path = tmp_path / "file"
    fd = files.open(path, os.O_RDWR | os.O_CREAT)
    before = files.count(op)
    files.fault(op, 1, 1, -errno.EIO)
    with pytest.raises(OSError, match="Input/output") as info:
        call(files, path, fd)
    assert info.value.errno == errno.EIO
    assert info.value.filename == str(path)
    assert files.count(op) == before + 1


@pytest.mark.parametrize(("op", "nth", "result"), [(FileOp.READ, 0, -5), (FileOp.OPEN, 1, 3), (FileOp.READ, 1, -5000), (99, 1, -5)])
def test_a_fault_that_makes_no_sense_is_refused(files: Files, op: FileOp, nth: int, result: int) -> None:
    with pytest.raises(OSError, match="fault"):
        files.fault(op, nth, 1, result)
