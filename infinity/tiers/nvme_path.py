"""One path: a directory, usually a drive's, with files of slots in it, for the life of this process only.

Each start makes a directory of its own in the one it is given, ``infinity-<pid>-<random>``, so that runs at once do not touch each
other. Its files lose their names as soon as they are open: however the process ends, the kernel takes their blocks back. What can be
left is that directory, empty; the next start removes it. Who is alive is told by a POSIX record lock on the directory itself: it ends
with its process and, unlike an flock, is not inherited by a forked loader worker.

Slots are reserved at the start, so that a full disk is found before the first step and not at step 400. Files are opened with O_DIRECT
where the file system does it, else without. It knows no other path.
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
from collections.abc import Sequence
from pathlib import Path

from infinity.errors import IoError, SpaceError
from infinity.sizes import align_up, format_bytes
from infinity.task_queue import Files
from infinity.tiers.mounts import mount_of, parse_mounts

logger = logging.getLogger(__name__)

FILE_NBYTES_MAX = 1 << 40
"""Bytes of one file at most, well below what file systems allow (ext4: 16 TiB)."""
FILES_MAX = 512
"""Files of one path at most, where a limit on their size makes many of them."""
ALIGNMENT_UNKNOWN = 4096
"""Alignment of O_DIRECT where the kernel does not say (before 6.1)."""
_WRITE_TEST_NBYTES = 4096
_DIRECTORY_NAME = re.compile(r"infinity-\d+-[0-9a-f]{16}")
_FILE_NAME = re.compile(r"pages-\d+")
_FLOCK = "hhqqi4x"  # struct flock of Linux, 64 bits: type, whence, start, len, pid

_GET_FLAGS, _SET_FLAGS, _NO_COPY_ON_WRITE = 0x80086601, 0x40086602, 0x00800000  # FS_IOC_GETFLAGS, FS_IOC_SETFLAGS, FS_NOCOW_FL

_alive: set[str] = set()
"""Directories of this process: it must not open them to ask for their lock, because closing any descriptor drops it."""


def check_paths(paths: Sequence[str | os.PathLike[str]]) -> list[str | None]:
    """What is wrong with each of several directories: what `check_path` says, or that it is one of those before under another name."""
    problems: list[str | None] = []
    seen: dict[tuple[int, int], str] = {}
    for path in paths:
        problem = check_path(path)
        if problem is None:
            try:
                status = os.stat(path)
            except OSError as error:
                problems.append(
                    f"{os.fspath(path)} cannot be looked at: {error.strerror}. Check the file system, or name another directory."
                )
                continue
            first = seen.setdefault((status.st_dev, status.st_ino), os.fspath(path))
            if first != os.fspath(path):
                problem = f"{os.fspath(path)} is the same directory as {first}. Name each once."
        problems.append(problem)
    return problems


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
            left = memoryview(bytes(_WRITE_TEST_NBYTES))
            while left:  # the write after a short one says what stops it
                written = os.write(fd, left)
                if written == 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                left = left[written:]
        finally:
            os.close(fd)
    except OSError as error:
        fix = {
            errno.EACCES: "Give this user the right to write there (chown, chmod)",
            errno.EPERM: "Give this user the right to write there (chown, chmod)",
            errno.EROFS: "Mount it writable",
            errno.ENOSPC: "Free some space",
            errno.EDQUOT: "Raise the disk quota",
            errno.EFBIG: "Raise the limit of file sizes (RLIMIT_FSIZE: ulimit -f)",
            errno.EMFILE: "Raise the limit of open files (RLIMIT_NOFILE: ulimit -n)",
        }.get(error.errno or 0, "Check the file system")
        with contextlib.suppress(OSError):  # what could not be unlinked at first
            os.unlink(name)
        return f"{directory} cannot be written: {os.strerror(error.errno or 0)}. {fix}, or name another directory."
    return None


class NvmePath:
    """Slots in unlinked, preallocated files of one directory, as many as `reserve` asks for.

    Memory: owns its descriptors and its directory; borrows ``files``.
    Errors: SpaceError when a limit on files makes ``n_slots_max`` impossible; IoError when the directory cannot be used.
    """

    def __init__(
        self,
        files: Files,
        directory: str | os.PathLike[str],
        *,
        slot_nbytes: int,
        n_slots_max: int,
        file_nbytes_max: int = FILE_NBYTES_MAX,
    ) -> None:
        self.slot_nbytes = slot_nbytes
        self.n_slots = 0
        self.parent = os.path.realpath(directory)
        self._slots_per_file = max(1, _largest_file_nbytes(self.parent, slot_nbytes, n_slots_max, file_nbytes_max) // slot_nbytes)
        remove_leftovers(self.parent)
        while not self._open(files, has_files=n_slots_max > 0):
            pass

    def _open(self, files: Files, *, has_files: bool) -> bool:
        """Make the directory and the first file; False where another start took the directory for a leftover before there was a file."""
        fds: list[int] = []
        self.directory, lock_fd = _make_directory(self.parent)
        self._finalizer = weakref.finalize(self, _forget, os.getpid(), self.directory, fds, lock_fd)
        self._pid = os.getpid()
        self._files = files
        self.fds = fds
        self._lock_fd = lock_fd
        try:
            self.direct, self.alignment = self._open_first() if has_files else (True, 1)
        except BaseException as error:
            self.close()
            if isinstance(error, IoError) and error.errno == errno.ENOENT and os.path.isdir(self.parent):
                return False
            raise
        return True

    def reserve(self, n_slots: int) -> None:
        """Room for so many slots from now on, fewer than before or more.

        Errors: SpaceError when they do not fit the disk.
        """
        n_files = -(-n_slots // self._slots_per_file)
        while len(self.fds) < n_files:
            self.fds.append(_open_unlinked(self._files, self._file_path(len(self.fds)), os.O_DIRECT if self.direct else 0))
        for index, fd in enumerate(self.fds):
            nbytes = min(max(0, n_slots - index * self._slots_per_file), self._slots_per_file) * self.slot_nbytes
            before_nbytes = os.fstat(fd).st_size
            if nbytes > before_nbytes:
                _reserve(self._files, fd, self._file_path(index), nbytes)
            elif nbytes < before_nbytes:
                os.ftruncate(fd, nbytes)
        self.n_slots = n_slots

    def place(self, slot: int) -> tuple[int, int]:
        """(descriptor, offset in bytes) of a slot."""
        file, index = divmod(slot, self._slots_per_file)
        return self.fds[file], index * self.slot_nbytes

    def path(self, slot: int) -> str:
        """The name that the file of a slot had; it has none any more."""
        return self._file_path(slot // self._slots_per_file)

    def error(self, op: str, slot: int, nbytes: int, code: int, what: str) -> IoError:
        """The error of a transfer of a slot, with what is free where the disk is full, and the file's length where it ended too early."""
        fd, offset = self.place(slot)
        free = free_bytes(fd) if code in (errno.ENOSPC, errno.EDQUOT) else None
        length = os.fstat(fd).st_size if code == errno.ENODATA else None
        return IoError(op, self.path(slot), offset, nbytes, code, what, free_bytes=free, file_nbytes=length)

    def close(self) -> None:
        """Give the descriptors, and with them the blocks, back; a second call does nothing, nor does one in a forked child."""
        if self._finalizer.detach() is None or os.getpid() != self._pid:
            return
        for fd in self.fds:
            try:
                self._files.close(fd)
            except OSError as error:
                logger.debug("%s: %s", self.directory, error)
        self.fds.clear()
        _remove_directory(self.directory, self._lock_fd)

    def _file_path(self, index: int) -> str:
        return os.path.join(self.directory, f"pages-{index}")

    def _open_first(self) -> tuple[bool, int]:
        """Open the first file, with O_DIRECT if that works: whether it does, and the alignment that transfers then need."""
        path = self._file_path(0)
        try:
            fd = _open_unlinked(self._files, path, os.O_DIRECT)
        except IoError as error:
            if error.errno != errno.EINVAL:
                raise
            _unlink(self._files, path)  # some file systems make the file before they refuse
        else:
            self.fds.append(fd)
            alignment = _direct_alignment(self._files, fd, path)
            if alignment <= self.slot_nbytes and _direct_works(fd, path, alignment):
                return True, alignment
            self._files.close(self.fds.pop())
        self.fds.append(_open_unlinked(self._files, path, 0))
        return False, 1


