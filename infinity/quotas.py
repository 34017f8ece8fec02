"""Which setting of kernel, container or process keeps an I/O backend from working, and how to lift it.

Reads /proc and the limits of this process; opens nothing. It knows what the codes of the native queue mean, not how it works.
"""

from __future__ import annotations

import errno
import os
import resource
from dataclasses import dataclass

from infinity.sizes import format_bytes

__all__ = ["Refusal", "explain"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """That ``backend`` does not work: ``reason`` names the setting, ``remedy`` says what to do."""

    backend: str
    errno: int
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.backend} does not work here: {self.reason}"


def explain(backend: str, code: int, *, wanted: int, proc: str = "/proc") -> Refusal:
    """Why opening ``backend`` with ``wanted`` requests in flight gave the errno ``code``."""
    reason, remedy = _explain(backend, code, wanted, proc)
    return Refusal(backend, code, f"{reason} [{errno.errorcode.get(code, code)}]", remedy)


def _explain(backend: str, code: int, wanted: int, proc: str) -> tuple[str, str]:
    if code == errno.EMFILE:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"RLIMIT_NOFILE allows {limit} open files, and all are open", "Raise it (ulimit -n)."
    if code == errno.ENFILE:
        return "fs.file-max is reached: no more files can be opened on this machine", "Raise it (sysctl fs.file-max)."
    if backend == "uring":
        setting = _number(f"{proc}/sys/kernel/io_uring_disabled")
        if code == errno.EPERM and setting:
            return f"kernel.io_uring_disabled is {setting}", "Set it to 0 (sysctl -w kernel.io_uring_disabled=0, as root)."
        if code in (errno.EPERM, errno.EACCES, errno.ENOSYS) and _is_filtered(proc):
            return (
                "a seccomp filter forbids io_uring",
                "Run the container with a seccomp profile that allows io_uring_setup, _enter and _register.",
            )
        if code == errno.ENOSYS:
            return "this kernel has no io_uring, or an old one", "Use kernel 5.6 or later, with CONFIG_IO_URING."
        if code == errno.ENOMEM:
            limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            text = "unlimited" if limit == resource.RLIM_INFINITY else format_bytes(limit)
            return f"too little memory for the ring, or too much of it locked (RLIMIT_MEMLOCK: {text})", "Raise the limit (ulimit -l)."
    if backend == "libaio":
        if code == errno.EAGAIN:
            used, most = _number(f"{proc}/sys/fs/aio-nr"), _number(f"{proc}/sys/fs/aio-max-nr")
            amounts = f"is {most}, of which {used} are taken" if most is not None else "is used up"
            return f"fs.aio-max-nr {amounts}, and {wanted} are wanted", "Raise it (sysctl -w fs.aio-max-nr=1048576, as root)."
        if code in (errno.EPERM, errno.EACCES, errno.ENOSYS) and _is_filtered(proc):
            return (
                "a seccomp filter forbids asynchronous I/O",
                "Run the container with a seccomp profile that allows io_setup, io_submit and io_getevents.",
            )
        if code == errno.ENOSYS:
            return "this kernel has no asynchronous I/O", "Use a kernel with CONFIG_AIO."
    if code == errno.EAGAIN:
        limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        text = "no limit" if limit == resource.RLIM_INFINITY else str(limit)
        return f"no thread can be started (RLIMIT_NPROC: {text}, or pids.max of the control group)", "Raise the limit (ulimit -u)."
    return os.strerror(code), "Look at the kernel's log (dmesg)."


def _number(path: str) -> int | None:
    try:
        with open(path) as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def _is_filtered(proc: str) -> bool:
    """Whether this process has a seccomp filter."""
    try:
        with open(f"{proc}/self/status") as file:
            return any(line.split() == ["Seccomp:", "2"] for line in file)
    except OSError:
        return False
