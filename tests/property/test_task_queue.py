"""Random graphs of tasks against a model that runs them one after the other."""

from __future__ import annotations

import errno
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.faults import Fault
from infinity.task_queue import Batch, FileOp, Files, TaskQueue
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
        return batch.write(fd, CELL * step.other, CELL, cell, after)
    if step.kind == "read":
        return batch.read(fd, CELL * step.other, CELL, cell, after)
    if step.kind == "copy":
        return batch.kernel(COPY, copy_args(target, cell, CELL) if cell != target else copy_args(target, cell, 0), after)
    if step.kind == "flush":
        return batch.flush(fd, after)
    if step.kind == "fail":
        return batch.kernel(SLEEP, sleep_args(status=-errno.EIO), after)
    return batch.read(fd, 10 * CELL * SLOTS, CELL, cell, after)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(deadline=None, max_examples=150)
@given(
    program=steps,
    block_nbytes=st.sampled_from([7, 16, 1 << 20]),
    depth=st.sampled_from([1, 2, 32]),
    workers=st.integers(1, 3),
    shorts=st.lists(st.tuples(st.sampled_from([FileOp.READ, FileOp.WRITE]), st.integers(1, 20), st.integers(1, 30)), max_size=3),
    interrupts=st.lists(st.tuples(st.sampled_from([FileOp.READ, FileOp.WRITE, FileOp.DATASYNC]), st.integers(1, 20)), max_size=3),
)
def test_any_graph_of_tasks_gives_what_a_run_in_order_gives(
    backend: str,
    program: list[Step],
    block_nbytes: int,
    depth: int,
    workers: int,
    shorts: list[tuple[FileOp, int, int]],
    interrupts: list[tuple[FileOp, int]],
) -> None:
    needed = dependencies(program)
    cells = [os.urandom(CELL) for _ in range(CELLS)]
    slots = [os.urandom(CELL) for _ in range(SLOTS)]
    memory = Memory(CELL * CELLS, b"".join(cells))
    files = Files()
    with tempfile.TemporaryDirectory() as directory, opened(files, Path(directory) / "file", content=b"".join(slots)) as fd:
        for op, nth, result in shorts:
            files.fault(op, Fault.short(result), nth=nth)
        for op, nth in interrupts:
            files.fault(op, Fault.error(errno.EINTR), nth=nth, times=2)
        queue = TaskQueue(files, backend=backend, queue_depth=depth, block_nbytes=block_nbytes, workers=workers, io_threads=3)
        batch = Batch()
        names: list[int] = []  # ids, or handles of the open batch
        begin = 0
        completions = []

        def submit() -> None:
            nonlocal begin
            first_id = queue.submit(batch)
            names[begin:] = [first_id - 1 - handle for handle in names[begin:]]
            begin = len(names)

        for step, after in zip(program, needed, strict=True):
            if step.starts_batch:
                submit()
                completions += queue.poll()
            names.append(add(batch, step, fd, memory, [names[j] for j in after]))
        submit()
        queue.wait(names, timeout_s=60)
        completions += queue.poll()
        queue.close()
        content = (Path(directory) / "file").read_bytes()

    statuses = model(program, needed, cells, slots)
    assert sorted(c.id for c in completions) == names
    assert [c.status for c in sorted(completions)] == statuses
    assert memory.bytes() == b"".join(cells)
    assert content == b"".join(slots)
    place = {c.id: i for i, c in enumerate(completions)}
    for name, after in zip(names, needed, strict=True):
        assert all(place[names[j]] < place[name] for j in after)
