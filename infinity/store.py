"""What is where: the one writer of the residency of pages.

``PageStore`` gives frames to pages and takes them back, adds the tasks that move pages to the caller's batch, and applies what the
queue reports. It decides no order of transfers and never waits on the training path; ``executor.py`` does both. It must not know
torch, units, optimizers or plans.

Kept here, and counted by ``check``:

* S1  only this file changes a state, through ``_move``, which consults ``residency.TRANSITIONS``
* S2  a page has a frame if and only if it is not ABSENT; a frame belongs to at most one page
* S3  holds > 0 implies CLEAN, DIRTY or WRITING; a writing hold excludes WRITING
* S4  one transfer is in flight for a FETCHING or WRITING page, one chain for a CHAINED page, none for others (tasks that only read a
  frame, told by ``use``, aside)
* S5  free frames + frames of pages + scratch frames = frames of the pool
* S6  a page read back has the checksum of what was last written (when ``verify`` is on)
* S7  no two pages rest in one slot
* S8  a frame passes to its next page by a dependency in the queue, never by a poll

[Note: one open batch] Between a task's entry in a batch and ``submitted``, it is known by a handle, a negative number that means
something in that batch only. So one batch is open at a time: the store refuses to add to a second one, and ``read_page`` and
``write_page``, which submit a batch of their own, refuse to run.

[Note: writer and readers of a frame] Each frame remembers its last writing task and the reading tasks since. Who reads the frame
comes after the writer (``after``); who writes it, the next page's READ above all, comes after all of them. A task that was settled
is left out: it is complete. Thus a CLEAN page may be evicted while a copy out of its frame still runs. Python itself must wait before
it writes (``busy``), and ``hold(writing=True)`` checks that.

[Note: who checks] The checksum of a page that was read is compared, and that of a page to be written taken, by the kernel that works on
the page, where there is one that says so (``Chain.kernel(covers=...)``, ``fetch_copied``): the bytes are in its cache then. Where there
is none, a task of its own does it. Either way it comes between the read and whatever delivers or changes the bytes for good, and
between the last change and the write. Checksums that kernels take go to ``_crc_found``, one place for each page, because a page is
in at most one chain or transfer (S4).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum, IntEnum
from typing import TypeAlias

from infinity.errors import BudgetError, CorruptPageError, InfinityError, InvariantError, KernelError
from infinity.kernel_args import CHECKS_MAX, Check, Kernel, pack_check, pack_checksum, pack_copy, pack_verify
from infinity.layout import PageId, Space
from infinity.residency import PageEvent, PageState, step
from infinity.sizes import align_up
from infinity.task_queue import Batch, Completion, TaskQueue
from infinity.tiers.backing import Backing
from infinity.tiers.frames import FramePool

_ABSENT, _FETCHING, _CLEAN = PageState.ABSENT, PageState.FETCHING, PageState.CLEAN
_DIRTY, _WRITING, _CHAINED = PageState.DIRTY, PageState.WRITING, PageState.CHAINED

_COPY_KERNEL, _CHECKSUM_KERNEL, _VERIFY_KERNEL = int(Kernel.COPY), int(Kernel.CHECKSUM), int(Kernel.VERIFY)
_BEFORE, _AFTER = int(Check.BEFORE), int(Check.AFTER)

_NO_FRAME = -1
_NO_SLOT = -1
_NO_KEY = -1
_READERS_LISTED = 8
"""Reading tasks of a frame after which the complete ones are dropped from the list."""


class Rest(Enum):
    """Where the pages of a space rest."""

    BACKING = "backing"
    """In a slot each; a frame comes and goes."""
    FRAME = "frame"
    """In a frame each, for good; there is no slot."""


class _Op(IntEnum):
    """What a task of ours does, for its completion and its error."""

    READ_PAGE = 0
    VERIFY_PAGE = 1
    CHECKSUM_PAGE = 2
    WRITE_PAGE = 3
    KERNEL_OF_CHAIN = 4
    USE_OF_FRAME = 5
    GIVEN_UP = 6
    """A read that nobody waits for any more."""


class _Single(Enum):
    """What the last task of a fetch or write-back ends: that page's transfer."""

    TRANSFER = 0


_SINGLE = _Single.TRANSFER


