"""A recording of what a task queue was handed, and reading it back.

The file is JSON, line by line. The first line is the header::

    {"format": "infinity-io-trace", "version": 1, "queue": {...}}

``queue`` says how the queue was opened. Then come, in the order of time, files when they are first used, and batches as they were
submitted::

    {"file": 0, "path": "/mnt/nvme/..."}
    {"at_s": 0.001234567, "first_id": 1, "tasks": [[OP, ...], ...]}

Task i of a batch has the id ``first_id + i``; ids grow by one from task to task. A task is one of

    ["read", file, offset, nbytes, address, priority, after]      the same for "write"
    ["flush", file, priority, after]
    ["kernel", kernel, priority, after]

``after`` lists what it depends on as it was submitted: the id of an earlier task, or ``-1 - i`` for task i of the same batch. The last
line, without which the file is not whole, says what the recorded run came to::

    {"end": {"seconds": 1.25, "tasks": 3, ...}}

Addresses tell which transfers shared memory, and nothing else. This module knows queues by their tasks only, and replays nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TextIO

from infinity.errors import InfinityError
from infinity.task_queue import Batch

FORMAT = "infinity-io-trace"
VERSION = 1
_WRITE_CHARS = 1 << 18
_TRANSFERS = ("read", "write")


class TraceError(InfinityError, ValueError):
    """A trace cannot be used: ``path``, and ``line`` where what is wrong is."""

    def __init__(self, path: str, line: int, problem: str) -> None:
        super().__init__(f"{path}, line {line}: {problem}")
        self.path = path
        self.line = line


class IoTrace:
    """Writes what a queue is handed, from ``begin`` to ``end``; a file of that name is replaced.

    It is cheap: about a microsecond and 60 bytes per task, written in large pieces.

    Order: ``begin``, then ``record`` for each batch, then ``end``, then ``close``. Without ``end`` the file is not whole.
    Errors: OSError when it cannot be opened. ``record`` never raises: what it is told of has happened. Where writing fails, a full disk
    say, nothing more is recorded and ``end`` raises.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._name = os.fspath(path)
        self._file: TextIO | None = open(path, "w", encoding="utf-8")  # noqa: SIM115 - owned until close
        self._lines: list[str] = []
        self._chars = 0
        self._indices: dict[int, int] = {}
        self._path_of: Callable[[int], str] = str
        self._begin_s = 0.0
        self._failure: OSError | None = None
        self.n_tasks = 0

    def begin(self, queue: Mapping[str, object], path_of: Callable[[int], str]) -> None:
        """Starts the clock. ``queue`` says how the queue was opened, ``path_of`` gives the path of a descriptor."""
        self._path_of = path_of
        self._add(json.dumps({"format": FORMAT, "version": VERSION, "queue": dict(queue)}))
        self._begin_s = time.perf_counter()

    def record(self, first_id: int, batch: Batch) -> None:
        """A batch that was just taken by the queue, and is not empty yet."""
        if self._failure is not None or self._file is None:
            return
        at_s = time.perf_counter() - self._begin_s
        indices = self._indices
        tasks = []
        for op, fd, offset, nbytes, address, kernel, priority, after in batch.rows():
            if op == "kernel":
                tasks.append(f'["kernel",{kernel},{priority},{after}]')
                continue
            index = indices.get(fd)
            if index is None:
                index = indices[fd] = len(indices)
                self._add(json.dumps({"file": index, "path": self._path_of(fd)}))
            if op == "flush":
                tasks.append(f'["flush",{index},{priority},{after}]')
            else:
                tasks.append(f'["{op}",{index},{offset},{nbytes},{address},{priority},{after}]')
        self.n_tasks += len(tasks)
        self._add(f'{{"at_s":{at_s:.9f},"first_id":{first_id},"tasks":[{",".join(tasks)}]}}')
        if self._chars > _WRITE_CHARS:
            self._write()

    def end(self, figures: Mapping[str, object]) -> None:
        """Stops the clock; ``figures`` are what the run came to. Everything is in the file afterwards.

        Errors: InfinityError when it could not be written.
        """
        seconds = time.perf_counter() - self._begin_s
        self._add(json.dumps({"end": {"seconds": seconds, "tasks": self.n_tasks, **figures}}))
        self._write()
        if self._failure is not None:
            error = self._failure
            raise InfinityError(
                f"the I/O trace {error.filename or self._name} cannot be written: {error.strerror}. It is not whole."
            ) from error

    def close(self) -> None:
        """Writes what is left; a second call does nothing."""
        self._write()
        if self._file is not None:
            with contextlib.suppress(OSError):  # the buffer that could not be written, once more
                self._file.close()
            self._file = None

    def __enter__(self) -> IoTrace:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def _add(self, line: str) -> None:
        self._lines.append(line)
        self._chars += len(line)

    def _write(self) -> None:
        if self._file is not None and self._lines and self._failure is None:
            self._lines.append("")
            try:
                self._file.write("\n".join(self._lines))
                self._file.flush()
            except OSError as error:
                self._failure = error
        self._lines.clear()
        self._chars = 0


