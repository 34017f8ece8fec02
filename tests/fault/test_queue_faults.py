"""Transfers that fail, come short, are interrupted or refused: a right result or an errno, once, and nothing of it left behind."""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infinity.faults import Fault
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
        files.fault(op, Fault.error(code), nth=nth)
        job = Job(queue, files, tmp_path / "file")
        files.mend(op)
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
        files.fault(op, Fault.short(short), nth=nth)
        job = Job(queue, files, tmp_path / "file")
        assert job.statuses == [0] * 4
        assert job.right
        assert [c.retries for c in job.completions] == [int(STATUSES[op] == i) for i in range(4)]
        files.mend(op)


@pytest.mark.parametrize("op", [FileOp.READ, FileOp.WRITE])
def test_every_call_comes_short_and_the_bytes_are_right(open_queue: OpenQueue, files: Files, tmp_path: Path, op: FileOp) -> None:
    queue = open_queue(block_nbytes=BLOCK)
    files.fault(op, Fault.short(97), times=10**6)
    job = Job(queue, files, tmp_path / "file")
    assert job.statuses == [0] * 4
    assert job.right
    assert queue.stats().shorts > NBYTES // 97 - 10


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN])
@pytest.mark.parametrize("op", list(STATUSES))
def test_interrupted_calls_are_made_again(open_queue: OpenQueue, files: Files, tmp_path: Path, op: FileOp, code: int) -> None:
    queue = open_queue(block_nbytes=BLOCK)
    files.fault(op, Fault.error(code), times=10)
    job = Job(queue, files, tmp_path / "file")
    assert job.statuses == [0] * 4
    assert job.right
    assert [c.retries for c in job.completions] == [10 if STATUSES[op] == i else 0 for i in range(4)]
    assert queue.stats().retries == 10


def test_a_call_that_is_refused_for_ever_ends_with_its_errno(open_queue: OpenQueue, files: Files, tmp_path: Path) -> None:
    queue = open_queue()
    memory = Memory(64)
    files.fault(FileOp.READ, Fault.error(errno.EAGAIN), times=10**9)
    with opened(files, tmp_path / "file", content=noise(64)) as fd:
        batch = Batch()
        batch.flush(fd, (batch.read(fd, 0, 64, memory.address),))
        batch.write(fd, 64, 64, memory.address)
        completions = finish(queue, queue.submit(batch), 3)
    assert [c.status for c in completions] == [-errno.EAGAIN, -errno.ECANCELED, 0]


def test_a_read_that_moves_nothing_is_the_end_of_the_file(open_queue: OpenQueue, files: Files, tmp_path: Path) -> None:
    queue = open_queue(block_nbytes=BLOCK)
    files.fault(FileOp.READ, Fault.short(0), nth=3)
    assert Job(queue, files, tmp_path / "file").statuses == [0, 0, -errno.ENODATA, -errno.ECANCELED]


def test_a_write_that_moves_nothing_is_made_again(open_queue: OpenQueue, files: Files, tmp_path: Path) -> None:
    queue = open_queue(block_nbytes=BLOCK)
    files.fault(FileOp.WRITE, Fault.short(0), nth=2, times=3)
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
    files.fault(op, Fault.short(short))
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
        files.fault(FileOp.READ, Fault.error(errno.EIO), nth=3)
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
    files.fault(FileOp.WRITE, Fault.error(errno.EIO))
    files.mend(FileOp.WRITE)
    assert Job(queue, files, tmp_path / "file").right
    files.fault(FileOp.WRITE, Fault.error(errno.EIO))
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
    files.fault(op, Fault.error(errno.EIO))
    with pytest.raises(OSError, match="Input/output") as info:
        call(files, path, fd)
    assert info.value.errno == errno.EIO
    assert info.value.filename == str(path)
    assert files.count(op) == before + 1


