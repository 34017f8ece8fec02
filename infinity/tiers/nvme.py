"""Pages at rest on NVMe: slots striped over one or several paths.

Every path gets as many slots as its speed is worth, measured at the start, and at most as many as it has room for; what a small one
cannot take goes to the others. All slots are reserved at the start. One path is the plain case: it gets all of them, and nothing is
measured. Which path a slot is on changes no content.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infinity.errors import ConfigError, ConfigProblem, IoError, SpaceError
from infinity.sizes import format_rate
from infinity.task_queue import Batch, Files, TaskQueue
from infinity.tiers.backing import Backing
from infinity.tiers.frames import FramePool
from infinity.tiers.nvme_path import FILE_NBYTES_MAX, NvmePath, file_system, file_system_id, free_bytes
from infinity.tiers.stripes import deal, share_slots

logger = logging.getLogger(__name__)

_PROBE_NBYTES = 32 << 20
"""Most bytes of one wave of a measurement. Waves double up to it, so that a path writes and reads less than twice as much each."""
_PROBE_LEAST_NBYTES = 1 << 20
_PROBE_S = 0.05
"""A wave that takes so long is the last one."""
_PROBE_MEMORY_NBYTES = 4 << 20
_MARGIN = 64
"""Of several paths none is filled to the brim by choice: this part of what is free is left, for the file system's own needs."""


@dataclass(frozen=True, slots=True)
class PathShare:
    """One path as it is used. ``bytes_per_s`` is None where it was not measured; ``direct`` tells whether the page cache is passed by."""

    path: str
    file_system: str
    n_slots: int
    share: float
    bytes_per_s: float | None
    direct: bool
    free_bytes: int | None
    """After the slots were reserved."""


class NvmeBacking(Backing):
    """Slots over paths.

    ``weights`` say how many slots each path gets relative to the others; without them several paths are measured through ``queue``, in
    which nothing else may be in flight, with ``frames`` that nobody has been lent.

    Memory: owns its paths; borrows ``files``, and during the start ``queue`` and ``frames``. An interrupted measurement closes the queue.
    Errors: SpaceError when the slots do not fit all paths together, or a limit; IoError when a path cannot be used; ConfigError when
    ``direct_required`` and a path does not take O_DIRECT.
    """

    def __init__(
        self,
        files: Files,
        directories: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        page_nbytes: int,
        n_slots: int,
        weights: Sequence[float] | None = None,
        queue: TaskQueue | None = None,
        frames: FramePool | None = None,
        direct_required: bool = False,
        file_nbytes_max: int = FILE_NBYTES_MAX,
    ) -> None:
        names = [directories] if isinstance(directories, (str, os.PathLike)) else list(directories)
        self.slot_nbytes = page_nbytes
        self.n_slots = n_slots
        self.paths: list[NvmePath] = []
        rates: Sequence[float | None] = [None] * len(names)
        capacities = _capacities([os.path.realpath(name) for name in names], page_nbytes, n_slots)
        try:
            for name in names:
                self.paths.append(NvmePath(files, name, slot_nbytes=page_nbytes, n_slots_max=n_slots, file_nbytes_max=file_nbytes_max))
            self.alignment = max(path.alignment for path in self.paths)
            self._check_direct(direct_required)
            if weights is None and len(names) > 1 and n_slots:
                if queue is None or frames is None:
                    raise ValueError("several paths need weights, or a queue and frames to measure them with")
                weights = [_measure(queue, frames, index, path, n_slots) for index, path in enumerate(self.paths)]
                rates = weights
            counts = share_slots(n_slots, weights or [1.0] * len(names), capacities)
            # those that give something back come first: what was reserved to measure one path may be what another needs
            for path, count in sorted(zip(self.paths, counts, strict=True), key=lambda pair: pair[1] - pair[0].n_slots):
                path.reserve(count)
            self._path_of, self._index_of = deal(counts)
            self.shares = tuple(
                PathShare(
                    path=path.parent,
                    file_system=file_system(path.parent),
                    n_slots=path.n_slots,
                    share=path.n_slots / max(1, n_slots),
                    bytes_per_s=rate,
                    direct=path.direct,
                    free_bytes=free_bytes(path.parent),
                )
                for path, rate in zip(self.paths, rates, strict=True)
            )
            """What each path holds, in the order in which they were given."""
        except BaseException:
            self.close()
            raise
        if len(names) > 1:
            logger.info("pages are striped over %s", ", ".join(map(_in_words, self.shares)))

    @property
    def direct(self) -> bool:
        """Does I/O pass the page cache by, on every path?"""
        return all(path.direct for path in self.paths)

    def place(self, slot: int) -> tuple[int, int]:
        """(descriptor, offset in bytes) of a slot."""
        return self.paths[self._path_of[slot]].place(self._index_of[slot])

    def path(self, slot: int) -> str:
        """The name that the file of a slot had; it has none any more."""
        return self.paths[self._path_of[slot]].path(self._index_of[slot])

    def files(self) -> list[tuple[int, int]]:
        """(descriptor, path) of every file."""
        return [(fd, index) for index, path in enumerate(self.paths) for fd in path.fds]

    def error(self, op: str, slot: int, nbytes: int, code: int, what: str) -> IoError:
        return self.paths[self._path_of[slot]].error(op, self._index_of[slot], nbytes, code, what)

    def close(self) -> None:
        """Give the descriptors, and with them the blocks, back; a second call does nothing, nor does one in a forked child."""
        for path in self.paths:
            path.close()

    def _check_direct(self, required: bool) -> None:
        buffered = [f"{path.parent} ({file_system(path.parent)})" for path in self.paths if not path.direct]
        if not buffered:
            return
        where = ", ".join(buffered)
        if required:
            message = f'"required", but O_DIRECT does not work on {where}. Name another directory in nvme_path, or write "auto".'
            raise ConfigError([ConfigProblem("aio.direct_io", message)])
        logger.warning("O_DIRECT does not work on %s: pages are read and written through the page cache there", where)


