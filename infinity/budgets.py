"""Every number that is decided before anything is allocated: what rests where, page size, frames, device bytes, and the minimums.

Arithmetic over shapes and a config; it allocates nothing and touches no model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infinity.config import Config, budget_bytes
from infinity.errors import BudgetError
from infinity.layout import FRAMES_MIN, GRAD, PARAM, RESIDUAL, FlatSpec, Layout, UnitSpec, build_layout, choose_page_nbytes, minimum_frames
from infinity.optim.base import Optimizer
from infinity.sizes import format_bytes
from infinity.store import Rest
from infinity.tiers.device import DeviceKind, available_bytes
from infinity.units import FoundUnit


class Budgets:
    """Layout, page size, frames and bytes of one engine.

    Errors: BudgetError when a budget is below the minimum.
    """

    def __init__(self, config: Config, found: Sequence[FoundUnit], algorithm: Optimizer, kind: DeviceKind) -> None:
        zero = config.zero_optimization
        self.config = config
        self.kind = kind
        self.cast = torch.bfloat16 if config.bf16.enabled else None
        self.unit_specs: list[UnitSpec] = [unit.spec(self.cast) for unit in found]
        self.rest = {PARAM: zero.offload_param.device, GRAD: zero.offload_optimizer.device}
        self._resident_units = _resident_units(
            self.unit_specs, zero.stage3_param_persistence_threshold, zero.stage3_model_persistence_threshold
        )
        free_host = available_bytes("cpu")
        host_guess = budget_bytes(config.memory.host, free_bytes=free_host, useful_bytes=free_host)
        on_device = [plane for plane in self._plane_names(algorithm) if self.tier(plane) == "none"]
        in_frames = [plane for plane in self._plane_names(algorithm) if self.tier(plane) == "cpu"]
        self.page_nbytes: int = (
            choose_page_nbytes(self.unit_specs, algorithm.planes, host_guess, without=on_device, resting=in_frames)
            if config.page == "auto"
            else config.page
        )
        self.layout: Layout = build_layout(self.unit_specs, algorithm.planes, self.page_nbytes)
        tiers = {space.id: self.space_tier(space.flat, space.plane) for space in self.layout.spaces}
        self.paged_spaces = [space for space in self.layout.spaces if tiers[space.id] != "none"]
        self.rests = {space.id: Rest.BACKING if tiers[space.id] == "nvme" else Rest.FRAME for space in self.paged_spaces}
        self.n_slots = sum(space.page_count for space in self.paged_spaces if tiers[space.id] == "nvme")
        resting_frames = sum(space.page_count for space in self.paged_spaces if tiers[space.id] == "cpu")
        self.reserve_frames = max(minimum_frames(self.layout, (*on_device, *in_frames)), FRAMES_MIN)
        self.minimum_host_bytes = (resting_frames + self.reserve_frames) * self.page_nbytes
        useful_frames = sum(space.page_count for space in self.paged_spaces) + self.reserve_frames
        host_bytes = budget_bytes(config.memory.host, free_bytes=free_host, useful_bytes=useful_frames * self.page_nbytes)
        if host_bytes < self.minimum_host_bytes:
            raise BudgetError(
                f"memory.host is {format_bytes(host_bytes)}; this model with pages of {format_bytes(self.page_nbytes)} needs at least "
                f"{format_bytes(self.minimum_host_bytes)} "
                f"({resting_frames} pages that rest in host memory and {self.reserve_frames} to work in). "
                f"Raise memory.host to {self.minimum_host_bytes} bytes, offload more to nvme, or make page smaller.",
                knob="memory.host",
                needed_bytes=self.minimum_host_bytes,
                given_bytes=host_bytes,
            )
        self.host_bytes = host_bytes
        self.n_frames = min(host_bytes // self.page_nbytes, useful_frames)
        self._set_device_bytes(found)

    def _set_device_bytes(self, found: Sequence[FoundUnit]) -> None:
        grain = 2 << 20 if self.kind == "cpu" else 512
        resident_bytes = 0
        gathered: dict[str, int] = {}
        gradients: dict[str, int] = {}
        for flat in self.layout.flats:
            resident = self.resident_planes(flat)
            resident_bytes += sum(flat.shard_numel * flat.grids[plane].plane.elem_nbytes for plane in resident)
            width = flat.grids[PARAM].plane.elem_nbytes
            if PARAM not in resident:
                gathered[flat.unit] = gathered.get(flat.unit, 0) + -(-flat.numel * width // grain) * grain
            if flat.trainable:
                gradients[flat.unit] = gradients.get(flat.unit, 0) + sum(place.numel for place in flat.params) * width
        owner = {id(param): unit.name for unit in found for _, param in unit.owned}
        groups = {unit.path: {unit.name, *(owner[id(param)] for _, param in unit.borrowed)} for unit in found}
        needed, largest = 0, ""
        for unit in found:
            # the forwards of the modules around a unit's are open while its own runs
            group = set().union(*(groups.get(path, set()) for path in _paths_around(unit.path)))
            nbytes = sum(gathered.get(name, 0) for name in group) + max(gradients.get(name, 0) for name in group)
            if nbytes >= needed:
                needed, largest = nbytes, unit.name
        self.minimum_device_bytes = resident_bytes + needed
        self.resident_bytes = resident_bytes
        useful = resident_bytes + sum(gathered.values()) + sum(gradients.values())
        free = available_bytes(self.kind)
        self.device_bytes: int = budget_bytes(self.config.memory.device, free_bytes=free, useful_bytes=useful)
        if self.device_bytes < self.minimum_device_bytes:
            raise BudgetError(
                f"memory.device is {format_bytes(self.device_bytes)}; this model needs at least {format_bytes(self.minimum_device_bytes)}: "
                f"{format_bytes(resident_bytes)} rest there for good, "
                f"and unit {largest!r} with its gradients needs {format_bytes(needed)}. "
                f"Raise memory.device to {self.minimum_device_bytes} bytes, or offload more.",
                knob="memory.device",
                needed_bytes=self.minimum_device_bytes,
                given_bytes=self.device_bytes,
            )

    def _plane_names(self, algorithm: Optimizer) -> list[str]:
        return [PARAM, RESIDUAL, *(plane.name for plane in algorithm.planes("fp32")), GRAD]

    def tier(self, plane: str) -> str:
        """Where a plane of a unit that is not resident rests: "none" (the device), "cpu" or "nvme"."""
        return self.rest[PARAM] if plane == PARAM else self.rest[GRAD]

    def space_tier(self, flat_index: int, plane: str) -> str:
        """As ``tier``, for one flat parameter."""
        if plane == PARAM and self.layout.flats[flat_index].unit in self._resident_units:
            return "none"
        return self.tier(plane)

    def resident_planes(self, flat: FlatSpec) -> list[str]:
        """The planes of a flat parameter that rest on the device."""
        return [plane for plane in flat.grids if self.space_tier(flat.index, plane) == "none"]


def _paths_around(path: str) -> list[str]:
    """The paths of a module and of every module around it, the model's own included."""
    parts = path.split(".") if path else []
    return [".".join(parts[:end]) for end in range(len(parts) + 1)]


def _resident_units(specs: Sequence[UnitSpec], threshold: int, total: int) -> set[str]:
    """Units all of whose parameters are below the threshold, smallest first, as long as they stay below the total."""
    small = [spec for spec in specs if spec.params and all(param.numel < threshold for param in spec.params)]
    chosen: set[str] = set()
    for spec in sorted(small, key=lambda spec: sum(param.numel for param in spec.params)):
        numel = sum(param.numel for param in spec.params)
        if numel > total:
            break
        total -= numel
        chosen.add(spec.name)
    return chosen
