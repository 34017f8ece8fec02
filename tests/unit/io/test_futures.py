"""Futures: waiting alone and in bulk, from any thread, interrupted, forked; what they keep alive."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import infinity.io
from infinity.errors import EngineClosedError, IoError, StallError
from infinity.faults import Fault
from infinity.io import File, Future, Queue
from infinity.task_queue import FileOp
from tests.support.files import blank, noise
from tests.support.queues import WORKING_BACKENDS

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def file(one_queue: Queue, tmp_path: Path) -> Iterator[File]:
    (tmp_path / "a").write_bytes(noise(8 << 20).tobytes())
    with infinity.io.open(tmp_path / "a", "r+", queue=one_queue) as opened:
        yield opened


def slow(queue: Queue, ms: int, times: int = 1, nth: int = 1) -> None:
    queue.files.fault(FileOp.READ, Fault.delay(ms * 1000), nth=nth, times=times)


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_a_future_tells_what_it_is_and_how_far(file: File, one_queue: Queue) -> None:
    slow(one_queue, 50)
    future = file.read_into(blank(4096), 4096)
    assert (future.op, future.path, future.offset, future.nbytes) == ("read", file.path, 4096, 4096)
    assert not future.done()
    assert "pending" in repr(future)
    assert future.wait() == future.result() == 4096
    assert future.done()
    assert future.exception() is None
    assert "done" in repr(future)


def test_done_tells_without_a_wait(file: File) -> None:
    future = file.read_into(blank(1 << 20))
    deadline = time.monotonic() + 60
    while not future.done():
        assert time.monotonic() < deadline
    assert future.wait(0) == 1 << 20


def test_a_wait_that_takes_too_long_raises_and_the_operation_goes_on(file: File, one_queue: Queue) -> None:
    slow(one_queue, 300)
    array = blank(4096)
    future = file.read_into(array)
    with pytest.raises(TimeoutError, match="read of 4096 bytes at byte 0") as caught:
        future.wait(0.01)
    assert isinstance(caught.value, StallError)
    with pytest.raises(StallError):
        infinity.io.wait([future], 0.01)
    with pytest.raises(StallError):
        next(infinity.io.as_completed([future], 0.01))
    assert future.wait() == 4096
    assert array.any()


def test_an_error_can_be_asked_for_and_raised_again(file: File, one_queue: Queue) -> None:
    one_queue.files.fault(FileOp.READ, Fault.error(errno.EIO))
    future = file.read_into(blank(4096), 4096)
    assert future.exception() is not None
    for _ in range(2):
        with pytest.raises(IoError, match="read failed") as caught:
            future.wait()
        assert caught.value.errno == errno.EIO
    assert "failed" in repr(future)


def test_wait_gives_the_sum_and_takes_anything_iterable(file: File) -> None:
    futures = (file.read_into(blank(4096), i * 4096) for i in range(5))
    assert infinity.io.wait(futures) == 5 * 4096
    assert infinity.io.wait([]) == 0


def test_wait_raises_the_first_error_when_all_have_ended(file: File, one_queue: Queue) -> None:
    slow(one_queue, 100, nth=1)
    one_queue.files.fault(FileOp.READ, Fault.error(errno.EIO), nth=2)
    futures = [file.read_into(blank(4096), i * 4096) for i in range(2)]
    with pytest.raises(IoError):
        infinity.io.wait(futures)
    assert all(future._ended for future in futures)


def test_futures_of_several_queues_are_waited_for_together(file: File, one_queue: Queue) -> None:
    with Queue(backend="threads") as other, infinity.io.open(file.path, queue=other) as again:
        for first, second in [(1, 100), (100, 1), (50, 50)]:
            slow(one_queue, first, times=4)
            slow(other, second, times=4)
            futures = [opened.read_into(blank(4096), 4096 * i) for i in range(4) for opened in (file, again)]
            assert set(infinity.io.as_completed(futures)) == set(futures)
            assert infinity.io.wait(futures) == 8 * 4096
        slow(other, 100, times=4)
        futures = [opened.read_into(blank(4096), 4096 * i) for i in range(4) for opened in (file, again)]
        with pytest.raises(StallError):
            list(infinity.io.as_completed(futures, 0.02))
        assert infinity.io.wait(futures) == 8 * 4096


def test_as_completed_gives_each_once_as_it_ends(file: File, one_queue: Queue) -> None:
    slow(one_queue, 200, nth=1)
    one_queue.files.fault(FileOp.READ, Fault.error(errno.EIO), nth=2)
    futures = [file.read_into(blank(4096), i * 4096) for i in range(8)]
    order = list(infinity.io.as_completed([*futures, futures[3]]))
    assert sorted(map(id, order)) == sorted(map(id, futures))
    assert [future.exception() is None for future in order].count(False) == 1
    assert order[-1]._ended == max(future._ended for future in futures)
    assert [future._ended for future in order] == sorted(future._ended for future in order)
    assert list(infinity.io.as_completed([])) == []


def test_as_completed_does_not_wait_for_the_first_to_give_the_second(file: File, one_queue: Queue) -> None:
    slow(one_queue, 2000, nth=1)
    futures = [file.read_into(blank(4096), i * 4096) for i in range(2)]
    assert next(infinity.io.as_completed(futures, 60)).wait() == 4096
    assert [future._ended > 0 for future in futures].count(False) == 1
    infinity.io.wait(futures)


def test_cancel_ends_what_is_not_begun(file: File, one_queue: Queue) -> None:
    slow(one_queue, 50, times=100)
    futures = [file.read_into(blank(4096), i * 4096) for i in range(64)]
    for future in futures:
        future.cancel()
    errors = [future.exception() for future in futures]
    canceled = [error for error in errors if error is not None]
    assert len(canceled) >= 64 - 8
    assert {error.errno for error in canceled} == {errno.ECANCELED}
    futures[0].cancel()


def test_several_threads_wait_for_the_same_future(file: File, one_queue: Queue) -> None:
    slow(one_queue, 100)
    future = file.read_into(blank(1 << 20))
    answers: list[int] = []
    threads = [threading.Thread(target=lambda: answers.append(future.wait())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [1 << 20] * 8


# ---- memory ----


@pytest.mark.parametrize("shift", [0, 1])
def test_the_array_lives_until_the_operation_has_ended(file: File, one_queue: Queue, shift: int) -> None:
    slow(one_queue, 100, times=8)
    array = blank(1 << 20, shift=shift)
    alive = weakref.ref(array)
    future = file.read_into(array)
    del array
    gc.collect()
    assert alive() is not None
    future.wait()
    gc.collect()
    assert alive() is None


def test_a_dropped_future_keeps_the_array_until_it_has_ended(file: File, one_queue: Queue) -> None:
    slow(one_queue, 100)
    array = np.zeros(4096, np.uint8)
    alive = weakref.ref(array)
    file.read_into(array)
    del array
    gc.collect()
    assert alive() is not None
    file.read_into(blank(1)).wait()
    time.sleep(0.2)
    file.read_into(blank(1)).wait()
    assert alive() is None


def test_a_tensor_is_kept_as_well(file: File, one_queue: Queue) -> None:
    slow(one_queue, 100)
    tensor = torch.zeros(1024)
    alive = weakref.ref(tensor)
    future = file.read_into(tensor)
    del tensor
    gc.collect()
    assert alive() is not None
    future.wait()
    assert alive() is None


def test_a_queue_that_is_dropped_with_everything_pending_drains_first(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(noise(4 << 20).tobytes())
    queue = Queue(backend="threads")
    files = queue.files
    slow(queue, 20, times=100)
    array = blank(4 << 20, shift=1)
    infinity.io.open(tmp_path / "a", queue=queue).read_into(array)
    del queue
    gc.collect()
    assert (array == noise(4 << 20)).all()
    assert files.count(FileOp.READ) == 4


# ---- Ctrl-C, forks, the end of the process ----


def test_ctrl_c_ends_a_wait_and_nothing_is_lost(file: File, one_queue: Queue) -> None:
    slow(one_queue, 600, times=2)
    array = blank(2 << 20)
    future = file.read_into(array)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        future.wait()
    assert time.monotonic() - begin < 0.5
    assert future.wait() == 2 << 20
    assert (array == noise(8 << 20)[: 2 << 20]).all()


STORM = """
import random, signal, sys
import infinity.io
from infinity.errors import IoError
path = sys.argv[1]
content = open(path, "rb").read()
struck = lost = moved = 0
armed = False
def strike(*_):
    if armed:
        raise KeyboardInterrupt
