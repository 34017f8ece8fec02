"""What the benchmarks share: where a figure was taken, the counters of the process, and the rates of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import infinity
from infinity.kernel_args import Segment
from infinity.optim.adamw import AdamW
from infinity.sizes import format_rate
from infinity.task_queue import Batch, Files, TaskQueue
from infinity.tiers.frames import FramePool

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20


def provenance() -> dict[str, Any]:
    """Machine, versions and revision: a figure without them is none."""
    cpu = next(
        (line.split(":", 1)[1].strip() for line in _read("/proc/cpuinfo").splitlines() if line.startswith("model name")), platform.machine()
    )
    return {
        "machine": {
            "cpu": cpu,
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        },
        "load": round(os.getloadavg()[0], 2),
        "versions": {
            "infinity": infinity.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "linux": platform.release(),
        },
        "revision": _revision(),
    }


def emit(benchmark: str, case: str, figures: dict[str, Any], where: dict[str, Any]) -> None:
    """One JSON line on stdout."""
    print(json.dumps({"benchmark": benchmark, "case": case, **figures, **where}), flush=True)


def say(text: str) -> None:
    """For people, on stderr."""
    print(text, file=sys.stderr, flush=True)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def io_bytes() -> tuple[int, int]:
    """(read, written) by this process at the storage, as the kernel counts them."""
    counters = dict(line.split(": ") for line in _read("/proc/self/io").splitlines())
    return int(counters["read_bytes"]), int(counters["write_bytes"])


def memory_bytes(name: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process."""
    for line in _read("/proc/self/status").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def reset_high_water_mark() -> None:
    """``VmHWM`` starts again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


@contextlib.contextmanager
def scratch_directory(parent: str | None) -> Iterator[str]:
    """An empty directory on the drive to measure, removed at the end."""
    base = Path(parent) if parent else ROOT / "runs"
    base.mkdir(parents=True, exist_ok=True)
    path = tempfile.mkdtemp(prefix="bench-", dir=base)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class DiskRates:
    """Bytes per second with many requests in flight; ``mixed`` is reads and writes in turn, both counted."""

    read: float
    write: float
    mixed: float

    def __str__(self) -> str:
        return f"read {format_rate(self.read)}, write {format_rate(self.write)}, both at once {format_rate(self.mixed)}"


class Disk:
    """A file full of incompressible data, read and written past the page cache through the queue that training uses."""

    def __init__(self, directory: str, *, nbytes: int = 512 * MIB, block_nbytes: int = MIB, in_flight: int = 32) -> None:
        self._block_nbytes = block_nbytes
        self._n_blocks = nbytes // block_nbytes
        self._in_flight = in_flight
        self._files = Files()
        self._queue = TaskQueue(self._files)
        self._frames = FramePool(2 * in_flight * block_nbytes, block_nbytes)
        path = os.path.join(directory, "rates")
        flags = os.O_RDWR | os.O_CREAT
        try:
            self._fd = self._files.open(path, flags | os.O_DIRECT)
        except OSError:
            self._fd = self._files.open(path, flags)
            say(f"note: {directory} takes no O_DIRECT; the page cache is part of these rates")
        self._files.fallocate(self._fd, 0, self._n_blocks * block_nbytes)
        random = np.random.default_rng(0)
        for frame in range(self._frames.n_frames):
            self._frames.memory(frame)[:] = random.integers(0, 256, block_nbytes, np.uint8)
        self._run("w")  # so that every block has been written

    def rates(self) -> DiskRates:
        """Measured now."""
        return DiskRates(read=self._run("r"), write=self._run("w"), mixed=self._run("rw"))

    def close(self) -> None:
        self._queue.close()
        self._files.close(self._fd)
        self._frames.close()

    def _run(self, kinds: str) -> float:
        """Each frame has a chain of requests of its own, so that as many are in flight as there are frames."""
        batch = Batch()
        last: dict[int, int] = {}
        n_frames = self._in_flight
        for block in range(self._n_blocks):
            frame = block % n_frames
            after = (last[frame],) if frame in last else ()
            kind = kinds[(block + block // n_frames) % len(kinds)]  # each frame, and each round of frames, has both
            add = batch.read if kind == "r" else batch.write
            last[frame] = add(self._fd, block * self._block_nbytes, self._block_nbytes, self._frames.address(frame), after)
        n_tasks = len(batch)
        begin_s = time.perf_counter()
        first = self._queue.submit(batch)
        self._queue.wait(range(first, first + n_tasks))
        seconds = time.perf_counter() - begin_s
        failed = [completion for completion in self._queue.poll() if completion.status]
        if failed:
            raise OSError(-failed[0].status, os.strerror(-failed[0].status))
        return self._n_blocks * self._block_nbytes / seconds


def adamw_rate(*, workers: int = 1, numel: int = 1 << 24, tile_numel: int = 1 << 17) -> float:
    """Parameters per second of our AdamW kernel (bf16 weights in two halves, bf16 gradients) on memory that no cache holds."""
    algorithm = AdamW()
    scalars = algorithm.scalars(algorithm.defaults, 1, 1.0)
    param, residual, grad = (np.zeros(numel, np.uint16) for _ in range(3))
    exp_avg, exp_avg_sq = (np.zeros(numel, np.float32) for _ in range(2))
    for plane in (param, residual, grad, exp_avg, exp_avg_sq):
        plane[:] = 1  # the memory is there before it is timed
    queue = TaskQueue(Files(), workers=workers)
    try:
        batch = Batch()
        for begin in range(0, numel, tile_numel):
            args = algorithm.pack(
                param.ctypes.data + 2 * begin,
                residual.ctypes.data + 2 * begin,
                [[exp_avg.ctypes.data + 4 * begin], [exp_avg_sq.ctypes.data + 4 * begin]],
                tile_numel,
                [Segment(grad.ctypes.data + 2 * begin, 0, tile_numel, True, scalars)],
            )
            batch.kernel(algorithm.kernel, args)
        n_tasks = len(batch)
        begin_s = time.perf_counter()
        first = queue.submit(batch)
        queue.wait(range(first, first + n_tasks))
        return numel / (time.perf_counter() - begin_s)
    finally:
        queue.close()


def _read(path: str) -> str:
    return Path(path).read_text()


def _revision() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False).stdout.strip()

    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + (
        "+changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    )
