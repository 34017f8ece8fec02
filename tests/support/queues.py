"""What tests of the task queue share: backends that work here, memory with an address, kernels to give it."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from infinity.native import ffi, lib
from infinity.task_queue import Completion, Files, TaskQueue, probe_backends

REFUSALS = {probe.backend: "" if probe.works else f"{probe.backend} does not work here: {probe.reason}" for probe in probe_backends()}
"""Why a backend does not work here; empty where it does."""
WORKING_BACKENDS = [backend for backend, refusal in REFUSALS.items() if not refusal]
BACKENDS = [pytest.param(backend, marks=pytest.mark.skipif(bool(refusal), reason=refusal or "-")) for backend, refusal in REFUSALS.items()]
URING_REASON = REFUSALS["uring"]


class Memory:
    """Page-aligned memory of so many bytes."""

    def __init__(self, nbytes: int, content: bytes = b"") -> None:
        self.map = mmap.mmap(-1, max(nbytes, 1))
        self.nbytes = nbytes
        self.address = int(ffi.cast("uintptr_t", ffi.from_buffer(self.map)))
        self.map[: len(content)] = content

    def bytes(self, begin: int = 0, end: int | None = None) -> bytes:
        return self.map[begin : self.nbytes if end is None else end]


def alias_range(nbytes: int, piece: int, last: int) -> tuple[int, Callable[[], None]]:
    """``nbytes`` of addresses backed by ``piece`` bytes over and over, and the last ``last`` bytes by memory of their own."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    both = mmap.PROT_READ | mmap.PROT_WRITE
    fixed, no_reserve = 0x10, 0x4000
    base = libc.mmap(None, nbytes, both, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve, -1, 0)
    memory = os.memfd_create("piece")
    os.ftruncate(memory, piece)
    for at in range(0, nbytes, piece):
        assert libc.mmap(base + at, piece, both, mmap.MAP_SHARED | fixed, memory, 0) == base + at
    at = base + nbytes - last
    assert libc.mmap(at, last, both, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed, -1, 0) == at
    os.close(memory)
    return base, lambda: libc.munmap(base, nbytes)


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
