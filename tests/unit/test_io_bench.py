"""Measuring: a case is the job that it says, and a run counts what was moved."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from infinity.errors import IoError, SpaceError
from infinity.faults import Fault
from infinity.io_bench import Bench, Case, Direction
from infinity.task_queue import Backend, FileOp

KIB = 1 << 10


def case(direction: Direction = Direction.READ, **changes: object) -> Case:
    return Case(**{"direction": direction, "nbytes": 256 * KIB, "block_nbytes": 16 * KIB, "queue_depth": 4, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("direction", [Direction.READ, Direction.WRITE])
@pytest.mark.parametrize("page_nbytes", [None, 8 * KIB, 64 * KIB, 256 * KIB])
def test_a_job_walks_through_the_whole_file_in_order(direction: Direction, page_nbytes: int | None) -> None:
    job = case(direction, page_nbytes=page_nbytes)
    transfers = list(job.transfers())
    assert [offset for _, offset, _, _ in transfers] == list(range(0, job.nbytes, job.task_nbytes))
    assert {reads for reads, _, _, _ in transfers} == {direction is Direction.READ}


def test_a_mixed_job_reads_and_writes_in_turn_through_the_first_half() -> None:
    transfers = list(case(Direction.MIXED).transfers())
    half = list(range(0, 128 * KIB, 16 * KIB))
    assert [reads for reads, _, _, _ in transfers] == [True, False] * 8
    assert [offset for reads, offset, _, _ in transfers if reads] == half
    assert [offset for reads, offset, _, _ in transfers if not reads] == half


def test_without_pages_there_is_memory_for_as_many_requests_as_may_be_in_flight() -> None:
    job = case()
    assert job.memory_nbytes == 64 * KIB
    assert {memory for _, _, _, memory in job.transfers()} == {0, 16 * KIB, 32 * KIB, 48 * KIB}


def test_with_pages_each_has_memory_of_its_own() -> None:
    job = case(page_nbytes=32 * KIB)
    assert [memory for _, _, _, memory in job.transfers()] == list(range(0, job.nbytes, 32 * KIB))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"queue_depth": 0}, "positive"),
        ({"nbytes": 250 * KIB}, "whole number"),
        ({"block_nbytes": 1000, "nbytes": 10000}, "multiples of 512"),
        ({"page_nbytes": 256 * KIB, "direction": Direction.MIXED}, "even number"),
    ],
)
def test_a_job_that_cannot_be_done_says_why(changes: dict[str, object], words: str) -> None:
    assert any(words in problem for problem in case(**changes).problems(512))  # type: ignore[arg-type]
    assert case().problems(512) == []


@pytest.mark.parametrize("backend", [Backend.AUTO, Backend.THREADS])
@pytest.mark.parametrize("page_nbytes", [None, 8 * KIB, 64 * KIB])
@pytest.mark.parametrize("direction", list(Direction))
def test_a_run_moves_what_the_case_says(tmp_path: Path, direction: Direction, page_nbytes: int | None, backend: Backend) -> None:
    job = case(direction, page_nbytes=page_nbytes, backend=backend)
    with Bench(tmp_path, file_nbytes=job.nbytes, memory_nbytes=job.memory_nbytes) as bench:
        run = bench.run(job)
    parts = {Direction.READ: (1.0, 0.0), Direction.WRITE: (0.0, 1.0), Direction.MIXED: (0.5, 0.5)}[direction]
    assert (run.read_nbytes, run.write_nbytes) == tuple(part * job.nbytes for part in parts)
    assert run.requests == (32 if page_nbytes == 8 * KIB else 16)
    assert run.seconds > 0
    assert run.cpu_s >= 0


def test_the_file_is_full_of_data_that_cannot_be_compressed(tmp_path: Path) -> None:
    import zlib

    with Bench(tmp_path, file_nbytes=256 * KIB, memory_nbytes=4 * KIB) as bench:
        found = Path(bench.path).read_bytes()
    assert len(found) == 256 * KIB
    assert len(zlib.compress(found)) > len(found)


def test_nothing_is_left_in_the_directory(tmp_path: Path) -> None:
    with Bench(tmp_path, file_nbytes=64 * KIB, memory_nbytes=4 * KIB):
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_is_an_error_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(SpaceError) as caught:
        Bench(tmp_path, file_nbytes=1 << 60, memory_nbytes=4 * KIB)
    assert caught.value.needed_bytes == 1 << 60
    assert 0 < caught.value.free_bytes < 1 << 60


def test_a_request_that_fails_is_an_error_and_no_figure(tmp_path: Path) -> None:
    job = case()
    with Bench(tmp_path, file_nbytes=job.nbytes, memory_nbytes=job.memory_nbytes) as bench:
        bench._files.fault(FileOp.READ, Fault.error(errno.EIO), nth=7)
        with pytest.raises(IoError) as caught:
            bench.run(job)
    assert (caught.value.op, caught.value.offset, caught.value.errno) == ("read", 6 * job.block_nbytes, errno.EIO)


def test_short_transfers_are_continued_and_counted(tmp_path: Path) -> None:
    job = case(backend=Backend.THREADS)
    with Bench(tmp_path, file_nbytes=job.nbytes, memory_nbytes=job.memory_nbytes) as bench:
        bench._files.fault(FileOp.READ, Fault.short(4 * KIB), nth=3, times=2)
        run = bench.run(job)
    assert (run.read_nbytes, run.shorts) == (job.nbytes, 2)
