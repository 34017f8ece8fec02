"""The trace of one program: which units were needed in which order, and how often each was used.

A program is one known course of events (a train step, one accumulation phase, an evaluation). The first time its trace is recorded;
later times the events are compared with it, visit by visit. Plain data: no torch, no memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from enum import Enum
from typing import NamedTuple


class Phase(Enum):
    """What a unit is needed for."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Visit(NamedTuple):
    """Unit number ``unit`` enters ``phase``: a forward of its module, or, in backward, the first use after other units'."""

    unit: int
    phase: Phase


class Trace:
    """Visits in order, and per unit how many forwards began, saved tensors were unpacked, and gradients accumulated."""

    def __init__(self) -> None:
        self.visits: list[Visit] = []
        self.forwards: Counter[int] = Counter()
        self.unpacks: Counter[int] = Counter()
        self.accumulations: Counter[int] = Counter()
        self.wanted: tuple[bool, ...] = ()
        """For each parameter: did it ask for a gradient when backward began?"""
        self._positions: dict[int, list[int]] = {}

    def append(self, visit: Visit) -> int:
        """Adds a visit and gives its position."""
        position = len(self.visits)
        self.visits.append(visit)
        self._positions.setdefault(visit.unit, []).append(position)
        return position

    def next_use(self, unit: int, position: int) -> int | None:
        """The first position after ``position`` at which ``unit`` is visited, or None."""
        positions = self._positions.get(unit, [])
        index = bisect_right(positions, position)
        return positions[index] if index < len(positions) else None

    def used_up(self, other: Trace, unit: int) -> bool:
        """Has ``other`` (what was seen so far) reached every count that this trace has for ``unit``?"""
        return (
            other.forwards[unit] >= self.forwards[unit]
            and other.unpacks[unit] >= self.unpacks[unit]
            and other.accumulations[unit] >= self.accumulations[unit]
        )
