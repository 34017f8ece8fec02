"""The native task queue, and the one table of file operations that it and its neighbours use.

A task is a read, a write, a flush or a kernel. It may depend on earlier tasks, and what depends on a task that failed completes
with ``ECANCELED``. A task completes once, after everything it depends on, whole or with an errno; so a frame is free when the last
task that was given its address is complete, failed or not. No Python runs between two tasks of a chain.

This module knows no pages and makes no decisions: addresses, descriptors and offsets are the caller's.
"""

from __future__ import annotations

import enum
import errno
import logging
import os
import struct
import time
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from infinity.errors import EngineClosedError, StallError
from infinity.faults import Fault
from infinity.metrics import Histogram
from infinity.native import check, ffi, lib
from infinity.quotas import Refusal, explain

__all__ = [
    "Backend",
    "BackendProbe",
    "Batch",
    "Completion",
    "FileOp",
    "Files",
    "PathInfo",
    "PathStats",
    "Priority",
    "QueueStats",
    "TaskQueue",
    "probe_backends",
]

_log = logging.getLogger(__name__)

_READ, _WRITE, _FLUSH, _KERNEL = int(lib.INF_READ), int(lib.INF_WRITE), int(lib.INF_FLUSH), int(lib.INF_KERNEL)
_OP_NAMES = {_READ: "read", _WRITE: "write", _FLUSH: "flush", _KERNEL: "kernel"}
_PHASES = {
    int(lib.INF_WAITING): "waits for earlier tasks",
    int(lib.INF_READY): "is ready, and nothing is free to run it",
    int(lib.INF_RUNNING): "is running",
}

_OPS = {"read": _READ, "write": _WRITE}
_STAGES = {"submission": int(lib.INF_SUBMISSION), "completion": int(lib.INF_COMPLETION), "total": int(lib.INF_TOTAL)}

_TASK = struct.Struct("=iiQQQiIQIIiI")
_COMPLETION = struct.Struct("=QQiI")
if _TASK.size != ffi.sizeof("inf_task") or _COMPLETION.size != ffi.sizeof("inf_completion"):
    raise ImportError("infinity._native was built from another abi.h than infinity/task_queue.py expects; build it again")
_pack_task = _TASK.pack

_SLICE_MS = 100
_POLL_MAX = 256
_LISTED_MAX = 16


class FileOp(enum.IntEnum):
    """The rows of the table of file operations."""

    OPEN = lib.INF_FILE_OPEN
    CLOSE = lib.INF_FILE_CLOSE
    FALLOCATE = lib.INF_FILE_FALLOCATE
    READ = lib.INF_FILE_READ
    WRITE = lib.INF_FILE_WRITE
    DATASYNC = lib.INF_FILE_DATASYNC
    SYNC = lib.INF_FILE_SYNC
    RENAME = lib.INF_FILE_RENAME
    UNLINK = lib.INF_FILE_UNLINK


class Backend(enum.Enum):
    """What carries out reads, writes and flushes. ``AUTO`` takes the best that works here."""

    AUTO = "auto"
    URING = "uring"
    """io_uring, by system calls."""
    LIBAIO = "libaio"
    """The kernel's older asynchronous I/O, for where io_uring is forbidden; only files opened with O_DIRECT gain by it."""
    THREADS = "threads"
    """``pread`` and ``pwrite`` on threads: works everywhere."""


_BACKENDS = {
    Backend.URING: int(lib.INF_BACKEND_URING),
    Backend.LIBAIO: int(lib.INF_BACKEND_LIBAIO),
    Backend.THREADS: int(lib.INF_BACKEND_THREADS),
}
"""The best first."""
_BACKEND_NAMES = {code: backend.value for backend, code in _BACKENDS.items()}


class Priority(enum.IntEnum):
    """Of tasks that are ready, the most urgent goes first."""

    DEMAND = lib.INF_DEMAND
    """Somebody waits for it, or soon will."""
    WRITE_BACK = lib.INF_WRITE_BACK
    """It frees memory."""
    PREFETCH = lib.INF_PREFETCH
    """It may be needed later."""