@pytest.mark.parametrize(
    ("op", "fault", "arguments"),
    [
        (FileOp.READ, Fault.error(errno.EIO), {"nth": 0}),
        (FileOp.READ, Fault.error(errno.EIO), {"times": 0}),
        (99, Fault.error(errno.EIO), {}),
        (FileOp.READ, Fault.error(0), {}),
        (FileOp.READ, Fault.error(5000), {}),
        (FileOp.OPEN, Fault.short(3), {}),
        (FileOp.OPEN, Fault.flip(3), {}),
        (FileOp.READ, Fault.flip(3, bit=8), {}),
        (FileOp.READ, Fault.tear(3), {}),
        (FileOp.READ, Fault.lose(), {}),
        (FileOp.UNLINK, Fault.hold(1), {}),
        (FileOp.READ, Fault.hold(0), {}),
        (FileOp.READ, Fault.delay(0), {}),
        (FileOp.READ, Fault.delay(61_000_000), {}),
    ],
)
def test_a_fault_that_makes_no_sense_is_refused(files: Files, op: FileOp, fault: Fault, arguments: dict[str, int]) -> None:
    with pytest.raises(OSError, match="fault"):
        files.fault(op, fault, **arguments)


# ---- a disk that is slow, out of order, or wrong ----


@pytest.mark.parametrize("op", list(STATUSES))
def test_a_delayed_call_ends_late_and_right(open_queue: OpenQueue, files: Files, tmp_path: Path, op: FileOp) -> None:
    queue = open_queue(block_nbytes=BLOCK)
    files.fault(op, Fault.delay(30_000))
    begin = time.monotonic()
    job = Job(queue, files, tmp_path / "file")
    assert time.monotonic() - begin >= 0.03
    assert job.statuses == [0] * 4
    assert job.right


@pytest.mark.parametrize("op", [FileOp.READ, FileOp.WRITE])
def test_a_held_call_ends_after_later_ones(open_queue: OpenQueue, files: Files, tmp_path: Path, op: FileOp) -> None:
    """What it would be held for otherwise is longer than the test may take."""
    queue = open_queue(io_threads=2)
    memory = Memory(64 * 10, noise(64 * 10))
    with opened(files, tmp_path / "file", content=noise(64 * 10)) as fd:
        files.fault(op, Fault.hold(5, us=60_000_000))
        batch = Batch()
        add = batch.read if op is FileOp.READ else batch.write
        for i in range(10):
            add(fd, 64 * i, 64, memory.address + 64 * i)
        first_id = queue.submit(batch)
        queue.wait(range(first_id, first_id + 10))
    completions = queue.poll()
    assert all(c.status == 0 for c in completions)
    assert [c.id for c in completions].index(first_id) >= 3  # a call has ended a little before its task has
    assert memory.bytes() == noise(64 * 10)


@pytest.mark.parametrize("op", list(STATUSES))
def test_a_held_call_goes_on_where_there_are_no_others(open_queue: OpenQueue, files: Files, tmp_path: Path, op: FileOp) -> None:
    queue = open_queue(block_nbytes=NBYTES, io_threads=1)
    files.fault(op, Fault.hold(1, us=1000), times=100)
    job = Job(queue, files, tmp_path / "file")
    assert job.statuses == [0] * 4
    assert job.right


def test_the_bit_of_a_read_that_flips_is_wrong_in_memory_only(open_queue: OpenQueue, files: Files, tmp_path: Path) -> None:
    queue = open_queue(block_nbytes=BLOCK)
    files.fault(FileOp.READ, Fault.flip(7, bit=3), nth=3)
    job = Job(queue, files, tmp_path / "file")
    assert job.statuses == [0] * 4
    assert (tmp_path / "file").read_bytes() == noise(NBYTES)
    ((_, byte),) = flipped(job.read.bytes(), bit=3)
    assert byte == 7


def test_the_bit_of_a_write_that_flips_is_wrong_on_disk_only(open_queue: OpenQueue, files: Files, tmp_path: Path) -> None:
    queue = open_queue(block_nbytes=BLOCK)
    files.fault(FileOp.WRITE, Fault.flip(BLOCK + 7, bit=7), nth=2)
    job = Job(queue, files, tmp_path / "file")
    assert job.statuses == [0] * 4
    assert job.source.bytes() == noise(NBYTES)
    ((_, byte),) = flipped((tmp_path / "file").read_bytes(), bit=7)
    assert byte == 7


def flipped(found: bytes, bit: int) -> set[tuple[int, int]]:
    """(block, byte in it) of each byte that differs from what was written, and differs in this bit only."""
    wrong = [i for i, (a, b) in enumerate(zip(found, noise(NBYTES), strict=True)) if a != b]
    assert all(found[i] ^ noise(NBYTES)[i] == 1 << bit for i in wrong)
    return {divmod(i, BLOCK) for i in wrong}


