"""`infinity.io` on a disk that goes wrong: every transfer of a short program in turn."""

from __future__ import annotations

import contextlib
import errno
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import infinity.io
from infinity.errors import IoError
from infinity.faults import Fault
from infinity.io import Queue
from infinity.task_queue import FileOp
from tests.support.files import blank, noise
from tests.support.queues import WORKING_BACKENDS

CONTENT = noise(1_500_001).tobytes()
CODES = [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENODEV]


def copy_by_hand(directory: Path, queue: Queue) -> None:
    """Read a file in pieces that lie badly, write them to another in pieces that lie well, flush, read that."""
    array, again = blank(len(CONTENT), shift=1), blank(len(CONTENT))
    with infinity.io.open(directory / "from", queue=queue) as file:
        infinity.io.wait([file.read_into(array[at : at + 300_000], at) for at in range(0, len(CONTENT), 300_000)])
    with infinity.io.open(directory / "to", "w", queue=queue) as file:
        futures = [file.write_from(array[at : at + 500_000], at) for at in range(0, len(CONTENT), 500_000)]
        for future in infinity.io.as_completed(futures):
            future.wait()
        file.flush().wait()
        file.read_into(again).wait()
    assert again.tobytes() == CONTENT


def write_and_leave(directory: Path, queue: Queue) -> None:
    """No future is kept: closing tells."""
    with infinity.io.open(directory / "to", "w", queue=queue) as file:
        for at in range(0, len(CONTENT), 500_000):
            file.write_from(CONTENT[at : at + 500_000], at)


@pytest.mark.parametrize("program", [copy_by_hand, write_and_leave])
@pytest.mark.parametrize("backend", WORKING_BACKENDS)
def test_each_operation_in_turn_fails_as_a_typed_error_with_file_and_errno(
    backend: str, program: Callable[[Path, Queue], None], tmp_path: Path
) -> None:
    (tmp_path / "from").write_bytes(CONTENT)
    outcomes: Counter[str] = Counter()
    with Queue(backend=backend, block_size="256KiB") as queue:
        for op in (FileOp.OPEN, FileOp.READ, FileOp.WRITE, FileOp.DATASYNC, FileOp.CLOSE):
            for code in CODES:
                for nth in range(1, 200):
                    before = queue.files.count(op)
                    queue.files.fault(op, Fault.error(code), nth=nth)
                    try:
                        program(tmp_path, queue)
                    except IoError as error:
                        outcomes["error"] += 1
                        assert error.errno in (code, errno.ECANCELED)  # noqa: PT017 - what matters is that it is one
                        assert error.path.startswith(str(tmp_path))  # noqa: PT017
                    else:
                        assert queue.files.count(op) - before < nth
                        assert (tmp_path / "to").read_bytes() == CONTENT
                        outcomes["right"] += 1
                        break
                    finally:
                        queue.files.mend()
        assert not queue._futures
        assert not queue._of_task
        assert len(queue._stages._free) == 64 * len(queue._stages._memory)
    assert outcomes["error"] > 50
    assert outcomes["right"] == 25


@pytest.mark.parametrize("backend", WORKING_BACKENDS)
@pytest.mark.parametrize(
    ("fault", "times"),
    [
        (Fault.short(1), 1),
        (Fault.short(4096), 3),
        (Fault.error(errno.EINTR), 3),
        (Fault.error(errno.EAGAIN), 3),
        (Fault.delay(500), 3),
        (Fault.hold(3), 3),
    ],
)
def test_what_a_disk_may_do_changes_no_byte(backend: str, fault: Fault, times: int, tmp_path: Path) -> None:
    (tmp_path / "from").write_bytes(CONTENT)
    with Queue(backend=backend, block_size="128KiB") as queue:
        for nth in range(1, 20):
            for op in (FileOp.READ, FileOp.WRITE):
                queue.files.fault(op, fault, nth=nth, times=times)
            copy_by_hand(tmp_path, queue)
            queue.files.mend()
            assert (tmp_path / "to").read_bytes() == CONTENT


@pytest.mark.parametrize("backend", WORKING_BACKENDS)
def test_memory_is_free_for_others_once_a_failed_transfer_has_been_told(backend: str, tmp_path: Path) -> None:
    """The pieces of an unaligned read go on after one of them failed; what comes next must not see them."""
    (tmp_path / "a").write_bytes(noise(16 << 20).tobytes())
    with Queue(backend=backend) as queue, infinity.io.open(tmp_path / "a", queue=queue) as file:
        for nth in range(1, 17):
            array = blank(16 << 20, shift=1)
            queue.files.fault(FileOp.READ, Fault.error(errno.EIO), nth=nth)
            with contextlib.suppress(IoError):
                file.read_into(array).wait()
            queue.files.mend()
            array[:] = 7
            other = blank(16 << 20, shift=3)
            file.read_into(other).wait()
            assert (array == 7).all()
            assert (other == noise(16 << 20)).all()
