"""The figures of steps, as people and programs read them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """The figures of one step. ``grad_norm`` is before clipping, and None while updates are in flight or nothing was updated."""

    step: int
    lr: float
    grad_norm: float | None
    clip_factor: float
    step_s: float
    stall_s: float
    read_bytes: int
    write_bytes: int
    host_bytes: int
    device_bytes: int
    prefetch_hits: int
    demand_gathers: int


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums since the start of the engine."""

    read_bytes: int
    write_bytes: int
    stall_s: float
    prefetch_hits: int
    demand_gathers: int

    def since(self, before: Totals) -> Totals:
        """What came after ``before``."""
        return Totals(
            self.read_bytes - before.read_bytes,
            self.write_bytes - before.write_bytes,
            self.stall_s - before.stall_s,
            self.prefetch_hits - before.prefetch_hits,
            self.demand_gathers - before.demand_gathers,
        )
