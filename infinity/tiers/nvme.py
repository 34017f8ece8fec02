"""Pages at rest in files of one directory, for the life of this process only.

Each backing makes a directory of its own in the one it is given, ``infinity-<pid>-<random>``, so that runs at once do not touch each
other. Its files lose their names as soon as they are open: however the process ends, the kernel takes their blocks back. What can be
left is that directory, empty; the next start removes it. Who is alive is told by a POSIX record lock on the directory itself: it ends
with its process and, unlike an flock, is not inherited by a forked loader worker.

All slots are reserved at the start, so that a full disk is found before the first step and not at step 400. Files are opened with
O_DIRECT where the file system does it, else without, which is said once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import re
import resource
import secrets
import struct
import weakref
from pathlib import Path

from infinity.errors import IoError, SpaceError
from infinity.sizes import align_up
from infinity.task_queue import Files
from infinity.tiers.backing import Backing

logger = logging.getLogger(__name__)

FILE_NBYTES_MAX = 1 << 40
"""Bytes of one file at most, well below what file systems allow (ext4: 16 TiB)."""
ALIGNMENT_UNKNOWN = 4096
"""Alignment of O_DIRECT where the kernel does not say (before 6.1)."""
_WRITE_TEST_NBYTES = 4096
_DIRECTORY_NAME = re.compile(r"infinity-\d+-[0-9a-f]{16}")
_FILE_NAME = re.compile(r"pages-\d+")
_FLOCK = "hhqqi4x"  # struct flock of Linux, 64 bits: type, whence, start, len, pid

_alive: set[str] = set()
"""Directories of this process: it must not open them to ask for their lock, because closing any descriptor drops it."""


def check_path(path: str | os.PathLike[str]) -> str | None:
    """What is wrong with a directory for pages, and how to fix it, or None: it exists, and a file can be made and written in it."""
    directory = Path(path)
    if not directory.exists():
        return f"{directory} does not exist. Create it (mkdir -p {directory}), or name another directory."
    if not directory.is_dir():
        return f"{directory} is not a directory. Name a directory on the drive that is to hold the pages."
    name = directory / f"infinity-write-test-{os.getpid()}-{secrets.token_hex(8)}"
    try:
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.unlink(name)
            if os.write(fd, bytes(_WRITE_TEST_NBYTES)) < _WRITE_TEST_NBYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(fd)
    except OSError as error:
        fix = {
            errno.EACCES: "Give this user the right to write there (chown, chmod)",
            errno.EPERM: "Give this user the right to write there (chown, chmod)",
            errno.EROFS: "Mount it writable",
            errno.ENOSPC: "Free some space",
            errno.EDQUOT: "Raise the disk quota",
        }.get(error.errno or 0, "Check the file system")
        return f"{directory} cannot be written: {os.strerror(error.errno or 0)}. {fix}, or name another directory."
    return None


class NvmeBacking(Backing):
    """Slots in unlinked, preallocated files.

    Memory: owns its descriptors and its directory; borrows ``files``.
    Errors: SpaceError when the slots do not fit the disk or the file-size limit; IoError when the directory cannot be used.
    """

    def __init__(
        self,
        files: Files,
        directory: str | os.PathLike[str],
        *,
        page_nbytes: int,
        n_slots: int,
        file_nbytes_max: int = FILE_NBYTES_MAX,
    ) -> None:
        self.slot_nbytes = page_nbytes
        self.n_slots = n_slots
        self._slots_per_file = max(1, file_nbytes_max // page_nbytes)
        parent = os.path.realpath(directory)
        _check_space(parent, n_slots * page_nbytes, min(n_slots, self._slots_per_file) * page_nbytes)
        remove_leftovers(parent)
        while not self._open(files, parent):
            pass

    def _open(self, files: Files, parent: str) -> bool:
        """Make the directory and the files; False where another start took the directory for a leftover before there was a file in it."""
        fds: list[int] = []
        self.directory, lock_fd = _make_directory(parent)
        self._finalizer = weakref.finalize(self, _forget, os.getpid(), self.directory, fds, lock_fd)
        self._pid = os.getpid()
        self._files = files
        self._fds = fds
        self._lock_fd = lock_fd
        try:
            self.direct, self.alignment = self._open_files(files)
        except BaseException as error:
            self.close()
            if isinstance(error, IoError) and error.errno == errno.ENOENT and os.path.isdir(parent):
                return False
            raise
        return True

    def place(self, slot: int) -> tuple[int, int]:
        """(descriptor, offset in bytes) of a slot."""
        file, index = divmod(slot, self._slots_per_file)
        return self._fds[file], index * self.slot_nbytes

    def path(self, slot: int) -> str:
        """The name that the file of a slot had; it has none any more."""
        return self._file_path(slot // self._slots_per_file)

    def close(self) -> None:
        """Give the descriptors, and with them the blocks, back; a second call does nothing, nor does one in a forked child."""
        if self._finalizer.detach() is None or os.getpid() != self._pid:
            return
        for fd in self._fds:
            try:
                self._files.close(fd)
            except OSError as error:
                logger.debug("%s: %s", self.directory, error)
        self._fds.clear()
        _remove_directory(self.directory, self._lock_fd)

    def _file_path(self, index: int) -> str:
        return os.path.join(self.directory, f"pages-{index}")

    def _open_files(self, files: Files) -> tuple[bool, int]:
        direct, alignment = True, 1
        for index, begin in enumerate(range(0, self.n_slots, self._slots_per_file)):
            path = self._file_path(index)
            if index == 0:
                alignment = self._open_direct(files, path)
                direct = alignment > 0
            if index > 0 or not direct:
                self._fds.append(_open_unlinked(files, path, os.O_DIRECT if direct else 0))
            _reserve(files, self._fds[-1], path, min(self.n_slots - begin, self._slots_per_file) * self.slot_nbytes)
        return direct, max(alignment, 1)

    def _open_direct(self, files: Files, path: str) -> int:
        """Open the first file with O_DIRECT; the alignment that it needs, or 0 where it does not work: then nothing is open."""
        try:
            fd = _open_unlinked(files, path, os.O_DIRECT)
        except IoError as error:
            if error.errno != errno.EINVAL:
                raise
            _unlink(files, path)  # some file systems make the file before they refuse
        else:
            self._fds.append(fd)
            alignment = _direct_alignment(files, fd, path)
            if alignment <= self.slot_nbytes and _direct_works(fd, path, alignment):
                return alignment
            files.close(self._fds.pop())
        logger.info("%s does not take O_DIRECT: pages are read and written through the page cache", self.directory)
        return 0


def find_leftovers(parent: str) -> list[str]:
    """The directories that dead processes left in ``parent``; those of the living, and anything else, are not among them."""
    try:
        names = sorted(os.listdir(parent))
    except OSError:
        return []
    paths = [os.path.join(parent, name) for name in names if _DIRECTORY_NAME.fullmatch(name)]
    return [path for path in paths if path not in _alive and not _is_locked(path)]


def remove_leftovers(parent: str) -> None:
    """Remove the directories that ``find_leftovers`` finds."""
    for path in find_leftovers(parent):
        try:
            for file_name in os.listdir(path):  # only a kill between open and unlink leaves one
                if _FILE_NAME.fullmatch(file_name):
                    os.unlink(os.path.join(path, file_name))
            os.rmdir(path)
        except OSError:
            logger.debug("%s was left as it is", path)


def _is_locked(path: str) -> bool:
    """Whether a living process holds the directory; True where that cannot be known."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        answer = fcntl.fcntl(fd, fcntl.F_GETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError:
        return True
    finally:
        os.close(fd)
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)