@pytest.mark.parametrize("nbytes", [0, 1, 1000, BLOCK - 1])
def test_a_torn_write_leaves_the_rest_of_the_file_as_it_was_and_says_nothing(
    open_queue: OpenQueue, files: Files, tmp_path: Path, nbytes: int
) -> None:
    queue = open_queue()
    memory = Memory(BLOCK, noise(BLOCK))
    with opened(files, tmp_path / "file", content=noise(2 * BLOCK, seed=1)) as fd:
        files.fault(FileOp.WRITE, Fault.tear(nbytes))
        batch = Batch()
        batch.write(fd, 0, BLOCK, memory.address)
        (completion,) = finish(queue, queue.submit(batch), 1)
    assert (completion.status, completion.value, completion.retries) == (0, BLOCK, 0)
    assert (tmp_path / "file").read_bytes() == noise(BLOCK)[:nbytes] + noise(2 * BLOCK, seed=1)[nbytes:]


def test_a_lost_write_leaves_the_file_as_it_was_and_says_nothing(open_queue: OpenQueue, files: Files, tmp_path: Path) -> None:
    queue = open_queue()
    memory = Memory(BLOCK, noise(BLOCK))
    with opened(files, tmp_path / "file", content=bytes(BLOCK)) as fd:
        files.fault(FileOp.WRITE, Fault.lose())
        files.fault(FileOp.DATASYNC, Fault.lose())
        batch = Batch()
        batch.flush(fd, (batch.write(fd, 0, BLOCK, memory.address),))
        completions = finish(queue, queue.submit(batch), 2)
    assert [(c.status, c.value, c.retries) for c in completions] == [(0, BLOCK, 0), (0, 0, 0)]
    assert (tmp_path / "file").read_bytes() == bytes(BLOCK)


@pytest.mark.parametrize("fault", [Fault.flip(1000), Fault.tear(1000), Fault.lose(), Fault.short(1000)], ids=lambda fault: fault.kind.name)
def test_direct_writes_go_wrong_in_the_same_way(open_queue: OpenQueue, files: Files, tmp_path: Path, fault: Fault) -> None:
    queue = open_queue()
    memory = Memory(2 * BLOCK, noise(2 * BLOCK))
    path = tmp_path / "file"
    path.write_bytes(bytes(2 * BLOCK))
    try:
        fd = files.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError as error:
        pytest.skip(f"no O_DIRECT on {tmp_path}: {error}")
    files.fault(FileOp.WRITE, fault)
    batch = Batch()
    batch.write(fd, 0, 2 * BLOCK, memory.address)
    (completion,) = finish(queue, queue.submit(batch), 1)
    files.close(fd)
    assert (completion.status, completion.value) == (0, 2 * BLOCK)
    right = noise(2 * BLOCK)
    assert (
        path.read_bytes()
        == {
            "FLIP": right[:1000] + bytes([right[1000] ^ 1]) + right[1001:],
            "TEAR": right[:1000] + bytes(2 * BLOCK - 1000),
            "LOSE": bytes(2 * BLOCK),
            "SHORT": right,
        }[fault.kind.name]
    )


def test_one_call_in_so_many_goes_wrong_the_same_ones_for_the_same_seed(files: Files, tmp_path: Path) -> None:
    def failures(seed: int) -> list[int]:
        table = Files()
        table.fault(FileOp.OPEN, Fault.error(errno.EMFILE), times=1000, one_in=10, seed=seed)
        failed = []
        for i in range(1000):
            try:
                table.close(table.open(tmp_path, os.O_RDONLY))
            except OSError:
                failed.append(i)
        return failed

    assert failures(1) == failures(1) != failures(2)
    assert 50 < len(failures(1)) < 150


@pytest.mark.parametrize("seed", range(4))
def test_random_delays_and_holds_change_nothing(open_queue: OpenQueue, files: Files, tmp_path: Path, seed: int) -> None:
    queue = open_queue(block_nbytes=512, queue_depth=4)
    for op in STATUSES:
        files.fault(op, Fault.hold(3, us=2000), times=10**6, one_in=5, seed=seed)
        files.fault(op, Fault.delay(500), times=10**6, one_in=3, seed=seed + 100)
    job = Job(queue, files, tmp_path / "file")
    assert job.statuses == [0] * 4
    assert job.right
