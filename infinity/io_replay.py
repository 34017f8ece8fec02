"""A recording of ``io_trace`` done again: the same tasks, in the same batches, with the same dependencies and priorities.

The files are our own, as long as the recorded ones, and so is the memory: transfers that shared bytes share bytes again. Kernels are
tasks that do nothing, because the recording does not know how long they took: what is measured is what the transfers alone need.
"""

from __future__ import annotations

import bisect
import os
import time
from collections.abc import Callable, Sequence

from infinity.errors import IoError
from infinity.io_bench import Bench, Run, run_of
from infinity.io_trace import Trace
from infinity.kernel_args import Kernel, pack_sleep
from infinity.sizes import align_down, align_up
from infinity.task_queue import Backend, Batch, Completion, Priority, TaskQueue

_PAGE_NBYTES = 4096
_POLL_BATCHES = 64
_LOOK_S = 0.001


class Replay:
    """A trace made ready for a directory: files, memory, and how its addresses lie in it.

    Memory: owns files and memory, as ``Bench`` does.
    Errors: SpaceError, IoError.
    """

    def __init__(self, trace: Trace, directory: str | os.PathLike[str], *, progress: Callable[[int], None] | None = None) -> None:
        self._trace = trace
        self.block_nbytes = int(trace.queue.get("block_nbytes", 1 << 20))
        self.queue_depth = int(trace.queue.get("queue_depth", 32))
        self._begins: list[int] = []
        self._places: list[int] = []
        nbytes = 0
        for begin, end in memory_spans(trace):
            self._begins.append(begin)
            self._places.append(nbytes)
            nbytes += end - begin
        self._bench = Bench(directory, file_nbytes=file_lengths(trace) or _PAGE_NBYTES, memory_nbytes=nbytes, progress=progress)

    @property
    def direct(self) -> bool:
        return self._bench.direct

    def run(
        self, *, backend: Backend = Backend.AUTO, queue_depth: int | None = None, block_nbytes: int | None = None, paced: bool = False
    ) -> Run:
        """Everything, once, as fast as it goes; ``paced`` hands no batch over earlier than it was recorded.

        Errors: IoError of the first request that failed.
        """
        with self._bench.open_queue(
            backend=backend, queue_depth=queue_depth or self.queue_depth, block_nbytes=block_nbytes or self.block_nbytes
        ) as queue:
            batches = self._batches()
            times = [submission.at_s for submission in self._trace.submissions]
            failed: list[Completion] = []
            cpu_s = time.process_time()
            begin_s = time.perf_counter()
            for index, batch in enumerate(batches):
                if paced:
                    time.sleep(max(0.0, times[index] - (time.perf_counter() - begin_s)))
                queue.submit(batch)
                if index % _POLL_BATCHES == 0:
                    failed += _failed(queue)
            while queue.stats().in_flight:  # waiting for tasks would raise their priority
                time.sleep(_LOOK_S)
            seconds = time.perf_counter() - begin_s
            cpu_s = time.process_time() - cpu_s
            self._check(failed + _failed(queue))
            return run_of(queue, seconds, cpu_s)

    def close(self) -> None:
        self._bench.close()

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _batches(self) -> list[Batch]:
        """Made before the clock starts. Ids start at 1 again; what came before the recording is complete, and left out."""
        fds, alignment = self._bench.fds, self._bench.alignment
        empty = pack_sleep(0)
        shift = self._trace.submissions[0].first_id - 1 if self._trace.submissions else 0
        batches = []
        for submission in self._trace.submissions:
            batch = Batch()
            for task in submission.tasks:
                after = [one if one < 0 else one - shift for one in task.after if one < 0 or one > shift]
                priority = Priority(task.priority)
                if task.op == "kernel":
                    batch.kernel(Kernel.SLEEP, empty, after, priority)
                elif task.op == "flush":
                    batch.flush(fds[task.file], after, priority)
                else:
                    offset = align_down(task.offset, alignment)
                    nbytes = align_up(task.offset + task.nbytes, alignment) - offset
                    add = batch.read if task.op == "read" else batch.write
                    add(fds[task.file], offset, nbytes, self._address(task.address), after, priority)
            batches.append(batch)
        return batches

    def _address(self, address: int) -> int:
        span = bisect.bisect_right(self._begins, address) - 1
        return self._bench.address + self._places[span] + align_down(address - self._begins[span], self._bench.alignment)

    def _check(self, failed: Sequence[Completion]) -> None:
        if failed:
            first = min(failed, key=lambda completion: completion.id)
            task = next(task for index, task in enumerate(self._trace.tasks(), 1) if index == first.id)
            raise IoError(task.op, self._trace.files[task.file], task.offset, task.nbytes, -first.status, "replayed")


def file_lengths(trace: Trace) -> list[int]:
    """How long each file must be at least; one of which nothing is moved is a page."""
    lengths = [_PAGE_NBYTES] * len(trace.files)
    for task in trace.tasks():
        if task.op in ("read", "write"):
            lengths[task.file] = max(lengths[task.file], task.offset + task.nbytes)
    return lengths


def memory_spans(trace: Trace) -> list[tuple[int, int]]:
    """(begin, end) of the memory that transfers touch, in whole pages, with one to spare for a length that is rounded up."""
    transfers = {(task.address, task.nbytes) for task in trace.tasks() if task.op in ("read", "write")}
    pieces = sorted(
        (align_down(address, _PAGE_NBYTES), align_up(address + nbytes, _PAGE_NBYTES) + _PAGE_NBYTES) for address, nbytes in transfers
    )
    spans: list[tuple[int, int]] = []
    for begin, end in pieces:
        if spans and begin <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], end))
        else:
            spans.append((begin, end))
    return spans


def _failed(queue: TaskQueue) -> list[Completion]:
    return [completion for completion in queue.poll() if completion.status]
