"""What lives where, in bytes: the table that is shown before training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from infinity.budgets import Budgets
from infinity.layout import GRAD, PARAM, RESIDUAL
from infinity.sizes import format_bytes
from infinity.tiers.nvme import PathShare

Tier = Literal["device", "host", "nvme"]

_TIERS: dict[str, Tier] = {"none": "device", "cpu": "host", "nvme": "nvme"}
_WHAT = {PARAM: "weights", RESIDUAL: "master weights, low half", GRAD: "gradients, while a step needs them"}


@dataclass(frozen=True, slots=True)
class PlacementRow:
    """One kind of state and the lowest tier where it rests."""

    what: str
    tier: Tier
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Bytes per tier, and the budgets of the faster ones."""

    rows: tuple[PlacementRow, ...]
    n_params: int
    n_trainable: int
    page_nbytes: int
    backend: str
    paths: tuple[PathShare, ...]
    """Over which pages on NVMe are striped; none without NVMe."""
    host_budget_bytes: int
    """Frames: pages that rest in host memory, and pages on their way."""
    host_minimum_bytes: int
    device_budget_bytes: int
    device_minimum_bytes: int

    @property
    def direct_io(self) -> bool | None:
        """Does I/O pass the page cache by, on every path? None without NVMe."""
        return all(path.direct for path in self.paths) if self.paths else None

    @property
    def nvme_reserved_bytes(self) -> int:
        """Bytes of the files: whole pages, reserved at the start."""
        return sum(path.n_slots for path in self.paths) * self.page_nbytes

    def nbytes(self, tier: Tier) -> int:
        """The sum of the rows of one tier."""
        return sum(row.nbytes for row in self.rows if row.tier == tier)

    def summary(self) -> str:
        """One line."""
        tiers = ", ".join(f"{format_bytes(self.nbytes(tier))} on {tier}" for tier in ("device", "host", "nvme") if self.nbytes(tier))
        return (
            f"{self.n_params:,} parameters, {self.n_trainable:,} trained: {tiers}; frames {format_bytes(self.host_budget_bytes)}, "
            f"device budget {format_bytes(self.device_budget_bytes)}, pages of {format_bytes(self.page_nbytes)}, {self.backend}"
        )


def describe(budgets: Budgets, backend: str, paths: Sequence[PathShare]) -> Placement:
    """The table of an engine with these budgets and paths."""
    sums: dict[tuple[str, Tier], int] = {}
    for flat in budgets.layout.flats:
        for name, grid in flat.grids.items():
            tier = _TIERS[budgets.space_tier(flat.index, name)]
            what = _WHAT.get(name, f"optimizer state {name}")
            if not flat.trainable:
                what = "frozen weights"
            sums[what, tier] = sums.get((what, tier), 0) + flat.shard_numel * grid.plane.elem_nbytes
    return Placement(
        rows=tuple(PlacementRow(what, tier, nbytes) for (what, tier), nbytes in sums.items()),
        n_params=sum(param.numel for spec in budgets.unit_specs for param in spec.params),
        n_trainable=sum(param.numel for spec in budgets.unit_specs for param in spec.params if param.trainable),
        page_nbytes=budgets.page_nbytes,
        backend=backend,
        paths=tuple(paths),
        host_budget_bytes=budgets.n_frames * budgets.page_nbytes,
        host_minimum_bytes=budgets.minimum_host_bytes,
        device_budget_bytes=budgets.device_bytes,
        device_minimum_bytes=budgets.minimum_device_bytes,
    )
