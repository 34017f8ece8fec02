"""Every exception: what happened, which value, how to fix it.

One root class. Subclasses carry their numbers as attributes, so that a program (or a test) compares numbers, not text.
"""

from __future__ import annotations

import errno as _errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


class InfinityError(Exception):
    """The root of all errors raised by infinity."""


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """One thing wrong with a config: ``key`` is its dotted path, ``message`` says what is wrong and what to write instead."""

    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.key}: {self.message}" if self.key else self.message


class ConfigError(InfinityError, ValueError):
    """The config cannot be used; ``problems`` lists everything that is wrong with it."""

    def __init__(self, problems: Sequence[ConfigProblem]) -> None:
        self.problems = tuple(problems)
        lines = "\n".join(f"  {problem}" for problem in self.problems)
        count = len(self.problems)
        super().__init__(f"{count} problem{'s' if count != 1 else ''} in the config:\n{lines}")


class OptionsError(InfinityError, ValueError):
    """Options of a command cannot be used; ``problems`` lists everything that is wrong with them, each under its option."""

    def __init__(self, problems: Sequence[ConfigProblem]) -> None:
        self.problems = tuple(problems)
        lines = "\n".join(f"  {problem}" for problem in self.problems)
        count = len(self.problems)
        super().__init__(f"{count} problem{'s' if count != 1 else ''} with the options:\n{lines}")


class NotYetError(InfinityError, NotImplementedError):
    """Something that is planned and not built yet was asked for."""


class ModelError(InfinityError, ValueError):
    """The model cannot be managed as it is; the text names the module or parameter."""


class DataError(InfinityError, ValueError):
    """The text to train on is missing, unreadable, too little, or not the one that a saved state belongs to."""


class BudgetError(InfinityError, MemoryError):
    """A memory budget is too small: ``knob`` is the config key to raise, ``needed_bytes`` what it must be at least."""

    def __init__(self, message: str, *, knob: str, needed_bytes: int, given_bytes: int) -> None:
        super().__init__(message)
        self.knob = knob
        self.needed_bytes = needed_bytes
        self.given_bytes = given_bytes


class SpaceError(InfinityError, OSError):
    """There is not enough room on the disks (or a limit is too low): nothing was started.

    ``free_bytes_by_path`` has one entry where there is one path, and ``free_bytes`` is the sum of all. A disk that fills up later is an
    ``IoError`` of the write that found it.
    """

    def __init__(
        self, path: str, *, needed_bytes: int, free_bytes: int, reason: str = "", free_bytes_by_path: Mapping[str, int] | None = None
    ) -> None:
        self.path = path
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        self.free_bytes_by_path = dict(free_bytes_by_path or {path: free_bytes})
        self.reason = reason
        parts = ", ".join(f"{_mib(nbytes)} on {name}" for name, nbytes in self.free_bytes_by_path.items())
        of_each = f" ({parts})" if len(self.free_bytes_by_path) > 1 else ""
        super().__init__(
            f"{path}: {_mib(needed_bytes)} are needed and {_mib(free_bytes)} can be had{of_each}"
            + (f": {reason}." if reason else ". Free some space, or name another directory in nvme_path.")
        )


_REMEDIES = {
    _errno.ENODATA: "The file ends before the last byte asked for.",
    _errno.ECANCELED: "What it waited for had failed, or it was canceled.",
    _errno.ENOENT: "Check the path.",
    _errno.EACCES: "Check the permissions of the file and its directory.",
    _errno.ENOSPC: "Free some space, or name another disk.",
    _errno.EFBIG: "Raise the limit of file sizes (RLIMIT_FSIZE: ulimit -f), or take another file system.",
    _errno.EMFILE: "Raise the limit of open files of this process (RLIMIT_NOFILE: ulimit -n).",
    _errno.ENFILE: "Raise the limit of open files of this machine (sysctl fs.file-max).",
}


