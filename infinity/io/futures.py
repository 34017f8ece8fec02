"""What a read, a write or a flush becomes: something to wait for, alone or in bulk.

A future holds the memory and the descriptors that its tasks were given until the last of them is complete; only then is its outcome set.
Who may set it is the queue.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from infinity.errors import IoError, StallError

if TYPE_CHECKING:
    from infinity.io.queue import Queue

__all__ = ["Future", "as_completed", "wait"]

_TURN_S = 0.01


class Future:
    """The outcome of one ``read_into``, ``write_from`` or ``flush``. Any thread may ask; dropping it stops nothing.

    Memory: the array stays alive until the operation has ended.
    """

    __slots__ = (
        "__weakref__",
        "_asked",
        "_causes",
        "_ended",
        "_error",
        "_held",
        "_left",
        "_queue",
        "_status",
        "_tasks",
        "nbytes",
        "offset",
        "op",
        "path",
    )

    def __init__(self, queue: Queue, op: str, path: str, offset: int, nbytes: int, held: object, causes: tuple[Future, ...] = ()) -> None:
        self.op = op
        """``read``, ``write`` or ``flush``."""
        self.path = path
        self.offset = offset
        self.nbytes = nbytes
        self._queue = queue
        self._held = held
        self._causes = causes
        self._tasks = range(0)
        self._left = 0
        self._status = 0
        self._ended = 0  # 0: not yet; else when, counted in the queue
        self._error: IoError | None = None
        self._asked = False

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the operation has ended; the bytes that it moved, which are all.

        Errors: IoError says which operation failed and how; StallError (a TimeoutError) after ``timeout`` seconds, while it goes on.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self.nbytes

    result = wait

    def exception(self, timeout: float | None = None) -> IoError | None:
        """Wait like `wait`; the error, or None."""
        if not self._ended:
            self._queue._finish((self,), timeout)
        self._asked = True
        return self._error

    def done(self) -> bool:
        """Whether the operation has ended, well or not."""
        if not self._ended:
            self._queue._collect()
        return self._ended > 0

    def cancel(self) -> None:
        """Do what is not begun no more. Returns at once; unless it was done already, the future then fails with ECANCELED, and what of
        the bytes has moved is not said. A read cut short leaves the array, a write the file, half done."""
        self._asked = True
        if not self._ended:
            self._queue._cancel((self,))

    def __repr__(self) -> str:
        state = "pending" if not self._ended else "failed" if self._error is not None else "done"
        return f"<infinity.io.Future: {self.op} of {self.nbytes} bytes at byte {self.offset} of {self.path}: {state}>"

    def _advance(self, status: int, order: int) -> bool:
        """One of its tasks is complete; True when it was the last. The first errno counts, and one that says more than ECANCELED."""
        if status and self._status in (0, -errno.ECANCELED):
            self._status = status
        self._left -= 1
        if self._left > 0:
            return False
        self._end(order)
        return True

    def _end(self, order: int) -> None:
        if self._status:
            what = ""
            cause = next((future._error for future in self._causes if future._error is not None), None)
            if self._status == -errno.ECANCELED and cause is not None:
                what = f"after {cause.op} failed at byte {cause.offset}"
            self._error = IoError(
                self.op, self.path, self.offset, self.nbytes, -self._status, what, **_circumstances(self.path, -self._status)
            )
            self._error.__cause__ = cause
        self._causes = ()
        self._held = None
        self._ended = order

    def _lose(self, order: int) -> None:
        """Its tasks are complete, and Ctrl-C struck while their outcome was on the way here: nothing may be said of the bytes."""
        self._asked = self._asked or not self._tasks  # that one was never submitted
        self._status = -errno.EINTR
        self._end(order)


def _circumstances(path: str, code: int) -> dict[str, int]:
    """The figure that explains the errno, where there is one."""
    with contextlib.suppress(OSError):
        if code == errno.ENODATA:
            return {"file_nbytes": os.stat(path).st_size}
        if code in (errno.ENOSPC, errno.EDQUOT):
            disk = os.statvfs(path)
            return {"free_bytes": disk.f_bavail * disk.f_frsize}
    return {}


def wait(futures: Iterable[Future], timeout: float | None = None) -> int:
    """Wait until all have ended; the bytes that they moved in sum.

    Errors: the error of the first that failed, once all have ended (``future.exception()`` has those of the others); StallError after
        ``timeout`` seconds.
    """
    every = list(futures)
    for queue, group in _by_queue(every).items():
        queue._finish(group, timeout)
    first = next((future for future in every if future.exception() is not None), None)
    for future in every:
        future._asked = True
    return sum(future.nbytes for future in every) if first is None else first.wait()


def as_completed(futures: Iterable[Future], timeout: float | None = None) -> Iterator[Future]:
    """Each future when it has ended, well or not, in the order in which they end.

    Errors: StallError when one has not ended ``timeout`` seconds after the first was asked for.
    """
    pending = dict.fromkeys(futures)
    deadline = None if timeout is None else time.monotonic() + timeout
    while pending:
        groups = _by_queue(pending)
        for queue in groups:
            queue._collect()
        ended = sorted((future for future in pending if future._ended), key=lambda future: future._ended)
        for future in ended:
            del pending[future]
        yield from ended
        if not ended:
            _finish_one(groups, deadline)


def _finish_one(groups: dict[Queue, list[Future]], deadline: float | None) -> None:
    """Until one of the first of them, or one of its tasks, has ended. Of several queues each is waited for in turn, a little."""
    while True:
        for queue, group in groups.items():
            left = None if deadline is None else deadline - time.monotonic()
            if len(groups) == 1 or (left is not None and left <= _TURN_S):
                queue._finish_one(group, left)
                return
            with contextlib.suppress(StallError):
                queue._finish_one(group, _TURN_S)
                return


def _by_queue(futures: Iterable[Future]) -> dict[Queue, list[Future]]:
    groups: dict[Queue, list[Future]] = {}
    for future in futures:
        if not future._ended:
            groups.setdefault(future._queue, []).append(future)
    return groups
