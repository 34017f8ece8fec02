"""Random graphs of tasks against a model that runs them one after the other."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.errors import StallError
from infinity.faults import Fault
from infinity.task_queue import Batch, Completion, FileOp, Files, Priority, TaskQueue
from tests.support.queues import BACKENDS, COPY, SLEEP, Memory, copy_args, opened, sleep_args

CELL = 40
CELLS = 4
SLOTS = 4


@dataclass
class Step:
    """One task: what it does, to which memory cells and file slots, and which earlier ones it waits for beyond those it must."""

    kind: str
    cell: int
    other: int
    extra: list[int] = field(default_factory=list)
    starts_batch: bool = False
    priority: Priority = Priority.DEMAND
    waits_for: int | None = None
    """The step that is waited for a moment, if it was submitted, before this one is added: it is promoted."""

    def touches(self) -> tuple[set[str], set[str]]:
        """(reads, writes) of the places."""
        cell, slot, target = f"cell {self.cell}", f"slot {self.other}", f"cell {self.other}"
        return {
            "write": ({cell}, {slot}),
            "read": ({slot}, {cell}),
            "copy": ({cell}, {target}),
            "flush": ({f"slot {i}" for i in range(SLOTS)}, set()),
            "fail": (set(), set()),
            "behind": (set(), {cell}),
        }[self.kind]


steps = st.lists(
    st.builds(
        Step,
        kind=st.sampled_from(["write", "read", "copy", "write", "read", "copy", "flush", "fail", "behind"]),
        cell=st.integers(0, CELLS - 1),
        other=st.integers(0, SLOTS - 1),
        extra=st.lists(st.integers(0, 30), max_size=2),
        starts_batch=st.sampled_from([False, False, True]),
        priority=st.sampled_from(Priority),
        waits_for=st.none() | st.integers(0, 30),
    ),
    max_size=30,
)


def dependencies(program: list[Step]) -> list[list[int]]:
    """For each step the earlier ones that touch the same place, one of the two writing, and the extra ones."""
    needed = []
    for i, step in enumerate(program):
        reads, writes = step.touches()
        after = {j for j in step.extra if j < i}
        for j in range(i):
            earlier_reads, earlier_writes = program[j].touches()
            if writes & (earlier_reads | earlier_writes) or reads & earlier_writes:
                after.add(j)
        needed.append(sorted(after))
    return needed


def model(program: list[Step], needed: list[list[int]], cells: list[bytes], slots: list[bytes]) -> list[int]:
    statuses: list[int] = []
    for step, after in zip(program, needed, strict=True):
        if any(statuses[j] for j in after):
            statuses.append(-errno.ECANCELED)
        elif step.kind == "fail":
            statuses.append(-errno.EIO)
        elif step.kind == "behind":
            statuses.append(-errno.ENODATA)
        else:
            statuses.append(0)
            if step.kind == "write":
                slots[step.other] = cells[step.cell]
            elif step.kind == "read":
                cells[step.cell] = slots[step.other]
            elif step.kind == "copy":
                cells[step.other] = cells[step.cell]
    return statuses


def add(batch: Batch, step: Step, fd: int, memory: Memory, after: list[int]) -> int:
    cell, target = memory.address + CELL * step.cell, memory.address + CELL * step.other
    if step.kind == "write":
        return batch.write(fd, CELL * step.other, CELL, cell, after, step.priority)
    if step.kind == "read":
        return batch.read(fd, CELL * step.other, CELL, cell, after, step.priority)
    if step.kind == "copy":
        return batch.kernel(COPY, copy_args(target, cell, CELL) if cell != target else copy_args(target, cell, 0), after, step.priority)
    if step.kind == "flush":
        return batch.flush(fd, after, step.priority)
    if step.kind == "fail":
        return batch.kernel(SLEEP, sleep_args(status=-errno.EIO), after, step.priority)
    return batch.read(fd, 10 * CELL * SLOTS, CELL, cell, after, step.priority)


class Run:
    """A program on a queue of two paths: the file is opened once for each, and even and odd steps take turns."""

    def __init__(self, files: Files, program: list[Step], needed: list[list[int]], cancel_at: int | None = None, **arguments: Any) -> None:
        self.names: list[int] = []
        """Ids, or handles of the open batch."""
        self.completions: list[Completion] = []
        self._begin = 0
        self._batch = Batch()
        self.queue = TaskQueue(files, n_paths=2, **arguments)
        cells = [os.urandom(CELL) for _ in range(CELLS)]
        slots = [os.urandom(CELL) for _ in range(SLOTS)]
        self.cells, self.slots = list(cells), list(slots)
        memory = Memory(CELL * CELLS, b"".join(cells))
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "file"
            with opened(files, path, content=b"".join(slots)) as first, opened(files, path) as second:
                fds = (first, second)
                self.queue.add_file(second, 1)
                for i, (step, after) in enumerate(zip(program, needed, strict=True)):
                    if step.starts_batch:
                        self._submit()
                    if step.waits_for is not None and step.waits_for < self._begin:
                        with contextlib.suppress(StallError):
                            self.queue.wait([self.names[step.waits_for]], timeout_s=0.001)
                    if i == cancel_at:
                        self._submit()
                        self.queue.cancel()
                    self.names.append(add(self._batch, step, fds[i % 2], memory, [self.names[j] for j in after]))
                self._submit()
                self.queue.wait(self.names, timeout_s=60)
                self.completions += self.queue.poll()
                self.queue.close()
            content = path.read_bytes()
        self.cells_after = [memory.bytes(CELL * i, CELL * (i + 1)) for i in range(CELLS)]
        self.slots_after = [content[CELL * i : CELL * (i + 1)] for i in range(SLOTS)]

    @property
    def statuses(self) -> list[int]:
        return [c.status for c in sorted(self.completions)]

    def check_order(self, needed: list[list[int]]) -> None:
        """Each task completed once, after all that it depends on."""
        assert sorted(c.id for c in self.completions) == self.names
        place = {c.id: i for i, c in enumerate(self.completions)}
        for name, after in zip(self.names, needed, strict=True):
            assert all(place[self.names[j]] < place[name] for j in after)

    def _submit(self) -> None:
        first_id = self.queue.submit(self._batch)
        self.names[self._begin :] = [first_id - 1 - handle for handle in self.names[self._begin :]]
        self._begin = len(self.names)
        self.completions += self.queue.poll()


@pytest.mark.parametrize("backend", BACKENDS)
@settings(deadline=None, max_examples=150)
@given(
    program=steps,
    block_nbytes=st.sampled_from([7, 16, 1 << 20]),
    in_flight_nbytes=st.sampled_from([1, 20, 1 << 20]),
    depth=st.sampled_from([1, 2, 32]),
    workers=st.integers(1, 3),
    shorts=st.lists(st.tuples(st.sampled_from([FileOp.READ, FileOp.WRITE]), st.integers(1, 20), st.integers(1, 30)), max_size=3),
    interrupts=st.lists(st.tuples(st.sampled_from([FileOp.READ, FileOp.WRITE, FileOp.DATASYNC]), st.integers(1, 20)), max_size=3),
)
def test_any_graph_of_tasks_gives_what_a_run_in_order_gives(
    backend: str,
    program: list[Step],
    block_nbytes: int,
    in_flight_nbytes: int,
    depth: int,
    workers: int,
    shorts: list[tuple[FileOp, int, int]],
    interrupts: list[tuple[FileOp, int]],
) -> None:
    """Whatever their priorities, and whoever is waited for meanwhile."""
    needed = dependencies(program)
    files = Files()
    for op, nth, nbytes in shorts:
        files.fault(op, Fault.short(nbytes), nth=nth)
    for op, nth in interrupts:
        files.fault(op, Fault.error(errno.EINTR), nth=nth, times=2)
    run = Run(
        files,
        program,
        needed,
        backend=backend,
        queue_depth=depth,
        block_nbytes=block_nbytes,
        in_flight_nbytes=in_flight_nbytes,
        workers=workers,
        io_threads=3,
    )
    assert run.statuses == model(program, needed, run.cells, run.slots)
    assert run.cells_after == run.cells
    assert run.slots_after == run.slots
    run.check_order(needed)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(deadline=None, max_examples=100)
@given(program=steps, block_nbytes=st.sampled_from([7, 1 << 20]), depth=st.sampled_from([1, 32]), cancel_at=st.integers(0, 30))
def test_a_graph_that_is_cancelled_ends_and_what_was_not_begun_changed_nothing(
    backend: str, program: list[Step], block_nbytes: int, depth: int, cancel_at: int
) -> None:
    needed = dependencies(program)
    run = Run(Files(), program, needed, cancel_at, backend=backend, queue_depth=depth, block_nbytes=block_nbytes, io_threads=3)
    run.check_order(needed)
    expected = model(program, needed, list(run.cells), list(run.slots))
    places: dict[str, bytes | None] = {f"cell {i}": content for i, content in enumerate(run.cells)}
    places |= {f"slot {i}": content for i, content in enumerate(run.slots)}
    for i, (step, after, status) in enumerate(zip(program, needed, run.statuses, strict=True)):
        (reads, writes), failed_before = step.touches(), any(run.statuses[j] for j in after)
        if failed_before:
            assert status == -errno.ECANCELED
        elif status == -errno.ECANCELED:
            assert i < cancel_at
            if step.kind in ("read", "write", "behind"):  # some of its requests may have gone
                places |= dict.fromkeys(writes)
        elif status == 0 and step.kind in ("read", "write", "copy"):
            assert expected[i] == 0
            places |= dict.fromkeys(writes, places[next(iter(reads))])
        else:
            assert status == expected[i]
    after_run = {f"cell {i}": content for i, content in enumerate(run.cells_after)}
    after_run |= {f"slot {i}": content for i, content in enumerate(run.slots_after)}
    assert all(content is None or after_run[place] == content for place, content in places.items())
