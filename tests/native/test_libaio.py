"""The libaio backend's own: the library and the calls without it, a kernel without room, one that cannot flush, a small quota."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.queues import REFUSALS

pytestmark = pytest.mark.skipif(bool(REFUSALS["libaio"]), reason=REFUSALS["libaio"] or "-")

Build = Callable[[int], None]
NAMES = ("libaio.so.1t64", "libaio.so.1")
THROUGH, DIRECTLY = "calls are made through the system's libaio", "libaio is not installed: its calls are made directly"

ROUND = """
import os, sys, logging
from infinity.task_queue import *
from tests.support.queues import *
logging.basicConfig(level=logging.INFO)
files = Files()
queue = TaskQueue(files, backend="libaio", queue_depth=16, block_nbytes=4096)
source, target = Memory(1 << 20, os.urandom(1 << 20)), Memory(1 << 20)
fd = files.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
batch = Batch()
written = batch.write(fd, 0, 1 << 20, source.address)
batch.read(fd, 0, 1 << 20, target.address, (batch.flush(fd, (written,)),))
assert [c.status for c in finish(queue, queue.submit(batch), 3)] == [0, 0, 0]
assert target.bytes() == source.bytes()
info = queue.info()[0]
print(info.depth, *info.notes, sep="\\n")
batch.flush(-1)
assert finish(queue, queue.submit(batch), 1)[0].status == -9
queue.close()
"""

STUBBORN = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>
static int calls;
int io_setup(int n, void **context) {
    if (n > QUOTA) return -EAGAIN;
    return syscall(SYS_io_setup, n, context) < 0 ? -errno : 0;
}
int io_destroy(void *context) { return syscall(SYS_io_destroy, context) < 0 ? -errno : 0; }
int io_submit(void *context, long n, void **iocbs) {
    if (++calls % 3 == 0) return -EAGAIN;                      /* no room now */
    if (((unsigned short *)iocbs[0])[8] == 3) return -EINVAL;  /* no asynchronous fdatasync */
    const long done = syscall(SYS_io_submit, context, n < 2 ? n : 2, iocbs);   /* two at a time */
    return done < 0 ? -errno : done;
}
int io_getevents(void *context, long least, long n, void *events, void *timeout) {
    const long done = syscall(SYS_io_getevents, context, least, n < 3 ? n : 3, events, timeout);
    return done < 0 ? -errno : done;
}
"""


def run(tmp_path: Path, library_path: Path | None = None) -> tuple[list[str], list[str]]:
    """Lines of output and of the log of a process that finds libraries in ``library_path`` first."""
    environment = dict(os.environ)
    if library_path is not None:
        environment["LD_LIBRARY_PATH"] = str(library_path)
    done = subprocess.run(
        [sys.executable, "-c", ROUND, str(tmp_path / "file")],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr.splitlines()


def is_installed() -> bool:
    for name in NAMES:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return True
    return False


def test_the_note_says_whether_the_library_is_used(tmp_path: Path) -> None:
    assert run(tmp_path) == (["16", THROUGH if is_installed() else DIRECTLY], [])


def test_a_library_that_cannot_be_loaded_is_done_without(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / name).write_text("not a library")
    assert run(tmp_path, tmp_path) == (["16", DIRECTLY], [])


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Builds the library above, with room for so many requests, where libraries are looked for."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")

    def build_one(quota: int) -> None:
        (tmp_path / "stubborn.c").write_text(STUBBORN)
        for name in NAMES:
            subprocess.run(
                [compiler, "-shared", "-fPIC", f"-DQUOTA={quota}", "-o", tmp_path / name, tmp_path / "stubborn.c"], check=True, timeout=60
            )

    return build_one


def test_partial_submission_refusals_and_a_missing_flush_change_nothing(tmp_path: Path, build: Build) -> None:
    build(1 << 20)
    assert run(tmp_path, tmp_path) == (["16", THROUGH], [])


@pytest.mark.parametrize(("quota", "depth"), [(15, 8), (3, 2), (1, 1)])
def test_a_quota_that_is_nearly_used_up_gives_a_lower_depth_and_one_warning(tmp_path: Path, build: Build, quota: int, depth: int) -> None:
    build(quota)
    lines, log = run(tmp_path, tmp_path)
    assert lines == [str(depth), THROUGH, "fs.aio-max-nr allows no more requests in flight"]
    assert len(log) == 1
    assert log[0].startswith(f"WARNING:infinity.task_queue:{depth} requests are in flight at most, not 16: fs.aio-max-nr is ")