class Chain:
    """Tasks over some pages, from read to write, that run to their end by themselves; made by ``PageStore.chain``.

    Order: kernels are added with ``kernel_on_scratch`` and ``kernel``, then ``close`` once, before the batch is submitted.
    Memory: borrows the pages' frames and its scratch frames until the store settles its last task.
    """

    __slots__ = (
        "_addresses",
        "_after",
        "_batch",
        "_changed",
        "_frames_scratch",
        "_has_kernel",
        "_memory",
        "_outcome",
        "_pages_after",
        "_read",
        "_scratch_after",
        "_store",
        "_summed",
        "_unverified",
        "_write_back",
        "failed",
        "last",
    )

    def __init__(
        self,
        store: PageStore,
        batch: Batch,
        addresses: dict[PageId, int],
        changed: list[int],
        read: list[tuple[int, PageState]],
        unverified: dict[int, int],
        frames_scratch: list[int],
        pages_after: tuple[int, ...],
        scratch_after: tuple[int, ...],
        write_back: bool,
    ) -> None:
        self._store = store
        self._batch = batch
        self._addresses = addresses
        self._changed = changed
        self._read = read
        self._unverified = unverified
        """Page that is read and not checked yet -> its read."""
        self._summed: set[int] = set()
        """Pages to be written whose checksum is taken by the last kernel that changes them."""
        self._frames_scratch = frames_scratch
        self._pages_after = pages_after
        self._scratch_after = scratch_after
        self._after = pages_after + scratch_after
        self._has_kernel = False
        self._write_back = write_back
        self._outcome: list[tuple[int, PageEvent]] = []
        self._memory: list[object] = []
        self.last = 0
        """The task that ends the chain: 0 before ``close``, a handle before ``submitted``, then an id."""
        self.failed = False

    def address(self, page: PageId) -> int:
        """Where a page of the chain is."""
        return self._addresses[page]

    def scratch(self, index: int) -> int:
        """Where scratch frame ``index`` is; its content is undefined at first."""
        return self._store._addresses[self._frames_scratch[index]]

    def kernel(self, kernel_id: int, args: bytes, after: Sequence[int] = (), covers: Sequence[PageId] | None = None) -> int:
        """Add a kernel that comes after the reads, verifies and kernels of this chain so far, and after ``after``; its handle.

        ``covers``: it takes checks, and touches no other pages of the chain than these: it checks them itself. None: it touches any.
        """
        store = self._store
        if covers is None or len(covers) > CHECKS_MAX:
            store._verify_pages(self)
            self._summed.clear()
            keys: Sequence[int] = ()
        else:
            keys = store._keys(covers)
            args += store._checks(self, keys)
        handle = self._batch.kernel(kernel_id, args, (*self._after, *after) if after else self._after)
        store._open_tasks[handle] = (_Op.KERNEL_OF_CHAIN, _NO_KEY, None)
        for key in keys:
            if self._unverified.pop(key, None) is not None:
                store._set_writer(store._frame[key], handle)
        self._after = (handle,)
        self._has_kernel = True
        return handle

    def kernel_on_scratch(self, kernel_id: int, args: bytes, after: Sequence[int] = ()) -> int:
        """Add a kernel that touches no page of the chain, only scratch frames: it does not wait for the pages' reads."""
        if self._has_kernel:
            return self.kernel(kernel_id, args, after, covers=())
        handle = self._batch.kernel(kernel_id, args, (*self._scratch_after, *after))
        self._store._open_tasks[handle] = (_Op.KERNEL_OF_CHAIN, _NO_KEY, None)
        self._scratch_after = (handle,)
        self._after = (*self._pages_after, handle)
        return handle

    def keep(self, memory: object) -> None:
        """Let an object live until the chain ends: the owner of memory that its kernels use."""
        self._memory.append(memory)

    def close(self) -> int:
        """End the chain; the handle of its last task, which completes when everything of the chain is complete."""
        return self._store._close_chain(self)


_Ends: TypeAlias = "_Single | Chain | None"
_Task: TypeAlias = "tuple[_Op, int, _Ends]"


