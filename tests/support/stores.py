"""A small store over real files, with everything below it, as tests want it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from infinity.layout import PageId, Space
from infinity.store import PageStore, Rest
from infinity.task_queue import Batch, Files, TaskQueue
from infinity.tiers.frames import FramePool
from infinity.tiers.nvme import NvmeBacking

PAGE_NBYTES = 4096
TAIL_NBYTES = 1000


def make_space(id: int, page_count: int, tail_used_nbytes: int = TAIL_NBYTES) -> Space:
    """A space whose last page is short."""
    return Space(id, 0, f"plane{id}", page_count, PAGE_NBYTES, tail_used_nbytes, f"unit/plane{id}")


class StoreBench:
    """A store and its surroundings; ``run`` carries a batch out to its end."""

    def __init__(
        self,
        directory: Path,
        *,
        n_frames: int,
        rests: Sequence[Rest] = (Rest.BACKING,),
        page_count: int = 4,
        dynamic: Sequence[int] = (),
        verify: bool = True,
        backend: str = "threads",
        scratch_reserve: int = 0,
        with_backing: bool = True,
    ) -> None:
        self.files = Files()
        self.queue = TaskQueue(self.files, backend=backend, workers=2)
        self.frames = FramePool(n_frames * PAGE_NBYTES, PAGE_NBYTES, False)
        self.spaces = [make_space(id, page_count) for id in range(len(rests))]
        n_slots = sum(space.page_count for space, rest in zip(self.spaces, rests, strict=True) if rest is Rest.BACKING)
        self.backing = NvmeBacking(self.files, directory, page_nbytes=PAGE_NBYTES, n_slots=n_slots) if with_backing else None
        self.store = PageStore(
            self.queue,
            self.frames,
            self.backing,
            self.spaces,
            dict(enumerate(rests)),
            verify=verify,
            dynamic=dynamic,
            scratch_reserve=scratch_reserve,
        )

    def pages(self) -> Iterator[PageId]:
        """Every page, in order."""
        for space in self.spaces:
            for index in range(space.page_count):
                yield PageId(space.id, index)

    def used_nbytes(self, page: PageId) -> int:
        return self.spaces[page.space].used_nbytes(page.index)

    def content(self, page: PageId, seed: int = 0) -> bytes:
        """Bytes that belong to this page and seed only."""
        block = f"{page.space}.{page.index}.{seed}|".encode()
        nbytes = self.used_nbytes(page)
        return (block * (nbytes // len(block) + 1))[:nbytes]

    def fill(self, seed: int = 0) -> None:
        """Write every page."""
        for page in self.pages():
            self.store.write_page(page, self.content(page, seed))

    def submit(self, batch: Batch) -> list[int]:
        """Hand a batch over; the ids of its tasks."""
        n_tasks = len(batch)
        first_id = self.queue.submit(batch)
        self.store.submitted(first_id)
        return list(range(first_id, first_id + n_tasks))

    def finish(self, ids: Iterable[int]) -> None:
        """Wait for tasks and settle them."""
        self.queue.wait(list(ids))
        self.store.settle(self.queue.poll())

    def run(self, batch: Batch) -> None:
        """Hand a batch over, wait for it and settle it."""
        self.finish(self.submit(batch))

    def fetch(self, page: PageId) -> None:
        """ABSENT -> CLEAN."""
        batch = Batch()
        handle = self.store.fetch(page, batch)
        if handle is None:
            raise RuntimeError(f"no frame for {page}")
        self.run(batch)

    def poke(self, page: PageId, data: bytes) -> None:
        """Write a resident page's frame, as Python does under a writing hold."""
        self.store.hold(page, writing=True)
        frame = next(i for i in range(self.frames.n_frames) if self.frames.address(i) == self.store.address(page))
        memoryview(self.frames.memory(frame, len(data)))[:] = data
        self.store.mark_dirty(page)
        self.store.unhold(page, writing=True)

    def at_rest(self, page: PageId) -> bytes:
        """What the page's slot holds, read past the store; for stores whose spaces all rest in the backing."""
        if self.backing is None:
            raise RuntimeError("there is no backing")
        slot = sum(space.page_count for space in self.spaces[: page.space]) + page.index
        fd, offset = self.backing.place(slot)
        reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        try:
            return os.pread(reader, self.used_nbytes(page), offset)
        finally:
            os.close(reader)

    def close(self) -> None:
        self.queue.close()
        if self.backing is not None:
            self.backing.close()
        self.frames.close()


@contextmanager
def store_bench(directory: Path, **arguments: object) -> Iterator[StoreBench]:
    """A ``StoreBench`` that is closed at the end."""
    bench = StoreBench(directory, **arguments)  # type: ignore[arg-type]
    try:
        yield bench
    finally:
        bench.close()
