from __future__ import annotations

import ctypes
import errno
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from infinity.errors import BudgetError, CorruptPageError, InvariantError, KernelError
from infinity.kernel_args import CHECKS_MAX, Kernel, pack_copy, pack_sleep
from infinity.layout import PageId
from infinity.native import crc32c
from infinity.residency import PageState
from infinity.store import PageStore, Rest
from infinity.task_queue import Batch
from tests.support.stores import PAGE_NBYTES, StoreBench, make_space, store_bench

A, B, C, D = (PageId(0, index) for index in range(4))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[StoreBench]:
    """Three frames for four pages that rest in a backing and have content."""
    with store_bench(tmp_path, n_frames=3) as bench:
        bench.fill()
        yield bench
        bench.store.check()


@pytest.fixture
def gradients(tmp_path: Path) -> Iterator[StoreBench]:
    """Space 0 rests in a backing, space 1 is dynamic and has a backing, space 2 is dynamic without one."""
    with store_bench(tmp_path, n_frames=3, rests=(Rest.BACKING, Rest.BACKING, Rest.FRAME), page_count=2, dynamic=(1, 2)) as bench:
        yield bench
        bench.store.check()


class Memory:
    """Something that owns memory."""


def buffer_address(buffer: bytearray) -> int:
    return ctypes.addressof((ctypes.c_char * len(buffer)).from_buffer(buffer))


def slow(microseconds: int = 200_000) -> tuple[int, bytes]:
    """A kernel that takes a while."""
    return int(Kernel.SLEEP), pack_sleep(microseconds)


def corrupt(bench: StoreBench, page: PageId) -> None:
    """Flip the last bit of a page at rest; page 0 of space 0 has slot 0, and so on."""
    assert bench.backing is not None
    fd, offset = bench.backing.place(page.index)
    at = offset + bench.used_nbytes(page) - 1
    with open(f"/proc/self/fd/{fd}", "r+b", buffering=0) as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x80]))


def assert_names(error: CorruptPageError, bench: StoreBench, page: PageId) -> None:
    """The error says which page, where it is, and both checksums."""
    assert bench.backing is not None
    assert (error.page, error.path, error.offset) == (bench.store.name(page), bench.backing.path(page.index), page.index * PAGE_NBYTES)
    assert error.nbytes == bench.used_nbytes(page)
    content = bytearray(bench.content(page))
    assert error.expected == crc32c(content)
    content[-1] ^= 0x80
    assert error.found == crc32c(content)


# ---- the start ----


def test_pages_that_rest_in_a_backing_start_absent(bench: StoreBench) -> None:
    assert {bench.store.state(page) for page in bench.pages()} == {PageState.ABSENT}


def test_pages_that_rest_in_frames_have_them_from_the_start(tmp_path: Path) -> None:
    with store_bench(tmp_path, n_frames=5, rests=(Rest.FRAME,), with_backing=False) as bench:
        assert {bench.store.state(page) for page in bench.pages()} == {PageState.DIRTY}
        assert bench.store.frames_free == 1
        bench.store.check()


def test_too_few_frames_for_the_pages_that_rest_in_them_is_refused_with_the_bytes_needed(tmp_path: Path) -> None:
    with pytest.raises(BudgetError) as caught:
        StoreBench(tmp_path, n_frames=3, rests=(Rest.FRAME,), with_backing=False)
    assert caught.value.knob == "memory.host"
    assert caught.value.needed_bytes == 4 * PAGE_NBYTES


def test_a_backing_with_too_few_slots_is_refused(bench: StoreBench) -> None:
    with pytest.raises(ValueError, match="5 slots"):
        PageStore(bench.queue, bench.frames, bench.backing, [make_space(0, 5)], {0: Rest.BACKING}, verify=True)


def test_a_space_that_rests_in_a_missing_backing_is_refused(bench: StoreBench) -> None:
    with pytest.raises(ValueError, match="there is none"):
        PageStore(bench.queue, bench.frames, None, [make_space(0, 4)], {0: Rest.BACKING}, verify=True)


@pytest.mark.parametrize(("n_frames", "reserve", "fits"), [(12, 0, True), (11, 0, False), (14, 2, True), (13, 2, False)])
def test_everything_fits_when_all_but_gradients_with_a_slot_and_the_reserve_have_frames(
    tmp_path: Path, n_frames: int, reserve: int, fits: bool
) -> None:
    with store_bench(
        tmp_path,
        n_frames=n_frames,
        rests=(Rest.BACKING, Rest.FRAME, Rest.FRAME, Rest.BACKING),
        dynamic=(2, 3),
        scratch_reserve=reserve,
    ) as bench:
        assert bench.store.fits_all is fits


def test_a_page_is_named_by_its_space_and_index(bench: StoreBench) -> None:
    assert bench.store.name(C) == "unit/plane0 page 2"


