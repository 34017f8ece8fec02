"""Real file systems of a chosen kind and size, mounted for one test. What this machine does not give is skipped, with what is missing.

Each mount and each device is taken away at the end, also when the test fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

MIB = 1 << 20

EXT4_1K = ("-t", "ext4", "-b", "1024")
EXT4_4K = ("-t", "ext4", "-b", "4096")
NO_EXTENTS = ("-t", "ext4", "-O", "^extent,^64bit")
"""Blocks in the way of ext2 and ext3: space cannot be reserved."""


def run(*command: str | Path) -> str:
    """What a command prints; a test that needs it is skipped where it is missing or not allowed."""
    program = str(command[0])
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        pytest.skip(f"{' '.join(map(str, command))}: {done.stderr.strip() or done.returncode}")
    return done.stdout.strip()


def needs_root() -> None:
    """Skips where nothing can be mounted."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")


@contextmanager
def mounted(kind: str, where: Path, *, source: str = "none", options: str = "") -> Iterator[Path]:
    """A file system of ``kind`` at ``where``, which is made."""
    needs_root()
    where.mkdir(parents=True, exist_ok=True)
    run("mount", "-t", kind, *(("-o", options) if options else ()), source, where)
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True, timeout=60)


@contextmanager
def tmpfs(where: Path, nbytes: int) -> Iterator[Path]:
    with mounted("tmpfs", where, options=f"size={nbytes}") as path:
        yield path


@contextmanager
def loop_device(image: Path, nbytes: int, *, sector_nbytes: int = 512) -> Iterator[str]:
    """A block device over a file."""
    needs_root()
    with image.open("wb") as file:
        file.truncate(nbytes)
    device = run("losetup", "--sector-size", str(sector_nbytes), "--find", "--show", image)
    try:
        yield device
    finally:
        subprocess.run(["losetup", "--detach", device], check=True, timeout=60)


@contextmanager
def ext4(where: Path, nbytes: int, mkfs: Sequence[str] = EXT4_4K, *, sector_nbytes: int = 512) -> Iterator[Path]:
    """ext4 on a loop device. What is free is there for everybody: no blocks are kept for root."""
    with ExitStack() as stack:
        device = stack.enter_context(loop_device(where.with_suffix(".image"), nbytes, sector_nbytes=sector_nbytes))
        run("mke2fs", "-q", "-F", "-m", "0", *mkfs, device)
        yield stack.enter_context(mounted("ext4", where, source=device))


@contextmanager
def xfs(where: Path) -> Iterator[Path]:
    """xfs on a loop device, as small as its tool makes them."""
    with ExitStack() as stack:
        device = stack.enter_context(loop_device(where.with_suffix(".image"), 320 * MIB))
        run("mkfs.xfs", "-q", device)
        yield stack.enter_context(mounted("xfs", where, source=device))


@contextmanager
def btrfs(where: Path) -> Iterator[Path]:
    """btrfs on a loop device, as small as its tool makes them for sure."""
    with ExitStack() as stack:
        device = stack.enter_context(loop_device(where.with_suffix(".image"), 128 * MIB))
        run("mkfs.btrfs", "-q", "-m", "single", device)
        yield stack.enter_context(mounted("btrfs", where, source=device))


@contextmanager
def overlay(where: Path) -> Iterator[Path]:
    """An overlay over directories beside it."""
    lower, upper, work = (where.with_name(f"{where.name}-{layer}") for layer in ("lower", "upper", "work"))
    for layer in (lower, upper, work):
        layer.mkdir(parents=True)
    with mounted("overlay", where, options=f"lowerdir={lower},upperdir={upper},workdir={work}") as path:
        yield path


@contextmanager
def ramfs(where: Path) -> Iterator[Path]:
    """It takes no O_DIRECT, and does not say what is free."""
    with mounted("ramfs", where) as path:
        yield path


def fill(directory: Path, leave_nbytes: int) -> Path:
    """A file that leaves about ``leave_nbytes`` free, in real blocks."""
    path = directory / "filler"
    with path.open("wb", buffering=0) as file:
        while (disk := os.statvfs(directory)).f_bavail * disk.f_frsize > leave_nbytes:
            room = disk.f_bavail * disk.f_frsize - leave_nbytes
            try:
                file.write(os.urandom(min(room, MIB)))
            except OSError:
                break
        os.fsync(file.fileno())
    return path
