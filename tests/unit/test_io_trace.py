"""A recording says what was handed over, is read back as it was, and a bad one is refused with the line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infinity.errors import InfinityError
from infinity.io_trace import IoTrace, Submission, Task, TraceError, load_trace
from infinity.kernel_args import Kernel, pack_sleep
from infinity.task_queue import Batch, Files, Priority, TaskQueue


def record(path: Path) -> None:
    """Two batches as a queue would report them."""
    with IoTrace(path) as trace:
        trace.begin({"backend": "uring", "queue_depth": 8, "block_nbytes": 4096}, lambda fd: f"file {fd}")
        batch = Batch()
        first = batch.read(9, 0, 8192, 1 << 40)
        second = batch.kernel(Kernel.SLEEP, pack_sleep(0), [first])
        batch.write(7, 4096, 4096, (1 << 40) + 4096, [first, second])
        trace.record(5, batch)
        batch = Batch()
        batch.flush(7, [7, 2], Priority.PREFETCH)
        trace.record(8, batch)
        trace.end({"read_nbytes": 8192})


EXPECTED = [
    [
        Task("read", 0, 0, 8192, 1 << 40, 0, Priority.DEMAND, []),
        Task("kernel", 0, 0, 0, 0, Kernel.SLEEP, Priority.DEMAND, [-1]),
        Task("write", 1, 4096, 4096, (1 << 40) + 4096, 0, Priority.WRITE_BACK, [-1, -2]),
    ],
    [Task("flush", 1, 0, 0, 0, 0, Priority.PREFETCH, [7, 2])],
]


def test_a_recording_is_read_back_as_it_was(tmp_path: Path) -> None:
    record(tmp_path / "t")
    trace = load_trace(tmp_path / "t")
    assert trace.queue == {"backend": "uring", "queue_depth": 8, "block_nbytes": 4096}
    assert trace.files == ["file 9", "file 7"]
    assert [submission.tasks for submission in trace.submissions] == EXPECTED
    assert [submission.first_id for submission in trace.submissions] == [5, 8]
    assert 0 <= trace.submissions[0].at_s <= trace.submissions[1].at_s <= trace.end["seconds"]
    assert (trace.end["tasks"], trace.end["read_nbytes"]) == (4, 8192)


def test_a_queue_reports_every_batch_that_it_took(tmp_path: Path) -> None:
    files = Files()
    queue = TaskQueue(files)
    seen: list[tuple[int, int]] = []
    try:
        batch = Batch()
        batch.kernel(Kernel.SLEEP, pack_sleep(0))
        queue.submit(batch)
        queue.recorder = lambda first, batch: seen.append((first, len(batch)))
        for n in (2, 3):
            for _ in range(n):
                batch.kernel(Kernel.SLEEP, pack_sleep(0))
            queue.submit(batch)
        batch.kernel(Kernel.SLEEP, pack_sleep(0), [99])
        with pytest.raises(OSError, match="submit of 1 tasks"):
            queue.submit(batch)
    finally:
        queue.close()
    assert seen == [(2, 2), (4, 3)]


LINES = 6


@pytest.mark.parametrize("line", range(1, LINES + 1))
def test_a_trace_that_is_cut_off_is_refused_with_the_line(tmp_path: Path, line: int) -> None:
    record(tmp_path / "t")
    lines = (tmp_path / "t").read_text().splitlines(keepends=True)
    assert len(lines) == LINES
    (tmp_path / "t").write_text("".join(lines[: line - 1]) + lines[line - 1][: len(lines[line - 1]) // 2])
    with pytest.raises(TraceError) as caught:
        load_trace(tmp_path / "t")
    assert (caught.value.path, caught.value.line) == (str(tmp_path / "t"), line)


@pytest.mark.parametrize("n_lines", range(LINES))
def test_a_trace_without_its_end_is_refused(tmp_path: Path, n_lines: int) -> None:
    record(tmp_path / "t")
    (tmp_path / "t").write_text("".join((tmp_path / "t").read_text().splitlines(keepends=True)[:n_lines]))
    with pytest.raises(TraceError, match="without its last line") as caught:
        load_trace(tmp_path / "t")
    assert caught.value.line == n_lines + 1


def change(path: Path, line: int, **changes: Any) -> None:
    lines = path.read_text().splitlines()
    lines[line - 1] = json.dumps({**json.loads(lines[line - 1]), **changes})
    path.write_text("\n".join(lines))


@pytest.mark.parametrize(
    ("line", "changes", "words"),
    [
        (1, {"format": "other"}, "not a trace"),
        (1, {"version": 2}, "version 2"),
        (1, {"queue": 3}, "'queue'"),
        (2, {"file": 1}, "file 0 is expected"),
        (4, {"tasks": [["read", 2, 0, 1, 1, 0, []]]}, "the file of task 0"),
        (4, {"tasks": [["read", 0, -1, 1, 1, 0, []]]}, "a number of task 0"),
        (4, {"tasks": [["read", 0, 0, 1.5, 1, 0, []]]}, "a number of task 0"),
        (4, {"tasks": [["read", 0, 0, 1, 1, 3, []]]}, "the priority of task 0"),
        (4, {"tasks": [["read", 0, 0, 1, 1, 0, [-1]]]}, "depends on something"),
        (4, {"tasks": [["read", 0, 0, 1, 1, 0, [5]]]}, "depends on something"),
        (4, {"tasks": [["read", 0, 0, 1, 1, 0]]}, "is none"),
        (4, {"tasks": [["seek", 0, 0, []]]}, "is none"),
        (4, {"tasks": 3}, "'tasks'"),
        (4, {"at_s": "now"}, "at_s"),
        (5, {"first_id": 9}, "task 8 is expected"),
        (6, {"end": {"seconds": 1, "tasks": 5}}, "5 tasks were recorded"),
        (6, {"end": {"tasks": 4}}, "'seconds' is missing"),
        (6, {"end": {"seconds": -1, "tasks": 4}}, "seconds is -1"),
        (6, {"end": 4}, "'end'"),
    ],
)
def test_a_line_that_is_wrong_is_refused_with_its_number(tmp_path: Path, line: int, changes: dict[str, Any], words: str) -> None:
    record(tmp_path / "t")
    change(tmp_path / "t", line, **changes)
    with pytest.raises(TraceError, match=words) as caught:
        load_trace(tmp_path / "t")
    assert caught.value.line == line


@pytest.mark.parametrize("text", ["nonsense", "[]", '{"a": 1}', "\x00"])
def test_any_other_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "t").write_text(text)
    with pytest.raises(TraceError) as caught:
        load_trace(tmp_path / "t")
    assert caught.value.line == 1


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(bytes(range(128, 256)))
    with pytest.raises(TraceError, match="not text"):
        load_trace(tmp_path / "t")


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InfinityError, match="cannot be read: No such file"):
        load_trace(tmp_path / "t")


def test_a_full_disk_never_disturbs_the_run_and_is_said_at_the_end() -> None:
    trace = IoTrace("/dev/full")
    trace.begin({}, str)
    batch = Batch()
    for _ in range(2000):
        batch.read(3, 0, 4096, 4096)
    for first in range(1, 40_001, 2000):
        trace.record(first, batch)
    with pytest.raises(InfinityError, match="No space left on device"):
        trace.end({})
    trace.close()


def test_nothing_is_recorded_after_close(tmp_path: Path) -> None:
    record(tmp_path / "t")
    before = (tmp_path / "t").read_text()
    trace = IoTrace(tmp_path / "u")
    trace.begin({}, str)
    trace.close()
    batch = Batch()
    batch.read(3, 0, 4096, 4096)
    trace.record(1, batch)
    trace.close()
    assert (tmp_path / "u").read_text().count("\n") == 1
    assert (tmp_path / "t").read_text() == before


def test_a_submission_knows_its_tasks() -> None:
    assert Submission(0.5, 3, [EXPECTED[1][0]]).tasks[0].op == "flush"
