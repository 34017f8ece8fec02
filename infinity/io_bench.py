"""How fast a drive is through the task queue that training uses: a case in, figures out.

A case is a job over a file of our own, full of incompressible data (blocks that were never written read as zeros, for nothing), on memory
that is there before the clock starts. It is timed from the first submit to the last completion and nothing else: queue, tasks and
memory are made before, and a run that is not counted comes first. This file measures; it prints nothing and decides nothing.
"""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Literal, NamedTuple

import numpy as np

from infinity.errors import InfinityError, IoError
from infinity.metrics import Histogram
from infinity.sizes import align_up
from infinity.task_queue import Backend, Batch, Files, Priority, TaskQueue
from infinity.tiers.frames import FramePool
from infinity.tiers.nvme import NvmeBacking

WARM_UP_NBYTES = 64 << 20
"""Moved before the first counted run of a case."""
OPS: tuple[Literal["read", "write"], ...] = ("read", "write")
STAGES: tuple[Literal["submission", "completion", "total"], ...] = ("submission", "completion", "total")
_FILL_BLOCK_NBYTES = 8 << 20
_FILL_BLOCKS = 8
_ALIGNMENT = 4096


class Direction(enum.Enum):
    """What a job does. ``MIXED`` reads and writes in turn."""

    READ = "read"
    WRITE = "write"
    MIXED = "mixed"


class Transfer(NamedTuple):
    """One task of a case; ``memory_offset`` is where in the memory of the job its bytes are."""

    reads: bool
    offset: int
    nbytes: int
    memory_offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One job.

    Without ``page_nbytes`` it is what a disk benchmark does: each request of ``block_nbytes`` is a task of its own, in the order of the
    file, and there is memory for ``queue_depth`` of them. With it, all ``nbytes`` are in memory and each page is a task of its own,
    which the queue cuts into requests; a page of ``nbytes`` is one buffer. In a mixed job reads and writes alternate, each walking
    through the first half of the file.

    All tasks are handed over at once: what is in flight is the queue's business, as in training. So a request's wait for its turn is part
    of its latency (stage "submission"); what the kernel and the drive take is stage "completion".
    """

    direction: Direction
    nbytes: int
    block_nbytes: int
    queue_depth: int
    page_nbytes: int | None = None
    backend: Backend = Backend.AUTO
    io_threads: int = 4

    @property
    def task_nbytes(self) -> int:
        return self.page_nbytes or self.block_nbytes

    @property
    def memory_nbytes(self) -> int:
        """How much memory the job moves to or from."""
        return self.nbytes if self.page_nbytes else min(self.nbytes, self.block_nbytes * self.queue_depth)

    @property
    def requests(self) -> int:
        """Into how many requests of at most ``block_nbytes`` the job is cut."""
        return self.nbytes // self.task_nbytes * -(-self.task_nbytes // self.block_nbytes)

    def problems(self, alignment: int = 1) -> list[str]:
        """What is wrong with it; O_DIRECT asks for ``alignment``."""
        found = []
        if min(self.nbytes, self.block_nbytes, self.task_nbytes) <= 0 or self.queue_depth <= 0:
            return ["sizes and depths must be positive"]
        if self.block_nbytes % alignment or self.task_nbytes % alignment:
            found.append(f"blocks and pages must be multiples of {alignment} bytes")
        if self.nbytes % self.task_nbytes:
            found.append(f"{self.nbytes} bytes are not a whole number of pieces of {self.task_nbytes} bytes")
        elif self.direction is Direction.MIXED and self.nbytes // self.task_nbytes % 2:
            found.append(
                f"a mixed job needs an even number of pieces, and {self.nbytes} bytes are {self.nbytes // self.task_nbytes} of them"
            )
        return found

    def transfers(self) -> Iterator[Transfer]:
        """Its tasks, in order."""
        step = self.task_nbytes
        window = self.memory_nbytes // step
        for index in range(self.nbytes // step):
            if self.direction is Direction.MIXED:
                yield Transfer(index % 2 == 0, index // 2 * step, step, index % window * step)
            else:
                yield Transfer(self.direction is Direction.READ, index * step, step, index % window * step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one run of a case measured."""

    seconds: float
    read_nbytes: int
    write_nbytes: int
    requests: int
    cpu_s: float
    """Of the whole process, native threads and those of the kernel that work for it included."""
    shorts: int
    retries: int
    backend: str
    """What carried it out."""
    notes: tuple[str, ...]
    """What the backend did without, and why."""
    latency: Mapping[tuple[Literal["read", "write"], Literal["submission", "completion", "total"]], Histogram]
    """Of requests, by operation (``OPS``) and stage (``STAGES``)."""
    depths: Histogram
    """Requests at the backend, each time that one more was handed to it."""

    @property
    def nbytes(self) -> int:
        return self.read_nbytes + self.write_nbytes

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / self.seconds

    @property
    def requests_per_s(self) -> float:
        return self.requests / self.seconds

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / (self.nbytes / 1e9) if self.nbytes else 0.0


