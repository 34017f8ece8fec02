"""What does it buy that io_uring knows files and memory in advance, and what do the backends cost?

Alternately in one run, per backend and per what is registered: CPU time of the process per GB moved, requests per second, bytes per second.
The bound of the CPU time is that of `uring` with everything registered; of the rates, the drive.

    python benchmarks/registration.py [--runs 7 --nbytes 1073741824 --directory DIR]
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from _measure import MIB, emit, provenance, say, scratch_directory, spread

from infinity.task_queue import Batch, Files, TaskQueue, probe_backends
from infinity.tiers.frames import FramePool

MEMORY_NBYTES = 256 * MIB
DEPTH = 32


class Kind(NamedTuple):
    """A backend, and what is made known to it."""

    backend: str
    files: bool
    memory: bool

    def __str__(self) -> str:
        known = [name for name, is_known in (("files", self.files), ("memory", self.memory)) if is_known]
        return self.backend + (f" with {' and '.join(known)} registered" if known else "")


KINDS = (
    Kind("uring", True, True),
    Kind("uring", True, False),
    Kind("uring", False, False),
    Kind("libaio", False, False),
    Kind("threads", False, False),
)
JOBS = (("read", MIB, 1), ("write", MIB, 1), ("read", 4096, 4), ("write", 4096, 8))
"""Operation, bytes of a request, and by how much less is moved."""


@contextmanager
def opened(files: Files, directory: Path, nbytes: int) -> Iterator[int]:
    fd = files.open(directory / "registration", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    files.unlink(directory / "registration")
    files.fallocate(fd, 0, nbytes)
    yield fd
    files.close(fd)


def moved(files: Files, fd: int, frames: FramePool, kind: Kind, op: str, block_nbytes: int, nbytes: int) -> tuple[float, float]:
    """CPU time and time that ``nbytes`` took, in seconds."""
    queue = TaskQueue(files, backend=kind.backend, queue_depth=DEPTH, block_nbytes=block_nbytes)
    if kind.files:
        queue.add_file(fd)
    if kind.memory:
        queue.add_memory(frames.base_address, frames.nbytes)
    batch = Batch()
    for offset in range(0, nbytes, MEMORY_NBYTES):
        length = min(MEMORY_NBYTES, nbytes - offset)
        add = batch.read if op == "read" else batch.write
        add(fd, offset, length, frames.base_address)
    n = len(batch)
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    first_id = queue.submit(batch)
    queue.wait(range(first_id, first_id + n))
    took, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    if any(completion.status for completion in queue.poll()):
        raise RuntimeError("a transfer failed")
    queue.close()
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--nbytes", type=int, default=1 << 30)
    parser.add_argument("--directory")
    given = parser.parse_args()
    where, files = provenance(), Files()
    frames = FramePool(MEMORY_NBYTES, MEMORY_NBYTES)
    frames.memory(0)[:] = bytearray(os.urandom(MIB)) * (MEMORY_NBYTES // MIB)
    kinds = [kind for kind in KINDS if kind.backend in {probe.backend for probe in probe_backends() if probe.works}]
    with scratch_directory(given.directory) as directory, opened(files, Path(directory), given.nbytes) as fd:
        moved(files, fd, frames, kinds[-1], "write", MIB, given.nbytes)  # a place never written is not read from the drive
        for op, block_nbytes, divisor in JOBS:
            nbytes = given.nbytes // divisor
            figures: dict[Kind, list[tuple[float, float]]] = {kind: [] for kind in kinds}
            for _ in range(given.runs):
                for kind in kinds:
                    figures[kind].append(moved(files, fd, frames, kind, op, block_nbytes, nbytes))
            say(f"{op}, requests of {block_nbytes} bytes")
            for kind, runs in figures.items():
                found: dict[str, Any] = {
                    "cpu_s_per_gb": spread([cpu / (nbytes / 1e9) for cpu, _ in runs]),
                    "requests_per_s": spread([nbytes / block_nbytes / took for _, took in runs]),
                    "bytes_per_s": spread([nbytes / took for _, took in runs]),
                }
                cpu, rate = found["cpu_s_per_gb"]["median"], found["requests_per_s"]["median"]
                say(f"    {kind!s:42} {cpu:.3f} s of CPU per GB   {rate:,.0f} requests/s   {found['bytes_per_s']['median'] / 1e9:.2f} GB/s")
                emit("registration", f"{kind}, {op} {block_nbytes}", found, where)
    frames.close()


if __name__ == "__main__":
    main()
