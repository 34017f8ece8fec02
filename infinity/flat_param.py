"""Units and their flat parameters: the memory that parameters are views of, and what is known of their gradients.

::

    SHARDED --gather--> GATHERING --arrived--> GATHERED --release--> SHARDED
      no memory behind    copies are in         full parameters        (a resident unit is
      the parameters      flight                are present            GATHERED for good)

The storage object of a flat parameter lives as long as its engine; only the memory behind it comes and goes, so whatever autograd
saved - the parameter, a transposed view of it - is right again after the next gather. This file changes no page and never waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

import torch
from torch import nn
from torch.utils import swap_tensors

from infinity.layout import PARAM, FlatSpec, ParamPlace
from infinity.tiers.device import Device, DeviceRange
from infinity.units import DTYPES


class UnitState(Enum):
    """Where a unit's full parameters are; drawn above."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"


class Gradient(NamedTuple):
    """One accumulation that fired: the number of the parameter in its flat parameter, and its gradient on the device."""

    param: int
    grad: torch.Tensor
    charged_nbytes: int
    """What it counts for in the device budget."""


class FlatParam:
    """One flat parameter: parameters of one dtype and use as views of one device storage.

    Memory: owns its range (or, where it is resident, its ordinary allocation) and the planes that rest on the device.
    """

    def __init__(
        self, spec: FlatSpec, params: Iterable[nn.Parameter], device: Device, *, resident_planes: Iterable[str], name: str
    ) -> None:
        self.spec = spec
        self.name = name
        self.params = list(params)
        self.dtype = DTYPES.get(spec.dtype) or getattr(torch, spec.dtype)
        self.planes: dict[str, torch.Tensor] = {
            plane: device.allocate(spec.shard_numel * spec.grids[plane].plane.elem_nbytes, f"{name}/{plane}") for plane in resident_planes
        }
        """Planes that rest on the device for good, as bytes."""
        self.resident = PARAM in self.planes
        self.nbytes = spec.numel * spec.grids[PARAM].plane.elem_nbytes
        self.range: DeviceRange | None = None if self.resident else device.open_range(self.nbytes)
        self.tensor: torch.Tensor = self.planes[PARAM] if self.range is None else self.range.tensor
        self.aliases: list[torch.Tensor] = []
        """One per parameter, sharing its version counter."""
        self.versions: list[int] = []
        self.gradients: list[Gradient] = []
        """Accumulations of this backward that have not been reduced yet, in the order in which they fired."""
        self.has_grad = [False] * len(self.params)
        """Per parameter: does the ``grad`` plane hold a running sum of it?"""
        self.steps = [0] * len(self.params)
        """Per parameter: updates so far, as torch.optim counts them."""
        self.grad_pages: set[int] = set()
        """Pages of the ``grad`` plane that hold something of this step."""
        self._numbers = {place.elem_offset: number for number, place in enumerate(spec.params)}

    @property
    def storage_id(self) -> int:
        """Identity of the storage: the same for every view of it."""
        return int(self.tensor.untyped_storage()._cdata)

    def view(self, index: int) -> torch.Tensor:
        """Parameter ``index`` as a view of the storage."""
        place = self.spec.params[index]
        elem_nbytes = self.dtype.itemsize
        raw = self.tensor[place.elem_offset * elem_nbytes : place.elem_end * elem_nbytes]
        return raw.view(self.dtype).view(place.spec.shape)

    def bind(self) -> None:
        """Makes every parameter a view of the storage, keeping the parameter's identity."""
        for index, param in enumerate(self.params):
            param.grad = None
            if param.is_meta:
                swap_tensors(param, nn.Parameter(self.view(index), requires_grad=param.requires_grad))  # type: ignore[no-untyped-call]
            else:
                param.data = self.view(index)
            self.aliases.append(param.detach())
        self.versions = [alias._version for alias in self.aliases]

    def number_of(self, place: ParamPlace) -> int:
        """Which of ``params`` a place is."""
        return self._numbers[place.elem_offset]

    def mark_updated(self, numbers: Iterable[int]) -> None:
        """The parameters get new values: a graph that saved the old ones must not go on."""
        for number in numbers:
            torch.autograd.graph.increment_version(self.aliases[number])
            self.versions[number] = self.aliases[number]._version

    def modified(self) -> list[int]:
        """The parameters that were written in place since the last call or gather."""
        found = [i for i, alias in enumerate(self.aliases) if alias._version != self.versions[i]]
        for i in found:
            self.versions[i] = self.aliases[i]._version
        return found

    def drop_gradients(self) -> int:
        """Forgets everything about this step's gradients; gives the bytes that unreduced ones held."""
        nbytes = sum(gradient.charged_nbytes for gradient in self.gradients)
        self.gradients.clear()
        self.has_grad = [False] * len(self.params)
        return nbytes


class Unit:
    """A module subtree whose parameters are gathered and released together."""

    def __init__(self, index: int, name: str, module: nn.Module, flats: list[FlatParam]) -> None:
        self.index = index
        self.name = name
        self.module = module
        self.flats = flats
        self.lenders: tuple[Unit, ...] = ()
        """The units whose parameters this unit's module uses too."""
        self.state = UnitState.GATHERED if all(flat.resident for flat in flats) else UnitState.SHARDED
        self.open_visits = 0
        self.numel = sum(flat.spec.numel for flat in flats if not flat.resident)
        self.nbytes = sum(flat.range.charged_nbytes for flat in flats if flat.range is not None)
        """Device bytes that a gather takes; 0 for a resident unit."""
        self.gradient_nbytes = sum(place.numel * flat.dtype.itemsize for flat in flats if flat.spec.trainable for place in flat.spec.params)
        """Device bytes of all its gradients."""
        self.updated = False
        """Has this step begun to update it?"""

    @property
    def resident(self) -> bool:
        """Is it on the device for good?"""
        return self.nbytes == 0

    @property
    def trainable(self) -> bool:
        """Has it a parameter that is trained?"""
        return any(flat.spec.trainable for flat in self.flats)

    def wear(self, kind: type[nn.Parameter]) -> None:
        """Gives every parameter the class ``kind``."""
        for flat in self.flats:
            for param in flat.params:
                param.__class__ = kind
