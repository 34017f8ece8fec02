"""A file whose bytes move between the drive and the user's memory, past the page cache where that works.

[Note: two ways into one file]
A file is opened twice: with O_DIRECT, and without. What lies at whole pages of the file goes the direct way, from and to the array itself
where its address allows that, else through aligned memory of the queue; the first and the last bytes of a transfer, which fill no page, go
through the page cache, and so do transfers too small to gain. So exactly the bytes asked for change, and a file ends where it is to end.

The kernel keeps both ways coherent for transfers that follow each other. At the same time they are safe on different pages only, so
operations of one file that touch the same bytes, one of them writing, wait for each other: the later call returns when the earlier
operation has ended and its own has begun. Nothing is cached on pages that a direct write covers (readahead is off for the edges).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import weakref
from types import TracebackType
from typing import Any, cast

from infinity.errors import ArrayError, EngineClosedError, IoError, SpaceError
from infinity.io.arrays import empty, memory_of
from infinity.io.futures import Future
from infinity.io.queue import GRAIN_NBYTES, Queue, default_queue
from infinity.kernel_args import Kernel, pack_copy
from infinity.sizes import align_down, align_up
from infinity.task_queue import Batch, Files, Priority, TaskQueue

__all__ = ["File", "open_file"]

logger = logging.getLogger(__name__)

DIRECT_NBYTES_MIN = 64 << 10
"""A transfer that is not aligned as it is goes the direct way from so many whole pages on."""

_PRUNE_AT = 256

_FLAGS = {"r": os.O_RDONLY, "r+": os.O_RDWR, "w": os.O_RDWR | os.O_CREAT | os.O_TRUNC}
_DIRECT = ("auto", "required", "off")


def open_file(path: str | os.PathLike[str], mode: str = "r", *, direct: str = "auto", queue: Queue | None = None) -> File:
    """Open a file: "r" to read it, "r+" to read and write it, "w" to make or empty it first.

    ``direct`` is "auto" (past the page cache where the file system does that), "required" (else IoError) or "off".
    Errors: IoError when it cannot be opened.
    """
    if mode not in _FLAGS:
        raise ValueError(f"mode {mode!r}: must be 'r', 'r+' or 'w' (bytes always; 'w' and 'r+' can read as well)")
    if direct not in _DIRECT:
        raise ValueError(f"direct {direct!r}: must be 'auto', 'required' or 'off'")
    return File(path, mode, direct, default_queue() if queue is None else queue)


class File:
    """An open file; made by `infinity.io.open`. Any thread may call.

    Order: operations on the same bytes take effect in the order in which they were asked for; others in any. (Other ``File``s of the same
        file, and other processes, are not known here: wait before they follow.)
    Memory: arrays are borrowed until their future has ended.
    """

    def __init__(self, path: str | os.PathLike[str], mode: str, direct: str, queue: Queue) -> None:
        self.path = os.fspath(path)
        self.mode = mode
        self._queue = queue
        self._pid = os.getpid()
        self._pending: list[Future] = []
        self._pending_end = 0
        self._prune_at = _PRUNE_AT
        self._failed: list[Future] = []
        self._is_open = True
        self._descriptors = _Descriptors(queue.files, queue._queue)
        try:
            self._fd = self._open(_FLAGS[mode])
            self._check_kind()
            self._direct_fd, self._memory_alignment = self._open_direct(direct) if direct != "off" else (-1, 1)
        except BaseException:
            self._descriptors.close()
            raise
        if self._direct_fd >= 0:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)

    @property
    def direct(self) -> bool:
        """Whether transfers go past the page cache."""
        return self._direct_fd >= 0

    @property
    def nbytes(self) -> int:
        """The length of the file, now."""
        self._check_open()
        return os.lseek(self._fd, 0, os.SEEK_END)

    def read_into(self, array: Any, offset: int = 0, nbytes: int | None = None, *, priority: Priority = Priority.DEMAND) -> Future:
        """Read ``nbytes`` (what the array holds, by default) at byte ``offset`` into the array's memory; returns at once.

        Errors: ArrayError; the future has IoError, with ENODATA where the file ends before the last byte asked for.
        """
        return self._transfer("read", array, offset, nbytes, priority)

    def write_from(self, array: Any, offset: int = 0, nbytes: int | None = None, *, priority: Priority = Priority.WRITE_BACK) -> Future:
        """Write ``nbytes`` (what the array holds, by default) from the array's memory to byte ``offset``; returns at once.

        The array must not change until the future has ended. Durable after `flush`.
        """
        if self.mode == "r":
            raise ValueError(f"{self.path} is open to be read. Open it with mode 'r+' or 'w'.")
        return self._transfer("write", array, offset, nbytes, priority)

    def flush(self) -> Future:
        """``fdatasync`` behind every write asked for so far: when it has ended well, they are on the drive.

        It fails with a write that it waits for, or that has failed before and whose future nobody asked.
        """
        queue = self._queue
        with queue._locked():
            self._check_open()
            pending = self._unended()
            writes = [future for future in pending + self._failed if future.op == "write" and not (future._ended and future._asked)]
            future = Future(queue, "flush", self.path, 0, 0, self._descriptors, tuple(writes))
            batch = Batch()
            batch.flush(self._fd, [id for write in writes for id in write._tasks])
            self._submit(future, batch)
            return future

    def reserve(self, nbytes: int) -> None:
        """Make the file at least ``nbytes`` long, with room on the drive for all of it where the file system can reserve.

        Errors: SpaceError when there is too little.
        """
        self._check_open()
        try:
            self._queue.files.fallocate(self._fd, 0, nbytes)
        except OSError as error:
            code = error.errno or errno.EIO
            if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                disk = os.fstatvfs(self._fd)
                free_nbytes = disk.f_bavail * disk.f_frsize
                raise SpaceError(self.path, needed_bytes=nbytes, free_bytes=free_nbytes, reason=os.strerror(code)) from error
            if code not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise IoError("fallocate", self.path, 0, nbytes, code) from error
            if self.nbytes < nbytes:
                self.truncate(nbytes)

    def truncate(self, nbytes: int) -> None:
        """Make the file ``nbytes`` long: cut it, or add zeros. Waits for what was asked for before."""
        while True:
            with self._queue._locked():
                self._check_open()
                pending = self._unended()
                if not pending:
                    try:
                        os.ftruncate(self._fd, nbytes)
                    except OSError as error:
                        raise IoError("truncate", self.path, nbytes, 0, error.errno or errno.EIO) from error
                    return
            self._queue._finish(pending)

    def close(self) -> None:
        """Wait for everything asked for, then close. Nothing is flushed to the drive (`flush` is for that). Twice is fine.

        Errors: that of the first operation that failed and whose future nobody asked; then that of closing.
        """
        self._is_open = False
        if os.getpid() == self._pid:
            while True:
                with self._queue._locked():
                    pending = self._unended()
                if not pending:
                    break
                self._queue._finish(pending)
        self._descriptors.close()
        failed = next((future for future in self._failed if not future._asked), None)
        self._failed.clear()
        if failed is not None:
            failed.wait()

    def __enter__(self) -> File:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(OSError, EngineClosedError):  # the caller's own error is the one to be seen
            if os.getpid() == self._pid:
                with self._queue._locked():
                    reads = [future for future in self._unended() if future.op == "read"]  # nobody will look at them
                self._queue._cancel(reads)
            self.close()

    def __repr__(self) -> str:
        way = "closed" if not self._is_open else "past the page cache" if self.direct else "through the page cache"
        return f"<infinity.io.File {self.path!r}, mode {self.mode!r}, {way}>"

    # -- opening

    def _open(self, flags: int) -> int:
        try:
            fd = self._queue.files.open(self.path, flags | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise IoError("open", self.path, 0, 0, error.errno or errno.EIO) from error
        self._descriptors.fds.append(fd)
        self._queue._add_file(fd, self.path)
        return fd

    def _check_kind(self) -> None:
        kind = os.fstat(self._fd).st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISBLK(kind)):
            code = errno.EISDIR if stat.S_ISDIR(kind) else errno.ESPIPE
            raise IoError("open", self.path, 0, 0, code, "not a regular file or block device")

    def _open_direct(self, direct: str) -> tuple[int, int]:
        """A second descriptor with O_DIRECT and the alignment of memory that it needs, or -1 where that does not work."""
        n_open = len(self._descriptors.fds)
        try:
            fd = self._open(_FLAGS[self.mode] & ~(os.O_CREAT | os.O_TRUNC) | os.O_DIRECT)
            if not os.path.sameopenfile(fd, self._fd):
                raise IoError("open", self.path, 0, 0, errno.ESTALE, "it was replaced meanwhile")
            alignments = self._queue.files.direct_alignment(fd)
            if max(alignments) > GRAIN_NBYTES or not (max(alignments) or self._direct_works(fd)):
                raise IoError("open", self.path, 0, 0, errno.EINVAL)
        except IoError as error:
            if error.errno != errno.EINVAL:
                raise
            if direct == "required":
                raise IoError(
                    "open", self.path, 0, 0, errno.EINVAL, "the file system does not do O_DIRECT (direct='auto' does without it)"
                ) from error
            logger.info("%s: the file system does not do O_DIRECT: it is read and written through the page cache", self.path)
            self._descriptors.close(n_open)
            return -1, 1
        return fd, alignments[0] or GRAIN_NBYTES

    def _direct_works(self, fd: int) -> bool:
        """Where the kernel does not say (before 6.1): whether the first page can be read, or of an empty file written and cut off again."""
        page = memoryview(cast(Any, empty(GRAIN_NBYTES)))
        try:
            if os.preadv(fd, [page], 0) == 0 and self.mode != "r":
                os.pwrite(fd, page, 0)
                os.ftruncate(fd, 0)
        except OSError as error:
            return error.errno not in (errno.EINVAL, errno.EOPNOTSUPP)  # others will be met, and named, where they matter
        return True

    # -- transfers

    def _transfer(self, op: str, array: Any, offset: int, nbytes: int | None, priority: Priority) -> Future:
        memory = memory_of(array, writable=op == "read")
        length = memory.nbytes if nbytes is None else nbytes
        if not 0 <= length <= memory.nbytes:
            raise ArrayError(f"{op} of {length} bytes, but the array has {memory.nbytes}")
        if offset < 0:
            raise ValueError(f"{op} at byte {offset}: an offset cannot be negative")
        queue = self._queue
        future = Future(queue, op, self.path, offset, length, (memory.owner, self._descriptors))
        while True:
            with queue._locked():
                self._check_open()
                queue._collect()
                before = self._conflict(future)
                if before is None:
                    batch = Batch()
                    if self._plan(batch, future, memory.address, priority):
                        self._pending_end = max(self._pending_end, offset + length)
                        self._submit(future, batch)
                        return future
                    before = queue._stages.borrower
            if before is not None:
                queue._finish((before,))

    def _submit(self, future: Future, batch: Batch) -> None:
        self._pending.append(future)
        try:
            self._queue._submit(future, batch)
        except BaseException:
            if not future._tasks:
                self._pending.remove(future)
            raise

    def _conflict(self, future: Future) -> Future | None:
        """An operation under way that touches the same bytes, one of the two writing."""
        if len(self._pending) >= self._prune_at:
            self._prune_at = max(_PRUNE_AT, 2 * len(self._unended()))
        begin, end = future.offset, future.offset + future.nbytes
        if self.mode == "r" or begin >= self._pending_end:
            return None
        for other in self._pending:
            if begin < other.offset + other.nbytes and other.offset < end and not other._ended and "write" in (future.op, other.op):
                return other
        return None

    def _plan(self, batch: Batch, future: Future, address: int, priority: Priority) -> bool:
        """The tasks of a transfer; False when it has to wait for memory of the queue."""
        move = batch.read if future.op == "read" else batch.write
        begin, end = future.offset, future.offset + future.nbytes
        body_begin, body_end = align_up(begin, GRAIN_NBYTES), align_down(end, GRAIN_NBYTES)
        lies_well = (address + body_begin - begin) % self._memory_alignment == 0
        is_whole = lies_well and begin == body_begin and end == body_end
        if self._direct_fd < 0 or body_end - body_begin < (1 if is_whole else DIRECT_NBYTES_MIN):
            move(self._fd, begin, future.nbytes, address, (), priority)
            return True
        if lies_well:
            move(self._direct_fd, body_begin, body_end - body_begin, address + body_begin - begin, (), priority)
        elif not self._plan_staged(batch, future, address, range(body_begin, body_end), priority):
            return False
        if begin < body_begin:
            move(self._fd, begin, body_begin - begin, address, (), priority)
        if body_end < end:
            move(self._fd, body_end, end - body_end, address + body_end - begin, (), priority)
        return True

    def _plan_staged(self, batch: Batch, future: Future, address: int, body: range, priority: Priority) -> bool:
        """Through pieces of the queue's memory, each of which carries one part of the body after the other."""
        stages = self._queue._stages
        piece_nbytes = stages.piece_nbytes
        pieces = stages.lend(future, -(-len(body) // piece_nbytes))
        if not pieces:
            return False
        last: list[tuple[int, ...]] = [()] * len(pieces)
        for index, at in enumerate(range(body.start, body.stop, piece_nbytes)):
            slot = index % len(pieces)
            piece, there, nbytes = pieces[slot], address + at - future.offset, min(piece_nbytes, body.stop - at)
            if future.op == "read":
                read = batch.read(self._direct_fd, at, nbytes, piece, last[slot], priority)
                last[slot] = (batch.kernel(Kernel.COPY, pack_copy(there, piece, nbytes), (read,), priority),)
            else:
                copy = batch.kernel(Kernel.COPY, pack_copy(piece, there, nbytes), last[slot], priority)
                last[slot] = (batch.write(self._direct_fd, at, nbytes, piece, (copy,), priority),)
        return True

    def _unended(self) -> list[Future]:
        """Order: with the lock."""
        self._queue._collect()
        self._failed += [future for future in self._pending if future._error is not None]
        self._pending = [future for future in self._pending if not future._ended]
        if not self._pending:
            self._pending_end = 0
        return list(self._pending)

    def _check_open(self) -> None:
        if not self._is_open:
            raise EngineClosedError(f"{self.path}: the file was closed")


class _Descriptors:
    """Open descriptors; closed with the last reference, and each pending future has one: a number must not get another file's meanwhile."""

    def __init__(self, files: Files, queue: TaskQueue) -> None:
        self.fds: list[int] = []
        self._files = files
        self._queue = queue
        self._finalizer = weakref.finalize(self, _close_unless_forked, files, queue, self.fds, os.getpid())
        self._finalizer.atexit = False

    def close(self, keep: int = 0) -> None:
        """All but the first ``keep``."""
        error = _close(self._files, self._queue, self.fds, keep)
        if error is not None:
            raise error


def _close(files: Files, queue: TaskQueue, fds: list[int], keep: int = 0) -> IoError | None:
    first = None
    while len(fds) > keep:
        fd = fds.pop()
        path = files.path(fd)
        with contextlib.suppress(EngineClosedError):  # a queue that was closed, or is another process's, has let go
            queue.drop_file(fd)
        try:
            files.close(fd)
        except OSError as error:
            first = first or IoError("close", path, 0, 0, error.errno or errno.EIO)
    return first


def _close_unless_forked(files: Files, queue: TaskQueue, fds: list[int], pid: int) -> None:
    if os.getpid() == pid:
        error = _close(files, queue, fds)
        if error is not None:
            logger.warning("a file that was not closed: %s", error)
