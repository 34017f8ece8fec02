"""HOW units come and go: gathers and releases, carried out on store, queue and device, and the room that they need.

Everything is issued as early as memory allows and waited for as late as possible. ``pump`` takes what the queue finished and issues
what can be issued now; it never waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from infinity.errors import BudgetError, InfinityError
from infinity.flat_param import FlatParam, Gradient, Unit, UnitState
from infinity.flight import Flight
from infinity.kernel_args import Kernel, pack_copy
from infinity.layout import PARAM, RESIDUAL, PageId
from infinity.optim.step import Step
from infinity.planes import Planes
from infinity.residency import PageState
from infinity.sizes import format_bytes
from infinity.task_queue import Batch, Priority
from infinity.tiers.device import Device, Ticket


@dataclass(slots=True)
class Piece:
    """One page of a gather: where it goes in the range of its flat parameter."""

    flat: FlatParam
    page: PageId
    offset: int
    nbytes: int


@dataclass(slots=True)
class GatherJob:
    """A gather under way: the copies of ``pieces[:issued]`` are issued."""

    unit: Unit
    pieces: list[Piece]
    priority: Priority
    issued: int = 0
    tasks: list[int] = field(default_factory=list)
    """The last task of each page, ended or not, in the order of issue."""
    copies_left: int = 0
    """Copy tasks in the queue that have not ended."""
    failed: bool = False
    """Did one of them not copy? All are made again."""
    tickets: list[tuple[Ticket, PageId]] = field(default_factory=list)
    """Copies that the device itself makes, and the pages held for them."""


class Executor:
    """Carries out what the coordinator and the engine decide."""

    def __init__(
        self,
        flight: Flight,
        planes: Planes,
        step: Step,
        device: Device,
        units: Sequence[Unit],
        *,
        max_live_numel: int,
        prefetch_numel: int,
    ) -> None:
        self.flight = flight
        self.step = step
        self.units = units
        self.is_busy: Callable[[Unit], bool] = lambda unit: bool(unit.open_visits)
        self.next_use: Callable[[Unit], int | None] = lambda unit: None
        self.is_backward: Callable[[], bool] = lambda: False
        self.keeps_pages = False
        """Should the pages of a gather stay in frames, if they can, until the unit's update? So they are read once for both."""
        self.demand_gathers = 0
        """Gathers that had to be waited for."""
        self.prefetch_hits = 0
        """Gathers that had been started before they were needed."""
        self._store = flight.store
        self._planes = planes
        self._device = device
        self._max_live_numel = max_live_numel
        self._prefetch_numel = prefetch_numel
        self._unit_of = {flat.spec.index: unit for unit in units for flat in unit.flats}
        self._gradient_nbytes = max((unit.gradient_nbytes for unit in units), default=0)
        """What gathering ahead leaves free in backward: gradients of a unit come on top of it."""
        self._jobs: dict[int, GatherJob] = {}
        self._ahead: set[int] = set()
        """Units gathered, or being gathered, ahead of their use."""
        self._last_used: dict[int, int] = {}
        self._clock = 0
        step.open_units(units)
        flight.on_idle = self._finish_device_copies

    def unit_of(self, flat: FlatParam) -> Unit:
        """The unit that owns ``flat``."""
        return self._unit_of[flat.spec.index]

    # ---- progress ----

    def pump(self) -> None:
        """Takes what has finished and issues what can be issued; never waits."""
        self.flight.poll()
        for job in list(self._jobs.values()):
            self._advance(job)
        self.step.pump()

    def _wait(self, wanted: Iterable[int] = ()) -> None:
        """Lets something come: waits for what is in flight, the tasks ``wanted`` first, or, when nothing is, issues anew the gathers
        whose reads failed."""
        if self.flight.idle:
            n_jobs = len(self._jobs)
            self.pump()
            if len(self._jobs) < n_jobs:
                return
        self.flight.wait_any(wanted)
        self.pump()

    def _finish_device_copies(self) -> bool:
        """Waits for a copy that the device itself makes, so that its page can be had; False where there is none."""
        job = next((job for job in self._jobs.values() if job.tickets), None)
        if job is None:
            return False
        self._device.wait(job.tickets[0][0])
        self._advance(job)
        return True

    def finish(self) -> None:
        """Waits until nothing is in flight and nothing is waiting to be issued."""
        self.pump()
        while self._jobs or not self.step.is_idle or not self.flight.idle:
            self._wait()

    # ---- gather and release ----

    def gather(self, unit: Unit) -> None:
        """The unit's full parameters are on the device when this returns."""
        self._clock += 1
        self._last_used[unit.index] = self._clock
        if self.step.is_updating(unit):
            if unit.resident or not self._device.copies_in_queue:
                self.step.finish(unit)
            else:
                self.step.hand_over(unit)  # the copies come after the kernels, in the queue
        if unit.state is UnitState.GATHERED:
            if unit.index in self._ahead:
                self._ahead.discard(unit.index)
                self.prefetch_hits += 1
            return
        job = self._jobs.get(unit.index)
        if job is None:
            self.demand_gathers += 1
            while self._live_numel() + unit.numel > self._max_live_numel and (victim := self._victim(later_than=None)) is not None:
                self.release(victim)
            self._make_room(unit.nbytes, f"unit {unit.name!r}")
            job = self._begin(unit, Priority.DEMAND)
        else:
            self.prefetch_hits += 1
            self._ahead.discard(unit.index)
            job.priority = Priority.DEMAND
            self.flight.queue.promote(job.tasks)
        self._advance(job)
        while unit.index in self._jobs:
            self._wait(job.tasks)
        self._ahead.discard(unit.index)

    def prefetch(self, unit: Unit, position: int) -> bool:
        """Starts a gather needed at ``position`` if it takes memory only from what is needed later; never waits. False: not now."""
        if unit.state is not UnitState.SHARDED:
            return True
        if (self.step.is_waiting(unit) if self._device.copies_in_queue else self.step.is_updating(unit)) or self._store.frames_spare == 0:
            return False
        ahead = sum(self.units[index].numel for index in self._ahead)
        if ahead and ahead + unit.numel > self._prefetch_numel:
            return False
        reserve = self._gradient_nbytes if self.is_backward() else 0
        while self._device.free_bytes < unit.nbytes + reserve or self._live_numel() + unit.numel > self._max_live_numel:
            victim = self._victim(later_than=position)
            if victim is None:
                return False
            self.release(victim)
        self._ahead.add(unit.index)
        self._advance(self._begin(unit, Priority.PREFETCH))
        return True

    def _begin(self, unit: Unit, priority: Priority) -> GatherJob:
        with self.flight.bookkeeping:
            pieces = []
            for flat in unit.flats:
                if flat.range is None:
                    continue
                if not flat.range.fill():
                    raise InfinityError(f"unit {unit.name!r}: the device has less room than it said, a fault of infinity.")
                width = flat.dtype.itemsize
                for index in range(flat.spec.page_count(PARAM)):
                    begin, end = flat.spec.page_elems(PARAM, index)
                    page = self._planes.page(flat, PARAM, index)
                    if self.keeps_pages and flat.spec.trainable:
                        self._store.keep(page)
                    pieces.append(Piece(flat, page, begin * width, (end - begin) * width))
            unit.state = UnitState.GATHERING
            job = self._jobs[unit.index] = GatherJob(unit, pieces, priority)
            return job

    def _advance(self, job: GatherJob) -> None:
        if job.failed and not job.copies_left:
            job.failed, job.issued = False, 0
        if self._device.copies_in_queue:
            self._issue_copies(job)
        else:
            self._issue_device_copies(job)
        complete = job.issued == len(job.pieces) and not job.copies_left and not job.tickets and not job.failed
        if complete and job.unit.state is UnitState.GATHERING:
            job.unit.state = UnitState.GATHERED
            del self._jobs[job.unit.index]

    def _issue_copies(self, job: GatherJob) -> None:
        with self.flight.bookkeeping:
            batch = Batch(job.priority)
            handles = []
            short = False
            for piece in job.pieces[job.issued :]:
                assert piece.flat.range is not None
                to = piece.flat.range.address + piece.offset
                if self._store.state(piece.page) is PageState.ABSENT:
                    if not self._may_fetch(job):
                        break
                    fetched = self._store.fetch_copied(piece.page, batch, to)
                    if fetched is None:
                        short = True
                        break
                    handle = fetched
                else:
                    args = pack_copy(to, self._store.address(piece.page), piece.nbytes)
                    handle = batch.kernel(Kernel.COPY, args, self._store.after(piece.page))
                    self._store.use(piece.page, handle)
                handles.append(handle)

            def copied() -> None:
                job.copies_left -= 1

            def failed() -> None:
                job.copies_left -= 1
                job.failed = True

            job.issued += len(handles)
            job.copies_left += len(handles)
            job.tasks += self.flight.submit_each(batch, handles, copied, failed)
            if short:
                self.step.spill()

    def _issue_device_copies(self, job: GatherJob) -> None:
        with self.flight.bookkeeping:
            for ticket, page in list(job.tickets):
                if self._device.done(ticket):
                    self._device.order(ticket)
                    job.tickets.remove((ticket, page))
                    self._store.unhold(page)
            while job.issued < len(job.pieces):
                piece = job.pieces[job.issued]
                if self._store.state(piece.page) not in (PageState.CLEAN, PageState.DIRTY, PageState.WRITING):
                    break
                assert piece.flat.range is not None
                self._store.hold(piece.page)
                address = self._store.address(piece.page)
                job.tickets.append((self._device.copy_to_device(piece.flat.range.tensor, piece.offset, address, piece.nbytes), piece.page))
                job.issued += 1
            batch = Batch(job.priority)
            handles = []
            short = False
            for piece in job.pieces[job.issued :]:
                if self._store.state(piece.page) is PageState.ABSENT:
                    if not self._may_fetch(job):
                        break
                    handle = self._store.fetch(piece.page, batch)
                    if handle is None:
                        short = True
                        break
                    handles.append(handle)
            job.tasks += self.flight.submit_each(batch, handles)
            if short:
                self.step.spill()

    def _may_fetch(self, job: GatherJob) -> bool:
        """Is there a frame for a page of ``job``? One that is kept for an update is taken only when nothing else can come."""
        return self._store.frames_spare > 0 or (job.unit.index not in self._ahead and self.step.is_idle)

    def release(self, unit: Unit) -> None:
        """Gives the memory behind the unit's parameters back; their pages know everything that is worth knowing."""
        with self.flight.bookkeeping:
            if unit.state is not UnitState.GATHERED or unit.resident:
                return
            for flat in unit.flats:
                if flat.range is not None:
                    flat.range.drain()
            unit.state = UnitState.SHARDED
            self._ahead.discard(unit.index)

    def _live_numel(self) -> int:
        return sum(unit.numel for unit in self.units if unit.state is not UnitState.SHARDED)

    def _victim(self, later_than: int | None) -> Unit | None:
        """The unit to release first: the one needed last, then the one used longest ago. None: all are in use, or needed sooner."""
        best: tuple[tuple[float, int], Unit] | None = None
        for unit in self.units:
            if unit.state is not UnitState.GATHERED or unit.resident or self.is_busy(unit):
                continue
            use = self.next_use(unit)
            distance = math.inf if use is None else use
            if later_than is not None and distance <= later_than:
                continue
            rank = (distance, -self._last_used.get(unit.index, 0))
            if best is None or rank > best[0]:
                best = rank, unit
        return best[1] if best else None

    def _make_room(self, nbytes: int, what: str) -> None:
        """Releases units, reduces gradients, and waits, until the device has ``nbytes`` free."""
        while self._device.free_bytes < nbytes and self._free_some():
            pass
        if self._device.free_bytes < nbytes:
            used = self._device.used_bytes
            raise BudgetError(
                f"{what} needs {format_bytes(nbytes)} of device memory, but memory.device leaves {format_bytes(self._device.free_bytes)} "
                f"({format_bytes(self._device.budget_bytes)} minus {format_bytes(used)} in use). "
                f"Raise memory.device to at least {format_bytes(used + nbytes)}.",
                knob="memory.device",
                needed_bytes=used + nbytes,
                given_bytes=self._device.budget_bytes,
            )

    def _free_some(self) -> bool:
        """Does one thing that frees device memory; False where there is none left to do."""
        victim = self._victim(later_than=None)
        if victim is not None and self.next_use(victim) is None:
            self.release(victim)  # costs nothing: it is not needed again
        elif not self.step.is_idle:
            self._wait()  # costs time only: the gradients of updates in flight are memory soon
        elif victim is not None:
            self.release(victim)
        elif self._jobs or not self.flight.idle:
            self._wait()
        elif not any(self.step.put_away(unit) for unit in self.units if not unit.updated):
            return False
        return True

    # ---- gradients and updates ----

    def take_gradient(self, flat: FlatParam, index: int, grad: torch.Tensor) -> None:
        """A gradient arrived; it stays where autograd left it until it is reduced or used."""
        gradient = self.charged(index, grad)  # making room may put away what is there: the list is looked up after it
        flat.gradients.append(gradient)

    def charged(self, index: int, grad: torch.Tensor) -> Gradient:
        """A gradient with its bytes counted in the device budget. It is there already, so it counts for 0 where no room can be made."""
        nbytes = grad.nbytes
        while not self._device.charge(nbytes):
            if not self._free_some():
                return Gradient(index, grad, 0)
        return Gradient(index, grad, nbytes)

    def reduce(self, unit: Unit) -> None:
        """Adds the gradients that have fired to the running sums."""
        self.step.reduce(unit)
        self.pump()

    def update(self, unit: Unit, grad_factor: float = 1.0) -> None:
        """Begins the unit's update; its gathered copy is stale from now on."""
        unit.updated = True
        while unit.index in self._jobs:
            self._wait(self._jobs[unit.index].tasks)
        with self.flight.bookkeeping:
            self.step.update(unit, grad_factor)
            self.release(unit)
        self.pump()

    def write_back_modified(self, unit: Unit) -> None:
        """Parameters that were written in place since the last gather go to where they rest; their residual is cleared."""
        for flat in unit.flats:
            for index in flat.modified():
                self.finish()
                place = flat.spec.params[index]
                width = flat.dtype.itemsize
                if not flat.resident:
                    memory = self._planes.to_host(flat.tensor[place.elem_offset * width : place.elem_end * width])
                    self._planes.write(flat, PARAM, place.elem_offset, memory.numpy())
                if RESIDUAL in flat.spec.grids:
                    self._planes.write(flat, RESIDUAL, place.elem_offset, np.zeros(place.numel * 2, np.uint8))

    def finished_planes(self) -> Planes:
        """The planes, when nothing is in flight any more."""
        self.finish()
        return self._planes

    def forget(self, units: Iterable[Unit]) -> None:
        """Drops every gradient that no update has used."""
        self.finish()
        self.step.drop(units)
