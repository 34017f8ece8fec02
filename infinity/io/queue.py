"""The task queue for people: its options by the names of the config's ``aio`` block, and its completions brought to their futures.

One lock guards what is handed over and what is taken from the native queue; nobody waits for a transfer with it. A future is reachable
from here from before its tasks are submitted until they are complete, so memory is never freed under the kernel, whoever drops what.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType

from infinity.errors import ConfigError, ConfigProblem, EngineClosedError
from infinity.io.arrays import Memory, empty, memory_of
from infinity.io.futures import Future
from infinity.sizes import parse_bytes
from infinity.task_queue import Batch, Files, TaskQueue

__all__ = ["GRAIN_NBYTES", "Queue", "default_queue"]

GRAIN_NBYTES = max(4096, os.sysconf("SC_PAGE_SIZE"))
"""What goes past the page cache are whole pages of it, so that no page is moved both ways at once."""

_STAGE_NBYTES = 1 << 20
_STAGES = 64


class Queue:
    """The engine with options of its own: ``backend``, ``queue_depth``, ``block_size`` (the largest request), ``io_threads`` (of the
    ``threads`` backend), as in the config's ``aio`` block.

    Units: sizes are bytes, or text such as "1MiB".
    Order: close it after the files that were opened with it. Without one, files share a queue that is opened for the first of them and
        closed at exit.
    Memory: up to 64 MiB, from the first transfer on whose array does not lie as O_DIRECT needs it.
    Errors: ConfigError for an option that cannot be; OSError when the backend asked for does not work here.
    """

    def __init__(self, *, backend: str = "auto", queue_depth: int = 32, block_size: int | str = "1MiB", io_threads: int = 4) -> None:
        self.block_nbytes = _checked_block(block_size)
        self.files = Files()
        """The table of file operations that everything here goes through."""
        self._queue = TaskQueue(self.files, backend=backend, queue_depth=queue_depth, block_nbytes=self.block_nbytes, io_threads=io_threads)
        self.backend = self._queue.backend
        """The backend that runs."""
        self._pid = os.getpid()
        self._lock = threading.Condition(threading.RLock())
        self._waiting = 0
        self._closing = False
        self._futures: dict[Future, None] = {}
        self._of_task: dict[int, Future] = {}
        self._early: dict[int, int] = {}
        self._n_ended = 0
        self._stages = _Stages()
        self._finalizer = weakref.finalize(self, _drain, self._queue, self._futures, self._stages)

    def close(self) -> None:
        """Wait until everything asked for has ended, and end the threads. Twice is fine."""
        if os.getpid() != self._pid:
            return
        while True:
            with self._lock:
                pending = [future for future in self._futures if future._tasks]
                if not pending or self._closing:
                    self._closing = True
                    while self._waiting:
                        self._lock.wait()
                    break
            self._finish(pending)
        self._finalizer()

    def __enter__(self) -> Queue:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- for files and futures

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        if os.getpid() != self._pid:
            raise EngineClosedError("this file or queue belongs to the process that opened it, and this is a forked child: open it again")
        with self._lock:
            yield

    def _submit(self, future: Future, batch: Batch) -> None:
        """Order: with the lock."""
        if self._closing:
            raise EngineClosedError("the queue was closed")
        n_tasks = len(batch)
        self._futures[future] = None
        try:
            first_id = self._queue.submit(batch)
        except OSError:
            self._let_go(future)
            raise
        # Should Ctrl-C strike here, the future stays among the others, and with it the memory, until the queue is closed.
        future._tasks = range(first_id, first_id + n_tasks)
        future._left = n_tasks
        for id in future._tasks:
            self._of_task[id] = future
        for id in [id for id in self._early if id in future._tasks]:
            self._complete(id, self._early.pop(id))

    def _collect(self) -> None:
        """Bring what is complete to its futures."""
        with self._locked():
            if not self._closing:
                for completion in self._queue.poll():
                    self._complete(completion.id, completion.status)

    def _complete(self, id: int, status: int) -> None:
        future = self._of_task.pop(id, None)
        if future is None:
            self._early[id] = status
        elif future._advance(status, self._n_ended + 1):
            self._n_ended += 1
            self._let_go(future)

    def _let_go(self, future: Future) -> None:
        self._futures.pop(future, None)
        self._stages.give_back(future)

    def _finish(self, futures: Iterable[Future], timeout: float | None = None) -> None:
        """Until all of them have ended."""
        pending = [future for future in futures if not future._ended]
        with self._waiter() as is_open:
            if is_open:
                self._queue.wait([id for future in pending for id in future._tasks], timeout)
                self._collect()
        for future in pending:
            if not future._ended:
                with self._locked():
                    future._lose()
                    self._let_go(future)

    def _finish_one(self, futures: Sequence[Future], timeout: float | None) -> None:
        """Until one of them has ended."""
        self._finish(futures[:1], timeout)

    @contextlib.contextmanager
    def _waiter(self) -> Iterator[bool]:
        """False when the native queue is gone; else it stays while somebody is in here."""
        with self._locked():
            is_open = not self._closing
            self._waiting += is_open
        try:
            yield is_open
        finally:
            if is_open:
                with self._lock:
                    self._waiting -= 1
                    self._lock.notify_all()


class _Stages:
    """Aligned memory through which arrays move that do not lie as O_DIRECT needs it: a few pieces for each transfer under way."""

    def __init__(self) -> None:
        self.piece_nbytes = _STAGE_NBYTES
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
            self._free = [memory.address + index * _STAGE_NBYTES for index in range(_STAGES)]
        n_lent = min(n_pieces, max(1, len(self._free) // 4))
        lent, self._free = self._free[:n_lent], self._free[n_lent:]
        if lent:
            self._borrowers[future] = lent
        return lent

    def give_back(self, future: Future) -> None:
        self._free += self._borrowers.pop(future, ())


def _drain(queue: TaskQueue, futures: dict[Future, None], stages: _Stages) -> None:
    """For a queue that nobody closed: memory goes after the kernel has let go of it."""
    queue.close()
    futures.clear()


def _checked_block(block_size: int | str) -> int:
    try:
        nbytes = parse_bytes(block_size)
    except ValueError as error:
        raise ConfigError([ConfigProblem("block_size", str(error))]) from None
    if nbytes == 0 or nbytes % GRAIN_NBYTES:
        raise ConfigError([ConfigProblem("block_size", f"{block_size!r} is not a positive multiple of {GRAIN_NBYTES} bytes")])
    return nbytes


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