def _make_directory(parent: str) -> tuple[str, int]:
    """A new directory, locked by this process, and the descriptor that holds the lock."""
    while True:
        path = os.path.join(parent, f"infinity-{os.getpid()}-{secrets.token_hex(8)}")
        _alive.add(path)
        try:
            os.mkdir(path, 0o700)
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            _alive.discard(path)
            if error.errno == errno.ENOENT and os.path.isdir(parent):
                continue  # another start took it for a leftover, in the instant before it was locked
            with contextlib.suppress(OSError):
                os.rmdir(path)
            raise IoError("mkdir", path, 0, 0, error.errno or errno.EIO) from error
        try:
            fcntl.fcntl(fd, fcntl.F_SETLK, struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0))
        except OSError:
            logger.debug("%s cannot be locked", path)  # then a later start may remove it while it is empty, which harms nothing
        if os.path.isdir(path):
            return path, fd
        os.close(fd)
        _alive.discard(path)


def _open_unlinked(files: Files, path: str, extra_flags: int) -> int:
    """A new file that has no name any more."""
    try:
        fd = files.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | extra_flags, 0o600)
    except OSError as error:
        raise IoError("open", path, 0, 0, error.errno or errno.EIO) from error
    try:
        _unlink(files, path)
    except BaseException:
        files.close(fd)
        with contextlib.suppress(OSError):  # once more: nothing is left where that is possible
            os.unlink(path)
        raise
    return fd