@pytest.mark.parametrize("page", [PageId(0, 4), PageId(0, -1)])
def test_a_page_that_does_not_exist_is_an_index_error(bench: StoreBench, page: PageId) -> None:
    with pytest.raises(IndexError):
        bench.store.state(page)


# ---- fetch, write back, evict ----


def test_fetch_brings_what_was_written(bench: StoreBench) -> None:
    bench.fetch(A)
    assert bench.store.state(A) is PageState.CLEAN
    assert bench.store.read_page(A) == bench.content(A)


def test_a_page_is_fetching_until_its_completion_is_settled(bench: StoreBench) -> None:
    batch = Batch()
    bench.store.fetch(A, batch)
    assert bench.store.state(A) is PageState.FETCHING
    bench.run(batch)
    assert bench.store.state(A) is PageState.CLEAN


def test_fetch_gives_none_and_changes_nothing_when_no_frame_can_be_had(bench: StoreBench) -> None:
    for page in (A, B, C):
        bench.fetch(page)
        bench.store.hold(page)
    batch = Batch()
    assert bench.store.fetch(D, batch) is None
    assert len(batch) == 0
    assert bench.store.state(D) is PageState.ABSENT
    bench.store.check()


def test_the_least_recently_used_clean_page_makes_room(bench: StoreBench) -> None:
    for page in (A, B, C):
        bench.fetch(page)
    bench.store.hold(A)
    bench.store.unhold(A)
    bench.fetch(D)
    assert [bench.store.state(page) for page in (A, B, C, D)] == [PageState.CLEAN, PageState.ABSENT, PageState.CLEAN, PageState.CLEAN]


def test_a_use_counts_as_recent(bench: StoreBench) -> None:
    for page in (A, B, C):
        bench.fetch(page)
    batch = Batch()
    bench.store.use(A, batch.kernel(*slow(0)))
    bench.run(batch)
    bench.fetch(D)
    assert bench.store.state(A) is PageState.CLEAN
    assert bench.store.state(B) is PageState.ABSENT


def test_a_kept_page_is_evicted_only_when_nothing_else_is_left(bench: StoreBench) -> None:
    for page in (A, B, C):
        bench.fetch(page)
    bench.store.keep(A)
    bench.fetch(D)
    assert bench.store.state(A) is PageState.CLEAN
    bench.store.keep(C)
    bench.store.keep(D)
    bench.fetch(B)
    assert bench.store.state(A) is PageState.ABSENT


def test_unkeep_takes_the_preference_back(bench: StoreBench) -> None:
    for page in (A, B, C):
        bench.fetch(page)
        bench.store.keep(page)
    bench.store.unkeep(B)
    bench.fetch(D)
    assert bench.store.state(B) is PageState.ABSENT


def test_a_page_marked_before_it_arrives_is_kept(bench: StoreBench) -> None:
    bench.store.keep(A)
    for page in (A, B, C, D):
        bench.fetch(page)
    assert bench.store.state(A) is PageState.CLEAN


def test_a_dirty_page_is_never_evicted(bench: StoreBench) -> None:
    bench.fetch(A)
    bench.store.mark_dirty(A)
    for page in (B, C, D):
        bench.fetch(page)
    assert bench.store.state(A) is PageState.DIRTY
    with pytest.raises(InvariantError, match="DIRTY cannot EVICT"):
        bench.store.evict(A)


def test_write_back_puts_the_frame_to_rest(bench: StoreBench) -> None:
    bench.fetch(A)
    bench.poke(A, bench.content(A, seed=1))
    batch = Batch()
    bench.store.write_back(A, batch)
    assert bench.store.state(A) is PageState.WRITING
    bench.run(batch)
    assert bench.store.state(A) is PageState.CLEAN
    bench.store.evict(A)
    assert bench.at_rest(A) == bench.content(A, seed=1)
    assert bench.store.read_page(A) == bench.content(A, seed=1)


def test_a_page_that_is_being_written_can_be_read(bench: StoreBench) -> None:
    bench.fetch(A)
    bench.poke(A, bench.content(A, seed=1))
    batch = Batch()
    bench.store.write_back(A, batch)
    bench.submit(batch)
    bench.store.hold(A)
    assert bench.store.read_page(A) == bench.content(A, seed=1)
    bench.store.unhold(A)
    bench.finish(bench.store.busy(A))


