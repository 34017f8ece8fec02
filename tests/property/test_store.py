"""The store against a dict of bytes: whatever is asked of it, in whatever order, each page reads as what was last put there."""

from __future__ import annotations

import ctypes
import itertools
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from infinity.errors import InvariantError
from infinity.kernel_args import Kernel, pack_copy, pack_sleep
from infinity.layout import PageId
from infinity.residency import TRANSITIONS, PageEvent, PageState
from infinity.store import Rest
from infinity.task_queue import Batch
from tests.support.stores import StoreBench

RESTS = (Rest.BACKING, Rest.FRAME, Rest.BACKING, Rest.FRAME)
DYNAMIC = (2, 3)
PAGE_COUNT = 2
PAGES = [PageId(space, index) for space in range(len(RESTS)) for index in range(PAGE_COUNT)]

pages = st.sampled_from(PAGES)
choices = st.integers(0, 100)
delays = st.sampled_from([0, 0, 0, 2000])
page_sets = st.lists(pages, unique=True, max_size=5)


class StoreMachine(RuleBasedStateMachine):
    """``content`` is the model: what each page must read as, None where it has no content."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.content: dict[PageId, bytes | None] = dict.fromkeys(PAGES)
        self.undefined: set[PageId] = set()
        """Allocated, and not written since."""
        self.copies: list[tuple[ctypes.Array[ctypes.c_char], bytes]] = []
        self.holds: list[tuple[PageId, bool]] = []
        self.buffers: list[object] = []
        self.seed = 0
        self.batch = Batch()
        self.in_flight: list[int] = []

    @initialize(n_frames=st.integers(3, 8), verify=st.booleans())
    def open_store(self, n_frames: int, verify: bool) -> None:
        self.bench = StoreBench(
            Path(self.directory.name), n_frames=n_frames, rests=RESTS, page_count=PAGE_COUNT, dynamic=DYNAMIC, verify=verify
        )
        self.store = self.bench.store
        for page in PAGES:
            if page.space not in DYNAMIC:
                self.content[page] = self.fresh(page)
                self.store.write_page(page, self.content[page] or b"")

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.progress("submit and wait")
            for page in PAGES:
                self.compare(page)
            self.bench.close()
        self.directory.cleanup()

    # ---- the model ----

    def fresh(self, page: PageId) -> bytes:
        self.seed += 1
        return self.bench.content(page, self.seed)

    def readable(self, page: PageId) -> bool:
        return self.content[page] is not None and page not in self.undefined

    def compare(self, page: PageId) -> None:
        if self.readable(page):
            assert self.store.read_page(page) == self.content[page]

    def can(self, action: str, page: PageId) -> bool:
        """Whether the store must take ``action`` on the page as it is now; it must refuse it otherwise."""
        state, held = self.store.state(page), self.store.holds(page) > 0
        on_frame = RESTS[page.space] is Rest.FRAME
        if action == "fetch":
            return state is PageState.ABSENT and self.content[page] is not None
        if action == "allocate":
            return state is PageState.ABSENT
        if action == "hold":
            return state in (PageState.CLEAN, PageState.DIRTY, PageState.WRITING)
        if action == "hold for writing":
            return state in (PageState.CLEAN, PageState.DIRTY) and not self.is_used(page)
        if action == "write back":
            return state is PageState.DIRTY and not on_frame and (page, True) not in self.holds
        if action == "evict":
            return state is PageState.CLEAN and not held
        if action == "discard":
            settled = state in (PageState.ABSENT, PageState.CLEAN, PageState.DIRTY)
            return settled and not held and (not on_frame or page.space in DYNAMIC)
        if action == "use":
            return state is not PageState.ABSENT
        return (state, PageEvent.CHAIN) in TRANSITIONS and not held

    def is_used(self, page: PageId) -> bool:
        try:
            return bool(self.store.busy(page))
        except InvariantError:
            return True

    def pick(self, action: str, choice: int) -> PageId | None:
        candidates = [page for page in PAGES if self.can(action, page)]
        return candidates[choice % len(candidates)] if candidates else None

    # ---- rules: few, each with many cases, so that every run has all of them ----

    @rule(action=st.sampled_from(["fetch", "hold", "hold for writing", "write back", "evict", "discard", "chain", "allocate"]), page=pages)
    def what_the_state_forbids_is_refused(self, action: str, page: PageId) -> None:
        if self.can(action, page):
            return
        attempts = {
            "fetch": lambda: self.store.fetch(page, self.batch),
            "allocate": lambda: self.store.allocate(page),
            "hold": lambda: self.store.hold(page),
            "hold for writing": lambda: self.store.hold(page, writing=True),
            "write back": lambda: self.store.write_back(page, self.batch),
            "evict": lambda: self.store.evict(page),
            "discard": lambda: self.store.discard(page),
            "chain": lambda: self.store.chain(self.batch, read=[page], write_back=True),
        }
        before, n_tasks = [self.store.state(other) for other in PAGES], len(self.batch)
        with pytest.raises(InvariantError):
            attempts[action]()
        assert [self.store.state(other) for other in PAGES] == before
        assert len(self.batch) == n_tasks

    @rule(choice=choices, delay=delays, at_once=st.booleans())
    def fetch_and_copy_out(self, choice: int, delay: int, at_once: bool) -> None:
        """What a gather does."""
        page = self.pick("fetch", choice)
        if page is not None:
            could = self.store.frames_free + self.store.frames_evictable > 0
            if at_once:
                buffer = (ctypes.c_char * self.bench.used_nbytes(page))()
                assert (self.store.fetch_copied(page, self.batch, ctypes.addressof(buffer)) is not None) == could
                self.buffers.append(buffer)
                if could and page not in self.undefined:
                    self.copies.append((buffer, self.content[page] or b""))
            else:
                assert (self.store.fetch(page, self.batch) is not None) == could
        self.copy_out(page if page is not None and self.can("use", page) else self.pick("use", choice), delay)

    def copy_out(self, page: PageId | None, delay: int) -> None:
        if page is None or not self.readable(page):
            return
        expected = self.content[page] or b""
        buffer = (ctypes.c_char * len(expected))()
        wait = self.batch.kernel(Kernel.SLEEP, pack_sleep(delay))
        args = pack_copy(ctypes.addressof(buffer), self.store.address(page), len(expected))
        self.store.use(page, self.batch.kernel(Kernel.COPY, args, (wait, *self.store.after(page))))
        self.copies.append((buffer, expected))

    @rule(choice=choices)
    def allocate(self, choice: int) -> None:
        candidates = [page for page in PAGES if self.content[page] is None and self.store.state(page) is PageState.ABSENT]
        if candidates:
            page = candidates[choice % len(candidates)]
            if self.store.allocate(page):
                self.content[page] = b""
                self.undefined.add(page)

    @rule(choice=choices)
    def put(self, choice: int) -> None:
        """Write a resident page from Python."""
        page = self.pick("hold for writing", choice)
        if page is not None:
            self.content[page] = content = self.fresh(page)
            self.bench.poke(page, content)
            self.undefined.discard(page)

    @rule(choice=choices, how=st.sampled_from(["write back", "spill", "evict", "discard"]))
    def leave(self, choice: int, how: str) -> None:
        if how == "spill":
            could = any(self.can("write back", page) and not self.store.holds(page) for page in PAGES)
            assert (self.store.spill(self.batch) is not None) == could
            return
        page = self.pick(how, choice)
        if page is None or (how == "discard" and page.space not in DYNAMIC):
            return
        if how == "write back":
            self.store.write_back(page, self.batch)
        elif how == "evict":
            self.store.evict(page)
        else:
            self.store.discard(page)
            self.content[page] = None
            self.undefined.discard(page)

    @rule(choice=choices, how=st.sampled_from(["hold", "hold for writing", "unhold", "unhold", "keep", "unkeep"]))
    def prefer(self, choice: int, how: str) -> None:
        if how == "keep":
            self.store.keep(PAGES[choice % len(PAGES)])
        elif how == "unkeep":
            self.store.unkeep(PAGES[choice % len(PAGES)])
        elif how == "unhold":
            if self.holds:
                page, writing = self.holds.pop(choice % len(self.holds))
                self.store.unhold(page, writing=writing)
        else:
            chosen = self.pick(how, choice)
            if chosen is not None:
                self.store.hold(chosen, writing=how == "hold for writing")
                self.holds.append((chosen, how == "hold for writing"))

    @rule(
        chosen=page_sets,
        split=st.tuples(choices, choices),
        scratch=st.integers(0, 2),
        write_back=st.booleans(),
        delay=delays,
        covering=st.lists(st.booleans(), min_size=8, max_size=8),
    )
    def chain(self, chosen: list[PageId], split: tuple[int, int], scratch: int, write_back: bool, delay: int, covering: list[bool]) -> None:
        """``covering``: which of the chain's kernels say what they cover."""
        says = itertools.cycle(covering)

        def covers(*pages: PageId) -> tuple[PageId, ...] | None:
            return pages if next(says) else None

        chosen = [page for page in chosen if self.can("chain", page)]
        first, second = sorted(at % (len(chosen) + 1) for at in split)
        update = [page for page in chosen[:first] if self.readable(page)]
        read = [page for page in chosen[first:second] if self.readable(page)]
        write = chosen[second:]
        n_tasks = len(self.batch)
        n_absent = sum(self.store.state(page) is PageState.ABSENT for page in (*update, *read, *write))
        n_clean = sum(self.store.state(page) is PageState.CLEAN for page in (*update, *read, *write))
        room = self.store.frames_free + self.store.frames_evictable - n_clean
        chain = self.store.chain(self.batch, update=update, read=read, write=write, scratch=scratch, write_back=write_back)
        assert (chain is not None) == (n_absent + scratch <= room)
        if chain is None:
            assert len(self.batch) == n_tasks
            return
        if delay:
            chain.kernel_on_scratch(Kernel.SLEEP, pack_sleep(delay))
        for page in write:
            self.content[page] = content = self.fresh(page)
            self.undefined.discard(page)
            source = ctypes.create_string_buffer(content, len(content))
            self.buffers.append(source)
            if scratch:
                chain.kernel_on_scratch(Kernel.COPY, pack_copy(chain.scratch(0), ctypes.addressof(source), len(content)))
                chain.kernel(Kernel.COPY, pack_copy(chain.address(page), chain.scratch(0), len(content)), covers=covers(page))
            else:
                chain.kernel(Kernel.COPY, pack_copy(chain.address(page), ctypes.addressof(source), len(content)), covers=covers(page))
        for to, source_page in zip(update, [*read, *write], strict=False):
            before, content = self.content[to] or b"", self.content[source_page] or b""
            nbytes = min(len(before), len(content))
            args = pack_copy(chain.address(to), chain.address(source_page), nbytes)
            chain.kernel(Kernel.COPY, args, covers=covers(to, source_page))
            self.content[to] = content[:nbytes] + before[nbytes:]
        chain.close()

    @rule(how=st.sampled_from(["submit", "submit and poll", "submit and wait", "submit and wait"]))
    def progress(self, how: str) -> None:
        if len(self.batch):
            self.in_flight += self.bench.submit(self.batch)
        if how == "submit and poll":
            self.store.settle(self.bench.queue.poll())
        elif how == "submit and wait":
            self.bench.finish(self.in_flight)
            self.in_flight.clear()
            for buffer, expected in self.copies:
                assert buffer.raw == expected
            self.copies.clear()
            self.buffers.clear()

    @rule(page=pages, write=st.booleans())
    def access(self, page: PageId, write: bool) -> None:
        self.progress("submit")
        if not write:
            self.compare(page)
            return
        if (page, True) in self.holds or (
            self.store.state(page) is PageState.ABSENT and RESTS[page.space] is Rest.FRAME and not self.store.frames_free
        ):
            return
        self.content[page] = content = self.fresh(page)
        self.store.write_page(page, content)
        self.undefined.discard(page)

    @invariant()
    def rules_hold(self) -> None:
        if hasattr(self, "store"):
            self.store.check()


StoreMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
TestStore = StoreMachine.TestCase
