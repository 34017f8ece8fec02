"""One task of more bytes than Linux moves in one call."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from infinity.native import ffi
from infinity.task_queue import Batch, Files, TaskQueue
from tests.support.queues import BACKENDS

KIB = 1 << 10
GIB = 1 << 30
NBYTES = 2 * GIB + 64 * KIB
NOISE = (0, 1 * GIB - 4 * KIB, 2 * GIB - 8 * KIB, 2 * GIB - 4 * KIB, 2 * GIB, NBYTES - 4 * KIB)
"""Places where a lost or repeated piece would show; the rest is zero, and takes no memory."""


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block_nbytes", [1 * GIB, 4 * GIB])
def test_more_than_two_gib_are_written_and_read_by_one_task(tmp_path: Path, backend: str, block_nbytes: int) -> None:
    files = Files()
    fd = files.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    memory = mmap.mmap(-1, NBYTES)
    address = int(ffi.cast("uintptr_t", ffi.from_buffer(memory)))
    noise = {at: os.urandom(4 * KIB) for at in NOISE}
    for at, data in noise.items():
        memory[at : at + len(data)] = data
    queue = TaskQueue(files, backend=backend, block_nbytes=block_nbytes, in_flight_nbytes=8 * GIB)
    try:
        batch = Batch()
        written = batch.write(fd, 0, NBYTES, address)
        batch.read(fd, 0, NBYTES, address, after=(written,))
        first_id = queue.submit(batch)
        queue.wait([first_id, first_id + 1])
        assert [(done.status, done.value) for done in sorted(queue.poll())] == [(0, NBYTES), (0, NBYTES)]
        assert os.fstat(fd).st_size == NBYTES
        with open(f"/proc/self/fd/{fd}", "rb", buffering=0) as file:
            for at, data in noise.items():
                assert os.pread(file.fileno(), len(data), at) == data
                assert memory[at : at + len(data)] == data
    finally:
        queue.close()
        files.close(fd)