def test_the_tail_page_moves_only_its_used_bytes_rounded_up(bench: StoreBench) -> None:
    before = bench.queue.stats().read_nbytes
    bench.fetch(D)
    assert bench.backing is not None
    assert bench.queue.stats().read_nbytes - before == -(-1000 // bench.backing.alignment) * bench.backing.alignment


def test_without_verification_no_kernel_runs(tmp_path: Path) -> None:
    with store_bench(tmp_path, n_frames=2, verify=False) as bench:
        bench.fill()
        bench.fetch(A)
        assert bench.queue.stats().kernels == 0
        assert bench.store.read_page(A) == bench.content(A)


def test_spill_writes_back_the_page_that_was_dirtied_first(bench: StoreBench) -> None:
    for page in (A, B, C):
        bench.fetch(page)
    for page in (B, C, A):
        bench.store.mark_dirty(page)
    bench.store.hold(B)
    bench.store.keep(C)
    batch = Batch()
    assert bench.store.spill(batch) == A
    assert bench.store.spill(batch) == C
    assert bench.store.spill(batch) is None
    bench.run(batch)
    assert bench.store.frames_evictable == 2


# ---- holds ----


def test_a_held_page_is_neither_evicted_nor_chained_nor_discarded(bench: StoreBench) -> None:
    bench.fetch(A)
    bench.store.hold(A)
    for attempt in (
        lambda: bench.store.evict(A),
        lambda: bench.store.discard(A),
        lambda: bench.store.chain(Batch(), update=[A], write_back=True),
    ):
        with pytest.raises(InvariantError, match="is held"):
            attempt()
    assert bench.store.holds(A) == 1
    assert bench.store.state(A) is PageState.CLEAN


def test_an_absent_page_cannot_be_held(bench: StoreBench) -> None:
    with pytest.raises(InvariantError, match="cannot be held"):
        bench.store.hold(A)


def test_a_page_held_for_writing_is_not_written_back(bench: StoreBench) -> None:
    bench.fetch(A)
    bench.store.hold(A, writing=True)
    bench.store.mark_dirty(A)
    with pytest.raises(InvariantError, match="held for writing"):
        bench.store.write_back(A, Batch())


def test_a_page_that_is_being_written_cannot_be_held_for_writing(bench: StoreBench) -> None:
    bench.fetch(A)
    bench.store.mark_dirty(A)
    batch = Batch()
    bench.store.write_back(A, batch)
    with pytest.raises(InvariantError, match="WRITING"):
        bench.store.hold(A, writing=True)
    bench.run(batch)


def test_a_page_that_the_queue_still_reads_cannot_be_held_for_writing(bench: StoreBench) -> None:
    bench.fetch(A)
    batch = Batch()
    bench.store.use(A, batch.kernel(*slow()))
    bench.submit(batch)
    with pytest.raises(InvariantError, match="use its frame"):
        bench.store.hold(A, writing=True)
    bench.finish(bench.store.busy(A))
    bench.store.hold(A, writing=True)


def test_unhold_without_a_hold_of_that_kind_is_refused(bench: StoreBench) -> None:
    bench.fetch(A)
    bench.store.hold(A)
    with pytest.raises(InvariantError, match="no writing hold"):
        bench.store.unhold(A, writing=True)
    bench.store.unhold(A)
    with pytest.raises(InvariantError, match="no reading hold"):
        bench.store.unhold(A)


# ---- dynamic spaces ----


def test_an_allocated_page_is_dirty_and_a_discarded_one_absent(gradients: StoreBench) -> None:
    page = PageId(2, 0)
    assert gradients.store.allocate(page)
    assert gradients.store.state(page) is PageState.DIRTY
    gradients.store.discard(page)
    assert gradients.store.state(page) is PageState.ABSENT
    assert gradients.store.frames_free == 3


def test_allocate_says_no_when_no_frame_can_be_had(gradients: StoreBench) -> None:
    pages = [PageId(2, 0), PageId(2, 1), PageId(1, 0)]
    assert all(gradients.store.allocate(page) for page in pages)
    assert not gradients.store.allocate(PageId(1, 1))


def test_a_gradient_page_with_a_backing_can_be_spilled_and_fetched_again(gradients: StoreBench) -> None:
    page = PageId(1, 0)
    gradients.store.allocate(page)
    gradients.store.write_page(page, gradients.content(page))
    batch = Batch()
    gradients.store.write_back(page, batch)
    gradients.run(batch)
    gradients.store.evict(page)
    gradients.fetch(page)
    assert gradients.store.read_page(page) == gradients.content(page)


def test_a_gradient_page_without_a_backing_cannot_be_written_back(gradients: StoreBench) -> None:
    gradients.store.allocate(PageId(2, 0))
    with pytest.raises(InvariantError, match="no slot"):
        gradients.store.write_back(PageId(2, 0), Batch())


def test_a_discarded_page_is_not_read_again(gradients: StoreBench) -> None:
    page = PageId(1, 0)
    gradients.store.write_page(page, gradients.content(page))
    assert gradients.store.has_content(page)
    gradients.store.discard(page)
    assert not gradients.store.has_content(page)
    with pytest.raises(InvariantError, match="no content"):
        gradients.store.fetch(page, Batch())
    with pytest.raises(InvariantError, match="no content"):
        gradients.store.chain(Batch(), read=[page], write_back=True)
    with pytest.raises(InvariantError, match="no content"):
        gradients.store.read_page(page)


def test_a_page_that_rests_in_its_frame_is_not_discarded(tmp_path: Path) -> None:
    with store_bench(tmp_path, n_frames=5, rests=(Rest.FRAME,), with_backing=False) as bench, pytest.raises(InvariantError):
        bench.store.discard(A)


# ---- checks made by the kernel that works on the page ----


def test_a_fetched_page_is_checked_by_its_copy_and_by_nothing_else(bench: StoreBench) -> None:
    before = bench.queue.stats().kernels
    buffer = bytearray(PAGE_NBYTES)
    batch = Batch()
    handle = bench.store.fetch_copied(A, batch, buffer_address(buffer))
    assert handle is not None
    assert bench.store.after(A) == (handle,)
    bench.run(batch)
    assert bytes(buffer) == bench.content(A) == bench.store.read_page(A)
    assert bench.store.state(A) is PageState.CLEAN
    assert bench.queue.stats().kernels - before == 1


def test_a_copy_of_the_tail_page_copies_its_used_bytes(bench: StoreBench) -> None:
    buffer = bytearray(PAGE_NBYTES)
    batch = Batch()
    bench.store.fetch_copied(D, batch, buffer_address(buffer))
    bench.run(batch)
    assert bytes(buffer) == bench.content(D) + bytes(PAGE_NBYTES - len(bench.content(D)))


@pytest.mark.parametrize("page", [B, D])
def test_a_page_whose_copy_finds_a_flipped_bit_is_absent_and_can_be_tried_again(bench: StoreBench, page: PageId) -> None:
    corrupt(bench, page)
    buffer = bytearray(PAGE_NBYTES)
    for _ in range(2):
        batch = Batch()
        bench.store.fetch_copied(page, batch, buffer_address(buffer))
        with pytest.raises(CorruptPageError) as caught:
            bench.run(batch)
        assert_names(caught.value, bench, page)
        assert bench.store.state(page) is PageState.ABSENT
        assert bench.store.frames_free == 3
    corrupt(bench, page)  # once more, and it is right again
    bench.store.fetch_copied(page, batch, buffer_address(buffer))
    bench.run(batch)
    assert bytes(buffer[: bench.used_nbytes(page)]) == bench.content(page)


def test_tasks_that_read_a_page_come_after_the_copy_that_checks_it(bench: StoreBench) -> None:
    corrupt(bench, A)
    first, second = bytearray(PAGE_NBYTES), bytearray(PAGE_NBYTES)
    batch = Batch()
    bench.store.fetch_copied(A, batch, buffer_address(first))
    args = pack_copy(buffer_address(second), bench.store.address(A), PAGE_NBYTES)
    bench.store.use(A, batch.kernel(Kernel.COPY, args, bench.store.after(A)))
    with pytest.raises(CorruptPageError):
        bench.run(batch)
    assert bytes(second) == bytes(PAGE_NBYTES)


def test_fetch_copied_gives_none_and_changes_nothing_when_no_frame_can_be_had(bench: StoreBench) -> None:
    for page in (A, B, C):
        bench.fetch(page)
        bench.store.hold(page)
    batch = Batch()
    assert bench.store.fetch_copied(D, batch, 0) is None
    assert len(batch) == 0
    for page in (A, B, C):
        bench.store.unhold(page)


def test_without_verification_a_page_is_there_before_its_copy_has_ended(tmp_path: Path) -> None:
    with store_bench(tmp_path, n_frames=2, verify=False) as bench:
        bench.fill()
        buffer = bytearray(PAGE_NBYTES)
        batch = Batch()
        copy = bench.store.fetch_copied(A, batch, buffer_address(buffer))
        assert copy is not None
        assert bench.store.after(A) != (copy,)
        bench.run(batch)
        assert bytes(buffer) == bench.content(A)
        assert bench.queue.stats().kernels == 1


def test_a_kernel_that_covers_its_pages_is_the_only_one(bench: StoreBench) -> None:
    before = bench.queue.stats().kernels
    batch = Batch()
    chain = bench.store.chain(batch, update=[A], read=[B], write_back=True)
    assert chain is not None
    chain.kernel(Kernel.COPY, pack_copy(chain.address(A), chain.address(B), PAGE_NBYTES), covers=(A, B))
    chain.close()
    bench.run(batch)
    assert bench.queue.stats().kernels - before == 1
    assert bench.at_rest(A) == bench.content(B)
    bench.store.evict(A)
    bench.fetch(A)  # with the checksum that the kernel took
    assert bench.store.read_page(A) == bench.content(B)


@pytest.mark.parametrize("page", [A, B])
def test_a_flipped_bit_in_a_covered_page_ends_the_chain_and_nothing_is_written(bench: StoreBench, page: PageId) -> None:
    corrupt(bench, page)
    at_rest = bench.at_rest(A)
    batch = Batch()
    chain = bench.store.chain(batch, update=[A], read=[B], write_back=True)
    assert chain is not None
    chain.kernel(Kernel.COPY, pack_copy(chain.address(A), chain.address(B), PAGE_NBYTES), covers=(A, B))
    chain.close()
    with pytest.raises(CorruptPageError) as caught:
        bench.run(batch)
    assert_names(caught.value, bench, page)
    assert chain.failed
    assert bench.at_rest(A) == at_rest
    assert bench.store.state(A) is bench.store.state(B) is PageState.CHAINED


def test_a_page_that_no_kernel_covers_is_checked_before_the_chain_writes(bench: StoreBench) -> None:
    corrupt(bench, B)
    batch = Batch()
    chain = bench.store.chain(batch, update=[A], read=[B], write_back=True)
    assert chain is not None
    buffer = bytearray(b"\1" * PAGE_NBYTES)
    chain.kernel(Kernel.COPY, pack_copy(chain.address(A), buffer_address(buffer), PAGE_NBYTES), covers=(A,))
    chain.close()
    with pytest.raises(CorruptPageError) as caught:
        bench.run(batch)
    assert_names(caught.value, bench, B)
    assert bench.at_rest(A) == bench.content(A)


def test_a_kernel_that_may_touch_any_page_comes_after_the_checks_of_all(bench: StoreBench) -> None:
    corrupt(bench, B)
    buffer = bytearray(PAGE_NBYTES)
    batch = Batch()
    chain = bench.store.chain(batch, update=[A], read=[B], write_back=True)
    assert chain is not None
    chain.kernel(Kernel.COPY, pack_copy(chain.address(A), chain.address(A), 0), covers=(A,))
    chain.kernel(Kernel.COPY, pack_copy(buffer_address(buffer), chain.address(B), PAGE_NBYTES))
    chain.close()
    with pytest.raises(CorruptPageError):
        bench.run(batch)
    assert bytes(buffer) == bytes(PAGE_NBYTES)


def test_a_checksum_is_taken_anew_when_a_later_kernel_may_have_changed_the_page(bench: StoreBench) -> None:
    before = bench.queue.stats().kernels
    batch = Batch()
    chain = bench.store.chain(batch, update=[A], read=[B], write_back=True)
    assert chain is not None
    chain.kernel(Kernel.COPY, pack_copy(chain.address(A), chain.address(B), 100), covers=(A, B))
    chain.kernel(Kernel.COPY, pack_copy(chain.address(A), chain.address(B), PAGE_NBYTES))
    chain.close()
    bench.run(batch)
    assert bench.queue.stats().kernels - before == 3
    bench.store.evict(A)
    bench.fetch(A)
    assert bench.store.read_page(A) == bench.content(B)


def test_the_last_of_several_kernels_that_cover_a_page_says_what_its_checksum_is(bench: StoreBench) -> None:
    batch = Batch()
    chain = bench.store.chain(batch, update=[A], read=[B], write_back=True)
    assert chain is not None
    chain.kernel(Kernel.COPY, pack_copy(chain.address(A), chain.address(B), 100), covers=(A, B))
    chain.kernel(Kernel.COPY, pack_copy(chain.address(A), chain.address(B), PAGE_NBYTES), covers=(A, B))
    chain.kernel(*slow(1), covers=())
    chain.close()
    bench.run(batch)
    bench.store.evict(A)
    bench.fetch(A)
    assert bench.store.read_page(A) == bench.content(B)


def test_a_chain_that_does_not_write_takes_no_checksum(bench: StoreBench) -> None:
    batch = Batch()
    chain = bench.store.chain(batch, update=[A], write_back=False)
    assert chain is not None
    chain.kernel(Kernel.COPY, pack_copy(0, 0, 0), covers=(A,))
    chain.close()
    bench.run(batch)
    assert bench.store.state(A) is PageState.DIRTY
    bench.poke(A, bench.content(A, seed=1))
    bench.store.write_back(A, batch)
    bench.run(batch)
    bench.store.evict(A)
    bench.fetch(A)
    assert bench.store.read_page(A) == bench.content(A, seed=1)


def test_more_pages_than_a_kernel_can_check_are_checked_by_tasks_of_their_own(tmp_path: Path) -> None:
    n_pages = CHECKS_MAX + 1
    with store_bench(tmp_path, n_frames=n_pages, page_count=n_pages) as bench:
        bench.fill()
        pages = list(bench.pages())
        before = bench.queue.stats().kernels
        batch = Batch()
        chain = bench.store.chain(batch, update=pages, write_back=True)
        assert chain is not None
        chain.kernel(Kernel.COPY, pack_copy(0, 0, 0), covers=pages)
        chain.close()
        bench.run(batch)
        assert bench.queue.stats().kernels - before == n_pages + 1 + n_pages + 1
        for page in pages:
            bench.store.evict(page)
            bench.fetch(page)


# ---- chains ----


def test_a_chain_reads_updates_and_writes_back(bench: StoreBench) -> None:
    batch = Batch()
    chain = bench.store.chain(batch, update=[A], read=[B], write_back=True)
    assert chain is not None
    chain.kernel(Kernel.COPY, pack_copy(chain.address(A), chain.address(B), PAGE_NBYTES))
    chain.close()
    assert bench.store.state(A) is bench.store.state(B) is PageState.CHAINED
    bench.run(batch)
    assert bench.store.state(A) is bench.store.state(B) is PageState.CLEAN
    assert bench.at_rest(A) == bench.content(B)
    assert bench.store.frames_evictable == 2


def test_a_chain_that_does_not_write_back_leaves_its_pages_dirty(bench: StoreBench) -> None:
    batch = Batch()
    chain = bench.store.chain(batch, update=[A], read=[B], write_back=False)
    assert chain is not None
    chain.kernel(Kernel.COPY, pack_copy(chain.address(A), chain.address(B), PAGE_NBYTES))
    chain.close()
    bench.run(batch)
    assert bench.store.state(A) is PageState.DIRTY
    assert bench.store.state(B) is PageState.CLEAN
    assert bench.store.read_page(A) == bench.content(B)
    assert bench.at_rest(A) == bench.content(A)


def test_a_dirty_page_that_a_chain_reads_is_dirty_again_afterwards(bench: StoreBench) -> None:
    bench.fetch(B)
    bench.store.mark_dirty(B)
    batch = Batch()
    chain = bench.store.chain(batch, update=[A], read=[B], write_back=True)
    assert chain is not None
    chain.close()
    bench.run(batch)
    assert bench.store.state(B) is PageState.DIRTY


def test_a_page_that_a_chain_overwrites_is_not_read(bench: StoreBench) -> None:
    before = bench.queue.stats().reads
    batch = Batch()
    chain = bench.store.chain(batch, write=[A], read=[B], write_back=True)
    assert chain is not None
    chain.kernel(Kernel.COPY, pack_copy(chain.address(A), chain.address(B), PAGE_NBYTES))
    chain.close()
    bench.run(batch)
    assert bench.queue.stats().reads - before == 1
    assert bench.at_rest(A) == bench.content(B)


def test_pages_that_rest_in_frames_end_a_chain_dirty(tmp_path: Path) -> None:
    with store_bench(tmp_path, n_frames=5, rests=(Rest.FRAME,), with_backing=False) as bench:
        bench.fill()
        batch = Batch()
        chain = bench.store.chain(batch, update=[A, B], write_back=True)
        assert chain is not None
        chain.kernel(Kernel.COPY, pack_copy(chain.address(A), chain.address(B), PAGE_NBYTES))
        chain.close()
        bench.run(batch)
        assert bench.store.state(A) is PageState.DIRTY
        assert bench.store.read_page(A) == bench.content(B)
        bench.store.check()


def test_a_chain_that_is_short_of_frames_changes_nothing(bench: StoreBench) -> None:
    bench.fetch(A)
    bench.store.hold(A)
    batch = Batch()
    assert bench.store.chain(batch, update=[B, C], scratch=1, write_back=True) is None
    assert len(batch) == 0
    assert bench.store.state(B) is bench.store.state(C) is PageState.ABSENT
    assert bench.store.frames_free == 2


def test_a_chain_does_not_count_its_own_clean_pages_as_room(bench: StoreBench) -> None:
    for page in (A, B, C):
        bench.fetch(page)
    assert bench.store.chain(Batch(), update=[A, B, C], scratch=1, write_back=True) is None
    batch = Batch()
    chain = bench.store.chain(batch, update=[A, B], scratch=1, write_back=True)
    assert chain is not None
    assert bench.store.state(C) is PageState.ABSENT
    chain.close()
    bench.run(batch)


def test_scratch_frames_come_back_when_the_chain_ends(bench: StoreBench) -> None:
    batch = Batch()
    chain = bench.store.chain(batch, scratch=2, write_back=True)
    assert chain is not None
    assert chain.scratch(0) != chain.scratch(1)
    assert bench.store.frames_free == 1
    chain.kernel_on_scratch(*slow(1000))
    chain.close()
    ids = bench.submit(batch)
    bench.store.check()
    bench.finish(ids)
    assert bench.store.frames_free == 3


def test_a_kernel_on_scratch_does_not_wait_for_the_pages(bench: StoreBench) -> None:
    bench.fetch(A)
    batch = Batch()
    bench.store.use(A, batch.kernel(*slow()))
    chain = bench.store.chain(batch, update=[A], scratch=1, write_back=False)
    assert chain is not None
    chain.kernel_on_scratch(Kernel.COPY, pack_copy(chain.scratch(0), chain.scratch(0), PAGE_NBYTES))
    chain.kernel(Kernel.COPY, pack_copy(chain.address(A), chain.scratch(0), PAGE_NBYTES))
    chain.close()
    ids = bench.submit(batch)
    bench.queue.wait(ids)
    completions = bench.queue.poll()
    bench.store.settle(completions)
    assert [completion.id - ids[0] for completion in completions] == [1, 0, 2]


def test_a_kernel_comes_after_the_kernels_on_scratch(bench: StoreBench) -> None:
    batch = Batch()
    chain = bench.store.chain(batch, update=[A], read=[B], scratch=1, write_back=True)
    assert chain is not None
    chain.kernel_on_scratch(*slow())
    chain.kernel(Kernel.COPY, pack_copy(chain.scratch(0), chain.address(B), PAGE_NBYTES))
    chain.kernel_on_scratch(Kernel.COPY, pack_copy(chain.address(A), chain.scratch(0), PAGE_NBYTES))
    chain.close()
    bench.run(batch)
    assert bench.at_rest(A) == bench.content(B)


def test_the_last_task_of_a_chain_ends_after_all_its_writes(bench: StoreBench) -> None:
    batch = Batch()
    chain = bench.store.chain(batch, update=[A, B, C], write_back=True)
    assert chain is not None
    last = chain.close()
    first_id = bench.submit(batch)[0]
    bench.queue.wait([first_id - 1 - last])
    bench.store.settle(bench.queue.poll())
    assert {bench.store.state(page) for page in (A, B, C)} == {PageState.CLEAN}


def test_a_chained_page_is_not_fetched_held_dirtied_or_chained_again(bench: StoreBench) -> None:
    bench.fetch(A)
    batch = Batch()
    chain = bench.store.chain(batch, update=[A], write_back=True)
    assert chain is not None
    for attempt in (
        lambda: bench.store.fetch(A, batch),
        lambda: bench.store.hold(A),
        lambda: bench.store.mark_dirty(A),
        lambda: bench.store.chain(batch, read=[A], write_back=True),
        lambda: bench.store.evict(A),
        lambda: bench.store.discard(A),
    ):
        with pytest.raises(InvariantError):
            attempt()
    chain.close()
    bench.run(batch)


def test_a_page_named_twice_in_a_chain_is_refused(bench: StoreBench) -> None:
    with pytest.raises(InvariantError, match="twice"):
        bench.store.chain(Batch(), update=[A], read=[A], write_back=True)


def test_a_chain_is_closed_once(bench: StoreBench) -> None:
    batch = Batch()
    chain = bench.store.chain(batch, update=[A], write_back=True)
    assert chain is not None
    chain.close()
    with pytest.raises(InvariantError, match="once"):
        chain.close()
    bench.run(batch)


def test_an_object_that_a_chain_keeps_lives_until_it_ends(bench: StoreBench) -> None:
    memory = Memory()
    gone = weakref.ref(memory)
    batch = Batch()
    chain = bench.store.chain(batch, update=[A], write_back=True)
    assert chain is not None
    chain.keep(memory)
    del memory
    chain.close()
    ids = bench.submit(batch)
    assert gone() is not None
    bench.finish(ids)
    assert gone() is None


def test_a_chain_whose_kernel_fails_leaves_its_pages_chained_and_the_error_known(tmp_path: Path) -> None:
    with store_bench(tmp_path, n_frames=3) as bench:
        bench.fill()
        batch = Batch()
        chain = bench.store.chain(batch, update=[A], scratch=1, write_back=True)
        assert chain is not None
        chain.kernel(Kernel.SLEEP, pack_sleep(0, -errno.EINVAL))
        chain.close()
        with pytest.raises(KernelError) as caught:
            bench.run(batch)
        assert bench.store.state(A) is PageState.CHAINED
        assert chain.failed
        assert bench.store.error is caught.value
        bench.store.check()
        with pytest.raises(KernelError):
            bench.store.read_page(A)
        assert bench.at_rest(A) == bench.content(A)


# ---- the queue ----


def test_tasks_that_read_a_page_come_after_its_fetch(bench: StoreBench) -> None:
    batch = Batch()
    handle = bench.store.fetch(A, batch)
    assert bench.store.after(A) == (handle,)
    ids = bench.submit(batch)
    assert bench.store.after(A) == (ids[-1],)
    bench.finish(ids)
    assert bench.store.after(A) == ()


def test_tasks_that_read_a_chained_page_come_after_its_last_kernel_but_not_its_write(bench: StoreBench) -> None:
    batch = Batch()
    chain = bench.store.chain(batch, update=[A], write_back=True)
    assert chain is not None
    handle = chain.kernel(*slow(0))
    chain.close()
    assert bench.store.after(A) == (handle,)
    bench.run(batch)


def test_a_frame_goes_to_its_next_page_while_a_copy_out_of_it_runs_and_the_copy_is_right(bench: StoreBench) -> None:
    for page in (A, B, C):
        bench.fetch(page)
    bench.store.hold(B)
    bench.store.hold(C)
    copy_to = bytearray(PAGE_NBYTES)
    address = buffer_address(copy_to)
    batch = Batch()
    wait = batch.kernel(*slow())
    copy = batch.kernel(Kernel.COPY, pack_copy(address, bench.store.address(A), PAGE_NBYTES), (wait, *bench.store.after(A)))
    bench.store.use(A, copy)
    bench.store.fetch(D, batch)
    assert bench.store.state(A) is PageState.ABSENT
    bench.run(batch)
    assert bytes(copy_to) == bench.content(A)
    assert bench.store.read_page(D) == bench.content(D)


def test_the_hand_over_holds_across_batches_that_nobody_polled(bench: StoreBench) -> None:
    for page in (A, B, C):
        bench.fetch(page)
    bench.store.hold(B)
    bench.store.hold(C)
    copy_to = bytearray(PAGE_NBYTES)
    address = buffer_address(copy_to)
    first = Batch()
    wait = first.kernel(*slow())
    bench.store.use(A, first.kernel(Kernel.COPY, pack_copy(address, bench.store.address(A), PAGE_NBYTES), (wait,)))
    bench.submit(first)
    second = Batch()
    bench.store.fetch(D, second)
    bench.run(second)
    assert bytes(copy_to) == bench.content(A)
    assert bench.store.read_page(D) == bench.content(D)


def test_a_second_batch_is_refused_while_one_is_open(bench: StoreBench) -> None:
    batch = Batch()
    bench.store.fetch(A, batch)
    with pytest.raises(InvariantError, match="another batch is open"):
        bench.store.fetch(B, Batch())
    with pytest.raises(InvariantError, match="a batch is open"):
        bench.store.read_page(B)
    bench.run(batch)


def test_what_is_busy_in_an_open_batch_cannot_be_waited_for(bench: StoreBench) -> None:
    batch = Batch()
    bench.store.fetch(A, batch)
    with pytest.raises(InvariantError, match="not submitted"):
        bench.store.busy(A)
    bench.run(batch)
    assert bench.store.busy(A) == ()


def test_the_failure_of_a_task_that_the_store_does_not_know_is_an_error(bench: StoreBench) -> None:
    batch = Batch()
    batch.kernel(Kernel.SLEEP, pack_sleep(0, -errno.EINVAL))
    with pytest.raises(KernelError):
        bench.run(batch)


# ---- read_page and write_page ----


def test_reading_and_writing_an_absent_page_leaves_residency_as_it_is(bench: StoreBench) -> None:
    bench.store.write_page(A, bench.content(A, seed=2))
    assert bench.store.read_page(A) == bench.content(A, seed=2)
    assert bench.store.state(A) is PageState.ABSENT
    assert bench.store.frames_free == 3


def test_writing_a_clean_page_makes_it_dirty(bench: StoreBench) -> None:
    bench.fetch(A)
    bench.store.write_page(A, bench.content(A, seed=2))
    assert bench.store.state(A) is PageState.DIRTY
    assert bench.store.read_page(A) == bench.content(A, seed=2)


def test_a_page_in_flight_is_waited_for(bench: StoreBench) -> None:
    batch = Batch()
    bench.store.fetch(A, batch)
    bench.submit(batch)
    assert bench.store.read_page(A) == bench.content(A)
    bench.store.write_page(A, bench.content(A, seed=1))
    batch = Batch()
    bench.store.write_back(A, batch)
    bench.submit(batch)
    bench.store.write_page(A, bench.content(A, seed=2))
    assert bench.store.read_page(A) == bench.content(A, seed=2)
    batch = Batch()
    chain = bench.store.chain(batch, update=[A], read=[B], write_back=True)
    assert chain is not None
    chain.kernel(Kernel.COPY, pack_copy(chain.address(A), chain.address(B), PAGE_NBYTES))
    chain.close()
    bench.submit(batch)
    assert bench.store.read_page(A) == bench.content(B)


def test_data_of_another_length_is_refused(bench: StoreBench) -> None:
    with pytest.raises(ValueError, match="1000 bytes, not 4096"):
        bench.store.write_page(D, bytes(PAGE_NBYTES))


def test_writing_a_page_without_slot_that_finds_no_frame_names_the_knob(gradients: StoreBench) -> None:
    for page in (PageId(1, 0), PageId(1, 1), PageId(2, 0)):
        gradients.store.allocate(page)
    with pytest.raises(BudgetError) as caught:
        gradients.store.write_page(PageId(2, 1), gradients.content(PageId(2, 1)))
    assert caught.value.needed_bytes == 4 * PAGE_NBYTES


def test_an_interrupted_read_does_not_harm_the_next_one(bench: StoreBench, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(ids: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench.queue, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        bench.store.read_page(A)
    monkeypatch.undo()
    assert bench.store.read_page(B) == bench.content(B)
    assert bench.store.read_page(A) == bench.content(A)


def test_store_and_residency_do_not_import_torch() -> None:
    program = "import sys, infinity.store, infinity.residency, infinity.tiers.nvme; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
