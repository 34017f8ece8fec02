"""Fail each transfer in turn: a typed error that names it and a store that can go on, or the right result; never a wrong page."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from infinity.errors import CorruptPageError, IoError
from infinity.faults import Fault
from infinity.kernel_args import Kernel, pack_copy
from infinity.layout import PageId
from infinity.residency import PageState
from infinity.task_queue import Batch, FileOp
from tests.support.queues import BACKENDS
from tests.support.stores import PAGE_NBYTES, StoreBench, store_bench

A, B, C, D = (PageId(0, index) for index in range(4))


@pytest.fixture(params=BACKENDS)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreBench]:
    with store_bench(tmp_path, n_frames=3, backend=request.param) as bench:
        bench.fill()
        yield bench
        bench.store.check()


def corrupt(bench: StoreBench, page: PageId) -> None:
    """Flip one bit of a page at rest."""
    if bench.backing is None:
        raise RuntimeError("there is no backing")
    fd, offset = bench.backing.place(page.index)
    with open(f"/proc/self/fd/{fd}", "r+b", buffering=0) as file:
        file.seek(offset + 123)
        byte = file.read(1)[0]
        file.seek(offset + 123)
        file.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize("code", [errno.EIO, errno.ENODATA, errno.EBADF])
def test_a_failed_fetch_names_page_file_and_place_and_can_be_tried_again(bench: StoreBench, code: int) -> None:
    assert bench.backing is not None
    bench.files.fault(FileOp.READ, Fault.error(code))
    with pytest.raises(IoError) as caught:
        bench.fetch(B)
    error = caught.value
    assert (error.op, error.errno, error.path, error.offset, error.nbytes) == (
        "read",
        code,
        bench.backing.path(1),
        PAGE_NBYTES,
        PAGE_NBYTES,
    )
    assert bench.store.name(B) in str(error)
    assert bench.store.state(B) is PageState.ABSENT
    assert bench.store.frames_free == 3
    bench.fetch(B)
    assert bench.store.read_page(B) == bench.content(B)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_after_a_failed_write_back_the_page_is_dirty_and_can_be_written_again(bench: StoreBench, code: int) -> None:
    bench.fetch(A)
    bench.poke(A, bench.content(A, seed=1))
    bench.files.fault(FileOp.WRITE, Fault.error(code))
    batch = Batch()
    bench.store.write_back(A, batch)
    with pytest.raises(IoError) as caught:
        bench.run(batch)
    assert (caught.value.op, caught.value.errno) == ("write", code)
    assert bench.store.state(A) is PageState.DIRTY
    batch = Batch()
    bench.store.write_back(A, batch)
    bench.run(batch)
    assert bench.at_rest(A) == bench.content(A, seed=1)


def test_one_failed_page_does_not_harm_the_others_of_its_batch(bench: StoreBench) -> None:
    bench.files.fault(FileOp.READ, Fault.error(errno.EIO), nth=2)
    batch = Batch()
    for page in (A, B, C):
        bench.store.fetch(page, batch)
    with pytest.raises(IoError):
        bench.run(batch)
    states = [bench.store.state(page) for page in (A, B, C)]
    assert sorted(state.name for state in states) == ["ABSENT", "CLEAN", "CLEAN"]
    for page in (A, B, C):
        assert bench.store.read_page(page) == bench.content(page)


def test_a_task_that_waits_for_a_failed_fetch_does_not_run_and_its_frame_is_free(bench: StoreBench) -> None:
    bench.files.fault(FileOp.READ, Fault.error(errno.EIO))
    batch = Batch()
    bench.store.fetch(A, batch)
    bench.store.use(A, batch.kernel(Kernel.COPY, pack_copy(0, 0, 1 << 40), bench.store.after(A)))
    with pytest.raises(IoError):
        bench.run(batch)
    for page in (A, B, C):
        bench.fetch(page)
        assert bench.store.read_page(page) == bench.content(page)


def test_a_failed_read_ends_the_chain_and_nothing_is_written(bench: StoreBench) -> None:
    bench.files.fault(FileOp.READ, Fault.error(errno.EIO))
    batch = Batch()
    chain = bench.store.chain(batch, update=[A], read=[B], write_back=True)
    assert chain is not None
    chain.kernel(Kernel.COPY, pack_copy(chain.address(A), chain.address(B), PAGE_NBYTES))
    chain.close()
    with pytest.raises(IoError):
        bench.run(batch)
    assert chain.failed
    assert bench.store.state(A) is PageState.CHAINED
    assert bench.at_rest(A) == bench.content(A)


def test_a_failed_write_of_a_chain_is_its_error_and_its_pages_stay_chained(bench: StoreBench) -> None:
    bench.files.fault(FileOp.WRITE, Fault.error(errno.ENOSPC), nth=2)
    batch = Batch()
    chain = bench.store.chain(batch, update=[A, B], write_back=True)
    assert chain is not None
    chain.close()
    with pytest.raises(IoError) as caught:
        bench.run(batch)
    assert caught.value.errno == errno.ENOSPC
    assert bench.store.state(A) is bench.store.state(B) is PageState.CHAINED
    assert isinstance(bench.store.error, IoError)


def test_a_flipped_bit_is_found_by_a_fetch(bench: StoreBench) -> None:
    assert bench.backing is not None
    corrupt(bench, B)
    with pytest.raises(CorruptPageError) as caught:
        bench.fetch(B)
    error = caught.value
    assert (error.page, error.path, error.offset, error.nbytes) == (bench.store.name(B), bench.backing.path(1), PAGE_NBYTES, PAGE_NBYTES)
    assert error.expected != error.found
    assert bench.store.state(B) is PageState.ABSENT


def test_a_flipped_bit_is_found_by_reading_an_absent_page(bench: StoreBench) -> None:
    corrupt(bench, B)
    with pytest.raises(CorruptPageError):
        bench.store.read_page(B)
    assert bench.store.read_page(A) == bench.content(A)


def test_a_flipped_bit_ends_a_chain_before_its_first_kernel(bench: StoreBench) -> None:
    corrupt(bench, B)
    batch = Batch()
    chain = bench.store.chain(batch, update=[A], read=[B], write_back=True)
    assert chain is not None
    chain.kernel(Kernel.COPY, pack_copy(chain.address(A), chain.address(B), PAGE_NBYTES))
    chain.close()
    with pytest.raises(CorruptPageError):
        bench.run(batch)
    assert bench.at_rest(A) == bench.content(A)


def test_an_error_of_direct_access_is_raised_and_leaves_the_page_without_trusted_content(bench: StoreBench) -> None:
    bench.files.fault(FileOp.WRITE, Fault.error(errno.EIO))
    with pytest.raises(IoError):
        bench.store.write_page(A, bench.content(A, seed=1))
    assert not bench.store.has_content(A)
    bench.store.write_page(A, bench.content(A, seed=1))
    assert bench.store.read_page(A) == bench.content(A, seed=1)


def scenario(bench: StoreBench) -> None:
    """Moves of every kind; errors are let through."""
    store = bench.store
    for page in (A, B):
        store.write_page(page, bench.content(page, seed=5))
        bench.fetch(page)
    bench.poke(A, bench.content(A, seed=6))
    batch = Batch()
    store.write_back(A, batch)
    store.fetch(C, batch)
    bench.run(batch)
    batch = Batch()
    chain = store.chain(batch, update=[D], read=[C], write_back=True)
    if chain is None:
        raise RuntimeError("three frames are enough")
    chain.kernel(Kernel.COPY, pack_copy(chain.address(D), chain.address(C), 1000))
    chain.close()
    bench.run(batch)
    expected = {A: bench.content(A, seed=6), B: bench.content(B, seed=5), C: bench.content(C), D: bench.content(C)[:1000]}
    for page, content in expected.items():
        assert store.read_page(page) == content


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("op", "fault", "harmless"),
    [
        (FileOp.READ, Fault.error(errno.EIO), False),
        (FileOp.READ, Fault.error(errno.EINTR), True),
        (FileOp.READ, Fault.error(errno.EAGAIN), True),
        (FileOp.READ, Fault.short(512), True),
        (FileOp.WRITE, Fault.error(errno.EIO), False),
        (FileOp.WRITE, Fault.error(errno.ENOSPC), False),
        (FileOp.WRITE, Fault.error(errno.EINTR), True),
        (FileOp.WRITE, Fault.error(errno.EAGAIN), True),
        (FileOp.WRITE, Fault.short(512), True),
    ],
    ids=lambda value: (
        value.name if isinstance(value, FileOp) else f"{value.kind.name}-{value.value}" if isinstance(value, Fault) else str(value)
    ),
)
def test_the_nth_transfer_fails_and_the_result_is_right_or_a_typed_error(
    tmp_path: Path, backend: str, op: FileOp, fault: Fault, harmless: bool
) -> None:
    nth = 0
    while True:
        nth += 1
        with store_bench(tmp_path, n_frames=3, backend=backend) as bench:
            bench.fill()
            before = bench.files.count(op)
            bench.files.fault(op, fault, nth=nth)
            failed = None
            try:
                scenario(bench)
            except IoError as error:
                failed = error.errno
            reached = bench.files.count(op) - before >= nth
            bench.files.mend(op)
            bench.store.check()
            assert failed is None or (failed == fault.value and not harmless)
            for page in bench.pages():
                if bench.store.state(page) is not PageState.CHAINED and bench.store.has_content(page):
                    assert bench.store.read_page(page) in {*(bench.content(page, seed) for seed in (0, 5, 6)), bench.content(C)[:1000]}
            if not reached:
                return
            assert harmless or failed is not None
