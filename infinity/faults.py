"""What a test makes of a file operation: it fails, or comes short, late, out of order or wrong.

Values only; ``task_queue.Files.fault`` says which calls they are set for, and ``native/files.cpp`` carries them out.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from infinity.native import lib

__all__ = ["Fault", "FaultKind"]


class FaultKind(enum.IntEnum):
    """How a call goes wrong."""

    ERROR = lib.INF_FAULT_ERROR
    SHORT = lib.INF_FAULT_SHORT
    DELAY = lib.INF_FAULT_DELAY
    HOLD = lib.INF_FAULT_HOLD
    FLIP = lib.INF_FAULT_FLIP
    TEAR = lib.INF_FAULT_TEAR
    LOSE = lib.INF_FAULT_LOSE


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to go wrong; made by the methods, which say for which operations there is such a thing."""

    kind: FaultKind
    value: int = 0
    bit: int = 0
    us: int = 0

    @classmethod
    def error(cls, code: int) -> Fault:
        """Any operation: it is not carried out and gives ``code``, an errno. (A descriptor is closed all the same.)"""
        return cls(FaultKind.ERROR, code)

    @classmethod
    def short(cls, nbytes: int) -> Fault:
        """Reads and writes: ``nbytes`` are moved at most, and the call says so."""
        return cls(FaultKind.SHORT, nbytes)

    @classmethod
    def delay(cls, us: int) -> Fault:
        """Any operation: it begins ``us`` microseconds later, so it ends no sooner."""
        return cls(FaultKind.DELAY, us=us)

    @classmethod
    def hold(cls, others: int, us: int = 20_000) -> Fault:
        """Reads, writes and datasyncs: it begins when ``others`` have ended, which were submitted before or after it.

        Order: where nothing else ends, it begins ``us`` microseconds later; so nothing hangs.
        """
        return cls(FaultKind.HOLD, others, us=us)

    @classmethod
    def flip(cls, byte: int, bit: int = 0) -> Fault:
        """Reads: one bit arrives inverted in memory. Writes: one bit arrives inverted in the file, and memory stays right.

        Units: ``byte`` counts from the start of the call's bytes, modulo their number.
        """
        return cls(FaultKind.FLIP, byte, bit)

    @classmethod
    def tear(cls, nbytes: int) -> Fault:
        """Writes: the first ``nbytes`` reach the file, the others stay as they were, and the call says that all is well."""
        return cls(FaultKind.TEAR, nbytes)

    @classmethod
    def lose(cls) -> Fault:
        """Writes, datasyncs and syncs: nothing is done, and the call says that all is well."""
        return cls(FaultKind.LOSE)
