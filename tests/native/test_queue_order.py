"""What goes first in the native queue: priorities, bounds of what is in flight, promotion by waiting, cancellation."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infinity.errors import StallError
from infinity.faults import Fault
from infinity.native import lib
from infinity.task_queue import Batch, FileOp, Files, Priority, TaskQueue
from tests.support.queues import BACKENDS, COPY, SLEEP, Memory, copy_args, finish, opened, sleep_args

OpenQueue = Callable[..., TaskQueue]

DEMAND, WRITE_BACK, PREFETCH = Priority.DEMAND, Priority.WRITE_BACK, Priority.PREFETCH
BLOCK = 1 << 20
LONG_US = 10_000_000


@pytest.fixture
def files() -> Files:
    return Files()


@pytest.fixture
def fd(files: Files, tmp_path: Path) -> Iterator[int]:
    with opened(files, tmp_path / "file", content=bytes(2 * BLOCK)) as descriptor:
        yield descriptor


@pytest.fixture(params=BACKENDS)
def open_queue(request: pytest.FixtureRequest, files: Files, fd: int) -> Iterator[OpenQueue]:
    """Opens queues of one backend and closes them, before ``fd`` is closed."""
    queues: list[TaskQueue] = []

    def open_one(**arguments: Any) -> TaskQueue:
        arguments.setdefault("io_threads", arguments.get("queue_depth", 8))
        queues.append(TaskQueue(files, backend=request.param, **arguments))
        return queues[-1]

    yield open_one
    files.mend()
    for queue in queues:
        queue.cancel()
        queue.close()


@pytest.fixture(scope="module")
def memory() -> Memory:
    return Memory(2 * BLOCK)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def until_running(queue: TaskQueue, id: int) -> None:
    until(lambda: queue._phase(id) == lib.INF_RUNNING)


# ---- the most urgent first ----


def test_of_transfers_that_are_ready_the_most_urgent_go_first(open_queue: OpenQueue, fd: int, memory: Memory) -> None:
    queue = open_queue(queue_depth=1)
    batch = Batch()
    for priority in (PREFETCH, WRITE_BACK, DEMAND, PREFETCH, WRITE_BACK, DEMAND):
        batch.read(fd, 0, 64, memory.address, priority=priority)
    first_id = queue.submit(batch)
    queue.wait(range(first_id + 5, first_id + 6))
    until(lambda: queue.stats().in_flight == 0)
    assert [c.id - first_id for c in queue.poll()] == [2, 5, 1, 4, 0, 3]


def test_of_kernels_that_are_ready_the_most_urgent_go_first(open_queue: OpenQueue) -> None:
    queue = open_queue(workers=1)
    batch = Batch()
    for priority in (PREFETCH, WRITE_BACK, DEMAND, PREFETCH, WRITE_BACK, DEMAND):
        batch.kernel(SLEEP, sleep_args(), priority=priority)
    first_id = queue.submit(batch)
    until(lambda: queue.stats().in_flight == 0)
    assert [c.id - first_id for c in queue.poll()] == [2, 5, 1, 4, 0, 3]


def test_a_flush_goes_by_its_priority(open_queue: OpenQueue, fd: int, memory: Memory) -> None:
    queue = open_queue(queue_depth=1)
    batch = Batch()
    batch.flush(fd, priority=PREFETCH)
    batch.read(fd, 0, 64, memory.address, priority=WRITE_BACK)
    batch.flush(fd, priority=DEMAND)
    first_id = queue.submit(batch)
    until(lambda: queue.stats().in_flight == 0)
    assert [c.id - first_id for c in queue.poll()] == [2, 1, 0]


def test_a_long_transfer_that_is_less_urgent_holds_up_no_other(open_queue: OpenQueue, files: Files, fd: int, memory: Memory) -> None:
    queue = open_queue(queue_depth=2, block_nbytes=4096)
    files.fault(FileOp.READ, Fault.delay(4000), times=1 << 30)
    batch = Batch()
    batch.read(fd, 0, 2 * BLOCK, memory.address, priority=PREFETCH)
    long_id = queue.submit(batch)
    until_running(queue, long_id)
    batch.read(fd, 0, 64, memory.address)
    urgent_id = queue.submit(batch)
    queue.wait([urgent_id])
    assert [c.id for c in queue.poll()] == [urgent_id]
    files.mend()
    finish(queue, long_id, 1)


@pytest.mark.parametrize(("more", "less"), [(DEMAND, WRITE_BACK), (DEMAND, PREFETCH), (WRITE_BACK, PREFETCH)])
@pytest.mark.parametrize("kind", ["transfers", "kernels"])
def test_what_is_less_urgent_gets_its_turn_under_a_load_that_never_ends(
    open_queue: OpenQueue, fd: int, memory: Memory, kind: str, more: Priority, less: Priority
) -> None:
    queue = open_queue(queue_depth=1, workers=1)
    batch = Batch()

    def add(priority: Priority) -> None:
        if kind == "transfers":
            batch.read(fd, 0, 64, memory.address, priority=priority)
        else:
            batch.kernel(SLEEP, sleep_args(), priority=priority)

    for _ in range(100):
        add(more)
    add(less)
    first_id = queue.submit(batch)
    until(lambda: queue.stats().in_flight == 0)
    assert [c.id for c in queue.poll()].index(first_id + 100) == 16


# ---- what is in flight ----


def test_beside_demand_one_request_of_the_background_is_in_flight_and_two_soon_after(
    open_queue: OpenQueue, files: Files, fd: int, memory: Memory
) -> None:
    queue = open_queue(queue_depth=8)
    files.fault(FileOp.READ, Fault.hold(3, LONG_US))  # stays until three writes have ended
    batch = Batch()
    batch.read(fd, 0, 64, memory.address)
    for _ in range(5):
        batch.write(fd, 0, 64, memory.address)
    queue.submit(batch)
    until(lambda: queue.stats().in_flight == 0)
    assert queue.depths().max == 2


def test_without_demand_the_background_has_the_whole_depth(open_queue: OpenQueue, files: Files, fd: int, memory: Memory) -> None:
    queue = open_queue(queue_depth=8)
    files.fault(FileOp.WRITE, Fault.hold(100, 200_000), times=100)
    batch = Batch()
    for _ in range(10):
        batch.write(fd, 0, 64, memory.address)
    queue.submit(batch)
    until(lambda: queue.path_stats()[0].in_flight == 8)
    queue.cancel()


def test_small_requests_of_the_background_go_on_by_the_mebibyte(open_queue: OpenQueue, files: Files, fd: int, memory: Memory) -> None:
    queue = open_queue(queue_depth=8, block_nbytes=BLOCK // 4)
    files.fault(FileOp.READ, Fault.hold(100, 200_000))
    files.fault(FileOp.WRITE, Fault.hold(100, 200_000), times=100)
    batch = Batch()
    batch.read(fd, 0, 64, memory.address)
    batch.write(fd, 0, 2 * BLOCK, memory.address)
    queue.submit(batch)
    until(lambda: queue.path_stats()[0].in_flight == 1 + 4)
    queue.cancel()


def test_demand_has_the_whole_depth(open_queue: OpenQueue, files: Files, fd: int, memory: Memory) -> None:
    queue = open_queue(queue_depth=8)
    files.fault(FileOp.READ, Fault.hold(100, 200_000), times=100)
    batch = Batch()
    for _ in range(10):
        batch.read(fd, 0, 64, memory.address)
    queue.submit(batch)
    until(lambda: queue.path_stats()[0].in_flight == 8)
    queue.cancel()


@pytest.mark.parametrize("priority", Priority)
def test_bytes_in_flight_are_bounded(open_queue: OpenQueue, files: Files, fd: int, memory: Memory, priority: Priority) -> None:
    queue = open_queue(queue_depth=8, block_nbytes=4096, in_flight_nbytes=3 * 4096)
    files.fault(FileOp.READ, Fault.delay(2000), times=100)
    batch = Batch()
    batch.read(fd, 0, 64 * 4096, memory.address, priority=priority)
    finish(queue, queue.submit(batch), 1)
    assert queue.depths().max == 3


def test_a_request_larger_than_all_bytes_in_flight_goes_alone(open_queue: OpenQueue, files: Files, fd: int, memory: Memory) -> None:
    queue = open_queue(queue_depth=8, in_flight_nbytes=100)
    files.fault(FileOp.READ, Fault.delay(2000), times=100)
    batch = Batch()
    for nbytes in (4096, 101, 4096):
        batch.read(fd, 0, nbytes, memory.address)
    assert [c.status for c in finish(queue, queue.submit(batch), 3)] == [0, 0, 0]
    assert queue.depths().max == 1


# ---- waiting promotes ----


def test_what_is_waited_for_goes_before_what_was_more_urgent_with_all_that_it_depends_on(open_queue: OpenQueue) -> None:
    queue = open_queue(workers=1)
    batch = Batch()
    for _ in range(1000):
        batch.kernel(SLEEP, sleep_args(1000), priority=WRITE_BACK)
    last = batch.kernel(SLEEP, sleep_args(), priority=PREFETCH)
    for _ in range(10):
        last = batch.kernel(SLEEP, sleep_args(), (last,), priority=PREFETCH)
    first_id = queue.submit(batch)
    queue.wait([first_id + 1010])
    assert len(queue.poll()) < 800


def test_who_will_wait_may_promote_now_and_wait_later(open_queue: OpenQueue) -> None:
    queue = open_queue(workers=1)
    batch = Batch()
    for _ in range(1000):
        batch.kernel(SLEEP, sleep_args(1000), priority=WRITE_BACK)
    last = batch.kernel(SLEEP, sleep_args(), (batch.kernel(SLEEP, sleep_args(), priority=PREFETCH),), priority=PREFETCH)
    first_id = queue.submit(batch)
    queue.promote([first_id - 1 - last, 0, 10**6])
    queue.promote([])
    until(lambda: queue._phase(first_id - 1 - last) is None)
    assert len(queue.poll()) < 800


def test_a_transfer_that_is_waited_for_goes_before_what_was_more_urgent(
    open_queue: OpenQueue, files: Files, fd: int, memory: Memory
) -> None:
    queue = open_queue(queue_depth=1)
    files.fault(FileOp.WRITE, Fault.delay(1000), times=1 << 30)
    batch = Batch()
    for _ in range(1000):
        batch.write(fd, 0, 64, memory.address)
    read = batch.read(fd, 0, 4096, memory.address, priority=PREFETCH)
    batch.kernel(SLEEP, sleep_args(), (read,), priority=PREFETCH)
    first_id = queue.submit(batch)
    queue.wait([first_id + 1001])
    assert len(queue.poll()) < 800


def test_what_is_at_the_backend_and_waited_for_counts_as_demand(open_queue: OpenQueue, files: Files, fd: int, memory: Memory) -> None:
    queue = open_queue(queue_depth=8)
    files.fault(FileOp.READ, Fault.hold(3, LONG_US))
    batch = Batch()
    batch.read(fd, 0, 64, memory.address, priority=PREFETCH)
    read_id = queue.submit(batch)
    until_running(queue, read_id)
    with pytest.raises(StallError):
        queue.wait([read_id], timeout_s=0.001)
    for _ in range(5):
        batch.write(fd, 0, 64, memory.address)
    queue.submit(batch)
    until(lambda: queue.stats().in_flight == 0)
    assert queue.depths().max == 2


def test_who_only_asks_promotes_nothing(open_queue: OpenQueue, files: Files, fd: int, memory: Memory) -> None:
    queue = open_queue(queue_depth=8)
    files.fault(FileOp.READ, Fault.hold(100, 200_000))
    files.fault(FileOp.WRITE, Fault.hold(100, 200_000), times=100)
    batch = Batch()
    batch.read(fd, 0, 64, memory.address, priority=PREFETCH)
    read_id = queue.submit(batch)
    with pytest.raises(StallError):
        queue.wait([read_id], timeout_s=0)
    for _ in range(3):
        batch.write(fd, 0, 64, memory.address)
    queue.submit(batch)
    until(lambda: queue.path_stats()[0].in_flight == 4)


def test_a_chain_of_a_hundred_thousand_is_promoted_and_cancelled(open_queue: OpenQueue, files: Files, fd: int, memory: Memory) -> None:
    queue = open_queue(queue_depth=8)
    files.fault(FileOp.READ, Fault.hold(1, LONG_US))  # stays until another has ended
    batch = Batch()
    last = batch.read(fd, 0, 64, memory.address, priority=PREFETCH)
    for _ in range(100_000):
        last = batch.kernel(SLEEP, sleep_args(), (last,), priority=PREFETCH)
    first_id = queue.submit(batch)
    until_running(queue, first_id)
    with pytest.raises(StallError):
        queue.wait([first_id + 100_000], timeout_s=0.001)
    queue.cancel()
    batch.read(fd, 0, 64, memory.address)
    queue.submit(batch)
    statuses = [c.status for c in finish(queue, first_id, 100_002)]
    assert (statuses[0], set(statuses[1:-1]), statuses[-1]) == (0, {-errno.ECANCELED}, 0)


@pytest.mark.parametrize("shape", ["apart", "chain", "star"])
def test_a_hundred_thousand_tasks_are_handed_over_in_one_call(open_queue: OpenQueue, memory: Memory, shape: str) -> None:
    """In 0.05 s on an idle machine; what is not linear takes minutes."""
    queue = open_queue(workers=2)
    batch, nothing = Batch(), copy_args(memory.address, memory.address, 0)
    first = last = batch.kernel(COPY, nothing)
    for _ in range(100_000):
        last = batch.kernel(COPY, nothing, {"apart": (), "chain": (last,), "star": (first,)}[shape])
    began = time.perf_counter()
    first_id = queue.submit(batch)
    assert time.perf_counter() - began < 5
    assert {c.status for c in finish(queue, first_id, 100_001)} == {0}


# ---- cancellation ----


def test_what_is_not_begun_is_cancelled_and_what_runs_goes_to_its_end(open_queue: OpenQueue, fd: int, memory: Memory) -> None:
    queue = open_queue(workers=1)
    batch = Batch()
    running = batch.kernel(SLEEP, sleep_args(100_000, value=7))
    batch.kernel(SLEEP, sleep_args())
    batch.write(fd, 0, 64, memory.address, (running,))
    first_id = queue.submit(batch)
    until_running(queue, first_id)
    queue.cancel()
    assert [c.id - first_id for c in queue.poll()] == [1]
    queue.wait(range(first_id, first_id + 3))
    assert [(c.id - first_id, c.status, c.value) for c in queue.poll()] == [(0, 0, 7), (2, -errno.ECANCELED, 0)]


def test_of_a_transfer_that_was_begun_no_further_request_goes(open_queue: OpenQueue, files: Files, fd: int, memory: Memory) -> None:
    queue = open_queue(queue_depth=2, block_nbytes=4096)
    files.fault(FileOp.READ, Fault.delay(20_000), times=1 << 30)
    batch = Batch()
    batch.read(fd, 0, 2 * BLOCK, memory.address)
    first_id = queue.submit(batch)
    until_running(queue, first_id)
    queue.cancel([first_id])
    begun = files.count(FileOp.READ)
    assert finish(queue, first_id, 1)[0].status == -errno.ECANCELED
    assert files.count(FileOp.READ) <= begun + 2 < 512
    batch.read(fd, 0, 64, memory.address)
    assert finish(queue, queue.submit(batch), 1)[0].status == 0


def test_only_what_is_named_is_cancelled_and_what_depends_on_it(open_queue: OpenQueue) -> None:
    queue = open_queue(workers=1)
    batch = Batch()
    batch.kernel(SLEEP, sleep_args(50_000))
    named = batch.kernel(SLEEP, sleep_args())
    batch.kernel(SLEEP, sleep_args(), (named,))
    batch.kernel(SLEEP, sleep_args())
    first_id = queue.submit(batch)
    until_running(queue, first_id)
    queue.cancel([first_id + 1, 10**6, 0])
    queue.cancel([])
    assert [c.status for c in finish(queue, first_id, 4)] == [0, -errno.ECANCELED, -errno.ECANCELED, 0]
    queue.cancel([first_id + 1])
    queue.cancel()


def test_cancelling_ends_a_wait(open_queue: OpenQueue, files: Files, fd: int, memory: Memory) -> None:
    queue = open_queue(queue_depth=1)
    files.fault(FileOp.READ, Fault.delay(100_000))
    batch = Batch()
    batch.read(fd, 0, 64, memory.address)
    batch.read(fd, 0, 64, memory.address)
    first_id = queue.submit(batch)
    until_running(queue, first_id)
    waiting = threading.Thread(target=queue.wait, args=([first_id + 1],))
    waiting.start()
    queue.cancel([first_id + 1])
    waiting.join(timeout=30)
    assert not waiting.is_alive()
    assert queue.stats().in_flight == 1


def test_tasks_submitted_after_a_cancellation_run(open_queue: OpenQueue) -> None:
    queue = open_queue(workers=1)
    batch = Batch()
    batch.kernel(SLEEP, sleep_args(20_000))
    batch.kernel(SLEEP, sleep_args())
    first_id = queue.submit(batch)
    queue.cancel()
    batch.kernel(SLEEP, sleep_args(), (first_id + 1,))
    batch.kernel(SLEEP, sleep_args(value=3))
    second_id = queue.submit(batch)
    queue.wait(range(first_id, second_id + 2))
    last, unrelated = sorted(queue.poll())[-2:]
    assert (last.status, unrelated.value) == (-errno.ECANCELED, 3)


# ---- while nothing happens ----


def test_an_idle_queue_uses_no_cpu(open_queue: OpenQueue, files: Files, fd: int, memory: Memory) -> None:
    queue = open_queue(n_paths=4, workers=2)
    files.fault(FileOp.READ, Fault.delay(1_500_000))
    batch = Batch()
    batch.read(fd, 0, 64, memory.address)
    queue.submit(batch)
    time.sleep(0.05)
    began = time.process_time()
    time.sleep(1)
    assert time.process_time() - began < 0.005
    with contextlib.suppress(StallError):
        queue.wait([1], timeout_s=0)
