"""Random graphs of tasks on a disk that goes wrong at random: what ended well is as the model says, and what did not says why."""

from __future__ import annotations

import errno
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.faults import Fault, FaultKind
from infinity.task_queue import FileOp, Files
from tests.property.test_task_queue import Run, Step, dependencies, model, steps
from tests.support.queues import BACKENDS

IO = {"read": FileOp.READ, "behind": FileOp.READ, "write": FileOp.WRITE, "flush": FileOp.DATASYNC}
"""Kinds of steps that are file operations."""

FATAL = (errno.EIO, errno.ENOSPC, errno.EROFS)
MASKED = (
    *map(Fault.error, (errno.EINTR, errno.EAGAIN)),
    *map(Fault.short, (0, 1, 5, 39)),
    Fault.delay(300),
    Fault.hold(2, us=1000),
    Fault.hold(9, us=1000),
)


class Trouble(NamedTuple):
    op: FileOp
    fault: Fault
    nth: int
    times: int
    one_in: int
    seed: int

    def set(self, files: Files) -> None:
        if not (self.fault.kind is FaultKind.SHORT and self.op is FileOp.DATASYNC):
            files.fault(self.op, self.fault, nth=self.nth, times=self.times, one_in=self.one_in, seed=self.seed)


def troubles(faults: st.SearchStrategy[Fault]) -> st.SearchStrategy[list[Trouble]]:
    return st.lists(
        st.builds(
            Trouble,
            op=st.sampled_from([FileOp.READ, FileOp.WRITE, FileOp.DATASYNC]),
            fault=faults,
            nth=st.integers(1, 30),
            times=st.integers(1, 6),
            one_in=st.integers(1, 3),
            seed=st.integers(0, 100),
        ),
        max_size=6,
    )


def is_end_of_file(trouble: Trouble) -> bool:
    """A read that moves nothing is no trouble that could be masked: it is the end of the file."""
    return trouble.op is FileOp.READ and trouble.fault == Fault.short(0)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(deadline=None, max_examples=100)
@given(
    program=steps,
    trouble=troubles(st.sampled_from(MASKED)).map(lambda found: [one for one in found if not is_end_of_file(one)]),
    block_nbytes=st.sampled_from([7, 1 << 20]),
    depth=st.sampled_from([1, 3, 32]),
)
def test_what_is_short_late_or_out_of_order_changes_nothing(
    backend: str, program: list[Step], trouble: list[Trouble], block_nbytes: int, depth: int
) -> None:
    needed = dependencies(program)
    files = Files()
    for one in trouble:
        one.set(files)
    run = Run(files, program, needed, backend=backend, queue_depth=depth, block_nbytes=block_nbytes, io_threads=3)
    run.check_order(needed)
    assert run.statuses == model(program, needed, run.cells, run.slots)
    assert run.cells_after == run.cells
    assert run.slots_after == run.slots


@pytest.mark.parametrize("backend", BACKENDS)
@settings(deadline=None, max_examples=150)
@given(
    program=steps,
    trouble=troubles(st.sampled_from([*map(Fault.error, FATAL), *MASKED])),
    block_nbytes=st.sampled_from([7, 1 << 20]),
    depth=st.sampled_from([1, 3, 32]),
)
def test_what_fails_says_so_and_harms_nothing_but_its_own_target(
    backend: str, program: list[Step], trouble: list[Trouble], block_nbytes: int, depth: int
) -> None:
    needed = dependencies(program)
    files = Files()
    for one in trouble:
        one.set(files)
    run = Run(files, program, needed, backend=backend, queue_depth=depth, block_nbytes=block_nbytes, io_threads=3)
    run.check_order(needed)
    alone = model(program, [[] for _ in program], list(run.cells), list(run.slots))
    fatal = [one for one in trouble if one.fault.kind is FaultKind.ERROR and one.fault.value in FATAL]
    possible = {op: {-one.fault.value for one in fatal if one.op is op} for op in FileOp}
    if any(is_end_of_file(one) for one in trouble):
        possible[FileOp.READ].add(-errno.ENODATA)
    n_failed = 0

    places: dict[str, bytes | None] = {f"cell {i}": content for i, content in enumerate(run.cells)}
    places |= {f"slot {i}": content for i, content in enumerate(run.slots)}
    for step, after, status, own in zip(program, needed, run.statuses, alone, strict=True):
        reads, writes = step.touches()
        if any(run.statuses[j] for j in after):
            assert status == -errno.ECANCELED
        elif status == own == 0:
            if step.kind in ("read", "write", "copy"):
                places |= dict.fromkeys(writes, places[next(iter(reads))])
        elif status != own:
            n_failed += 1
            assert status in possible[IO[step.kind]]
            places |= dict.fromkeys(writes)  # some of its requests may have gone
    assert n_failed <= sum(one.times for one in trouble)
    found = {f"cell {i}": content for i, content in enumerate(run.cells_after)}
    found |= {f"slot {i}": content for i, content in enumerate(run.slots_after)}
    assert all(content is None or found[place] == content for place, content in places.items())
