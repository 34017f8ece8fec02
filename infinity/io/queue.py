"""The task queue for people: its options by the names of the config's ``aio`` block, and its completions brought to their futures.

One lock guards what is handed over and what is taken from the native queue; nobody waits for a transfer with it. A future is reachable
from here from before its tasks are submitted until they are complete, so memory is never freed under the kernel, whoever drops what.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType

from infinity.errors import ConfigError, ConfigProblem, EngineClosedError
from infinity.io.arrays import Memory, empty, memory_of
from infinity.io.futures import Future
from infinity.native import lib
from infinity.sizes import parse_bytes
from infinity.task_queue import Backend, Batch, Files, TaskQueue

__all__ = ["GRAIN_NBYTES", "Queue", "default_queue"]

GRAIN_NBYTES = max(4096, os.sysconf("SC_PAGE_SIZE"))
"""What goes past the page cache are whole pages of it, so that no page is moved both ways at once."""

_STAGE_NBYTES = 1 << 20
_STAGES = 64
_COPIERS = 2
_WATCHED_MAX = 64
_LEAVE_S = 5.0


class Queue:
    """The engine with options of its own: ``backend``, ``queue_depth``, ``block_size`` (the largest request) and ``io_threads`` (of the
    ``threads`` backend) as in the config's ``aio`` block; ``in_flight`` is how many bytes may be at the drive at a time.

    ``paths`` are directories, one on each of several drives: each has its own dispatcher, depth and bytes in flight, and a file belongs to
    the one that it lies in (else to the first).
    Units: sizes are bytes, or text such as "1MiB".
    Order: close it after the files that were opened with it. Without one, files share a queue that is opened for the first of them and
        closed at exit.
    Memory: up to 64 MiB, from the first transfer on whose array does not lie as O_DIRECT needs it.
    Errors: ConfigError for an option that cannot be; OSError when the backend asked for does not work here.
    """

    def __init__(
        self,
        *,
        backend: str = "auto",
        queue_depth: int = 32,
        block_size: int | str = "1MiB",
        in_flight: int | str = "256MiB",
        io_threads: int = 4,
        paths: Sequence[str | os.PathLike[str]] = (),
    ) -> None:
        self.block_nbytes = _checked_bytes("block_size", block_size, GRAIN_NBYTES)
        self.paths = tuple(os.path.realpath(path) for path in paths)
        self.files = Files()
        """The table of file operations that everything here goes through."""
        self._queue = TaskQueue(
            self.files,
            backend=_checked_backend(backend),
            queue_depth=_checked_count("queue_depth", queue_depth, 4096),
            block_nbytes=self.block_nbytes,
            in_flight_nbytes=_checked_bytes("in_flight", in_flight, 1),
            io_threads=_checked_count("io_threads", io_threads, 1024),
            workers=_COPIERS,
            n_paths=_checked_count("paths", max(1, len(self.paths)), int(lib.INF_PATHS_MAX)),
        )
        self.backend = self._queue.backend
        """The backend that runs."""
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._waiting: set[int] = set()
        self._closing = False
        self._futures: dict[Future, None] = {}
        self._of_task: dict[int, Future] = {}
        self._n_ended = 0
        self._stages = _Stages(self._queue)
        self._finalizer = weakref.finalize(self, _drain, self._queue, self._futures, self._stages)

    def close(self) -> None:
        """Wait until everything asked for has ended, and end the threads. Twice is fine."""
        if os.getpid() != self._pid:
            return
        while True:
            with self._lock:
                pending = [future for future in self._futures if not future._ended]
                if not pending or self._closing:
                    self._closing = True
                    break
            self._finish(pending)
        # Another thread that waits is on its way out, since nothing is pending. (One that Ctrl-C struck may have left its mark for good.)
        deadline = time.monotonic() + _LEAVE_S
        while self._waiting - {threading.get_ident()} and time.monotonic() < deadline:
            time.sleep(0.001)
        self._queue.close()
        self._finalizer()

    def __enter__(self) -> Queue:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- for files and futures

    def _add_file(self, fd: int, path: str) -> None:
        """Tell the native queue which drive it is on."""
        place = os.path.realpath(path)
        inside = [(len(root), index) for index, root in enumerate(self.paths) if os.path.commonpath((root, place)) == root]
        with self._locked():
            if self._closing:
                raise EngineClosedError("the queue was closed")
            self._queue.add_file(fd, max(inside, default=(0, 0))[1])

    def _cancel(self, futures: Iterable[Future]) -> None:
        with self._locked():
            if not self._closing:
                self._queue.cancel([id for future in futures for id in future._tasks])

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        if os.getpid() != self._pid:
            raise EngineClosedError("this file or queue belongs to the process that opened it, and this is a forked child: open it again")
        with self._lock:
            yield

    def _submit(self, future: Future, batch: Batch) -> None:
        """Order: with the lock.

        The future is registered under the ids that its tasks will get before they get them, so that there is no instant, for Ctrl-C to
        strike in, at which the kernel has an address and nobody here keeps the memory.
        """
        if self._closing:
            raise EngineClosedError("the queue was closed")
        first_id = self._next_id()
        future._tasks = range(first_id, first_id + len(batch))
        future._left = len(batch)
        self._futures[future] = None
        self._of_task.update(dict.fromkeys(future._tasks, future))
        try:
            self._queue.submit(batch)
        except BaseException:
            if self._next_id() == first_id:
                future._tasks = range(0)
                self._let_go(future)
            raise

    def _next_id(self) -> int:
        return self._queue.submit(Batch())  # of no tasks: says which id would be the first

    def _collect(self) -> None:
        """Bring what is complete to its futures."""
        with self._locked():
            if not self._closing:
                for completion in self._queue.poll():
                    self._complete(completion.id, completion.status)

    def _complete(self, id: int, status: int) -> None:
        future = self._of_task.pop(id, None)
        if future is not None and future._advance(status, self._n_ended + 1):
            self._n_ended += 1
            self._let_go(future)

    def _let_go(self, future: Future) -> None:
        self._futures.pop(future, None)
        self._stages.give_back(future)

    def _finish(self, futures: Iterable[Future], timeout: float | None = None) -> None:
        """Until all of them have ended."""
        pending = [future for future in futures if not future._ended]
        assert all(future._queue is self for future in pending)
        self._wait(self._queue.wait, [id for future in pending for id in future._tasks], timeout)
        for future in pending:
            with self._locked():
                if not future._ended:
                    future._lose(self._n_ended + 1)
                    self._let_go(future)

    def _finish_one(self, futures: Sequence[Future], timeout: float | None) -> None:
        """Until one of the first of them, or one of its tasks, has ended."""
        with self._locked():
            last = [next((id for id in reversed(future._tasks) if id in self._of_task), 0) for future in futures[:_WATCHED_MAX]]
        if all(last):
            self._wait(self._queue.wait_any, last, timeout)
        else:
            self._finish([future for future, id in zip(futures, last, strict=False) if not id], timeout)

    def _wait(self, wait: Callable[[list[int], float | None], None], ids: list[int], timeout: float | None) -> None:
        if os.getpid() == self._pid:
            self._waiting.add(threading.get_ident())  # the native queue stays while somebody is in there
        try:
            if not self._closing:
                with self._locked():
                    next_id = self._next_id()
                wait([id for id in ids if id < next_id], timeout)  # others were never given: Ctrl-C struck before they were
                self._collect()
        finally:
            self._waiting.discard(threading.get_ident())


class _Stages:
    """Aligned memory through which arrays move that do not lie as O_DIRECT needs it: a few pieces for each transfer under way."""

    def __init__(self, queue: TaskQueue) -> None:
        self.piece_nbytes = _STAGE_NBYTES
        self._queue = queue
        self._memory: list[Memory] = []
        self._free: list[int] = []
        self._borrowers: dict[Future, list[int]] = {}

    @property
    def borrower(self) -> Future | None:
        """Who has had some for longest."""
        return next((future for future in self._borrowers if future._tasks), None)

    def lend(self, future: Future, n_pieces: int) -> list[int]:
        """Addresses of up to ``n_pieces``, but never more than a quarter of what is free (or one), so that others find some too."""
        if not self._free and self.borrower is None:
            memory = memory_of(empty(_STAGES * _STAGE_NBYTES), writable=True)
            self._memory.append(memory)
            self._queue.add_memory(memory.address, memory.nbytes)
            self._free = [memory.address + index * _STAGE_NBYTES for index in range(_STAGES)]
        n_lent = min(n_pieces, max(1, len(self._free) // 4))
        lent, self._free = self._free[:n_lent], self._free[n_lent:]
        if lent:
            self._borrowers[future] = lent
        return lent

    def give_back(self, future: Future) -> None:
        self._free += self._borrowers.pop(future, ())


_abandoned: list[object] = []


def _drain(queue: TaskQueue, futures: dict[Future, None], stages: _Stages) -> None:
    """For a queue that nobody closed: memory goes after the kernel has let go of it, or not at all."""
    try:
        queue.close()
    except BaseException:
        _abandoned.append((queue, futures, stages))
        raise


def _checked_bytes(key: str, value: int | str, multiple: int) -> int:
    try:
        nbytes = parse_bytes(value)
    except ValueError as error:
        raise ConfigError([ConfigProblem(key, str(error))]) from None
    if nbytes == 0 or nbytes % multiple:
        raise ConfigError([ConfigProblem(key, f"{value!r} is not a positive multiple of {multiple} bytes")])
    return nbytes


def _checked_count(key: str, value: int, most: int) -> int:
    if type(value) is not int or not 1 <= value <= most:
        raise ConfigError([ConfigProblem(key, f"{value!r} is no number from 1 to {most}")])
    return value


def _checked_backend(backend: str) -> Backend:
    try:
        return Backend(backend)
    except ValueError:
        names = ", ".join(repr(known.value) for known in Backend)
        raise ConfigError([ConfigProblem("backend", f"{backend!r} is none of {names}")]) from None


_shared: list[Queue] = []
_shared_lock = threading.Lock()


def default_queue() -> Queue:
    """The queue of this process that files share which were given none; opened now if it is not open."""
    with _shared_lock:
        if not _shared or _shared[0]._closing or _shared[0]._pid != os.getpid():
            _shared[:] = [Queue()]
        return _shared[0]


def _forget_shared() -> None:
    """In a forked child: the queue is its parent's, and so may be whoever held the lock."""
    global _shared_lock
    _shared_lock = threading.Lock()
    _shared.clear()


os.register_at_fork(after_in_child=_forget_shared)
