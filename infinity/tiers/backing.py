"""What the store asks of a place where pages rest below the frames.

A backing is a row of equal slots, each an extent of an open file; reading and writing them is the task queue's work. It decides
nothing, and knows neither pages nor states: which page rests in which slot is the store's page table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from infinity.errors import IoError


class Backing(ABC):
    """Slots at rest."""

    n_slots: int
    slot_nbytes: int
    alignment: int
    """Bytes: lengths, file offsets and addresses of transfers are multiples of it."""

    @abstractmethod
    def place(self, slot: int) -> tuple[int, int]:
        """(descriptor, offset in bytes) of a slot."""

    @abstractmethod
    def path(self, slot: int) -> str:
        """The file that holds a slot, for errors and reports."""

    @abstractmethod
    def files(self) -> list[tuple[int, int]]:
        """(descriptor, path) of every file; paths are counted from 0."""

    @abstractmethod
    def error(self, op: str, slot: int, nbytes: int, code: int, what: str) -> IoError:
        """The error of a transfer of ``nbytes`` of a slot, ``what``, that ended with errno ``code``."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back; a second call does nothing. No transfer may be in flight."""
