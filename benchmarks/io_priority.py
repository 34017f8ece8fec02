"""How long does a demand read take while write-backs fill the queue, beside how long it takes on an idle queue?

One read at a time, at random places, with pauses of 5 to 20 ms as between the demands of a training step, O_DIRECT. The same reads
take turns in three cases:

    idle      nothing else is in the queue; the bound
    loaded    at least 64 MiB of writes of 8 MiB are queued all the time, as write-backs
    equal     the same writes with the priority of the reads: what the reads would wait without priorities

Beside the latencies stands what the writes got meanwhile, and what they get alone. The goal: loaded at most twice idle.

    python benchmarks/io_priority.py [--backend uring --backend threads --rounds 7 --reads 40 --directory DIR]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import time
from typing import Any

import numpy as np
from _measure import MIB, emit, provenance, say, scratch_directory, spread

from infinity.sizes import format_rate, format_seconds
from infinity.task_queue import Backend, Batch, Files, Priority, TaskQueue
from infinity.tiers.frames import FramePool

FILE_NBYTES = 512 * MIB
WRITE_NBYTES = 8 * MIB
QUEUED_NBYTES = 64 * MIB
"""Of writes, at the least; they are topped up to twice as much."""
READ_NBYTES = (MIB, 8 * MIB)
PAUSE_S = (0.005, 0.020)
CASES = {"idle": None, "loaded": Priority.WRITE_BACK, "equal": Priority.DEMAND}


class Drive:
    """A file to read and one to write, both full of incompressible data, and one queue."""

    def __init__(self, directory: str, backend: str) -> None:
        self.files = Files()
        self.queue = TaskQueue(self.files, backend=backend)
        self.frames = FramePool(2 * WRITE_NBYTES, WRITE_NBYTES)
        noise = np.random.default_rng(0)
        for frame in range(2):
            self.frames.memory(frame)[:] = noise.integers(0, 256, WRITE_NBYTES, np.uint8)
        self._batch = Batch()
        self._writes: set[int] = set()
        self._next_write = 0
        self.to_read, self.to_write = (self._open(os.path.join(directory, f"{backend}-{name}")) for name in ("read", "write"))

    def close(self) -> None:
        self.queue.close()
        for fd in (self.to_read, self.to_write):
            self.files.close(fd)
        self.frames.close()

    def read(self, offset: int, nbytes: int) -> float:
        """Seconds of one read, from submission until Python has it."""
        self._batch.read(self.to_read, offset, nbytes, self.frames.address(0))
        begin_s = time.perf_counter()
        task = self.queue.submit(self._batch)
        self.queue.wait((task,))
        seconds = time.perf_counter() - begin_s
        self._take()
        return seconds

    def top_up(self, priority: Priority) -> None:
        """Queues writes where fewer than QUEUED_NBYTES are."""
        self._take()
        if len(self._writes) * WRITE_NBYTES > QUEUED_NBYTES:
            return
        while len(self._writes) + len(self._batch) < 2 * QUEUED_NBYTES // WRITE_NBYTES:
            self._next_write = (self._next_write + WRITE_NBYTES) % FILE_NBYTES
            self._batch.write(self.to_write, self._next_write, WRITE_NBYTES, self.frames.address(1), priority=priority)
        n_tasks = len(self._batch)
        first = self.queue.submit(self._batch)
        self._writes.update(range(first, first + n_tasks))

    def settle(self) -> None:
        """Lets every write end, and the drive rest."""
        while self._writes:
            time.sleep(0.001)
            self._take()
        time.sleep(0.1)

    @property
    def written_nbytes(self) -> int:
        return self.queue.path_stats()[0].write_nbytes

    def _take(self) -> None:
        for completion in self.queue.poll():
            if completion.status:
                raise OSError(-completion.status, os.strerror(-completion.status))
            self._writes.discard(completion.id)

    def _open(self, path: str) -> int:
        flags = os.O_RDWR | os.O_CREAT
        try:
            fd = self.files.open(path, flags | os.O_DIRECT)
        except OSError:
            fd = self.files.open(path, flags)
            say(f"note: {path} takes no O_DIRECT; the page cache is part of these figures")
        self.queue.add_file(fd)
        self.files.fallocate(fd, 0, FILE_NBYTES)
        for offset in range(0, FILE_NBYTES, WRITE_NBYTES):
            self._batch.write(fd, offset, WRITE_NBYTES, self.frames.address(1))
        n_tasks = len(self._batch)
        first = self.queue.submit(self._batch)
        self.queue.wait(range(first, first + n_tasks))
        self._take()
        return fd


class Turn:
    """What one turn of one case gave."""

    def __init__(self, drive: Drive, nbytes: int, n_reads: int, writes: Priority | None, pick: random.Random) -> None:
        self.latency_s: list[float] = []
        if writes is not None:
            drive.top_up(writes)
            time.sleep(0.02)
        begin_s, before = time.perf_counter(), drive.written_nbytes
        for _ in range(n_reads):
            until_s = time.perf_counter() + pick.uniform(*PAUSE_S)
            while (left_s := until_s - time.perf_counter()) > 0:
                if writes is not None:
                    drive.top_up(writes)
                time.sleep(min(left_s, 0.001))
            self.latency_s.append(drive.read(pick.randrange(FILE_NBYTES // nbytes) * nbytes, nbytes))
        self.write_rate = (drive.written_nbytes - before) / (time.perf_counter() - begin_s)
        drive.settle()


def writes_alone(drive: Drive, seconds: float) -> float:
    """Bytes per second of write-backs that nothing disturbs."""
    begin_s, before = time.perf_counter(), drive.written_nbytes
    while time.perf_counter() - begin_s < seconds:
        drive.top_up(Priority.WRITE_BACK)
        time.sleep(0.001)
    rate = (drive.written_nbytes - before) / (time.perf_counter() - begin_s)
    drive.settle()
    return rate


def percentiles(seconds: list[float]) -> dict[str, float]:
    return {name: float(np.percentile(seconds, p)) for name, p in (("median_s", 50), ("p90_s", 90), ("p99_s", 99))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", action="append", choices=[backend.value for backend in Backend], help="default: uring and threads")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--reads", type=int, default=40, help="of each case in each round")
    parser.add_argument("--directory", default=None, help="on the drive to measure; default: runs/")
    arguments = parser.parse_args()
    where = provenance()
    pick = random.Random(0)

    say(f"{'':24}{'median':>10}{'p90':>10}{'p99':>10}{'over idle':>11}{'p99':>7}   {'writes':>12}")
    for backend in arguments.backend or ("uring", "threads"):
        with scratch_directory(arguments.directory) as directory, contextlib.closing(Drive(directory, backend)) as drive:
            alone = [writes_alone(drive, 0.5) for _ in range(arguments.rounds)]
            for nbytes in READ_NBYTES:
                turns: dict[str, list[Turn]] = {case: [] for case in CASES}
                for round_ in range(arguments.rounds):
                    for case in [*CASES][round_ % len(CASES) :] + [*CASES][: round_ % len(CASES)]:
                        turns[case].append(Turn(drive, nbytes, arguments.reads, CASES[case], pick))
                idle = percentiles([seconds for turn in turns["idle"] for seconds in turn.latency_s])
                for case, of_case in turns.items():
                    latency = percentiles([seconds for turn in of_case for seconds in turn.latency_s])
                    rates = spread([turn.write_rate for turn in of_case])
                    figures: dict[str, Any] = {
                        "read_bytes": nbytes,
                        "reads": arguments.reads * arguments.rounds,
                        **latency,
                        "median_over_idle": latency["median_s"] / idle["median_s"],
                        "p99_over_idle": latency["p99_s"] / idle["p99_s"],
                        "write_bytes_per_s": rates,
                        "write_alone_bytes_per_s": spread(alone),
                    }
                    emit("io_priority", f"{backend}, read of {nbytes // MIB} MiB, {case}", figures, where)
                    columns = "".join(f"{format_seconds(value):>10}" for value in latency.values())
                    say(
                        f"{backend + ',':9}{nbytes // MIB} MiB, {case:8}{columns}{figures['median_over_idle']:>10.2f}x"
                        f"{figures['p99_over_idle']:>6.2f}x   {format_rate(rates['median']):>12}"
                    )
            say(f"{backend}: writes alone {format_rate(spread(alone)['median'])}")


if __name__ == "__main__":
    main()