class Completion(NamedTuple):
    """The end of a task. ``status`` is 0 or ``-errno``; ``value`` what a kernel answers, or bytes moved; ``retries`` counts short transfers
    continued and EINTR / EAGAIN retried."""

    id: int
    status: int
    value: int
    retries: int


@dataclass(frozen=True, slots=True)
class QueueStats:
    """Counters since the queue was opened.

    Units: ``reads`` to ``kernels`` count tasks; ``io_busy_s`` is the time with at least one read or write in flight.
    """

    read_nbytes: int
    write_nbytes: int
    reads: int
    writes: int
    flushes: int
    kernels: int
    shorts: int
    retries: int
    in_flight: int
    io_busy_s: float


@dataclass(frozen=True, slots=True)
class PathStats:
    """Counters of one path since the queue was opened.

    Units: ``reads`` to ``in_flight`` count requests; ``busy_s`` is the time with at least one read or write in flight.
    """

    read_nbytes: int
    write_nbytes: int
    reads: int
    writes: int
    flushes: int
    shorts: int
    retries: int
    in_flight: int
    busy_s: float


@dataclass(frozen=True, slots=True)
class PathInfo:
    """How one path is carried out.

    Units: ``depth`` is the most requests at the backend at a time, fewer than asked for where the system allows no more.
    """

    backend: str
    depth: int
    files_registered: int
    memory_registered_nbytes: int
    notes: tuple[str, ...]
    """What the backend does without, and why; also why ``AUTO`` did not take a better one."""


@dataclass(frozen=True, slots=True)
class BackendProbe:
    """Whether a backend works here. If not, or not as asked, ``reason`` names the setting, and ``remedy`` says what to do."""

    backend: str
    works: bool
    reason: str
    remedy: str


def _free_files(handle: Any, pid: int) -> None:
    if os.getpid() == pid:
        lib.inf_files_free(handle)