def free_bytes(path: str | int) -> int | None:
    """Bytes that this user can still write where ``path`` (or an open descriptor) is; None where the file system does not say."""
    try:
        disk = os.statvfs(path)
    except OSError as error:
        raise IoError("statvfs", str(path), 0, 0, error.errno or errno.EIO) from error
    return disk.f_bavail * disk.f_frsize if disk.f_blocks else None


def file_system_id(path: str) -> int:
    """The same for all paths that share their room."""
    try:
        return os.stat(path).st_dev
    except OSError as error:
        raise IoError("stat", path, 0, 0, error.errno or errno.EIO) from error


def file_system(path: str) -> str:
    """The type of the file system that ``path`` (a real one) is on, as the kernel names it, or "unknown"."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return "unknown"
    mount = mount_of(path, parse_mounts(mounts))
    return mount.kind if mount is not None else "unknown"


def _largest_file_nbytes(parent: str, slot_nbytes: int, n_slots: int, file_nbytes_max: int) -> int:
    """How large a file may be: as large as is wise, and as this process is allowed to make one."""
    limit_nbytes, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit_nbytes == resource.RLIM_INFINITY or limit_nbytes >= file_nbytes_max:
        return file_nbytes_max
    n_slots_per_file = limit_nbytes // slot_nbytes
    if n_slots_per_file * FILES_MAX < n_slots:
        needed_nbytes = -(-n_slots // FILES_MAX) * slot_nbytes
        raise SpaceError(
            parent,
            needed_bytes=needed_nbytes,
            free_bytes=limit_nbytes,
            reason=f"the file-size limit of this process (RLIMIT_FSIZE) is too low for {format_bytes(n_slots * slot_nbytes)} "
            f"in {FILES_MAX} files; raise it with ulimit -f",
        )
    return limit_nbytes


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
            with contextlib.suppress(OSError):  # it was made, and could not be opened
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
    _overwrite_in_place(fd)
    return fd


def _overwrite_in_place(fd: int) -> None:
    """Asks for blocks that are not copied when they are written again, as btrfs does else: what was reserved would not help then."""
    flags = bytearray(8)
    try:
        fcntl.ioctl(fd, _GET_FLAGS, flags)
        (value,) = struct.unpack_from("=I", flags)
        if not value & _NO_COPY_ON_WRITE:
            fcntl.ioctl(fd, _SET_FLAGS, struct.pack("=II", value | _NO_COPY_ON_WRITE, 0))
    except OSError:
        return  # most file systems have no such thing


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
    return SpaceError(path, needed_bytes=needed_nbytes, free_bytes=free_bytes(fd) or 0, reason=reason)


def _forget(pid: int, directory: str, fds: list[int], lock_fd: int) -> None:
    """What is done for a path that nobody closed.

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
