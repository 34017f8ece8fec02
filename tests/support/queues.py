"""What tests of the task queue share: backends that work here, memory with an address, kernels to give it."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from infinity.native import ffi, lib
from infinity.task_queue import Completion, Files, TaskQueue


def _uring_reason() -> str:
    try:
        TaskQueue(Files(), backend="uring").close()
    except OSError as error:
        return f"io_uring does not work here: {error}"
    return ""


URING_REASON = _uring_reason()
BACKENDS = [
    "threads",
    pytest.param("uring", marks=pytest.mark.skipif(bool(URING_REASON), reason=URING_REASON or "-")),
]
WORKING_BACKENDS = ["threads"] if URING_REASON else ["threads", "uring"]


class Memory:
    """Page-aligned memory of so many bytes."""

    def __init__(self, nbytes: int, content: bytes = b"") -> None:
        self.map = mmap.mmap(-1, max(nbytes, 1))
        self.nbytes = nbytes
        self.address = int(ffi.cast("uintptr_t", ffi.from_buffer(self.map)))
        self.map[: len(content)] = content

    def bytes(self, begin: int = 0, end: int | None = None) -> bytes:
        return self.map[begin : self.nbytes if end is None else end]


@contextmanager
def opened(files: Files, path: Path, *, content: bytes | None = None, flags: int = 0) -> Iterator[int]:
    """A descriptor to read and write ``path``, which is made with ``content``."""
    if content is not None:
        path.write_bytes(content)
    fd = files.open(path, os.O_RDWR | os.O_CREAT | flags)
    try:
        yield fd
    finally:
        files.close(fd)


def sleep_args(microseconds: int = 0, status: int = 0, value: int = 0) -> bytes:
    """Arguments of INF_KERNEL_SLEEP, which then ends with ``status``."""
    return struct.pack("=QiI", microseconds, status, value)


def copy_args(to: int, source: int, nbytes: int) -> bytes:
    """Arguments of INF_KERNEL_COPY."""
    return struct.pack("=QQQ", to, source, nbytes)


SLEEP = int(lib.INF_KERNEL_SLEEP)
COPY = int(lib.INF_KERNEL_COPY)


def finish(queue: TaskQueue, first_id: int, n_tasks: int) -> list[Completion]:
    """Waits for the tasks of a batch and takes all completions there are; they must be just these, by id."""
    queue.wait(range(first_id, first_id + n_tasks))
    completions = sorted(queue.poll())
    assert [completion.id for completion in completions] == list(range(first_id, first_id + n_tasks))
    return completions


def native_threads() -> set[Path]:
    """The queue threads of this process, as directories of /proc."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            name = (task / "comm").read_text()
        except FileNotFoundError:
            continue
        if name.startswith("infinity-"):
            found.add(task)
    return found