def _unlink(files: Files, path: str) -> None:
    try:
        files.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise IoError("unlink", path, 0, 0, error.errno or errno.EIO) from error


def _direct_alignment(files: Files, fd: int, path: str) -> int:
    alignment = max(files.direct_alignment(fd))
    if not alignment:
        logger.info("%s: the kernel does not say which alignment O_DIRECT needs; %d bytes are assumed", path, ALIGNMENT_UNKNOWN)
        return ALIGNMENT_UNKNOWN
    return alignment


def _direct_works(fd: int, path: str, alignment: int) -> bool:
    """Whether an aligned O_DIRECT write and read go through; some file systems refuse them only here."""
    nbytes = align_up(_WRITE_TEST_NBYTES, alignment)
    with mmap.mmap(-1, nbytes) as memory:
        try:
            return os.pwrite(fd, memory, 0) == nbytes and os.preadv(fd, [memory], 0) == nbytes
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise _space_error(path, nbytes, fd, os.strerror(error.errno)) from error
            raise IoError("write", path, 0, nbytes, error.errno or errno.EIO) from error


def _reserve(files: Files, fd: int, path: str, nbytes: int) -> None:
    try:
        files.fallocate(fd, 0, nbytes)
    except OSError as error:
        code = error.errno or errno.EIO
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise _space_error(path, nbytes, fd, os.strerror(code)) from error
        if code not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise IoError("fallocate", path, 0, nbytes, code) from error
        logger.info("%s: the file system cannot reserve space; a disk that fills up will be found by a write", path)
        os.ftruncate(fd, nbytes)


def _space_error(path: str, needed_nbytes: int, fd: int, reason: str) -> SpaceError:
    free = os.fstatvfs(fd)
    return SpaceError(path, needed_bytes=needed_nbytes, free_bytes=free.f_bavail * free.f_frsize, reason=reason)


def _check_space(directory: str, nbytes: int, file_nbytes: int) -> None:
    try:
        disk = os.statvfs(directory)
    except OSError as error:
        raise IoError("statvfs", directory, 0, 0, error.errno or errno.EIO) from error
    free_nbytes = disk.f_bavail * disk.f_frsize
    if nbytes > free_nbytes:
        raise SpaceError(directory, needed_bytes=nbytes, free_bytes=free_nbytes)
    limit_nbytes, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit_nbytes != resource.RLIM_INFINITY and file_nbytes > limit_nbytes:
        raise SpaceError(
            directory,
            needed_bytes=file_nbytes,
            free_bytes=limit_nbytes,
            reason="the file-size limit of this process (RLIMIT_FSIZE) is too low for one file; raise it with ulimit -f",
        )


def _forget(pid: int, directory: str, fds: list[int], lock_fd: int) -> None:
    """What is done for a backing that nobody closed.

    The queue may still have transfers for these descriptors, and another file that got one of their numbers would be written to: so the
    numbers stay taken, by /dev/null, and only the files go.
    """
    if os.getpid() != pid:
        return  # a forked child owns nothing of its parent's
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in fds:
        os.dup2(nowhere, fd, inheritable=False)
    os.close(nowhere)
    _remove_directory(directory, lock_fd)


def _remove_directory(directory: str, lock_fd: int) -> None:
    _alive.discard(directory)
    try:
        os.rmdir(directory)
    except OSError as error:
        logger.debug("%s was left: %s", directory, error)
    os.close(lock_fd)
