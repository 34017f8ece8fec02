"""task_queue.py: what its Python adds to the native queue."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infinity.errors import EngineClosedError, StallError
from infinity.faults import Fault
from infinity.native import check, crc32c, ffi
from infinity.task_queue import Backend, Batch, FileOp, Files, Priority, TaskQueue, probe_backends
from tests.support.queues import REFUSALS, SLEEP, WORKING_BACKENDS, Memory, finish, opened, sleep_args


@pytest.fixture
def files() -> Files:
    return Files()


@pytest.fixture
def queue(files: Files) -> Iterator[TaskQueue]:
    with_threads = TaskQueue(files, backend=Backend.THREADS)
    yield with_threads
    with_threads.close()


def in_child(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=False, cwd=root)


def settle(queue: TaskQueue) -> None:
    """Until nothing is in flight, whatever the queue thinks of the time that it takes."""
    while queue.stats().in_flight:
        time.sleep(0.005)


# ---- native.py ----


def test_check_gives_what_is_not_negative() -> None:
    assert check(0, "x") == 0
    assert check(7, "x") == 7


def test_check_raises_the_subclass_of_the_errno() -> None:
    with pytest.raises(FileNotFoundError) as info:
        check(-errno.ENOENT, "open", "/there")
    assert info.value.filename == "/there"
    with pytest.raises(PermissionError, match="task queue: Operation not permitted"):
        check(-errno.EPERM, "task queue")


def test_crc32c_takes_buffers_addresses_and_a_seed() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    memory = Memory(9, b"123456789")
    assert crc32c(memory.address, 9) == crc32c(memoryview(b"123456789")) == crc32c(bytearray(b"123456789xx"), 9)
    assert crc32c(b"6789", seed=crc32c(b"12345")) == 0xE3069283


def test_crc32c_reads_nothing_behind_a_buffer() -> None:
    with pytest.raises(ValueError, match="10 bytes, but the buffer has 9"):
        crc32c(b"123456789", 10)
    with pytest.raises(TypeError, match="nbytes"):
        crc32c(4096)


# ---- Batch ----


def test_handles_count_down_and_become_ids(queue: TaskQueue) -> None:
    batch = Batch()
    handles = [batch.kernel(SLEEP, sleep_args(value=i)) for i in range(3)]
    assert handles == [-1, -2, -3]
    assert len(batch) == 3
    first_id = queue.submit(batch)
    queue.wait([first_id - 1 - handle for handle in handles])
    assert {c.id: c.value for c in queue.poll()} == {first_id - 1 - handle: i for i, handle in enumerate(handles)}


def test_a_submitted_batch_is_empty_and_used_again(queue: TaskQueue) -> None:
    batch = Batch()
    batch.kernel(SLEEP, sleep_args())
    assert queue.submit(batch) == 1
    assert len(batch) == 0
    assert batch.kernel(SLEEP, sleep_args()) == -1
    assert queue.submit(batch) == 2
    finish(queue, 1, 2)


def test_an_empty_batch_does_nothing_and_tells_the_next_id(queue: TaskQueue) -> None:
    assert queue.submit(Batch()) == 1
    assert queue.poll() == []


def test_arguments_of_any_length_are_taken(queue: TaskQueue) -> None:
    batch = Batch()
    for nbytes in range(20):
        batch.kernel(SLEEP, bytes(nbytes))
    statuses = [c.status for c in finish(queue, queue.submit(batch), 20)]
    assert statuses == [0 if nbytes == ffi.sizeof("inf_sleep_args") else -errno.EINVAL for nbytes in range(20)]


def test_dependencies_are_taken_from_any_iterable(queue: TaskQueue) -> None:
    batch = Batch()
    first = batch.kernel(SLEEP, sleep_args(status=-errno.EIO))
    for after in ((first,), [first], {first}, iter([first])):
        batch.kernel(SLEEP, sleep_args(), after)
    assert [c.status for c in finish(queue, queue.submit(batch), 5)][1:] == [-errno.ECANCELED] * 4


def test_tasks_have_their_own_priority_or_that_of_their_batch_or_what_suits_their_kind() -> None:
    def priorities(batch: Batch, *given: Priority) -> list[int]:
        batch.read(0, 0, 1, 0, (), *given)
        batch.write(0, 0, 1, 0, (), *given)
        batch.flush(0, (), *given)
        batch.kernel(SLEEP, b"", (), *given)
        tasks = ffi.from_buffer("inf_task[]", batch._tasks)
        return [tasks[i].priority for i in range(4)]

    assert priorities(Batch()) == [Priority.DEMAND, Priority.WRITE_BACK, Priority.WRITE_BACK, Priority.DEMAND]
    assert priorities(Batch(Priority.PREFETCH)) == [Priority.PREFETCH] * 4
    assert priorities(Batch(Priority.PREFETCH), Priority.DEMAND) == [Priority.DEMAND] * 4


# ---- TaskQueue ----


def test_poll_takes_thousands_at_once(queue: TaskQueue) -> None:
    batch = Batch()
    for _ in range(5000):
        batch.kernel(SLEEP, sleep_args())
    assert len(finish(queue, queue.submit(batch), 5000)) == 5000


def test_waiting_for_nothing_returns(queue: TaskQueue) -> None:
    queue.wait([])
    queue.wait(iter(()), timeout_s=0)


def test_wait_returns_for_tasks_already_taken(queue: TaskQueue) -> None:
    batch = Batch()
    batch.kernel(SLEEP, sleep_args())
    finish(queue, queue.submit(batch), 1)
    queue.wait([1, 1])


def test_a_wait_that_times_out_lists_the_tasks(queue: TaskQueue, files: Files, tmp_path: Path) -> None:
    memory = Memory(64)
    with opened(files, tmp_path / "data", content=b"") as fd:
        batch = Batch()
        slow = batch.kernel(SLEEP, sleep_args(300_000))
        batch.write(fd, 4096, 64, memory.address, (slow,))
        batch.flush(fd, (slow,))
        batch.kernel(SLEEP, sleep_args())
        queue.submit(batch)
        with pytest.raises(StallError) as info:
            queue.wait(range(1, 5), timeout_s=0.01)
        text = str(info.value)
        queue.wait(range(1, 5))
    assert "4 of 4 tasks did not end, within 0.01 s" in text
    assert re.search(rf"task 1: kernel {SLEEP}: is", text)
    assert f"task 2: write of 64 bytes at byte 4096 of {tmp_path / 'data'}: waits for earlier tasks" in text
    assert f"task 3: flush of {tmp_path / 'data'}: waits for earlier tasks" in text
    assert len(queue.poll()) == 4


def test_a_queue_in_which_nothing_moves_is_a_stall(files: Files) -> None:
    queue = TaskQueue(files, backend="threads", stall_s=0.15)
    batch = Batch()
    batch.kernel(SLEEP, sleep_args(800_000))
    first_id = queue.submit(batch)
    with pytest.raises(StallError, match=r"1 of 1 tasks did not end, and nothing in the queue has moved") as info:
        queue.wait([first_id])
    assert info.value.ids == (first_id,)
    settle(queue)
    queue.close()


def test_a_stall_lists_first_what_is_at_work_and_also_what_nobody_waits_for(files: Files) -> None:
    queue = TaskQueue(files, backend="threads", workers=2, stall_s=0.1)
    batch = Batch()
    held = batch.kernel(SLEEP, sleep_args(500_000))
    waiting = [batch.kernel(SLEEP, sleep_args(), (held,)) for _ in range(30)]
    batch.kernel(SLEEP, sleep_args(500_000))
    queue.submit(batch)
    with pytest.raises(StallError) as info:
        queue.wait(range(2, 33))
    lines = str(info.value).splitlines()
    assert lines[1] == f"  task 32: kernel {SLEEP}: is running"
    assert "  ... and 15 more" in lines
    assert lines[-2:] == ["Also at work:", f"  task 1: kernel {SLEEP}: is running"]
    assert len(info.value.ids) == len(waiting) + 1
    settle(queue)
    queue.close()


def test_a_slow_queue_in_which_something_moves_is_none(files: Files) -> None:
    queue = TaskQueue(files, backend="threads", stall_s=0.5)
    batch = Batch()
    last = batch.kernel(SLEEP, sleep_args(60_000))
    for _ in range(12):
        last = batch.kernel(SLEEP, sleep_args(60_000), (last,))
    first_id = queue.submit(batch)
    queue.wait([first_id + 12])
    queue.close()


def test_ctrl_c_ends_a_wait_and_the_task_goes_on(queue: TaskQueue) -> None:
    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    batch = Batch()
    batch.kernel(SLEEP, sleep_args(600_000))
    first_id = queue.submit(batch)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            queue.wait([first_id])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert queue.stats().in_flight == 1
    finish(queue, first_id, 1)


def test_ctrl_c_ends_a_close_which_may_be_called_again(files: Files) -> None:
    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    queue, batch = TaskQueue(files, backend="threads"), Batch()
    batch.kernel(SLEEP, sleep_args(600_000))
    queue.submit(batch)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            queue.close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert queue.stats().in_flight == 1
    queue.close()
    with pytest.raises(EngineClosedError):
        queue.stats()


@pytest.mark.parametrize("call", ["wait", "close"])
def test_a_signal_every_millisecond_breaks_no_wait_and_is_handled_meanwhile(files: Files, tmp_path: Path, call: str) -> None:
    handled = 0

    def count(signum: int, frame: object) -> None:
        nonlocal handled
        handled += 1

    queue, batch, memory = TaskQueue(files), Batch(), Memory(4096)
    with opened(files, tmp_path / "file", content=bytes(4096)) as fd:
        last = batch.read(fd, 0, 4096, memory.address)
        for _ in range(50):
            last = batch.kernel(SLEEP, sleep_args(10_000), (batch.write(fd, 0, 4096, memory.address, (last,)),))
        first_id = queue.submit(batch)
        before = signal.signal(signal.SIGALRM, count)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
            if call == "wait":
                queue.wait(range(first_id, first_id + 101))
                assert {c.status for c in queue.poll()} == {0}
            queue.close()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    assert handled >= 4


def test_a_close_in_which_nothing_moves_is_a_stall_and_the_queue_is_still_there(files: Files, tmp_path: Path) -> None:
    queue, batch, memory = TaskQueue(files, backend="threads", stall_s=0.1), Batch(), Memory(64)
    with opened(files, tmp_path / "file", content=bytes(64)) as fd:
        files.fault(FileOp.READ, Fault.delay(800_000))
        batch.kernel(SLEEP, sleep_args(), (batch.read(fd, 0, 64, memory.address),))
        queue.submit(batch)
        with pytest.raises(StallError) as info:
            queue.close()
        assert info.value.ids == (1, 2)
        assert f"read of 64 bytes at byte 0 of {tmp_path / 'file'}: is running" in str(info.value).splitlines()[1]
        with pytest.raises(EngineClosedError, match="is being closed"):
            queue.submit(batch)
        queue.cancel()
        settle(queue)
        assert [(c.id, c.status) for c in queue.poll()] == [(1, 0), (2, -errno.ECANCELED)]
        queue.close()
    with pytest.raises(EngineClosedError, match="was closed"):
        queue.submit(batch)


def test_after_cancel_a_close_waits_only_for_what_was_begun(files: Files) -> None:
    queue, batch = TaskQueue(files, backend="threads"), Batch()
    for _ in range(1000):
        batch.kernel(SLEEP, sleep_args(100_000))
    queue.submit(batch)
    queue.cancel()
    queue.close()  # would take 100 seconds


def test_a_close_ends_the_waits_of_other_threads(files: Files) -> None:
    queue, batch = TaskQueue(files, backend="threads"), Batch()
    batch.kernel(SLEEP, sleep_args(100_000))
    queue.submit(batch)
    waiting = [threading.Thread(target=queue.wait, args=([1],)) for _ in range(4)]
    for thread in waiting:
        thread.start()
    queue.close()
    for thread in waiting:
        thread.join(timeout=30)
    assert not any(thread.is_alive() for thread in waiting)


def test_threads_may_share_a_queue(queue: TaskQueue) -> None:
    """Each gets the ids of its own tasks, and each completion goes to one of them."""
    taken: list[int] = []
    mine: list[int] = []
    switch_s = sys.getswitchinterval()

    def work() -> None:
        batch = Batch()
        for _ in range(250):
            for _ in range(4):
                batch.kernel(SLEEP, sleep_args())
            first_id = queue.submit(batch)
            mine.extend(range(first_id, first_id + 4))
            taken.extend(c.id for c in queue.poll())

    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(switch_s)
    assert sorted(mine) == list(range(1, 4001))
    queue.wait(mine)
    taken.extend(c.id for c in queue.poll())
    assert sorted(taken) == list(range(1, 4001))


def test_after_close_every_call_is_refused_but_close(files: Files) -> None:
    queue = TaskQueue(files, backend="threads")
    queue.close()
    queue.close()
    for call in (lambda: queue.submit(Batch()), queue.poll, lambda: queue.wait([]), queue.stats):
        with pytest.raises(EngineClosedError):
            call()


def test_a_forked_child_cannot_use_the_queue_and_does_not_close_it(queue: TaskQueue) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            queue.submit(Batch())
        except EngineClosedError:
            queue.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    batch = Batch()
    batch.kernel(SLEEP, sleep_args())
    finish(queue, queue.submit(batch), 1)


def test_an_interpreter_that_ends_with_tasks_in_flight_finishes_them() -> None:
    done = in_child(
        "from infinity.task_queue import *\n"
        "from tests.support.queues import *\n"
        "queue, batch = TaskQueue(Files()), Batch()\n"
        "batch.kernel(SLEEP, sleep_args(50_000))\n"
        "queue.submit(batch)\n"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_unknown_backend_is_refused(files: Files) -> None:
    with pytest.raises(ValueError, match="spdk"):
        TaskQueue(files, backend="spdk")


def limited(how: str, code: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """``code`` in a process of its own that is limited by ``how`` (tests/support/limits.py), after ``before``."""
    done = in_child(
        "import logging, sys\n"
        "from tests.support.limits import *\n"
        "from infinity.task_queue import *\n"
        "logging.basicConfig(level=logging.INFO)\n"
        f"{before}"
        f"try:\n    {how}\nexcept Impossible as error:\n    sys.exit(77)\n" + code
    )
    if done.returncode == 77:
        pytest.skip("seccomp filters cannot be installed here")
    return done


TAKE_AUTO = "queue = TaskQueue(Files()); print(queue.backend, *queue.info()[0].notes, sep='\\n'); queue.close()"


@pytest.mark.skipif("libaio" not in WORKING_BACKENDS, reason=REFUSALS["libaio"])
def test_where_io_uring_is_forbidden_auto_takes_libaio_and_says_so_in_one_line() -> None:
    done = limited("forbid(errno.EPERM, IO_URING_SETUP)", TAKE_AUTO)
    backend, *notes = done.stdout.splitlines()
    assert (backend, notes[0]) == ("libaio", "uring does not work here: a seccomp filter forbids io_uring [EPERM]"), done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("INFO:infinity.task_queue:reads and writes go through libaio. uring does not work here: a seccomp filter")


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_where_both_are_forbidden_auto_takes_threads_and_warns_in_one_line(code: int) -> None:
    done = limited(f"forbid({code}, IO_URING_SETUP, IO_SETUP)", TAKE_AUTO)
    name = errno.errorcode[code]
    assert done.stdout.splitlines() == [
        "threads",
        f"uring does not work here: a seccomp filter forbids io_uring [{name}]",
        f"libaio does not work here: a seccomp filter forbids asynchronous I/O [{name}]",
    ], done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("WARNING:infinity.task_queue:reads and writes go through 4 threads. ")


def test_where_no_more_files_can_be_opened_auto_takes_threads_and_names_the_limit() -> None:
    done = limited(
        "import os, resource; n = len(os.listdir('/proc/self/fd')) - 1; resource.setrlimit(resource.RLIMIT_NOFILE, (n, n))",
        "queue = TaskQueue(files); print(queue.backend); queue.close()",
        "files = Files()\n",
    )
    assert done.stdout == "threads\n", done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert re.search(r"WARNING:.*uring does not work here: RLIMIT_NOFILE allows \d+ open files.*ulimit -n", done.stderr)


def test_where_io_uring_is_forbidden_asking_for_it_is_an_error() -> None:
    done = limited(
        "forbid(errno.EPERM, IO_URING_SETUP)",
        "try:\n    TaskQueue(Files(), backend='uring')\nexcept PermissionError as error:\n    print(error)",
    )
    assert "a seccomp filter forbids io_uring [EPERM]. Run the container with a seccomp profile" in done.stdout, done.stderr


def test_where_the_quota_of_asynchronous_io_is_used_up_libaio_names_it() -> None:
    done = limited(
        "forbid(errno.EAGAIN, IO_SETUP)",
        "try:\n    TaskQueue(Files(), backend='libaio', queue_depth=9)\nexcept BlockingIOError as error:\n    print(error)",
    )
    most = Path("/proc/sys/fs/aio-max-nr").read_text().strip()
    assert re.search(rf"fs.aio-max-nr is {most}, of which \d+ are taken, and 9 are wanted", done.stdout), done.stderr


def test_a_backend_that_was_asked_for_and_works_has_no_refusals(files: Files) -> None:
    with contextlib.closing(TaskQueue(files, backend="threads")) as queue:
        assert queue.info()[0].notes == ()


def test_every_backend_is_probed_the_best_first() -> None:
    probes = probe_backends()
    assert [probe.backend for probe in probes] == ["uring", "libaio", "threads"]
    assert probes[2].works
    for probe in probes:
        assert probe.works == (probe.reason == "") == (probe.remedy == "")


def test_a_backend_that_does_not_work_is_probed_with_reason_and_remedy() -> None:
    done = limited("forbid(errno.EPERM, IO_URING_SETUP)", "print([(p.works, p.reason, p.remedy[:3]) for p in probe_backends()][0])")
    assert done.stdout == "(False, 'a seccomp filter forbids io_uring [EPERM]', 'Run')\n", done.stderr


def test_nothing_is_said_where_the_backend_asked_for_runs(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        TaskQueue(files, backend="threads").close()
    assert caplog.records == []


# ---- paths ----


def test_each_path_says_how_it_is_carried_out_and_what_it_moved(files: Files, tmp_path: Path) -> None:
    queue = TaskQueue(files, backend="threads", n_paths=3, queue_depth=32, io_threads=2)
    assert [(info.backend, info.depth) for info in queue.info()] == [("threads", 2)] * 3
    memory = Memory(4096)
    with opened(files, tmp_path / "a", content=bytes(4096)) as first, opened(files, tmp_path / "b", content=bytes(4096)) as second:
        queue.add_file(first, 1)
        queue.add_file(second, 2)
        batch = Batch()
        batch.read(first, 0, 100, memory.address)
        batch.flush(second, (batch.write(second, 0, 4096, memory.address),))
        finish(queue, queue.submit(batch), 3)
        queue.drop_file(first)
        queue.drop_file(second)
    stats = queue.path_stats()
    assert [(s.reads, s.read_nbytes, s.writes, s.write_nbytes, s.flushes) for s in stats] == [
        (0, 0, 0, 0, 0),
        (1, 100, 0, 0, 0),
        (0, 0, 1, 4096, 1),
    ]
    assert stats[0].busy_s == 0
    assert stats[1].busy_s > 0
    queue.close()


def test_a_file_that_was_not_added_or_was_dropped_belongs_to_path_0(files: Files, tmp_path: Path) -> None:
    queue = TaskQueue(files, backend="threads", n_paths=2)
    memory = Memory(64)
    with opened(files, tmp_path / "file", content=bytes(64)) as fd:
        batch = Batch()
        for path in (None, 1, 0, None):
            if path is None:
                queue.drop_file(fd)
            else:
                queue.add_file(fd, path)
            batch.read(fd, 0, 64, memory.address)
            finish(queue, queue.submit(batch), 1)
    assert [s.reads for s in queue.path_stats()] == [3, 1]
    queue.close()


def test_a_file_that_is_closed_is_dropped_before_its_number_is_another_files(files: Files, tmp_path: Path) -> None:
    queue, memory = TaskQueue(files, n_paths=2), Memory(64)
    with opened(files, tmp_path / "first", content=b"a" * 64) as first:
        queue.add_file(first, 1)
        closed = TaskQueue(files)
        closed.add_file(first)
        closed.close()
    with opened(files, tmp_path / "second", content=b"b" * 64) as second:
        assert second == first
        batch = Batch()
        batch.read(second, 0, 64, memory.address)
        finish(queue, queue.submit(batch), 1)
    assert memory.bytes() == b"b" * 64
    assert [s.reads for s in queue.path_stats()] == [1, 0]
    queue.close()


@pytest.mark.parametrize(("fd", "path"), [(-1, 0), (0, 2), (0, 16)])
def test_a_file_or_path_that_cannot_be_is_refused(files: Files, fd: int, path: int) -> None:
    queue = TaskQueue(files, backend="threads", n_paths=2)
    with pytest.raises(OSError, match=f"add descriptor {fd} to path {path} of 2") as info:
        queue.add_file(fd, path)
    assert info.value.errno == errno.EINVAL
    queue.close()


def test_memory_may_be_added_and_dropped_whatever_the_backend_makes_of_it(files: Files) -> None:
    queue = TaskQueue(files, n_paths=2)
    memory = Memory(1 << 20)
    queue.drop_memory(memory.address)
    queue.add_memory(memory.address, memory.nbytes)
    queue.drop_memory(memory.address)
    assert [info.memory_registered_nbytes for info in queue.info()] == [0, 0]
    queue.close()


# ---- histograms ----


def test_the_latency_of_every_request_is_counted_by_stage(files: Files, tmp_path: Path) -> None:
    queue = TaskQueue(files, backend="threads", queue_depth=1, block_nbytes=1024)
    memory = Memory(4096)
    with opened(files, tmp_path / "file", content=bytes(4096)) as fd:
        files.fault(FileOp.READ, Fault.delay(20_000), times=4)
        batch = Batch()
        batch.write(fd, 0, 1000, memory.address, (batch.read(fd, 0, 4096, memory.address),))
        finish(queue, queue.submit(batch), 2)
    submission, completion, total = (queue.latency("read", stage) for stage in ("submission", "completion", "total"))
    assert submission.count == completion.count == total.count == 4
    assert completion.percentile(0) >= 0.02
    assert submission.max >= 3 * 0.02  # the last of four, one at a time
    assert total.total == pytest.approx(submission.total + completion.total)
    assert queue.latency("write", "total").count == 1
    assert queue.depths().max == queue.depths().percentile(100) == 1
    queue.close()


def test_histograms_are_of_one_path_or_of_all(files: Files, tmp_path: Path) -> None:
    queue = TaskQueue(files, backend="threads", n_paths=3)
    memory = Memory(64)
    with opened(files, tmp_path / "file", content=bytes(64)) as fd:
        for path, n_reads in ((0, 1), (2, 3)):
            queue.add_file(fd, path)
            batch = Batch()
            last: tuple[int, ...] = ()
            for _ in range(n_reads):
                last = (batch.read(fd, 0, 64, memory.address, last),)
            finish(queue, queue.submit(batch), n_reads)
    assert [queue.latency("read", "total", path).count for path in range(3)] == [1, 0, 3]
    assert queue.latency("read", "total").count == queue.depths().count == 4
    with pytest.raises(OSError, match="path 3 of 3"):
        queue.depths(3)
    queue.close()


# ---- Files ----


def test_files_open_write_and_leave(files: Files, tmp_path: Path) -> None:
    path, other = tmp_path / "a", tmp_path / "b"
    fd = files.open(path, os.O_RDWR | os.O_CREAT, 0o640)
    assert files.path(fd) == str(path)
    assert path.stat().st_mode & 0o777 & ~0o640 == 0
    assert not os.get_inheritable(fd)
    files.fallocate(fd, 0, 8192)
    assert path.stat().st_size == 8192
    files.datasync(fd)
    files.sync(fd)
    files.rename(path, other)
    files.unlink(other)
    files.close(fd)
    assert list(tmp_path.iterdir()) == []
    assert [files.count(op) for op in FileOp] == [1, 1, 1, 0, 0, 1, 1, 1, 1]


def test_errors_of_files_name_the_file(files: Files, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(FileNotFoundError) as info:
        files.open(missing, os.O_RDONLY)
    assert info.value.filename == str(missing)
    with pytest.raises(FileNotFoundError):
        files.unlink(missing)
    with pytest.raises(FileNotFoundError):
        files.rename(missing, tmp_path / "other")
    with pytest.raises(OSError, match="descriptor -1") as bad:
        files.close(-1)
    assert bad.value.errno == errno.EBADF


def test_a_disk_too_small_is_enospc_or_efbig(files: Files, tmp_path: Path) -> None:
    with opened(files, tmp_path / "file", content=b"") as fd, pytest.raises(OSError, match=str(tmp_path)) as info:
        files.fallocate(fd, 0, 1 << 60)
    assert info.value.errno in (errno.ENOSPC, errno.EFBIG)


def test_direct_alignment_is_a_power_of_two_or_unknown(files: Files, tmp_path: Path) -> None:
    with opened(files, tmp_path / "file", content=b"") as fd:
        for align in files.direct_alignment(fd):
            assert align & (align - 1) == 0
    with pytest.raises(OSError, match="descriptor -1"):
        files.direct_alignment(-1)


# ---- the first of many ----


def test_wait_any_returns_with_the_first_and_not_with_the_last(queue: TaskQueue) -> None:
    batch = Batch()
    batch.kernel(SLEEP, sleep_args(microseconds=1_000_000), ())
    batch.read(0, 0, 0, 0)
    first = queue.submit(batch)
    queue.wait_any([first, first + 1], 60)
    assert [completion.id for completion in queue.poll()] == [first + 1]
    queue.wait_any([first, first + 1], 0)
    with pytest.raises(StallError):
        queue.wait_any([first], 0.01)
    queue.wait_any([])
    queue.wait_any([first])
    assert [completion.id for completion in queue.poll()] == [first]


def test_wait_any_wakes_for_a_task_that_others_wait_for_too(queue: TaskQueue) -> None:
    batch = Batch()
    for i in range(20):
        batch.kernel(SLEEP, sleep_args(microseconds=3000 * (i + 1)))
    first = queue.submit(batch)
    everybody = threading.Thread(target=queue.wait, args=(range(first, first + 20),))
    everybody.start()
    left = set(range(first, first + 20))
    while left:
        queue.wait_any(left, 60)
        left -= {completion.id for completion in queue.poll()}
    everybody.join()


def test_wait_any_of_an_id_never_given_is_refused(queue: TaskQueue) -> None:
    with pytest.raises(OSError, match="wait for 1 tasks"):
        queue.wait_any([12345])