class Files:
    """Every file operation of store and checkpoint, counted, and made to fail where a test says so.

    Memory: owns the native table, not the descriptors.
    Errors: ``OSError`` with errno and file name.
    """

    def __init__(self) -> None:
        out = ffi.new("inf_files **")
        check(lib.inf_files_new(out), "files")
        self._handle = out[0]
        self._paths: dict[int, str] = {}
        self._queues: weakref.WeakSet[TaskQueue] = weakref.WeakSet()
        """Those that files were added to."""
        weakref.finalize(self, _free_files, self._handle, os.getpid())

    @property
    def handle(self) -> Any:
        """The native ``inf_files *``; lives as long as this object."""
        return self._handle

    def path(self, fd: int) -> str:
        """The path that ``fd`` was opened with here."""
        return self._paths.get(fd, f"descriptor {fd}")

    def open(self, path: str | os.PathLike[str], flags: int, mode: int = 0o600) -> int:
        """A descriptor, close-on-exec."""
        name = os.fspath(path)
        fd = check(lib.inf_file_open(self._handle, os.fsencode(name), flags, mode), "open", name)
        self._paths[fd] = name
        return fd

    def close(self, fd: int) -> None:
        """Closes ``fd``; it is gone even when this raises. Queues that it was added to drop it first."""
        for queue in tuple(self._queues):
            queue._forget(fd)
        name = self._paths.pop(fd, f"descriptor {fd}")
        check(lib.inf_file_close(self._handle, fd), "close", name)

    def fallocate(self, fd: int, offset: int, nbytes: int) -> None:
        check(lib.inf_file_fallocate(self._handle, fd, offset, nbytes), "fallocate", self.path(fd))

    def datasync(self, fd: int) -> None:
        check(lib.inf_file_datasync(self._handle, fd), "datasync", self.path(fd))

    def sync(self, fd: int) -> None:
        check(lib.inf_file_sync(self._handle, fd), "sync", self.path(fd))

    def rename(self, source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
        check(lib.inf_file_rename(self._handle, os.fsencode(source), os.fsencode(target)), "rename", os.fspath(source))

    def unlink(self, path: str | os.PathLike[str]) -> None:
        check(lib.inf_file_unlink(self._handle, os.fsencode(path)), "unlink", os.fspath(path))

    def direct_alignment(self, fd: int) -> tuple[int, int]:
        """What O_DIRECT asks of memory addresses and of file offsets.

        Units: bytes; (0, 0) where the kernel does not say.
        """
        memory, offset = ffi.new("uint32_t *"), ffi.new("uint32_t *")
        check(lib.inf_file_direct_alignment(fd, memory, offset), "statx", self.path(fd))
        return int(memory[0]), int(offset[0])

    def fault(self, op: FileOp, fault: Fault, *, nth: int = 1, times: int = 1, one_in: int = 1, seed: int = 0) -> None:
        """For tests: the ``nth`` call of ``op`` from now on (the first is 1) and the ``times - 1`` after it go as ``fault`` says.

        ``one_in`` above 1: of these only about so many, chosen by ``seed``. A call takes the fault that was set first.
        """
        what = ffi.new(
            "inf_fault *",
            {"kind": fault.kind, "value": fault.value, "bit": fault.bit, "us": fault.us, "one_in": one_in, "seed": seed},
        )
        check(lib.inf_files_fault(self._handle, op, nth, times, what), f"fault of {op!r}: {fault}")

    def mend(self, *ops: FileOp) -> None:
        """Takes all faults of ``ops`` away, or of all operations where none is named."""
        for op in ops or FileOp:
            check(lib.inf_files_mend(self._handle, op), "mend")

    def count(self, op: FileOp) -> int:
        """How often ``op`` was called."""
        return int(lib.inf_files_count(self._handle, op))


class Batch:
    """Tasks to be handed over in one call.

    A task has the priority that it is given, else ``priority`` of the batch, else WRITE_BACK if it is a write or a flush, else DEMAND.
    Order: each method returns a handle, ``-1 - index``; ``after`` takes handles of this batch and ids of tasks already submitted. After
    ``first = queue.submit(batch)`` the task with handle h has the id ``first - 1 - h``, and the batch is empty again.
    Memory: borrows nothing; what an address names belongs to the queue from submit to completion.
    """

    __slots__ = ("_after", "_args", "_last", "_priority", "_priority_of_writes", "_tasks")

    def __init__(self, priority: Priority | None = None) -> None:
        self._tasks = bytearray()
        self._after = array("q")
        self._args = bytearray()
        self._last = 0
        self._priority = Priority.DEMAND if priority is None else priority
        self._priority_of_writes = Priority.WRITE_BACK if priority is None else priority

    def __len__(self) -> int:
        return -self._last

    def clear(self) -> None:
        """Drops every task."""
        self._tasks.clear()
        del self._after[:]
        self._args.clear()
        self._last = 0

    def rows(self) -> Iterator[tuple[str, int, int, int, int, int, int, list[int]]]:
        """(op, fd, offset, nbytes, address, kernel, priority, after) of each task, in order."""
        after = self._after.tolist()
        for op, fd, offset, nbytes, address, kernel, _, _, begin, count, priority, _ in _TASK.iter_unpack(self._tasks):
            yield _OP_NAMES[op], fd, offset, nbytes, address, kernel, priority, after[begin : begin + count]

    def read(self, fd: int, offset: int, nbytes: int, address: int, after: Iterable[int] = (), priority: Priority | None = None) -> int:
        """File to memory. At the end of the file the status is ``-ENODATA``."""
        return self._add(_READ, fd, offset, nbytes, address, after, self._priority if priority is None else priority)

    def write(self, fd: int, offset: int, nbytes: int, address: int, after: Iterable[int] = (), priority: Priority | None = None) -> int:
        """Memory to file."""
        return self._add(_WRITE, fd, offset, nbytes, address, after, self._priority_of_writes if priority is None else priority)

    def flush(self, fd: int, after: Iterable[int] = (), priority: Priority | None = None) -> int:
        """``fdatasync`` of ``fd``; covers the writes it depends on."""
        return self._add(_FLUSH, fd, 0, 0, 0, after, self._priority_of_writes if priority is None else priority)

    def kernel(self, kernel_id: int, args: bytes, after: Iterable[int] = (), priority: Priority | None = None) -> int:
        """A native kernel on a worker thread; ``args`` is its struct of arguments, copied here."""
        links = self._after
        begin = len(links)
        if after:
            links.extend(after)
        blob = self._args
        at = len(blob)
        nbytes = len(args)
        blob += args
        if nbytes & 7:
            blob += b"\0" * (8 - (nbytes & 7))
        urgency = self._priority if priority is None else priority
        self._tasks += _pack_task(_KERNEL, -1, 0, 0, 0, kernel_id, nbytes, at, begin, len(links) - begin, urgency, 0)
        self._last -= 1
        return self._last

    def _add(self, op: int, fd: int, offset: int, nbytes: int, address: int, after: Iterable[int], priority: Priority) -> int:
        links = self._after
        begin = len(links)
        if after:
            links.extend(after)
        self._tasks += _pack_task(op, fd, offset, nbytes, address, 0, 0, 0, begin, len(links) - begin, priority, 0)
        self._last -= 1
        return self._last


def _close_queue(handle: Any, files: Files, pid: int) -> None:
    """Ctrl-C ends it, and leaves the queue behind, where it is not ``close`` that calls. ``files`` is here to outlive the queue."""
    if os.getpid() == pid:
        while lib.inf_queue_drain(handle, _SLICE_MS) < 0:
            pass
        lib.inf_queue_close(handle)


class TaskQueue:
    """The native queue.

    Order: ``submit`` never waits, ``poll`` never waits, ``wait`` does. Ids grow from 1. Any thread may call. What is ready and most
    urgent goes first; what is waited for, and all that it depends on, becomes DEMAND.
    Units: ``queue_depth`` requests of at most ``block_nbytes``, and ``in_flight_nbytes``, are at the backend at a time, for each of
        ``n_paths`` paths, which have ``io_threads`` each where the backend is ``threads``.
    Memory: owns rings, descriptors and threads; keeps ``files`` alive. In a forked child it is nobody's: every call raises there.
    Errors: ``OSError`` when the backend asked for does not work here; ``EngineClosedError`` after ``close``.
    """

    def __init__(
        self,
        files: Files,
        *,
        backend: Backend | str = Backend.AUTO,
        queue_depth: int = 32,
        block_nbytes: int = 1 << 20,
        in_flight_nbytes: int = 256 << 20,
        workers: int = 1,
        io_threads: int = 4,
        n_paths: int = 1,
        stall_s: float = 600.0,
    ) -> None:
        options = ffi.new("inf_queue_options *")
        options.depth, options.block_nbytes, options.in_flight_nbytes = queue_depth, block_nbytes, in_flight_nbytes
        options.workers, options.io_threads, options.n_paths = workers, io_threads, n_paths
        self._handle, self._refusals = _open_queue(files, Backend(backend), options)
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, _close_queue, self._handle, files, self._pid)
        self._files = files
        self._stall_s = stall_s
        self.n_paths = n_paths
        self.recorder: Callable[[int, Batch], None] | None = None
        """Told of each batch that was taken: the id of its first task, and the batch while it still has its tasks."""
        self.backend: str = _BACKEND_NAMES[lib.inf_queue_backend(self._handle)]
        """The backend that runs: ``uring``, ``libaio`` or ``threads``."""
        limit = _limit(self._handle, self.backend, options)
        if limit is not None:
            _log.warning("%s. %s", limit.reason, limit.remedy)

    def submit(self, batch: Batch) -> int:
        """Hands all tasks of the batch over, or none; the id of the first. The batch is empty afterwards."""
        handle = self._open_handle()
        first_id = ffi.new("uint64_t *")
        code = lib.inf_queue_submit(
            handle,
            ffi.from_buffer("inf_task[]", batch._tasks),
            len(batch),
            ffi.from_buffer("int64_t[]", batch._after),
            len(batch._after),
            ffi.from_buffer("uint8_t[]", batch._args),
            len(batch._args),
            first_id,
        )
        if code < 0:
            if code == -errno.ESHUTDOWN:
                raise EngineClosedError("the task queue is being closed")
            check(code, f"submit of {len(batch)} tasks")
        first = int(first_id[0])
        if self.recorder is not None:
            self.recorder(first, batch)
        batch.clear()
        return first

    def poll(self) -> list[Completion]:
        """Everything complete and not yet taken, in the order of completion."""
        handle = self._open_handle()
        taken = bytearray(_POLL_MAX * _COMPLETION.size)
        completions: list[Completion] = []
        while True:
            n = lib.inf_queue_poll(handle, ffi.from_buffer("inf_completion[]", taken), _POLL_MAX)
            if n:
                rows = _COMPLETION.iter_unpack(memoryview(taken)[: n * _COMPLETION.size])
                completions += [Completion(id, status, value, retries) for id, value, status, retries in rows]
            if n < _POLL_MAX:
                return completions

    def wait(self, ids: Sequence[int] | Iterable[int], timeout_s: float | None = None) -> None:
        """Returns when every task of ``ids`` is complete, taken by ``poll`` or not; Ctrl-C works meanwhile.

        They and everything that they depend on become DEMAND, unless ``timeout_s`` is 0.
        Errors: ``StallError`` after ``timeout_s``, or when nothing in the whole queue has moved for its ``stall_s``; the tasks go on.
        """
        self._wait(lib.inf_queue_wait, ids, timeout_s)

    def wait_any(self, ids: Sequence[int] | Iterable[int], timeout_s: float | None = None) -> None:
        """Like ``wait``, until at least one task of ``ids`` is complete."""
        self._wait(lib.inf_queue_wait_any, ids, timeout_s)

    def _wait(self, call: Any, ids: Sequence[int] | Iterable[int], timeout_s: float | None) -> None:
        handle = self._open_handle()
        wanted = array("Q", ids)
        view = ffi.from_buffer("uint64_t[]", wanted)
        n = len(wanted)
        self._until(lambda ms: int(call(handle, view, n, ms)), f"wait for {n} tasks", lambda: wanted, timeout_s)

    def promote(self, ids: Iterable[int]) -> None:
        """These tasks and everything that they depend on become DEMAND, as if they were waited for. Never waits."""
        handle = self._open_handle()
        wanted = array("Q", ids)
        lib.inf_queue_promote(handle, ffi.from_buffer("uint64_t[]", wanted), len(wanted))

    def cancel(self, ids: Iterable[int] | None = None) -> None:
        """What is not begun of these tasks (None: of all) ends with ``ECANCELED``, a task that depends on others after them; kernels
        that run and requests at the backend go to their end. Never waits."""
        handle = self._open_handle()
        if ids is None:
            lib.inf_queue_cancel(handle, ffi.NULL, 0)
            return
        wanted = array("Q", ids)
        if wanted:
            lib.inf_queue_cancel(handle, ffi.from_buffer("uint64_t[]", wanted), len(wanted))

    # ---- what transfers will use ----

    def add_file(self, fd: int, path: int = 0) -> None:
        """Transfers of ``fd`` submitted from now on belong to that path; the backend may register the file."""
        self._files._queues.add(self)
        check(lib.inf_queue_add_file(self._open_handle(), fd, path), f"add descriptor {fd} to path {path} of {self.n_paths}")

    def drop_file(self, fd: int) -> None:
        """With nothing of ``fd`` in flight, before it is closed (``Files.close`` does it): a registered file would live on. One that was
        not added is fine."""
        check(lib.inf_queue_drop_file(self._open_handle(), fd), f"drop descriptor {fd}")

    def add_memory(self, address: int, nbytes: int) -> None:
        """Transfers will use this memory: the backends may register it."""
        check(lib.inf_queue_add_memory(self._open_handle(), ffi.cast("void *", address), nbytes), f"add {nbytes} bytes of memory")

    def drop_memory(self, address: int) -> None:
        """Before the memory is given back, with nothing in flight there. Memory that was not added is fine."""
        check(lib.inf_queue_drop_memory(self._open_handle(), ffi.cast("void *", address)), "drop memory")

    # ---- what happened ----

    def info(self) -> tuple[PathInfo, ...]:
        """How each path is carried out."""
        handle, info = self._open_handle(), ffi.new("inf_path_info *")
        paths = []
        for path in range(self.n_paths):
            check(lib.inf_queue_get_path_info(handle, path, info), f"path {path}")
            notes = ffi.string(info.notes).decode(errors="replace").splitlines()
            paths.append(
                PathInfo(
                    backend=_BACKEND_NAMES[info.backend],
                    depth=info.depth,
                    files_registered=info.files_registered,
                    memory_registered_nbytes=info.memory_registered_nbytes,
                    notes=(*map(str, self._refusals), *notes),
                )
            )
        return tuple(paths)

    def path_stats(self) -> tuple[PathStats, ...]:
        """The counters of each path, now."""
        handle, stats = self._open_handle(), ffi.new("inf_path_stats *")
        paths = []
        for path in range(self.n_paths):
            check(lib.inf_queue_get_path_stats(handle, path, stats), f"path {path}")
            paths.append(
                PathStats(
                    read_nbytes=stats.read_nbytes,
                    write_nbytes=stats.write_nbytes,
                    reads=stats.reads,
                    writes=stats.writes,
                    flushes=stats.flushes,
                    shorts=stats.shorts,
                    retries=stats.retries,
                    in_flight=stats.in_flight,
                    busy_s=stats.busy_ns / 1e9,
                )
            )
        return tuple(paths)

    def stats(self) -> QueueStats:
        """The counters, now."""
        self._open_handle()
        stats = self._counters()
        return QueueStats(
            read_nbytes=stats.read_nbytes,
            write_nbytes=stats.write_nbytes,
            reads=stats.reads,
            writes=stats.writes,
            flushes=stats.flushes,
            kernels=stats.kernels,
            shorts=stats.shorts,
            retries=stats.retries,
            in_flight=stats.in_flight,
            io_busy_s=stats.io_busy_ns / 1e9,
        )

    def latency(
        self, op: Literal["read", "write"], stage: Literal["submission", "completion", "total"], path: int | None = None
    ) -> Histogram:
        """Of every request of ``op``, on one path or on all: the time from when its task was ready until it was handed to the backend
        (submission), from then until it ended (completion), or both (total).

        Units: seconds.
        """

        def fill(handle: Any, path: int, out: Any) -> int:
            return int(lib.inf_queue_get_latency(handle, path, _OPS[op], _STAGES[stage], out))

        return self._histogram(fill, path, 1e-9)

    def depths(self, path: int | None = None) -> Histogram:
        """How many requests were at the backend of a path, each time that one more was handed to it, that one included."""
        return self._histogram(lambda handle, path, out: int(lib.inf_queue_get_depths(handle, path, out)), path, 1)

    def _histogram(self, fill: Callable[[Any, int, Any], int], path: int | None, unit: float) -> Histogram:
        handle, out = self._open_handle(), ffi.new("inf_histogram *")
        counts, total, maximum = [0] * lib.INF_HISTOGRAM_BUCKETS, 0, 0
        for index in range(self.n_paths) if path is None else (path,):
            check(fill(handle, index, out), f"path {index} of {self.n_paths}")
            counts = list(map(int.__add__, counts, out.buckets))
            total, maximum = total + out.total, max(maximum, out.max)
        return Histogram(counts, total, maximum, unit)

    def close(self) -> None:
        """Lets what is in flight end, and ends the threads; Ctrl-C works meanwhile. After ``cancel`` only what was begun is waited for.
        Twice is fine; in a forked child it does nothing.

        Errors: ``StallError`` when nothing has moved for ``stall_s``: the queue takes no more tasks then, but it is still there, for
        ``wait``, ``poll`` and ``cancel``, and to be closed again.
        """
        if self._finalizer.alive and os.getpid() == self._pid:
            handle = self._handle
            self._until(lambda ms: int(lib.inf_queue_drain(handle, ms)), "close of the task queue", self._pending)
        self._finalizer()

    def _forget(self, fd: int) -> None:
        if self._finalizer.alive and os.getpid() == self._pid:
            self.drop_file(fd)

    def _open_handle(self) -> Any:
        if not self._finalizer.alive:
            raise EngineClosedError("the task queue was closed")
        if os.getpid() != self._pid:
            raise EngineClosedError("the task queue belongs to the process that opened it, and this is a forked child: open another")
        return self._handle

    def _until(self, attempt: Callable[[int], int], what: str, wanted: Callable[[], Sequence[int]], timeout_s: float | None = None) -> None:
        """Calls ``attempt`` with a number of milliseconds to wait until it does not time out. In slices, for the sake of signals."""
        start = time.monotonic()
        moved_at, moved = start, -1
        slice_ms = _SLICE_MS if timeout_s is None else min(_SLICE_MS, max(0, int(timeout_s * 1000)))
        while True:
            code = attempt(slice_ms)
            if code != -errno.ETIMEDOUT:
                check(code, what)
                return
            now = time.monotonic()
            if timeout_s is not None:
                if now - start >= timeout_s:
                    raise self._stall(wanted(), f"within {timeout_s:g} s")
                slice_ms = min(_SLICE_MS, int((start + timeout_s - now) * 1000) + 1)
            progress = self._progress()
            if progress != moved:
                moved_at, moved = now, progress
            elif now - moved_at >= self._stall_s:
                raise self._stall(wanted(), f"and nothing in the queue has moved for {now - moved_at:.1f} s")

    def _pending(self) -> Sequence[int]:
        """The ids of tasks that are not complete, oldest first."""
        ids = array("Q", bytes(8 * int(self._counters().in_flight)))
        if ids:
            del ids[lib.inf_queue_list(self._handle, ffi.from_buffer("uint64_t[]", ids), len(ids)) :]
        return ids

    def _counters(self) -> Any:
        stats = ffi.new("inf_queue_stats *")
        lib.inf_queue_get_stats(self._handle, stats)
        return stats

    def _progress(self) -> int:
        stats = self._counters()
        return int(stats.read_nbytes + stats.write_nbytes + stats.reads + stats.writes + stats.flushes + stats.kernels + stats.retries)

    def _stall(self, ids: Sequence[int], how: str) -> StallError:
        left = tuple(id for id in ids if self._phase(id) is not None)
        text = f"{len(left)} of {len(ids)} tasks did not end, {how}. Look at the disk (dmesg, iostat). Not complete:\n{self._listed(left)}"
        wanted = set(left)
        running = [id for id in self._pending() if id not in wanted and self._phase(id) == lib.INF_RUNNING]
        if running:
            text += f"\nAlso at work:\n{self._listed(running)}"
        return StallError(text, left)

    def _listed(self, ids: Sequence[int]) -> str:
        """A line for each task, those that run first."""
        ordered = sorted(ids, key=lambda id: -(self._phase(id) or 0))
        lines = [line for id in ordered[:_LISTED_MAX] if (line := self._describe(id)) is not None]
        if len(ids) > _LISTED_MAX:
            lines.append(f"... and {len(ids) - _LISTED_MAX} more")
        return "\n".join(f"  {line}" for line in lines)

    def _phase(self, id: int) -> int | None:
        task, phase = ffi.new("inf_task *"), ffi.new("int *")
        return None if lib.inf_queue_pending(self._handle, id, task, phase) < 0 else int(phase[0])

    def _describe(self, id: int) -> str | None:
        """One line about a task that is not complete."""
        task, phase = ffi.new("inf_task *"), ffi.new("int *")
        if lib.inf_queue_pending(self._handle, id, task, phase) < 0:
            return None
        what = _OP_NAMES[task.op]
        if task.op == _KERNEL:
            what = f"{what} {task.kernel}"
        elif task.op == _FLUSH:
            what = f"{what} of {self._files.path(task.fd)}"
        else:
            what = f"{what} of {task.nbytes} bytes at byte {task.offset} of {self._files.path(task.fd)}"
        return f"task {id}: {what}: {_PHASES[phase[0]]}"


