"""How fast a drive is through the task queue that training uses: a case in, figures out.

A case is a job over a file of our own, full of incompressible data (blocks that were never written read as zeros, for nothing), on memory
that is there before the clock starts. It is timed from the first submit to the last completion and nothing else: queue, tasks and
memory are made before, and a run that is not counted comes first. This file measures; it prints nothing and decides nothing.
"""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import NamedTuple

import numpy as np

from infinity.errors import IoError
from infinity.sizes import align_up
from infinity.task_queue import Backend, Batch, Files, Priority, TaskQueue
from infinity.tiers.frames import FramePool
from infinity.tiers.nvme import NvmeBacking

WARM_UP_NBYTES = 64 << 20
"""Moved before the first counted run of a case."""
_FILL_BLOCK_NBYTES = 8 << 20
_FILL_BLOCKS = 8
_MEMORY_ALIGNMENT = 4096


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
        return self.cpu_s / (self.nbytes / 1e9)


class Bench:
    """A file without a name, full of incompressible data, and memory to move it to and from.

    ``progress`` is told how many bytes of the file are filled.

    Memory: owns both; the file's blocks go back to the drive however the process ends.
    Errors: SpaceError and IoError, as a run of training would meet them.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        file_nbytes: int,
        memory_nbytes: int,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.file_nbytes = file_nbytes
        self._files = Files()
        slot_nbytes = align_up(file_nbytes, _MEMORY_ALIGNMENT)
        self._backing = NvmeBacking(self._files, directory, page_nbytes=slot_nbytes, n_slots=1)
        self._memory: FramePool | None = None
        try:
            frame_nbytes = align_up(max(memory_nbytes, _FILL_BLOCK_NBYTES * _FILL_BLOCKS), _MEMORY_ALIGNMENT)
            self._memory = FramePool(frame_nbytes, frame_nbytes)
            self._fd, _ = self._backing.place(0)
            self._fill(progress)
        except BaseException:
            self.close()
            raise

    @property
    def direct(self) -> bool:
        """Whether transfers pass the page cache by. If not, the figures are those of the cache."""
        return self._backing.direct

    @property
    def alignment(self) -> int:
        """What offsets, lengths and addresses must be multiples of."""
        return self._backing.alignment

    @property
    def path(self) -> str:
        """A name by which other processes of this user can open the file while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def warm_up(self, case: Case) -> None:
        """A run that does not count, of the first part of the case."""
        queue = self._open_queue(case)
        try:
            self._transfer(queue, list(islice(case.transfers(), max(1, WARM_UP_NBYTES // case.task_nbytes))))
        finally:
            queue.close()

    def run(self, case: Case) -> Run:
        """The whole case, once.

        Errors: IoError of the first request that failed.
        """
        queue = self._open_queue(case)
        try:
            transfers = list(case.transfers())
            cpu_s = time.process_time()
            seconds = self._transfer(queue, transfers)
            cpu_s = time.process_time() - cpu_s
            stats = queue.stats()
            return Run(
                seconds=seconds,
                read_nbytes=stats.read_nbytes,
                write_nbytes=stats.write_nbytes,
                requests=case.requests,
                cpu_s=cpu_s,
                shorts=stats.shorts,
                retries=stats.retries,
                backend=queue.backend,
            )
        finally:
            queue.close()

    def close(self) -> None:
        """Gives memory and file back."""
        if self._memory is not None:
            self._memory.close()
        self._backing.close()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _open_queue(self, case: Case) -> TaskQueue:
        return TaskQueue(
            self._files,
            backend=case.backend,
            queue_depth=case.queue_depth,
            block_nbytes=case.block_nbytes,
            io_threads=case.io_threads,
        )

    def _transfer(self, queue: TaskQueue, transfers: Sequence[Transfer]) -> float:
        """One priority for all: it is their order that is measured."""
        assert self._memory is not None
        base = self._memory.base_address
        batch = Batch()
        for transfer in transfers:
            add = batch.read if transfer.reads else batch.write
            add(self._fd, transfer.offset, transfer.nbytes, base + transfer.memory_offset, priority=Priority.DEMAND)
        begin_s = time.perf_counter()
        first = queue.submit(batch)
        queue.wait(range(first, first + len(transfers)))
        seconds = time.perf_counter() - begin_s
        for completion in queue.poll():
            if completion.status:
                failed = transfers[completion.id - first]
                op = "read" if failed.reads else "write"
                raise IoError(op, self._backing.path(0), failed.offset, failed.nbytes, -completion.status)
        return seconds

    def _fill(self, progress: Callable[[int], None] | None) -> None:
        assert self._memory is not None
        memory = self._memory.memory(0)
        random = np.random.Generator(np.random.SFC64())
        step = _FILL_BLOCK_NBYTES * _FILL_BLOCKS
        for begin in range(0, len(memory), step):  # every page of it is there, and nothing in it can be compressed
            memory[begin : begin + step] = _random_bytes(random, min(step, len(memory) - begin))
        queue = TaskQueue(self._files, queue_depth=_FILL_BLOCKS, block_nbytes=_FILL_BLOCK_NBYTES)
        try:
            end = align_up(self.file_nbytes, self.alignment)
            for begin in range(0, end, step):
                nbytes = min(step, end - begin)
                memory[:nbytes] = _random_bytes(random, nbytes)
                self._transfer(queue, [Transfer(False, begin, nbytes, 0)])
                if progress is not None:
                    progress(min(begin + nbytes, self.file_nbytes))
        finally:
            queue.close()


def _random_bytes(random: np.random.Generator, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return random.integers(0, 1 << 64, -(-nbytes // 8), np.uint64).view(np.uint8)[:nbytes]
