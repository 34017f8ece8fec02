"""quotas.py: each refusal names the setting, its value and the remedy."""

from __future__ import annotations

import errno
import resource
from pathlib import Path

import pytest

from infinity.quotas import explain


def machine(tmp_path: Path, *, seccomp: int = 0, **numbers: int) -> str:
    """A /proc with these settings (``kernel__x`` is kernel/x)."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "status").write_text(f"Name:\tx\nSeccomp:\t{seccomp}\nSeccomp_filters:\t0\n")
    for name, number in numbers.items():
        path = tmp_path / "sys" / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{number}\n")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("backend", "code", "seccomp", "numbers", "expected"),
    [
        ("uring", errno.EPERM, 0, {"kernel__io_uring_disabled": 2}, "kernel.io_uring_disabled is 2 [EPERM]"),
        ("uring", errno.EPERM, 2, {"kernel__io_uring_disabled": 1}, "kernel.io_uring_disabled is 1 [EPERM]"),
        ("uring", errno.EPERM, 2, {"kernel__io_uring_disabled": 0}, "a seccomp filter forbids io_uring [EPERM]"),
        ("uring", errno.ENOSYS, 2, {}, "a seccomp filter forbids io_uring [ENOSYS]"),
        ("uring", errno.ENOSYS, 0, {}, "this kernel has no io_uring, or an old one [ENOSYS]"),
        ("uring", errno.EPERM, 0, {}, "Operation not permitted [EPERM]"),
        (
            "libaio",
            errno.EAGAIN,
            0,
            {"fs__aio-nr": 60, "fs__aio-max-nr": 64},
            "fs.aio-max-nr is 64, of which 60 are taken, and 32 are wanted [EAGAIN]",
        ),
        ("libaio", errno.EPERM, 2, {}, "a seccomp filter forbids asynchronous I/O [EPERM]"),
        ("libaio", errno.ENOSYS, 0, {}, "this kernel has no asynchronous I/O [ENOSYS]"),
        ("libaio", errno.ENOMEM, 0, {}, "Cannot allocate memory [ENOMEM]"),
        ("threads", errno.ENFILE, 0, {}, "fs.file-max is reached: no more files can be opened on this machine [ENFILE]"),
    ],
)
def test_a_refusal_names_the_setting(tmp_path: Path, backend: str, code: int, seccomp: int, numbers: dict[str, int], expected: str) -> None:
    refusal = explain(backend, code, wanted=32, proc=machine(tmp_path, seccomp=seccomp, **numbers))
    assert (refusal.backend, refusal.errno, refusal.reason) == (backend, code, expected)
    assert refusal.remedy.endswith(".")
    assert str(refusal) == f"{backend} does not work here: {expected}"


def test_limits_of_the_process_are_named_with_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {resource.RLIMIT_NOFILE: 64, resource.RLIMIT_NPROC: 7, resource.RLIMIT_MEMLOCK: 8 << 20}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (values[which], values[which]))
    assert "RLIMIT_NOFILE allows 64 open files" in explain("uring", errno.EMFILE, wanted=1).reason
    assert "RLIMIT_NPROC: 7," in explain("threads", errno.EAGAIN, wanted=1).reason
    assert "RLIMIT_MEMLOCK: 8.00 MiB" in explain("uring", errno.ENOMEM, wanted=1).reason


def test_a_machine_without_proc_is_explained_all_the_same(tmp_path: Path) -> None:
    assert explain("libaio", errno.EAGAIN, wanted=1, proc=str(tmp_path / "missing")).reason.startswith("fs.aio-max-nr is used up")