def _open_queue(files: Files, backend: Backend, options: Any) -> tuple[Any, tuple[Refusal, ...]]:
    """A queue, and why it has not a better backend."""
    out = ffi.new("inf_queue **")
    refusals: list[Refusal] = []
    for kind, number in _BACKENDS.items():
        if backend not in (Backend.AUTO, kind):
            continue
        options.backend = number
        code = int(lib.inf_queue_open(files.handle, options, out))
        if code == 0:
            break
        if code == -errno.EINVAL:
            check(code, "task queue: an option is out of its range")
        refusals.append(explain(kind.value, -code, wanted=options.depth))
    else:
        last = refusals[-1]
        raise OSError(last.errno, f"{'; '.join(map(str, refusals))}. {last.remedy}")
    if refusals:
        carrier = f"{options.io_threads} threads" if kind is Backend.THREADS else kind.value
        why = "; ".join(f"{refusal}. {refusal.remedy}" for refusal in refusals)
        _log.log(logging.WARNING if kind is Backend.THREADS else logging.INFO, "reads and writes go through %s. %s", carrier, why)
    return out[0], tuple(refusals)


def _limit(handle: Any, backend: str, options: Any) -> Refusal | None:
    """Why fewer requests can be in flight than were asked for; None where that is not so."""
    wanted = min(options.depth, options.io_threads) if backend == "threads" else options.depth
    info = ffi.new("inf_path_info *")
    depths = []
    for path in range(options.n_paths):
        check(lib.inf_queue_get_path_info(handle, path, info), f"path {path}")
        depths.append(info.depth)
    if min(depths) >= wanted:
        return None
    why = explain(backend, errno.ENOMEM if backend == "uring" else errno.EAGAIN, wanted=wanted)
    return replace(why, reason=f"{min(depths)} requests are in flight at most, not {wanted}: {why.reason}")


def probe_backends(queue_depth: int = 32) -> tuple[BackendProbe, ...]:
    """Every backend, the best first, and whether it works in this process now with so many requests in flight."""
    files = Files()
    options = ffi.new("inf_queue_options *")
    options.depth, options.block_nbytes, options.in_flight_nbytes, options.workers = queue_depth, 1 << 20, 1 << 20, 1
    options.io_threads, options.n_paths = 1, 1
    probes = []
    for kind, number in _BACKENDS.items():
        out = ffi.new("inf_queue **")
        options.backend = number
        code = int(lib.inf_queue_open(files.handle, options, out))
        if code < 0:
            why = explain(kind.value, -code, wanted=queue_depth)
            probes.append(BackendProbe(kind.value, False, why.reason, why.remedy))
            continue
        limit = _limit(out[0], kind.value, options)
        lib.inf_queue_close(out[0])
        probes.append(BackendProbe(kind.value, True, limit.reason if limit else "", limit.remedy if limit else ""))
    return tuple(probes)
