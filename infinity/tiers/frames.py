"""The arena of page-sized frames in host memory.

One mapping of exact size, made at the start, never grown and never remapped, so that it can be registered with a device and be a target of
O_DIRECT. A frame is a number; who uses it, and for which page, is the store's business.
Invariant: a frame is either free or lent to one borrower.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from infinity.errors import BudgetError
from infinity.native import check, ffi, lib
from infinity.tiers.mapped import MappedMemory

ALIGNMENT = 4096
"""Frames start at multiples of it: what O_DIRECT asks at most."""


class FramePool:
    """``nbytes_total // frame_nbytes`` frames; ``lock`` keeps them in physical memory.

    Memory: owns the arena. It is unmapped by `close`, or when the last array from `memory` dies, if that is later.
    Errors: BudgetError when not one frame fits; OSError when the kernel gives or locks too little.
    """

    def __init__(self, nbytes_total: int, frame_nbytes: int, lock: bool = False) -> None:
        if frame_nbytes <= 0 or frame_nbytes % ALIGNMENT != 0:
            raise ValueError(f"a frame of {frame_nbytes} bytes: must be a positive multiple of {ALIGNMENT}")
        self.frame_nbytes = frame_nbytes
        self.n_frames = nbytes_total // frame_nbytes
        if self.n_frames <= 0:
            raise BudgetError(
                f"memory.host of {nbytes_total} bytes holds no frame of {frame_nbytes} bytes. Raise memory.host, or lower page.",
                knob="memory.host",
                needed_bytes=frame_nbytes,
                given_bytes=nbytes_total,
            )
        self.nbytes = self.n_frames * frame_nbytes
        base = ffi.new("void **")
        what = f"mapping {self.nbytes} bytes of frames"
        if lock:
            what = f"mapping and locking {self.nbytes} bytes of frames (ulimit -l says how much may be locked)"
        check(lib.inf_arena_open(self.nbytes, int(lock), base), what)
        self.base_address = int(ffi.cast("uintptr_t", base[0]))
        self._arena: MappedMemory | None = MappedMemory(self.base_address, self.nbytes, partial(lib.inf_arena_close, base[0], self.nbytes))
        self._free = list(range(self.n_frames - 1, -1, -1))
        self._lent = bytearray(self.n_frames)

    @property
    def free(self) -> int:
        """How many frames can be lent now."""
        return len(self._free)

    def address(self, frame: int) -> int:
        return self.base_address + frame * self.frame_nbytes

    def lend(self) -> int | None:
        """The free frame that was used last (its memory is warm), or None when all are lent."""
        if not self._free:
            return None
        frame = self._free.pop()
        self._lent[frame] = 1
        return frame

    def give_back(self, frame: int) -> None:
        if not self._lent[frame]:
            raise ValueError(f"frame {frame} was given back and is not lent")
        self._lent[frame] = 0
        self._free.append(frame)

    def memory(self, frame: int, nbytes: int | None = None) -> NDArray[np.uint8]:
        """The first ``nbytes`` of a frame (all of it by default) as a writable array that keeps the arena mapped."""
        if self._arena is None:
            raise ValueError("the frames were closed")
        length = self.frame_nbytes if nbytes is None else nbytes
        if not (0 <= frame < self.n_frames and 0 <= length <= self.frame_nbytes):
            raise ValueError(f"{length} bytes of frame {frame}: there are {self.n_frames} frames of {self.frame_nbytes} bytes")
        begin = frame * self.frame_nbytes
        return self._arena.array()[begin : begin + length]

    def close(self) -> None:
        """Lends nothing more and unmaps.

        Order: after everything that was handed an address - the task queue, a device that registered the arena.
        """
        self._free = []
        self._arena = None