class IoError(InfinityError, OSError):
    """A file operation failed: ``op``, ``path``, ``offset`` (bytes), ``nbytes`` and ``errno`` say which one and how.

    ``free_bytes`` is what the disk has left where it was full (ENOSPC, EDQUOT), ``file_nbytes`` how long the file is where it ended too
    early (ENODATA); else None.
    """

    def __init__(
        self,
        op: str,
        path: str,
        offset: int,
        nbytes: int,
        errno: int,
        what: str = "",
        *,
        free_bytes: int | None = None,
        file_nbytes: int | None = None,
    ) -> None:
        super().__init__(errno, os.strerror(errno), path)
        self.op = op
        self.path = path
        self.offset = offset
        self.nbytes = nbytes
        self.errno = errno
        self.what = what
        self.free_bytes = free_bytes
        self.file_nbytes = file_nbytes

    def __str__(self) -> str:
        name = _errno.errorcode.get(self.errno or 0, "?")
        subject = f"{self.what}, " if self.what else ""
        fix = _REMEDIES.get(self.errno or 0, "Check the disk (dmesg, smartctl) and its free space.")
        if self.free_bytes is not None:
            fix = f"{_mib(self.free_bytes)} are free there: free some space, or raise the quota."
        elif self.file_nbytes is not None:
            needed = self.offset + self.nbytes
            fix = f"The file has {self.file_nbytes} bytes, and {needed} are needed: ask for less, or find who cut it short."
        return (
            f"{self.op} failed: {subject}{self.path} at byte {self.offset}, {self.nbytes} bytes: "
            f"[{name}] {os.strerror(self.errno or 0)}. {fix}"
        )


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.2f} MiB"


class ArrayError(InfinityError, ValueError):
    """An array or tensor cannot be read into or written from as it is; the text says why, and what to take instead."""


class SafetensorsError(InfinityError, ValueError):
    """A file is not a safetensors file, or tensors cannot become one: ``problem`` says which rule is broken (one word per rule),
    ``name`` by which tensor, where it is one."""

    def __init__(self, problem: str, path: str, what: str, name: str | None = None) -> None:
        self.problem = problem
        self.path = path
        self.name = name
        super().__init__(f"{path}: {what}" if name is None else f"{path}: tensor {name!r}: {what}")


class CorruptPageError(InfinityError):
    """A page read back has another checksum than what was written: the disk or memory is not to be trusted."""

    def __init__(self, page: str, path: str, offset: int, nbytes: int, expected: int, found: int) -> None:
        self.page = page
        self.path = path
        self.offset = offset
        self.nbytes = nbytes
        self.expected = expected
        self.found = found
        super().__init__(
            f"page {page} is corrupt: {path} at byte {offset}, {nbytes} bytes: checksum {found:#010x}, expected {expected:#010x}. "
            "Check the disk and the memory of this machine."
        )


class StallError(InfinityError, TimeoutError):
    """Tasks did not end within the limit: ``ids`` are theirs, and the text lists them, those that run first."""

    def __init__(self, message: str, ids: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ids = tuple(ids)


class KernelError(InfinityError):
    """A native kernel refused its arguments: a fault of ours."""


class ReleasedParameterError(InfinityError, RuntimeError):
    """An alias of a parameter whose memory is not here was asked for: use ``infinity.gathered`` or ``engine.state_dict()``."""


class ConsumedGradientError(InfinityError, RuntimeError):
    """The gradient went into the weights during backward: set ``optimizer_overlap`` to ``deferred`` to read it."""


class StaleStepError(InfinityError, RuntimeError):
    """``unit`` was used again in a backward that had already updated it; set ``optimizer_overlap`` to ``deferred``."""

    def __init__(self, unit: str) -> None:
        self.unit = unit
        super().__init__(
            f"unit {unit!r} was used again after it had been updated in this step, which the recorded steps did not do. "
            "Set optimizer_overlap to 'deferred' for models whose backward differs from step to step."
        )


class EngineFailedError(InfinityError, RuntimeError):
    """The engine stopped after an error in a step that cannot be undone; ``__cause__`` is that error."""


class EngineClosedError(InfinityError, RuntimeError):
    """The engine was closed."""


class InvariantError(InfinityError, AssertionError):
    """Infinity broke a rule of its own, which is a fault of ours; nothing was changed."""
