"""A recorded run is done again: the same transfers, in the same order, on files of our own."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from infinity.errors import IoError
from infinity.faults import Fault
from infinity.io_replay import Replay, file_lengths, memory_spans
from infinity.io_trace import IoTrace, Submission, Task, Trace, load_trace
from infinity.task_queue import Backend, Batch, FileOp

PAGE = 4096


def read(file: int, page: int, n: int = 1, address: int = 1 << 40, after: list[int] | None = None, priority: int = 0) -> Task:
    return Task("read", file, page * PAGE, n * PAGE, address, 0, priority, after or [])


def write(file: int, page: int, n: int = 1, address: int = 1 << 40, after: list[int] | None = None, priority: int = 1) -> Task:
    return Task("write", file, page * PAGE, n * PAGE, address, 0, priority, after or [])


def trace_of(*batches: list[Task], first_id: int = 1, files: int = 2, gap_s: float = 0.0) -> Trace:
    trace = Trace(queue={"queue_depth": 4, "block_nbytes": PAGE}, files=[f"/was/{index}" for index in range(files)])
    for index, tasks in enumerate(batches):
        trace.submissions.append(Submission(index * gap_s, first_id, tasks))
        first_id += len(tasks)
    trace.end = {"seconds": 1.0, "tasks": sum(map(len, batches))}
    return trace


CHAIN = [read(0, 3), Task("kernel", 0, 0, 0, 0, 2, 0, [-1]), write(1, 7, 2, 1 << 41, [-2]), Task("flush", 1, 0, 0, 0, 0, 1, [-3])]


@pytest.mark.parametrize("backend", [Backend.AUTO, Backend.THREADS])
def test_what_was_recorded_is_moved_again(tmp_path: Path, backend: Backend) -> None:
    trace = trace_of(CHAIN, [read(1, 0, 3, after=[3])], first_id=100)
    with Replay(trace, tmp_path) as replay:
        run = replay.run(backend=backend)
    assert (run.read_nbytes, run.write_nbytes) == (4 * PAGE, 2 * PAGE)
    assert run.requests == 6
    assert list(tmp_path.iterdir()) == []


def test_the_same_tasks_are_handed_over_in_the_same_batches(tmp_path: Path) -> None:
    trace = trace_of(CHAIN, [read(1, 0, after=[101, 50, 103]), write(0, 1, address=1 << 41, after=[-1], priority=2)], first_id=100)
    with Replay(trace, tmp_path) as replay:
        recorded = IoTrace(tmp_path / "again")
        with replay._bench.open_queue(queue_depth=4, block_nbytes=PAGE) as queue:
            recorded.begin(trace.queue, queue._files.path)
            queue.recorder = recorded.record
            for batch in replay._batches():
                queue.submit(batch)
        recorded.end({})
        recorded.close()
    again = load_trace(tmp_path / "again")
    assert again.submissions[0].first_id == 1
    for before, after in zip(trace.submissions, again.submissions, strict=True):
        for old, new in zip(before.tasks, after.tasks, strict=True):
            assert (old.op, old.file, old.offset, old.nbytes, old.priority) == (new.op, new.file, new.offset, new.nbytes, new.priority)
            assert [one if one < 0 else one - 99 for one in old.after if one < 0 or one >= 100] == new.after


def test_transfers_that_shared_memory_share_it_again(tmp_path: Path) -> None:
    trace = trace_of([read(0, 0, 2, 10 * PAGE), write(1, 0, 1, 11 * PAGE), read(0, 4, 1, 5_000 * PAGE)])
    with Replay(trace, tmp_path) as replay:
        first, second, third = (replay._address(task.address) for task in trace.tasks())
        assert second == first + PAGE
        assert not first <= third < first + 2 * PAGE
    assert memory_spans(trace) == [(10 * PAGE, 13 * PAGE), (5_000 * PAGE, 5_002 * PAGE)]


def test_files_are_as_long_as_what_was_moved(tmp_path: Path) -> None:
    assert file_lengths(trace_of([read(0, 9), write(0, 2)], files=2)) == [10 * PAGE, PAGE]


def test_odd_lengths_are_rounded_to_what_the_drive_takes(tmp_path: Path) -> None:
    trace = trace_of([Task("write", 0, 1000, 5000, (1 << 40) + 77, 0, 1, [])])
    with Replay(trace, tmp_path) as replay:
        run = replay.run()
    assert 5000 <= run.write_nbytes <= 2 * PAGE


def test_a_paced_replay_takes_as_long_as_the_recording(tmp_path: Path) -> None:
    trace = trace_of([read(0, 0)], [read(0, 1)], [read(0, 2)], gap_s=0.1)
    with Replay(trace, tmp_path) as replay:
        assert replay.run(paced=True).seconds >= 0.2


def test_a_request_that_fails_is_an_error_that_names_the_recorded_one(tmp_path: Path) -> None:
    with Replay(trace_of(CHAIN), tmp_path) as replay:
        replay._bench._files.fault(FileOp.READ, Fault.error(errno.EIO))
        with pytest.raises(IoError) as caught:
            replay.run()
    assert (caught.value.op, caught.value.path, caught.value.offset, caught.value.errno) == ("read", "/was/0", 3 * PAGE, errno.EIO)


def test_an_empty_recording_is_replayed(tmp_path: Path) -> None:
    with Replay(trace_of(files=0), tmp_path) as replay:
        assert replay.run().nbytes == 0


def test_a_batch_keeps_its_tasks_until_it_is_taken() -> None:
    batch = Batch()
    batch.write(3, 0, PAGE, PAGE, [-1 + 8])
    assert list(batch.rows()) == [("write", 3, 0, PAGE, PAGE, 0, 1, [7])]
