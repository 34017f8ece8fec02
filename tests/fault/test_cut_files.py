"""Files that someone else cuts, empties, lengthens or overwrites behind the store's back: they have no name, but /proc/<pid>/fd has them.

A typed error with file, place and lengths, or the right result; never a wrong page.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from infinity.errors import CorruptPageError, IoError
from infinity.layout import PageId
from infinity.residency import PageState
from tests.support.queues import BACKENDS
from tests.support.stores import PAGE_NBYTES, StoreBench, store_bench

A, B, C, D = (PageId(0, index) for index in range(4))


@pytest.fixture(params=BACKENDS)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreBench]:
    with store_bench(tmp_path, n_frames=3, backend=request.param) as bench:
        bench.fill()
        yield bench
        bench.store.check()


def file_of(bench: StoreBench) -> int:
    assert bench.backing is not None
    ((fd, _),) = bench.backing.files()
    return fd


@pytest.mark.parametrize("nbytes", [0, PAGE_NBYTES, PAGE_NBYTES + 1, 2 * PAGE_NBYTES - 512])
def test_a_page_behind_the_end_of_a_cut_file_is_an_error_with_both_lengths(bench: StoreBench, nbytes: int) -> None:
    os.ftruncate(file_of(bench), nbytes)
    with pytest.raises(IoError) as caught:
        bench.fetch(B)
    error = caught.value
    assert (error.op, error.errno, error.offset, error.nbytes) == ("read", errno.ENODATA, PAGE_NBYTES, PAGE_NBYTES)
    assert error.file_nbytes == nbytes
    assert f"has {nbytes} bytes, and {2 * PAGE_NBYTES} are needed" in str(error)
    assert bench.store.state(B) is PageState.ABSENT
    if nbytes:
        assert bench.store.read_page(A) == bench.content(A)


def test_a_page_written_again_after_the_cut_is_whole(bench: StoreBench) -> None:
    os.ftruncate(file_of(bench), 0)
    for page in (C, A):
        bench.store.write_page(page, bench.content(page, seed=1))
        assert bench.store.read_page(page) == bench.content(page, seed=1)
    with pytest.raises(CorruptPageError):
        bench.store.read_page(B)  # the file is long enough again, but there is a hole


def test_a_file_that_got_longer_is_no_matter(bench: StoreBench) -> None:
    os.ftruncate(file_of(bench), 1 << 20)
    for page in bench.pages():
        assert bench.store.read_page(page) == bench.content(page)


def test_a_file_that_was_cut_and_made_as_long_again_is_corrupt(bench: StoreBench) -> None:
    fd = file_of(bench)
    nbytes = os.fstat(fd).st_size
    os.ftruncate(fd, 0)
    os.ftruncate(fd, nbytes)
    for page in bench.pages():
        with pytest.raises(CorruptPageError) as caught:
            bench.store.read_page(page)
        assert caught.value.offset == page.index * PAGE_NBYTES
        assert caught.value.expected != caught.value.found
        assert bench.store.state(page) is PageState.ABSENT


def test_two_pages_that_were_exchanged_are_corrupt(bench: StoreBench) -> None:
    fd = os.open(f"/proc/self/fd/{file_of(bench)}", os.O_RDWR)
    try:
        first, second = os.pread(fd, PAGE_NBYTES, 0), os.pread(fd, PAGE_NBYTES, PAGE_NBYTES)
        os.pwrite(fd, second, 0)
        os.pwrite(fd, first, PAGE_NBYTES)
    finally:
        os.close(fd)
    for page in (A, B):
        with pytest.raises(CorruptPageError):
            bench.store.read_page(page)
    assert bench.store.read_page(C) == bench.content(C)