class Task(NamedTuple):
    """A recorded task; what its ``op`` has no use for is 0. ``file`` counts from 0."""

    op: str
    file: int
    offset: int
    nbytes: int
    address: int
    kernel: int
    priority: int
    after: list[int]


class Submission(NamedTuple):
    """A recorded batch."""

    at_s: float
    first_id: int
    tasks: list[Task]


@dataclass(slots=True)
class Trace:
    """A whole recording. Files and figures are complete once ``read`` has come to the end."""

    queue: dict[str, Any] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    submissions: list[Submission] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)

    def tasks(self) -> Iterator[Task]:
        for submission in self.submissions:
            yield from submission.tasks


def load_trace(path: str | os.PathLike[str]) -> Trace:
    """The whole of a recording.

    Errors: TraceError with the line of what is wrong; InfinityError when the file cannot be read.
    """
    name = os.fspath(path)
    trace = Trace()
    number = 0
    next_id = 0
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    record = json.loads(line)
                    if not isinstance(record, dict):
                        raise ValueError("a JSON object is expected")
                    if number == 1:
                        _read_header(record, trace)
                    elif trace.end:
                        raise ValueError("there is more after the end")
                    elif "tasks" in record:
                        submission = _read_submission(record, len(trace.files), next_id)
                        trace.submissions.append(submission)
                        next_id = submission.first_id + len(submission.tasks)
                    elif "file" in record:
                        if record["file"] != len(trace.files):
                            raise ValueError(f"file {record['file']!r} comes where file {len(trace.files)} is expected")
                        trace.files.append(str(record["path"]))
                    elif "end" in record:
                        trace.end = _read_end(record["end"], sum(len(submission.tasks) for submission in trace.submissions))
                    else:
                        raise ValueError(f"neither a file, nor a batch, nor the end: {line[:80]!r}")
                except (ValueError, KeyError, TypeError) as error:
                    problem = f"{error} is missing" if isinstance(error, KeyError) else str(error)
                    raise TraceError(name, number, problem) from error
    except OSError as error:
        raise InfinityError(f"the trace {name} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceError(name, number + 1, "not text: this is no trace") from error
    if not trace.end:
        raise TraceError(name, number + 1, "the trace ends here without its last line: its run did not end, or it was cut off")
    return trace


def _read_header(record: dict[str, Any], trace: Trace) -> None:
    if record.get("format") != FORMAT:
        raise ValueError("not a trace: `infinity train --io-trace FILE` makes one")
    if record["version"] != VERSION:
        raise ValueError(f"a trace of version {record['version']!r}, and this infinity reads version {VERSION}. Record it again")
    if not isinstance(record["queue"], dict):
        raise ValueError("'queue' is not an object")
    trace.queue = record["queue"]


def _read_submission(record: dict[str, Any], n_files: int, next_id: int) -> Submission:
    first_id = _count(record["first_id"], "first_id", 1)
    if next_id and first_id != next_id:
        raise ValueError(f"task {first_id} comes where task {next_id} is expected")
    at_s = record["at_s"]
    if isinstance(at_s, bool) or not isinstance(at_s, (int, float)) or at_s < 0:
        raise ValueError(f"at_s is {at_s!r}")
    if not isinstance(record["tasks"], list):
        raise ValueError("'tasks' is not a list")
    return Submission(at_s, first_id, [_read_task(row, index, first_id, n_files) for index, row in enumerate(record["tasks"])])


def _read_task(row: Any, index: int, first_id: int, n_files: int) -> Task:
    what = f"task {index} of the batch"
    lengths = {"read": 7, "write": 7, "flush": 4, "kernel": 4}
    if not isinstance(row, list) or not row or row[0] not in lengths or len(row) != lengths[row[0]]:
        raise ValueError(f"{what} is none: {row!r}")
    op, *numbers, priority, after = row
    if not isinstance(after, list) or not all(type(one) is int and (0 < one < first_id or -index <= one < 0) for one in after):
        raise ValueError(f"{what} depends on something that is not before it: {after!r}")
    _count(priority, f"the priority of {what}", 0, 2)
    for number in numbers:
        _count(number, f"a number of {what}", 0, (1 << 63) - 1)
    if op == "kernel":
        return Task(op, 0, 0, 0, 0, numbers[0], priority, after)
    _count(numbers[0], f"the file of {what}", 0, n_files - 1)
    if op == "flush":
        return Task(op, numbers[0], 0, 0, 0, 0, priority, after)
    file, offset, nbytes, address = numbers
    return Task(op, file, offset, nbytes, address, 0, priority, after)


def _read_end(record: Any, n_tasks: int) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise ValueError("'end' is not an object")
    if record["tasks"] != n_tasks:
        raise ValueError(f"{record['tasks']!r} tasks were recorded, and {n_tasks} are here")
    seconds = record["seconds"]
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or seconds < 0:
        raise ValueError(f"seconds is {seconds!r}")
    return record


def _count(value: Any, what: str, least: int, most: int | None = None) -> int:
    if type(value) is not int or value < least or (most is not None and value > most):
        raise ValueError(f"{what} is {value!r}")
    return value