class PageStore:
    """Pages, their states, frames, slots and checksums.

    ``rests`` says for each space where its pages rest. Pages of a static space have content from the start: those that rest in a
    frame get it here, and are DIRTY. ``dynamic`` names the spaces whose pages come and go (gradients): ABSENT without content until
    ``allocate`` or a chain writes them, and again after ``discard``; with a backing they can be written back and evicted in between.
    ``scratch_reserve`` is the number of frames that ``fits_all`` leaves for chains.

    Memory: borrows queue, frames and backing, which outlive it.
    Errors: BudgetError when the pool cannot hold the pages that rest in frames. InvariantError from any call that the state of the
        page does not allow: nothing is changed then.
    """

    def __init__(
        self,
        queue: TaskQueue,
        frames: FramePool,
        backing: Backing | None,
        spaces: Sequence[Space],
        rests: Mapping[int, Rest],
        *,
        verify: bool,
        dynamic: Collection[int] = (),
        scratch_reserve: int = 0,
    ) -> None:
        self._queue = queue
        self._pool = frames
        self._backing = backing
        self._verify = verify
        self._page_nbytes = frames.frame_nbytes
        alignment = backing.alignment if backing is not None else 1

        self._ranges: dict[int, tuple[int, int]] = {}
        self._pages: list[PageId] = []
        self._names: dict[int, str] = {}
        self._used: list[int] = []
        self._slots: list[int] = []
        """The page table: page -> slot. Without durability a page is rewritten in its own slot, so it never changes."""
        self._dynamic: list[bool] = []
        slot = 0
        for space in spaces:
            if space.page_nbytes != self._page_nbytes:
                raise ValueError(f"{space.name}: pages of {space.page_nbytes} bytes for frames of {self._page_nbytes}")
            self._ranges[space.id] = (len(self._pages), space.page_count)
            self._names[space.id] = space.name or f"space {space.id}/{space.plane}"
            is_dynamic, has_slot = space.id in dynamic, rests[space.id] is Rest.BACKING
            for index in range(space.page_count):
                self._pages.append(PageId(space.id, index))
                self._used.append(space.used_nbytes(index))
                self._dynamic.append(is_dynamic)
                if has_slot:
                    self._slots.append(slot)
                    slot += 1
                else:
                    self._slots.append(_NO_SLOT)
        if slot and backing is None:
            raise ValueError("spaces rest in a backing and there is none")
        if backing is not None and (slot > backing.n_slots or backing.slot_nbytes != self._page_nbytes):
            raise ValueError(
                f"{slot} slots of {self._page_nbytes} bytes are needed; the backing has {backing.n_slots} of {backing.slot_nbytes}"
            )
        n_pages = len(self._pages)
        self._moved = [align_up(nbytes, alignment) for nbytes in self._used]
        self._state = [_ABSENT] * n_pages
        self._frame = [_NO_FRAME] * n_pages
        self._holds = [0] * n_pages
        self._writing_holds: dict[int, int] = {}
        self._kept = [False] * n_pages
        self._written = [False] * n_pages
        """Whether the slot holds content of the page: what FETCHING trusts."""
        self._crc: list[int | None] = [None] * n_pages
        """The checksum of what was last written to the slot; None where that is not known, or not wanted."""
        self._crc_found = (ctypes.c_uint32 * max(n_pages, 1))()
        """Of each page that is being written; by native kernels too."""
        self._crc_found_address = ctypes.addressof(self._crc_found)

        self._addresses = [frames.address(frame) for frame in range(frames.n_frames)]
        self._writer = [0] * frames.n_frames
        self._readers: list[list[int]] = [[] for _ in range(frames.n_frames)]
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._evictable_kept: OrderedDict[int, None] = OrderedDict()
        self._spillable: OrderedDict[int, None] = OrderedDict()
        """DIRTY pages with a slot, held or not, least recently dirtied first."""

        self._tasks: dict[int, _Task] = {}
        self._chains: dict[int, Chain] = {}
        """CHAINED page -> its chain."""
        self._scratch_lent = 0
        self._batch: Batch | None = None
        self._open_tasks: dict[int, _Task] = {}
        self._open_frames: list[int] = []
        self._open_chains: list[Chain] = []
        self._bounce: mmap.mmap | None = None
        self._bounce_tasks: list[int] = []
        self._error: InfinityError | None = None
        self.has_failed_chains = False
        """Did a chain fail? Its pages stay CHAINED: nobody knows what they hold."""

        static = [key for key in range(n_pages) if not self._dynamic[key]]
        unmovable = sum(1 for key in range(n_pages) if self._dynamic[key] and self._slots[key] == _NO_SLOT)
        self.fits_all = len(static) + unmovable + scratch_reserve <= frames.n_frames
        """Whether all pages but dynamic ones with a slot can have a frame at once and leave the scratch reserve."""
        resting = [key for key in static if self._slots[key] == _NO_SLOT]
        if len(resting) > frames.n_frames:
            raise BudgetError(
                f"{len(resting)} pages of {self._page_nbytes} bytes rest in host memory, which has {frames.n_frames} frames. "
                f"Raise memory.host to at least {len(resting) * self._page_nbytes} bytes, or offload to nvme.",
                knob="memory.host",
                needed_bytes=len(resting) * self._page_nbytes,
                given_bytes=frames.n_frames * self._page_nbytes,
            )
        for key in resting:
            frame = self._take_frame()
            if frame is None:
                raise InvariantError("the pool has lent frames before the store was made")
            self._frame[key] = frame
            self._move(key, PageEvent.ALLOCATE)

    # ---- what is where ----

    def state(self, page: PageId) -> PageState:
        """The state of a page."""
        return self._state[self._key(page)]

    def address(self, page: PageId) -> int:
        """Where a page's frame is.

        Errors: InvariantError for an ABSENT page.
        """
        return self._addresses[self._frame_of(self._key(page))]

    def holds(self, page: PageId) -> int:
        """How many holds a page has."""
        return self._holds[self._key(page)]

    def name(self, page: PageId) -> str:
        """A page in words: ``blocks.3/exp_avg page 12``."""
        self._key(page)
        return f"{self._names[page[0]]} page {page[1]}"

    def has_slot(self, page: PageId) -> bool:
        """Whether the page rests in a backing, so that it can be written back and evicted."""
        return self._slots[self._key(page)] != _NO_SLOT

    def has_content(self, page: PageId) -> bool:
        """Whether there is something to read: the page has a frame, or was written to its slot."""
        key = self._key(page)
        return self._state[key] is not _ABSENT or self._written[key]

    @property
    def frames_free(self) -> int:
        """Frames that nobody has."""
        return self._pool.free

    @property
    def frames_evictable(self) -> int:
        """Frames that could be had by evicting CLEAN pages."""
        return len(self._evictable) + len(self._evictable_kept)

    @property
    def frames_spare(self) -> int:
        """Frames that could be had without evicting a page that is kept."""
        return self._pool.free + len(self._evictable)

    @property
    def error(self) -> InfinityError | None:
        """The last error that ``settle`` raised."""
        return self._error

    def after(self, page: PageId) -> tuple[int, ...]:
        """The tasks that a task which reads the page's frame must come after; empty when its content is there."""
        return self._after_writer(self._frame_of(self._key(page)))

    def busy(self, page: PageId) -> tuple[int, ...]:
        """The tasks to wait for until the page is out of FETCHING, WRITING and CHAINED and nothing in the queue uses its frame.

        Errors: InvariantError when one of them is in a batch that was not submitted.
        """
        key = self._key(page)
        frame = self._frame[key]
        if frame == _NO_FRAME:
            return ()
        ids = self._after_all(frame)
        chain = self._chains.get(key)
        if chain is not None and chain.last in self._tasks:
            ids = (*ids, chain.last)
        if (ids and min(ids) < 0) or (chain is not None and chain.last <= 0):
            raise InvariantError(f"{self.name(page)} is in a batch that was not submitted")
        return ids

    # ---- moves ----

    def allocate(self, page: PageId) -> bool:
        """ABSENT -> DIRTY, content undefined; False when no frame can be had now.

        Tasks may still read the frame for the page that had it: ``busy`` names them, for who writes it from Python.
        """
        key = self._key(page)
        step(self._state[key], PageEvent.ALLOCATE)
        frame = self._take_frame()
        if frame is None:
            return False
        self._frame[key] = frame
        self._move(key, PageEvent.ALLOCATE)
        return True

    def fetch(self, page: PageId, batch: Batch) -> int | None:
        """ABSENT -> FETCHING: add the read of the page (and its verification); the last task's handle, None when no frame can be had."""
        key = self._key(page)
        frame = self._begin_fetch(key, batch)
        return None if frame is None else self._fetch(batch, key, frame, None)

    def fetch_copied(self, page: PageId, batch: Batch, to: int) -> int | None:
        """As ``fetch``, and the used bytes are copied to ``to``, and checked on the way; the copy's handle, None when no frame can be had.

        Memory: borrows ``to`` until the copy has ended; what is there is worth nothing if it failed.
        """
        key = self._key(page)
        frame = self._begin_fetch(key, batch)
        return None if frame is None else self._fetch(batch, key, frame, to)

    def use(self, page: PageId, handle: int) -> None:
        """Record a task of the open batch that reads the page's frame, and comes after what ``after`` named."""
        key = self._key(page)
        frame = self._frame_of(key)
        if handle >= 0:
            raise InvariantError(f"{self.name(page)}: task {handle} is not of the open batch")
        self._open_tasks.setdefault(handle, (_Op.USE_OF_FRAME, key, None))
        self._add_reader(frame, handle)
        if key in self._evictable:
            self._evictable.move_to_end(key)
        elif key in self._evictable_kept:
            self._evictable_kept.move_to_end(key)

    def hold(self, page: PageId, writing: bool = False) -> None:
        """Keep the page in its frame, for Python to read, or, ``writing``, to write."""
        key = self._key(page)
        state = self._state[key]
        if state is not _CLEAN and state is not _DIRTY and (writing or state is not _WRITING):
            raise InvariantError(f"{self.name(page)} is {state.name}: it cannot be held{' for writing' if writing else ''}")
        if writing:
            if self._after_all(self._frame[key]):
                raise InvariantError(f"{self.name(page)} cannot be written: tasks in the queue use its frame")
            self._writing_holds[key] = self._writing_holds.get(key, 0) + 1
        self._holds[key] += 1
        if state is _CLEAN:
            self._leave_evictable(key)

    def unhold(self, page: PageId, writing: bool = False) -> None:
        """End a hold of the same kind."""
        key = self._key(page)
        n_writing = self._writing_holds.get(key, 0)
        if (n_writing if writing else self._holds[key] - n_writing) < 1:
            raise InvariantError(f"{self.name(page)} has no {'writing' if writing else 'reading'} hold")
        if writing:
            if n_writing == 1:
                del self._writing_holds[key]
            else:
                self._writing_holds[key] = n_writing - 1
        self._holds[key] -= 1
        if self._state[key] is _CLEAN and not self._holds[key]:
            self._enter_evictable(key)

    def keep(self, page: PageId) -> None:
        """Prefer to evict other pages, whatever state this one is in, until ``unkeep``."""
        key = self._key(page)
        self._kept[key] = True
        if key in self._evictable:
            del self._evictable[key]
            self._evictable_kept[key] = None

    def unkeep(self, page: PageId) -> None:
        """Take the preference back."""
        key = self._key(page)
        self._kept[key] = False
        if key in self._evictable_kept:
            del self._evictable_kept[key]
            self._evictable[key] = None

    def mark_dirty(self, page: PageId) -> None:
        """CLEAN -> DIRTY: the frame was, or will be, written by Python. A DIRTY page stays so."""
        key = self._key(page)
        if self._state[key] is not _DIRTY:
            self._move(key, PageEvent.MARK_DIRTY)

    def write_back(self, page: PageId, batch: Batch) -> int:
        """DIRTY -> WRITING: add the checksum and the write of the page; the write's handle."""
        key = self._key(page)
        step(self._state[key], PageEvent.WRITE_BACK)
        if self._slots[key] == _NO_SLOT:
            raise InvariantError(f"{self.name(page)} has no slot to be written to")
        if key in self._writing_holds:
            raise InvariantError(f"{self.name(page)} is held for writing")
        self._check_batch(batch)
        self._batch = batch
        self._move(key, PageEvent.WRITE_BACK)
        frame = self._frame[key]
        handle = self._add_write(batch, key, self._addresses[frame], self._after_writer(frame), _SINGLE)
        self._add_reader(frame, handle)
        return handle

    def spill(self, batch: Batch) -> PageId | None:
        """Write back the page that was least recently dirtied, can leave its frame then, and is not kept if another is not.

        None when there is none. Once the write is settled the page is CLEAN, and its frame can be had.
        """
        candidates = [key for key in self._spillable if not self._holds[key]]
        if not candidates:
            return None
        page = self._pages[next((key for key in candidates if not self._kept[key]), candidates[0])]
        self.write_back(page, batch)
        return page

    def evict(self, page: PageId) -> None:
        """CLEAN -> ABSENT."""
        key = self._key(page)
        step(self._state[key], PageEvent.EVICT)
        self._check_not_held(key)
        self._move(key, PageEvent.EVICT)
        self._free_frame(key)

    def discard(self, page: PageId) -> None:
        """DIRTY, CLEAN or ABSENT -> ABSENT, and its content is gone, in its slot too: it is not read again before it is written."""
        key = self._key(page)
        state = self._state[key]
        if self._slots[key] == _NO_SLOT and not self._dynamic[key]:
            raise InvariantError(f"{self.name(page)} rests in its frame and cannot be discarded")
        if state is not _ABSENT:
            event = PageEvent.EVICT if state is _CLEAN else PageEvent.DISCARD
            step(state, event)
            self._check_not_held(key)
            self._move(key, event)
            self._free_frame(key)
        self._written[key] = False
        self._crc[key] = None

    def chain(
        self,
        batch: Batch,
        *,
        update: Sequence[PageId] = (),
        read: Sequence[PageId] = (),
        write: Sequence[PageId] = (),
        scratch: int = 0,
        write_back: bool,
    ) -> Chain | None:
        """ABSENT, CLEAN, DIRTY -> CHAINED: a chain over these pages; None, and nothing changed, when frames are short now.

        ABSENT pages get a frame; those of ``update`` and ``read`` are read into it, those of ``write`` are overwritten whole.
        ``scratch`` frames are lent until the chain ends. With ``write_back`` each updated or written page that rests in a backing is
        written at the end and will be CLEAN; else it will be DIRTY.
        """
        update_keys, read_keys, write_keys = self._keys(update), self._keys(read), self._keys(write)
        keys = (*update_keys, *read_keys, *write_keys)
        if len(set(keys)) != len(keys):
            raise InvariantError("a page is named twice in one chain")
        n_wanted, n_own_evictable = scratch, 0
        for key in keys:
            state = self._state[key]
            step(state, PageEvent.CHAIN)
            self._check_not_held(key)
            if state is _ABSENT:
                n_wanted += 1
            elif state is _CLEAN:
                n_own_evictable += 1
        for key in (*update_keys, *read_keys):
            if self._state[key] is _ABSENT:
                self._check_readable(key)
        self._check_batch(batch)
        if n_wanted > self.frames_free + self.frames_evictable - n_own_evictable:
            return None

        self._batch = batch
        read_before = [(key, self._state[key]) for key in read_keys]
        absent = [key for key in keys if self._state[key] is _ABSENT]
        for key in keys:  # all of them first, so that none is evicted for another
            self._move(key, PageEvent.CHAIN)
        for key in absent:
            self._frame[key] = self._take_frame_now()
        frames_scratch = [self._take_frame_now() for _ in range(scratch)]
        self._scratch_lent += scratch
        overwritten = {*write_keys}
        shared = {*read_keys}
        fetched = {*absent} - overwritten
        pages_after: list[int] = []
        unverified: dict[int, int] = {}
        for key in keys:
            frame = self._frame[key]
            if key in fetched:
                handle = self._add_read(batch, key, self._addresses[frame], self._after_all(frame))
                self._set_writer(frame, handle)
                pages_after.append(handle)
                if self._crc[key] is not None:
                    unverified[key] = handle
            else:
                pages_after += self._after_writer(frame) if key in shared else self._after_all(frame)
        scratch_after: list[int] = []
        for frame in frames_scratch:
            scratch_after += self._after_all(frame)
        addresses = {self._pages[key]: self._addresses[self._frame[key]] for key in keys}
        chain = Chain(
            self,
            batch,
            addresses,
            [*update_keys, *write_keys],
            read_before,
            unverified,
            frames_scratch,
            tuple(pages_after),
            tuple(scratch_after),
            write_back,
        )
        for key in keys:
            self._chains[key] = chain
        self._open_chains.append(chain)
        return chain

    # ---- the queue ----

    def submitted(self, first_id: int) -> None:
        """The open batch was submitted and its first task got ``first_id``: handles become ids."""
        for chain in self._open_chains:
            if not chain.last:
                raise InvariantError("a batch was submitted with a chain that was not closed")
        shift = first_id - 1
        tasks = self._tasks
        for handle, task in self._open_tasks.items():
            tasks[shift - handle] = task
        for frame in self._open_frames:
            if self._writer[frame] < 0:
                self._writer[frame] = shift - self._writer[frame]
            self._readers[frame] = [shift - reader if reader < 0 else reader for reader in self._readers[frame]]
        for chain in self._open_chains:
            chain.last = shift - chain.last
        self._open_tasks.clear()
        self._open_frames.clear()
        self._open_chains.clear()
        self._batch = None

    def settle(self, completions: Iterable[Completion]) -> None:
        """Apply what the queue reported.

        Errors: IoError, CorruptPageError or KernelError for the first task that failed by itself, after all of them are applied.
        """
        error: InfinityError | None = None
        for completion in completions:
            id, status, value, _ = completion
            task = self._tasks.pop(id, None)
            if task is None:
                if status < 0 and status != -errno.ECANCELED and error is None:
                    error = KernelError(f"task {id} failed: {os.strerror(-status)}")
                continue
            op, key, ends = task
            if status < 0:
                if status != -errno.ECANCELED and op is not _Op.GIVEN_UP and error is None:
                    error = self._error_of(op, key, completion)
            elif op is _Op.CHECKSUM_PAGE:
                self._crc_found[key] = value
            elif op is _Op.WRITE_PAGE:
                self._written[key] = True
                self._crc[key] = self._crc_found[key] if self._verify else None
            if ends is _SINGLE:
                self._end_transfer(key, status)
            elif ends is not None:
                self._end_chain(ends, status)
        if error is not None:
            self._error = error
            raise error

    # ---- for Python, off the training path ----

    def read_page(self, page: PageId) -> bytes:
        """The used bytes of a page, whatever its state; waits for what is in flight on it. Residency stays as it is.

        Errors: InvariantError when it has no content; IoError and CorruptPageError as ``settle``.
        """
        key = self._key(page)
        self._wait_while(page, (_FETCHING, _CHAINED))
        if self._state[key] is not _ABSENT:
            self._wait_for(self.after(page))
            return ctypes.string_at(self._addresses[self._frame[key]], self._used[key])
        self._check_readable(key)
        address = self._bounce_address()
        batch = Batch()
        self._add_checked_read(batch, key, address, (), None)
        self._run(batch)
        return ctypes.string_at(address, self._used[key])

    def write_page(self, page: PageId, data: bytes | bytearray | memoryview) -> None:
        """Replace the used bytes of a page, whatever its state; waits for what is in flight on it.

        A page with a frame becomes DIRTY. An ABSENT one is written to its slot and stays ABSENT; without a slot it is allocated.
        Errors: BudgetError when it needs a frame and none can be had; IoError as ``settle``.
        """
        key = self._key(page)
        content = bytes(data)
        if len(content) != self._used[key]:
            raise ValueError(f"{self.name(page)} has {self._used[key]} bytes, not {len(content)}")
        self._wait_while(page, (_FETCHING, _WRITING, _CHAINED))
        if self._state[key] is _ABSENT and self._slots[key] != _NO_SLOT:
            address = self._bounce_address()
            ctypes.memmove(address, content, len(content))
            batch = Batch()
            self._written[key] = False
            self._add_write(batch, key, address, (), None)
            self._run(batch)
            return
        if self._state[key] is _ABSENT and not self.allocate(page):
            raise BudgetError(
                f"{self.name(page)} needs a frame of {self._page_nbytes} bytes and none is free. Raise memory.host.",
                knob="memory.host",
                needed_bytes=(self._pool.n_frames + 1) * self._page_nbytes,
                given_bytes=self._pool.n_frames * self._page_nbytes,
            )
        self._wait_for(self.busy(page))
        self.mark_dirty(page)
        ctypes.memmove(self._addresses[self._frame[key]], content, len(content))

    def check(self) -> None:
        """Verify S2, S3, S4, S5 and S7 by counting.

        Errors: InvariantError names the first rule that does not hold.
        """
        frames_used = [frame for frame in self._frame if frame != _NO_FRAME]
        chains = {id(chain): chain for chain in self._chains.values()}
        for chain in self._open_chains:
            chains[id(chain)] = chain
        in_flight: dict[int, int] = {}
        for _, key, ends in (*self._tasks.values(), *self._open_tasks.values()):
            if ends is _SINGLE:
                in_flight[key] = in_flight.get(key, 0) + 1
        evictable = {*self._evictable, *self._evictable_kept}
        for key, state in enumerate(self._state):
            name = self.name(self._pages[key])
            _require((self._frame[key] != _NO_FRAME) == (state is not _ABSENT), "S2", f"{name} is {state.name}")
            _require(not self._holds[key] or state in (_CLEAN, _DIRTY, _WRITING), "S3", f"{name} is {state.name} and held")
            _require(key not in self._writing_holds or state is not _WRITING, "S3", f"{name} is WRITING and held for writing")
            _require(
                in_flight.get(key, 0) == (state in (_FETCHING, _WRITING)),
                "S4",
                f"{name} is {state.name}, {in_flight.get(key, 0)} transfers",
            )
            _require((key in self._chains) == (state is _CHAINED), "S4", f"{name} is {state.name}")
            _require(
                (key in self._spillable) == (state is _DIRTY and self._slots[key] != _NO_SLOT),
                "S3",
                f"{name} is {state.name}, spillable or not",
            )
            _require((key in evictable) == (state is _CLEAN and not self._holds[key]), "S3", f"{name} is {state.name}, evictable or not")
            if self._slots[key] == _NO_SLOT:
                allowed = (_ABSENT, _DIRTY, _CHAINED) if self._dynamic[key] else (_DIRTY, _CHAINED)
                _require(state in allowed, "S2", f"{name} rests in its frame and is {state.name}")
        scratch = [frame for chain in chains.values() for frame in chain._frames_scratch]
        _require(len(set(frames_used)) == len(frames_used), "S2", "two pages have one frame")
        _require(len({*frames_used, *scratch}) == len(frames_used) + len(scratch), "S5", "a scratch frame belongs to another")
        _require(
            self._pool.free + len(frames_used) + self._scratch_lent == self._pool.n_frames,
            "S5",
            f"{self._pool.free} free + {len(frames_used)} of pages + {self._scratch_lent} scratch of {self._pool.n_frames} frames",
        )
        _require(len(scratch) <= self._scratch_lent, "S5", f"{len(scratch)} of {self._scratch_lent} scratch frames lent to chains")
        slots = [slot for slot in self._slots if slot != _NO_SLOT]
        _require(len(set(slots)) == len(slots), "S7", "two pages rest in one slot")

    # ---- inside ----

    def _key(self, page: PageId) -> int:
        space, index = page
        first, count = self._ranges[space]
        if not 0 <= index < count:
            raise IndexError(f"{self._names[space]}: page {index} of {count}")
        return first + index

    def _keys(self, pages: Sequence[PageId]) -> list[int]:
        return [self._key(page) for page in pages]

    def _move(self, key: int, event: PageEvent) -> None:
        before = self._state[key]
        after = step(before, event)
        self._state[key] = after
        if before is _CLEAN:
            self._leave_evictable(key)
        elif before is _DIRTY:
            self._spillable.pop(key, None)
        if after is _CLEAN and not self._holds[key]:
            self._enter_evictable(key)
        elif after is _DIRTY and self._slots[key] != _NO_SLOT:
            self._spillable[key] = None

    def _enter_evictable(self, key: int) -> None:
        if self._kept[key]:
            self._evictable_kept[key] = None
        else:
            self._evictable[key] = None

    def _leave_evictable(self, key: int) -> None:
        self._evictable.pop(key, None)
        self._evictable_kept.pop(key, None)

    def _frame_of(self, key: int) -> int:
        frame = self._frame[key]
        if frame == _NO_FRAME:
            raise InvariantError(f"{self.name(self._pages[key])} is ABSENT and has no frame")
        return frame

    def _take_frame(self) -> int | None:
        """A free frame, else that of the least recently used evictable page, kept ones last."""
        frame = self._pool.lend()
        if frame is not None:
            return frame
        victims = self._evictable or self._evictable_kept
        if not victims:
            return None
        key = next(iter(victims))
        self._move(key, PageEvent.EVICT)
        frame = self._frame[key]
        self._frame[key] = _NO_FRAME
        return frame

    def _take_frame_now(self) -> int:
        frame = self._take_frame()
        if frame is None:
            raise InvariantError("frames that were counted as free are not")
        return frame

    def _free_frame(self, key: int) -> None:
        self._pool.give_back(self._frame[key])
        self._frame[key] = _NO_FRAME

    def _after_writer(self, frame: int) -> tuple[int, ...]:
        writer = self._writer[frame]
        return (writer,) if writer < 0 or writer in self._tasks else ()

    def _after_all(self, frame: int) -> tuple[int, ...]:
        readers = self._readers[frame]
        if not readers:
            return self._after_writer(frame)
        tasks = self._tasks
        return tuple(task for task in (self._writer[frame], *readers) if task < 0 or task in tasks)

    def _add_reader(self, frame: int, handle: int) -> None:
        readers = self._readers[frame]
        if len(readers) >= _READERS_LISTED:
            readers[:] = [task for task in readers if task < 0 or task in self._tasks]
        readers.append(handle)
        self._open_frames.append(frame)

    def _set_writer(self, frame: int, handle: int) -> None:
        self._writer[frame] = handle
        self._readers[frame] = []
        self._open_frames.append(frame)

    def _begin_fetch(self, key: int, batch: Batch) -> int | None:
        """The frame of a page that is FETCHING from now on; None when none can be had."""
        step(self._state[key], PageEvent.FETCH)
        self._check_readable(key)
        self._check_batch(batch)
        frame = self._take_frame()
        if frame is None:
            return None
        self._batch = batch
        self._frame[key] = frame
        self._move(key, PageEvent.FETCH)
        return frame

    def _fetch(self, batch: Batch, key: int, frame: int, copy_to: int | None) -> int:
        address = self._addresses[frame]
        handle = self._add_checked_read(batch, key, address, self._after_all(frame), _SINGLE, copy_to)
        self._set_writer(frame, handle)
        if copy_to is not None and self._crc[key] is None:  # nothing to check: the page is there before its copy
            handle = batch.kernel(_COPY_KERNEL, pack_copy(copy_to, address, self._used[key]), (handle,))
            self._open_tasks[handle] = (_Op.USE_OF_FRAME, key, None)
            self._add_reader(frame, handle)
        return handle

    def _add_read(self, batch: Batch, key: int, address: int, after: tuple[int, ...], ends: _Ends = None) -> int:
        fd, offset = self._place(key)
        handle = batch.read(fd, offset, self._moved[key], address, after)
        self._open_tasks[handle] = (_Op.READ_PAGE, key, ends)
        return handle

    def _add_checked_read(
        self, batch: Batch, key: int, address: int, after: tuple[int, ...], ends: _Ends, copy_to: int | None = None
    ) -> int:
        """A read and its check, which copies the page if there is somewhere to copy it to; the handle of the last."""
        crc = self._crc[key]
        if crc is None:
            return self._add_read(batch, key, address, after, ends)
        read = self._add_read(batch, key, address, after)
        used = self._used[key]
        if copy_to is None:
            handle = batch.kernel(_VERIFY_KERNEL, pack_verify(address, used, crc), (read,))
        else:
            args = pack_copy(copy_to, address, used) + pack_check(address, used, _BEFORE, crc, 0, key)
            handle = batch.kernel(_COPY_KERNEL, args, (read,))
        self._open_tasks[handle] = (_Op.VERIFY_PAGE, key, ends)
        return handle

    def _add_write(self, batch: Batch, key: int, address: int, after: tuple[int, ...], ends: _Ends, is_summed: bool = False) -> int:
        if self._verify and not is_summed:
            checksum = batch.kernel(_CHECKSUM_KERNEL, pack_checksum(address, self._used[key]), after)
            self._open_tasks[checksum] = (_Op.CHECKSUM_PAGE, key, None)
            after = (checksum,)
        fd, offset = self._place(key)
        handle = batch.write(fd, offset, self._moved[key], address, after)
        self._open_tasks[handle] = (_Op.WRITE_PAGE, key, ends)
        return handle

    def _verify_pages(self, chain: Chain) -> None:
        """Add the checks of pages that were read and that no kernel of the chain has checked; what is added later comes after them."""
        for key, read in chain._unverified.items():
            frame, crc = self._frame[key], self._crc[key]
            assert crc is not None
            handle = chain._batch.kernel(_VERIFY_KERNEL, pack_verify(self._addresses[frame], self._used[key], crc), (read,))
            self._open_tasks[handle] = (_Op.VERIFY_PAGE, key, None)
            self._set_writer(frame, handle)
            chain._after = (*chain._after, handle)
        chain._unverified.clear()

    def _checks(self, chain: Chain, keys: Sequence[int]) -> bytes:
        """The checks that a kernel of a chain makes of the pages it touches."""
        checks = b""
        for key in keys:
            crc = self._crc[key] if key in chain._unverified else None
            flags = 0 if crc is None else _BEFORE
            if chain._write_back and self._verify and self._slots[key] != _NO_SLOT and key in chain._changed:
                flags |= _AFTER
                chain._summed.add(key)
            if flags:
                result = self._crc_found_address + key * ctypes.sizeof(ctypes.c_uint32)
                checks += pack_check(self._addresses[self._frame[key]], self._used[key], flags, crc or 0, result, key)
        return checks

    def _close_chain(self, chain: Chain) -> int:
        if chain.last:
            raise InvariantError("a chain is closed once")
        self._verify_pages(chain)
        batch, after = chain._batch, chain._after
        kernel = after[0] if chain._has_kernel else 0
        finals: list[int] = []
        for key in chain._changed:
            frame = self._frame[key]
            if kernel:
                self._writer[frame] = kernel
                self._readers[frame] = []
            if chain._write_back and self._slots[key] != _NO_SLOT:
                handle = self._add_write(batch, key, self._addresses[frame], after, None, key in chain._summed)
                self._add_reader(frame, handle)
                finals.append(handle)
                chain._outcome.append((key, PageEvent.FINISH))
            else:
                chain._outcome.append((key, PageEvent.FINISH_UNWRITTEN))
            self._open_frames.append(frame)
        for key, before in chain._read:
            chain._outcome.append((key, PageEvent.FINISH_UNWRITTEN if before is _DIRTY else PageEvent.FINISH))
            if kernel:
                self._add_reader(self._frame[key], kernel)
        for frame in chain._frames_scratch:
            self._writer[frame] = 0
            self._readers[frame] = list(after)  # all that was there before comes before these
            self._open_frames.append(frame)
        last = finals or after
        if len(last) == 1 and last[0] < 0:
            chain.last = last[0]
            op, key, _ = self._open_tasks[chain.last]
        else:  # a task that only ends: after several, or after none of this batch
            nowhere = self._addresses[0]
            chain.last = batch.kernel(_COPY_KERNEL, pack_copy(nowhere, nowhere, 0), last)
            op, key = _Op.KERNEL_OF_CHAIN, _NO_KEY
        self._open_tasks[chain.last] = (op, key, chain)
        return chain.last

    def _end_transfer(self, key: int, status: int) -> None:
        if status >= 0:
            self._move(key, PageEvent.FINISH)
            return
        fetching = self._state[key] is _FETCHING
        self._move(key, PageEvent.FAIL)
        if fetching:
            frame = self._frame[key]
            self._writer[frame] = 0
            self._readers[frame] = []  # they come after the read, so they never run
            self._free_frame(key)

    def _end_chain(self, chain: Chain, status: int) -> None:
        if status < 0:
            chain.failed = self.has_failed_chains = True
            return
        for key, event in chain._outcome:
            del self._chains[key]
            self._move(key, event)
        chain._memory.clear()
        for frame in chain._frames_scratch:
            self._pool.give_back(frame)
        self._scratch_lent -= len(chain._frames_scratch)

    def _place(self, key: int) -> tuple[int, int]:
        if self._backing is None:
            raise InvariantError(f"{self.name(self._pages[key])} has no backing")
        return self._backing.place(self._slots[key])

    def _error_of(self, op: _Op, key: int, completion: Completion) -> InfinityError:
        code = -completion.status
        is_corrupt = code == errno.EBADMSG and op in (_Op.VERIFY_PAGE, _Op.KERNEL_OF_CHAIN)
        found = completion.value & 0xFFFFFFFF
        if is_corrupt and op is _Op.KERNEL_OF_CHAIN:
            key = completion.value >> 32  # what `_checks` gave as the tag
        if not (is_corrupt or op is _Op.READ_PAGE or op is _Op.WRITE_PAGE) or self._backing is None:
            what = f" on {self.name(self._pages[key])}" if key != _NO_KEY else ""
            return KernelError(f"task {completion.id} ({op.name}){what} failed: {os.strerror(code)}")
        name, slot = self.name(self._pages[key]), self._slots[key]
        if is_corrupt:
            path, (_, offset) = self._backing.path(slot), self._place(key)
            return CorruptPageError(name, path, offset, self._used[key], self._crc[key] or 0, found)
        return self._backing.error("read" if op is _Op.READ_PAGE else "write", slot, self._moved[key], code, name)

    def _check_batch(self, batch: Batch) -> None:
        if self._batch is not None and self._batch is not batch:
            raise InvariantError("another batch is open: submit it first")

    def _check_not_held(self, key: int) -> None:
        if self._holds[key]:
            raise InvariantError(f"{self.name(self._pages[key])} is held")

    def _check_readable(self, key: int) -> None:
        if not self._written[key]:
            raise InvariantError(f"{self.name(self._pages[key])} has no content: it was never written, or was discarded")

    def _run(self, batch: Batch) -> None:
        """Submit a batch of our own, wait for it and apply it."""
        n_tasks = len(self._open_tasks)
        first_id = self._queue.submit(batch)
        self.submitted(first_id)
        ids = tuple(range(first_id, first_id + n_tasks))
        try:
            self._wait_for(ids)
        finally:
            for id in ids:  # some are left when the wait was interrupted
                task = self._tasks.get(id)
                if task is not None:
                    self._bounce_tasks.append(id)
                    if task[0] in (_Op.READ_PAGE, _Op.VERIFY_PAGE):
                        self._tasks[id] = (_Op.GIVEN_UP, task[1], None)

    def _wait_for(self, ids: tuple[int, ...]) -> None:
        if ids:
            self._queue.wait(ids)
            self.settle(self._queue.poll())

    def _wait_while(self, page: PageId, states: tuple[PageState, ...]) -> None:
        if self._batch is not None or self._open_tasks:
            raise InvariantError("a batch is open: submit it first")
        while self.state(page) in states:
            ids = self.busy(page)
            if not ids:
                raise self._error or InvariantError(f"{self.name(page)} is {self.state(page).name} and nothing is in flight for it")
            self._wait_for(ids)

    def _bounce_address(self) -> int:
        """A page of private memory, aligned as a frame, for transfers of pages that stay ABSENT; nothing in flight uses it."""
        while self._bounce_tasks:
            self._wait_for(tuple(self._bounce_tasks))
            self._bounce_tasks = [id for id in self._bounce_tasks if id in self._tasks]
        alignment = max(mmap.PAGESIZE, self._backing.alignment if self._backing is not None else 1)
        if self._bounce is None:
            self._bounce = mmap.mmap(-1, self._page_nbytes + alignment)
        return align_up(ctypes.addressof(ctypes.c_char.from_buffer(self._bounce)), alignment)


def _require(holds: bool, rule: str, what: str) -> None:
    if not holds:
        raise InvariantError(f"{rule} does not hold: {what}")