def _in_words(share: PathShare) -> str:
    rate = f", {format_rate(share.bytes_per_s)}" if share.bytes_per_s is not None else ""
    return f"{share.path} ({share.share:.0%}{rate})"


def _capacities(paths: Sequence[str], slot_nbytes: int, n_slots: int) -> list[tuple[list[int], int]]:
    """For each file system, the paths on it and the slots that fit there; SpaceError when they are too few."""
    needed_bytes = n_slots * slot_nbytes
    by_file_system: dict[int, list[int]] = {}
    for index, path in enumerate(paths):
        by_file_system.setdefault(file_system_id(path), []).append(index)
    capacities: list[tuple[list[int], int]] = []
    free_by_path: dict[str, int] = {}
    for indices in by_file_system.values():
        found = free_bytes(paths[indices[0]])
        free = needed_bytes if found is None else found
        spared = free // _MARGIN if len(by_file_system) > 1 else 0
        capacities.append((indices, (free - spared) // slot_nbytes))
        free_by_path[", ".join(paths[index] for index in indices)] = free - spared
    if sum(slots for _, slots in capacities) < n_slots:
        raise SpaceError(
            ", ".join(paths), needed_bytes=needed_bytes, free_bytes=sum(free_by_path.values()), free_bytes_by_path=free_by_path
        )
    return capacities


def _measure(queue: TaskQueue, frames: FramePool, index: int, path: NvmePath, n_slots: int) -> float:
    """Bytes per second of a path: as many read as written, page by page, in its own files, through the lane that will serve it."""
    room = free_bytes(path.parent)
    most = max(1, min(n_slots, _PROBE_NBYTES // path.slot_nbytes, *([room // 2 // path.slot_nbytes] if room is not None else [])))
    path.reserve(most)
    for fd in path.fds:
        queue.add_file(fd, index)
    n_frames = max(1, _PROBE_MEMORY_NBYTES // path.slot_nbytes)
    lent = [frame for frame in (frames.lend() for _ in range(n_frames)) if frame is not None]
    random = np.random.default_rng(index)
    for frame in lent:
        frames.memory(frame)[:] = random.integers(0, 256, path.slot_nbytes, np.uint8)
    addresses = [frames.address(frame) for frame in lent]
    count, write_s = min(most, max(1, _PROBE_LEAST_NBYTES // path.slot_nbytes)), 0.0
    while True:
        write_s = _wave(queue, path, "write", count, addresses)
        if count == most or write_s >= _PROBE_S:
            break
        count = min(2 * count, most)
    read_s = _wave(queue, path, "read", count, addresses)
    for fd in path.fds:
        queue.drop_file(fd)
    for frame in lent:
        frames.give_back(frame)
    return 2 * count * path.slot_nbytes / (write_s + read_s)


def _wave(queue: TaskQueue, path: NvmePath, op: str, count: int, addresses: Sequence[int]) -> float:
    """Seconds that it takes to move the first ``count`` slots."""
    batch = Batch()
    for slot in range(count):
        fd, offset = path.place(slot)
        move = batch.write if op == "write" else batch.read
        move(fd, offset, path.slot_nbytes, addresses[slot % len(addresses)])
    begin_s = time.perf_counter()
    first_id = queue.submit(batch)
    try:
        queue.wait(range(first_id, first_id + count))
    except BaseException:
        queue.close()  # nothing may be in flight when the files are closed
        raise
    seconds = time.perf_counter() - begin_s
    for completion in queue.poll():
        if completion.status < 0:
            raise path.error(op, completion.id - first_id, path.slot_nbytes, -completion.status, "measuring the path")
    return max(seconds, 1e-9)
