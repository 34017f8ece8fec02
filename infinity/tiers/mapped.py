"""Memory that native code mapped, seen from Python for exactly as long as something in Python can see it.

Invariant: memory is unmapped when the last array or tensor over it dies, never before, and never by a forked child.
Knows nothing of what the memory is for.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray


class MappedMemory:
    """``nbytes`` bytes at ``address``; ``unmap`` runs once, when this object and every array over it are gone.

    Memory: owns the mapping. ``unmap`` must not refer to this object. At the end of the process the kernel unmaps, so that what other exit
    handlers still read is there.
    """

    __slots__ = ("__array_interface__", "__weakref__", "address", "nbytes")

    __array_interface__: dict[str, Any]

    def __init__(self, address: int, nbytes: int, unmap: Callable[[], object]) -> None:
        self.address = address
        self.nbytes = nbytes
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
        finalizer = weakref.finalize(self, _unless_forked, os.getpid(), unmap)
        finalizer.atexit = False

    def array(self) -> NDArray[np.uint8]:
        """All of it as an array that keeps it mapped."""
        return np.asarray(self)


def _unless_forked(owner_pid: int, unmap: Callable[[], object]) -> None:
    if os.getpid() == owner_pid:
        unmap()