class Bench:
    """Files without names, full of incompressible data, and memory to move it to and from.

    ``file_nbytes`` is the length of the file, or of each of several; ``progress`` is told how many bytes are filled.

    Memory: owns all of it; the files' blocks go back to the drive however the process ends.
    Errors: SpaceError and IoError, as a run of training would meet them.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        file_nbytes: int | Sequence[int],
        memory_nbytes: int,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.file_nbytes = (file_nbytes,) if isinstance(file_nbytes, int) else tuple(file_nbytes)
        self._files = Files()
        self._backings: list[NvmeBacking] = []
        self._memory: FramePool | None = None
        try:
            for nbytes in self.file_nbytes:
                self._backings.append(NvmeBacking(self._files, directory, page_nbytes=align_up(nbytes, _ALIGNMENT), n_slots=1))
            self.fds = [backing.place(0)[0] for backing in self._backings]
            memory_nbytes = align_up(max(memory_nbytes, _FILL_BLOCK_NBYTES * _FILL_BLOCKS), _ALIGNMENT)
            self._memory = FramePool(memory_nbytes, memory_nbytes)
            self.address = self._memory.base_address
            self._fill(progress or (lambda done: None))
        except BaseException:
            self.close()
            raise

    @property
    def direct(self) -> bool:
        """Whether transfers pass the page cache by. If not, the figures are those of the cache."""
        return self._backings[0].direct

    @property
    def alignment(self) -> int:
        """What offsets, lengths and addresses must be multiples of."""
        return self._backings[0].alignment

    @property
    def path(self) -> str:
        """A name by which other processes of this user can open the (first) file while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self.fds[0]}"

    def warm_up(self, case: Case) -> None:
        """A run that does not count, of the first part of the case."""
        self._run(case, list(islice(case.transfers(), max(1, WARM_UP_NBYTES // case.task_nbytes))))

    def run(self, case: Case) -> Run:
        """The whole case, once.

        Errors: IoError of the first request that failed; InfinityError when the backend does not work here.
        """
        return self._run(case, list(case.transfers()))

    @contextmanager
    def open_queue(
        self, *, backend: Backend = Backend.AUTO, queue_depth: int, block_nbytes: int, io_threads: int = 4
    ) -> Iterator[TaskQueue]:
        """A queue that knows the files and the memory. What it has not begun when an exception comes is cancelled.

        Errors: InfinityError when the backend does not work here.
        """
        assert self._memory is not None
        try:
            queue = TaskQueue(
                self._files,
                backend=backend,
                queue_depth=queue_depth,
                block_nbytes=block_nbytes,
                in_flight_nbytes=queue_depth * block_nbytes,
                io_threads=io_threads,
            )
        except OSError as error:
            raise InfinityError(f"backend {backend.value!r}: {error.strerror}") from error
        try:
            for fd in self.fds:
                queue.add_file(fd)
            queue.add_memory(self.address, self._memory.nbytes)
            yield queue
        except BaseException:
            queue.cancel()
            raise
        finally:
            queue.close()

    def close(self) -> None:
        """Gives memory and files back."""
        if self._memory is not None:
            self._memory.close()
        for backing in self._backings:
            backing.close()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _run(self, case: Case, transfers: Sequence[Transfer]) -> Run:
        with self.open_queue(
            backend=case.backend, queue_depth=case.queue_depth, block_nbytes=case.block_nbytes, io_threads=case.io_threads
        ) as queue:
            batch = Batch()
            for transfer in transfers:  # all of one priority: it is their order that is measured
                add = batch.read if transfer.reads else batch.write
                add(self.fds[0], transfer.offset, transfer.nbytes, self.address + transfer.memory_offset, (), Priority.DEMAND)
            cpu_s = time.process_time()
            begin_s = time.perf_counter()
            first = queue.submit(batch)
            queue.wait(range(first, first + len(transfers)))
            seconds = time.perf_counter() - begin_s
            cpu_s = time.process_time() - cpu_s
            for completion in queue.poll():
                if completion.status:
                    failed = transfers[completion.id - first]
                    op = "read" if failed.reads else "write"
                    raise IoError(op, self._backings[0].path(0), failed.offset, failed.nbytes, -completion.status)
            return run_of(queue, seconds, cpu_s)

    def _fill(self, progress: Callable[[int], None]) -> None:
        assert self._memory is not None
        memory = self._memory.memory(0)
        random = np.random.Generator(np.random.SFC64())
        step = _FILL_BLOCK_NBYTES * _FILL_BLOCKS
        for begin in range(0, len(memory), step):  # every page of it is there, and nothing in it can be compressed
            memory[begin : begin + step] = _random_bytes(random, min(step, len(memory) - begin))
        filled = 0
        with self.open_queue(queue_depth=_FILL_BLOCKS, block_nbytes=_FILL_BLOCK_NBYTES) as queue:
            for fd, backing in zip(self.fds, self._backings, strict=True):
                for begin in range(0, backing.slot_nbytes, step):
                    nbytes = min(step, backing.slot_nbytes - begin)
                    memory[:nbytes] = _random_bytes(random, nbytes)
                    batch = Batch()
                    batch.write(fd, begin, nbytes, self.address)
                    queue.wait([queue.submit(batch)])
                    for completion in queue.poll():
                        if completion.status:
                            raise IoError("write", backing.path(0), begin, nbytes, -completion.status)
                    filled += nbytes
                    progress(filled)


def run_of(queue: TaskQueue, seconds: float, cpu_s: float) -> Run:
    """What a queue has done since it was opened."""
    stats = queue.stats()
    latency = {(op, stage): queue.latency(op, stage) for op in OPS for stage in STAGES}
    info = queue.info()
    return Run(
        seconds=seconds,
        read_nbytes=stats.read_nbytes,
        write_nbytes=stats.write_nbytes,
        requests=sum(latency[op, "total"].count for op in OPS),
        cpu_s=cpu_s,
        shorts=stats.shorts,
        retries=stats.retries,
        backend=queue.backend,
        notes=tuple(note for path in info for note in path.notes),
        latency=latency,
        depths=queue.depths(),
    )


def _random_bytes(random: np.random.Generator, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return random.integers(0, 1 << 64, -(-nbytes // 8), np.uint64).view(np.uint8)[:nbytes]