signal.signal(signal.SIGALRM, strike)
random.seed(0)
queue = infinity.io.Queue(backend=sys.argv[2])
for i in range(150):
    later_s = random.uniform(0.0001, 0.01)
    signal.setitimer(signal.ITIMER_REAL, later_s, 0.0003)
    try:
        armed = True
        with infinity.io.open(path, queue=queue) as file:
            arrays = [infinity.io.empty(5000 + 150_000 * (j == 0) + i % 3)[i % 3:] for j in range(10)]
            infinity.io.wait([file.read_into(array, 1000 * j) for j, array in enumerate(arrays)])
        armed = False
        for j, array in enumerate(arrays):
            assert array.tobytes() == content[1000 * j : 1000 * j + len(array)]
        moved += 1
    except KeyboardInterrupt:
        armed = False
        struck += 1
    except IoError as error:
        armed = False
        assert error.errno == 4, error
        lost += 1
signal.setitimer(signal.ITIMER_REAL, 0)
queue.close()
print(struck, lost, moved)
"""


@pytest.mark.parametrize("backend", WORKING_BACKENDS)
def test_a_storm_of_interrupts_neither_hangs_nor_gives_wrong_answers(tmp_path: Path, backend: str) -> None:
    (tmp_path / "a").write_bytes(noise(1 << 20).tobytes())
    done = run(STORM, str(tmp_path / "a"), backend)
    assert done.returncode == 0, done.stderr
    struck, lost, moved = map(int, done.stdout.split())
    assert struck > 0
    assert moved > 0
    assert struck + lost + moved == 150


def test_a_forked_child_is_told_so_and_can_open_its_own(file: File, one_queue: Queue) -> None:
    slow(one_queue, 200)
    future = file.read_into(blank(4096))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            told = 0
            for act in (
                future.wait,
                future.done,
                lambda: file.read_into(blank(1)),
                file.flush,
                lambda: list(infinity.io.as_completed([future])),
            ):
                try:
                    act()
                except EngineClosedError as error:
                    told += "forked child" in str(error)
            file.close()
            one_queue.close()
            with infinity.io.open(file.path) as again:
                array = blank(4096)
                again.read_into(array).wait()
            code = 0 if told == 5 and (array == noise(8 << 20)[:4096]).all() else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert future.wait() == 4096
    assert file.read_into(blank(4096)).wait() == 4096


def test_a_process_that_ends_with_reads_and_writes_pending_ends_well(tmp_path: Path) -> None:
    code = """
import sys, infinity.io, numpy as np
file = infinity.io.open(sys.argv[1], "w")
file.write_from(np.full((32 << 20) + 1, 7, np.uint8)[1:])
file.read_into(infinity.io.empty(1 << 20), 0)
"""
    done = run(code, str(tmp_path / "a"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "a").read_bytes() == b"\7" * (32 << 20)


def test_an_operation_on_a_closed_queue_is_refused_and_its_futures_still_answer(tmp_path: Path) -> None:
    queue = Queue(backend="threads")
    file = infinity.io.open(tmp_path / "a", "w", queue=queue)
    future: Future = file.write_from(b"abc")
    queue.close()
    queue.close()
    assert future.wait() == 3
    for act in (lambda: file.write_from(b"abc"), file.flush, lambda: infinity.io.open(tmp_path / "a", queue=queue)):
        with pytest.raises(EngineClosedError, match="queue was closed"):
            act()
    file.close()
    assert (tmp_path / "a").read_bytes() == b"abc"
