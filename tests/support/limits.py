"""What a process can be forbidden: system calls, capabilities, memory to lock. For good, so in a process of its own."""

from __future__ import annotations

import ctypes
import errno
import platform
import resource
import struct

__all__ = ["IO_SETUP", "IO_URING_SETUP", "Impossible", "errno", "forbid", "forbid_locked_memory"]

IO_URING_SETUP = 425
"""The same number everywhere."""
IO_SETUP = {"x86_64": 206, "aarch64": 0}.get(platform.machine(), 206)

_CAP_IPC_LOCK = 14


class Impossible(Exception):
    """The limit cannot be set here."""


def forbid(code: int, *calls: int) -> None:
    """From now on these system calls answer ``code``; all others are as before."""
    libc = ctypes.CDLL(None, use_errno=True)
    rows = [(0x20, 0, 0, 0)]  # load the number of the call
    rows += [(0x15, len(calls) - i, 0, call) for i, call in enumerate(calls)]  # where it is one of them, jump to the last row
    rows += [(6, 0, 0, 0x7FFF0000), (6, 0, 0, 0x00050000 | code)]  # SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *row) for row in rows))

    class Filter(ctypes.Structure):
        _fields_ = [("n", ctypes.c_ushort), ("rows", ctypes.c_void_p)]

    no_new_privileges, set_seccomp, filter_mode = 38, 22, 2
    if libc.prctl(no_new_privileges, 1, 0, 0, 0) != 0:
        raise Impossible("PR_SET_NO_NEW_PRIVS")
    if libc.prctl(set_seccomp, filter_mode, ctypes.byref(Filter(len(rows), ctypes.addressof(program))), 0, 0) != 0:
        raise Impossible("seccomp filters cannot be installed here")


def forbid_locked_memory(above_nbytes: int = 0) -> None:
    """No more may be locked than so many bytes, and the capability that lifts the limit is given up."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0)), ctypes.create_string_buffer(24)
    if libc.capget(header, data) != 0:
        raise Impossible("capget")
    effective, permitted, inheritable, *rest = struct.unpack("=6I", data.raw)
    keep = ~(1 << _CAP_IPC_LOCK)
    data = ctypes.create_string_buffer(struct.pack("=6I", effective & keep, permitted & keep, inheritable & keep, *rest))
    if libc.capset(header, data) != 0:
        raise Impossible("capset")
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (above_nbytes, above_nbytes))
