"""The gradient side of a step: reduce, norm, clip factor, update. Carries out; when each happens is decided above.

::

    reduce   gradients that fired are added, in fp32 and in the order of firing, to the ``grad`` plane
    update   per tile one native chain: read, sums of squares, the optimizer's kernel, write; kernels check pages and take checksums

[Note: direct gradients] A gradient that is the only one of its parameter in the step goes from where autograd left it straight into
the kernel. It becomes a page only when another one must be added, or when it has to wait for the norm and does not rest on the device.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from infinity.errors import ModelError
from infinity.flat_param import FlatParam, Gradient, Unit
from infinity.flight import IN_FLIGHT, Flight
from infinity.kernel_args import AccumulateSegment, Kernel, Segment, SumsqSegment, pack_accumulate, pack_sumsq
from infinity.layout import GRAD, PARAM, RESIDUAL, RUN, PageId
from infinity.optim.base import Optimizer
from infinity.planes import Planes
from infinity.residency import PageState
from infinity.store import Chain
from infinity.task_queue import Batch, Priority
from infinity.tiers.device import Device

SPILL_PAGES = 8
"""Gradient pages that are written back at once when frames are short."""


def clip_factor(norm: float, max_norm: float) -> float:
    """What gradients are multiplied by, computed in double: min(1, max_norm / (norm + 1e-6)); 1 where clipping is off."""
    if max_norm <= 0.0:
        return 1.0
    factor = max_norm / (norm + 1e-6)
    return factor if factor < 1.0 or math.isnan(factor) else 1.0


@dataclass(slots=True)
class TileUpdate:
    """The update of one tile that waits for frames."""

    unit: Unit
    flat: FlatParam
    tile: int
    segments: list[tuple[int, int, int]]
    """(parameter, begin, end) in elements of the shard."""
    grads: dict[int, torch.Tensor]
    """Direct gradients by parameter; empty: they are in the ``grad`` plane."""
    scalars: dict[int, bytes]


@dataclass(slots=True)
class FlatUpdate:
    """What remains to be done for a flat parameter whose update has begun."""

    tiles_left: int
    grad_nbytes: int


class Step:
    """Gradients and updates of one engine."""

    def __init__(
        self,
        flight: Flight,
        planes: Planes,
        device: Device,
        optimizer: Optimizer,
        page_nbytes: int,
        group_of: Callable[[FlatParam, int], dict[str, Any]],
    ) -> None:
        self._flight = flight
        self._store = flight.store
        self._planes = planes
        self._device = device
        self._optimizer = optimizer
        self._page_nbytes = page_nbytes
        self._group_of = group_of
        self._flats: dict[int, FlatParam] = {}
        self._waiting: deque[TileUpdate] = deque()
        self._in_flight = 0
        """Tiles whose update was handed over and has not ended."""
        self._tiles_left: dict[int, int] = {}
        """Unit -> tiles whose update is not done."""
        self._flat_updates: dict[int, FlatUpdate] = {}
        self._sums: dict[int, np.ndarray[Any, np.dtype[np.float64]]] = {}
        self._summed: set[tuple[int, int]] = set()
        """(flat parameter, parameter) whose squares were summed in this step."""
        self._grad_tail: dict[tuple[int, int], int] = {}
        """(flat parameter, page) -> last task on that part of a ``grad`` plane that rests on the device."""

    def open_units(self, units: Iterable[Unit]) -> None:
        """Takes the units whose gradients these are."""
        self._flats = {flat.spec.index: flat for unit in units for flat in unit.flats}

    # ---- gradients ----

    def reduce(self, unit: Unit) -> None:
        """Adds the gradients that have fired to the running sums; those that can stay where they are, stay."""
        for flat in unit.flats:
            if flat.gradients and not (GRAD in flat.planes and _is_direct(flat)):
                self._reduce_flat(flat)

    def has_pending(self, unit: Unit) -> bool:
        """Has ``unit`` a gradient that no update has taken?"""
        return any(flat.gradients or (any(flat.has_grad) and flat.spec.index not in self._flat_updates) for flat in unit.flats)

    def put_away(self, unit: Unit) -> bool:
        """Reduces every gradient that has fired, to free the memory it is in; False where there is none."""
        flats = [flat for flat in unit.flats if flat.gradients]
        for flat in flats:
            self._reduce_flat(flat)
        return bool(flats)

    def _reduce_flat(self, flat: FlatParam) -> None:
        gradients, flat.gradients = flat.gradients, []
        sources = [self._source(flat, gradient.param, gradient.grad) for gradient in gradients]
        page_numel = flat.spec.page_numel(GRAD)
        parts: dict[int, list[AccumulateSegment]] = {}
        for gradient, source in zip(gradients, sources, strict=True):
            place = flat.spec.params[gradient.param]
            width = source.element_size()
            for index, begin, end in _cut(place.elem_offset, place.elem_end, page_numel):
                address = source.data_ptr() + (begin - place.elem_offset) * width
                add = flat.has_grad[gradient.param]
                parts.setdefault(index, []).append(AccumulateSegment(begin % page_numel * 4, address, end - begin, width == 2, add))
            flat.has_grad[gradient.param] = True
        nbytes = sum(gradient.charged_nbytes for gradient in gradients)
        pages_left = len(parts)

        def done(n_pages: int = 1) -> None:
            nonlocal pages_left
            pages_left -= n_pages
            if pages_left == 0:
                self._device.refund(nbytes)
                sources.clear()

        accumulate = self._accumulate_on_device if GRAD in flat.planes else self._accumulate_in_page
        handed_over = 0
        try:
            for index, segments in parts.items():
                accumulate(flat, index, segments, done)
                handed_over += 1
        except BaseException:
            done(len(parts) - handed_over)
            raise

    def _accumulate_in_page(self, flat: FlatParam, index: int, segments: list[AccumulateSegment], done: Callable[[], None]) -> None:
        page = self._planes.page(flat, GRAD, index)
        fresh = index not in flat.grad_pages
        flat.grad_pages.add(index)
        segments.sort(key=lambda part: part.to)  # as the page is walked to check it; those of one parameter stay in the order of firing
        self._run_chain(
            lambda chain: chain.kernel(Kernel.ACCUMULATE, pack_accumulate(_based(segments, chain.address(page))), covers=(page,)),
            done,
            update=() if fresh else (page,),
            write=(page,) if fresh else (),
        )

    def _accumulate_on_device(self, flat: FlatParam, index: int, segments: list[AccumulateSegment], done: Callable[[], None]) -> None:
        begin, end = flat.spec.page_elems(GRAD, index)
        memory, put_back = self._planes.on_device(flat, GRAD, begin * 4, (end - begin) * 4)
        before = self._grad_tail.get((flat.spec.index, index))
        batch = Batch(Priority.WRITE_BACK)
        handle = batch.kernel(Kernel.ACCUMULATE, pack_accumulate(_based(segments, memory.data_ptr())), () if before is None else (before,))

        def finished() -> None:
            if put_back is not None:
                put_back()
            done()

        task = self._flight.submit_work(batch, handle, finished)
        self._grad_tail[flat.spec.index, index] = task
        if put_back is not None:
            self._flight.wait_for((task,))

    def _run_chain(
        self,
        build: Callable[[Chain], object],
        done: Callable[[], None] | None = None,
        *,
        update: Sequence[PageId] = (),
        read: Sequence[PageId] = (),
        write: Sequence[PageId] = (),
        priority: Priority = Priority.WRITE_BACK,
    ) -> None:
        """Hands over the chain that ``build`` makes of these pages, waiting for frames if need be, not for its end."""
        while True:
            for page in (*update, *read, *write):
                self._flight.settle_page(page)
            with self._flight.bookkeeping:
                batch = Batch(priority)
                chain = self._store.chain(batch, update=update, read=read, write=write, write_back=False)
                if chain is not None:
                    build(chain)
                    self._flight.submit_work(batch, chain.close(), done)
                    return
            self.spill(keep=(*update, *read, *write))
            self._flight.wait_any()

    def spill(self, keep: Sequence[PageId] = ()) -> None:
        """Writes some gradient pages back, so that their frames can be had; never waits."""
        with self._flight.bookkeeping:
            batch = Batch(Priority.WRITE_BACK)
            handles: list[int] = []
            for flat in self._flats.values():
                for index in flat.grad_pages:
                    page = self._planes.page(flat, GRAD, index)
                    if (
                        page not in keep
                        and self._store.has_slot(page)
                        and self._store.state(page) is PageState.DIRTY
                        and not self._store.holds(page)
                    ):
                        handles.append(self._store.write_back(page, batch))
                        if len(handles) == SPILL_PAGES:
                            break
                if len(handles) == SPILL_PAGES:
                    break
            self._flight.submit_each(batch, handles)

    def _source(self, flat: FlatParam, param: int, grad: torch.Tensor) -> torch.Tensor:
        """The gradient as contiguous memory that kernels can read."""
        if grad.dtype not in (torch.bfloat16, torch.float32):
            raise ModelError(
                f"parameter {flat.spec.params[param].spec.name!r} got a gradient of dtype {grad.dtype}; bf16 and fp32 are known."
            )
        return self._planes.to_host(grad)

    def drop(self, units: Iterable[Unit]) -> None:
        """Forgets every gradient that no update has used; waits for what is in flight."""
        self.finish()
        for unit in units:
            for flat in unit.flats:
                self._device.refund(flat.drop_gradients())
                for index in list(flat.grad_pages):
                    self._discard(flat, index)
        self._grad_tail.clear()
        self.forget_norm()

    def _discard(self, flat: FlatParam, index: int) -> None:
        page = self._planes.page(flat, GRAD, index)
        self._flight.settle_page(page)
        self._store.discard(page)
        flat.grad_pages.discard(index)

    def read_grad(self, unit: Unit, flat: FlatParam, index: int) -> torch.Tensor | None:
        """A copy of the sum so far of one parameter's gradient, in its dtype; None where there is none."""
        self.reduce(unit)
        place = flat.spec.params[index]
        for gradient in flat.gradients:
            if gradient.param == index:
                return gradient.grad.detach().clone()
        if not flat.has_grad[index]:
            return None
        summed = self._planes.read(flat, GRAD, place.elem_offset, place.elem_end).view(np.float32)
        return torch.from_numpy(summed).view(place.spec.shape).to(self._device.torch_device, flat.dtype)

    def write_grad(self, unit: Unit, flat: FlatParam, index: int, gradient: Gradient | None) -> None:
        """Puts ``gradient`` in the place of all that has arrived for one parameter."""
        self.reduce(unit)
        for old in [old for old in flat.gradients if old.param == index]:
            flat.gradients.remove(old)
            self._device.refund(old.charged_nbytes)
        flat.has_grad[index] = False
        if gradient is not None:
            flat.gradients.append(gradient)
            self.reduce(unit)

    # ---- norm ----

    def norm(self, units: Iterable[Unit]) -> float:
        """The 2-norm of every gradient of this step before clipping; waits for it.

        Order: per parameter, exact sum of the fp64 sums of its runs; then the exact sum over the parameters.
        """
        batch = Batch()
        handles: list[int] = []
        kept: list[torch.Tensor] = []
        for unit in units:
            for flat in unit.flats:
                for gradient in flat.gradients:
                    source = self._source(flat, gradient.param, gradient.grad)
                    kept.append(source)
                    place = flat.spec.params[gradient.param]
                    segment = self._sum_segment(
                        flat, gradient.param, source.data_ptr(), place.elem_offset, place.elem_end, source.element_size() == 2
                    )
                    handles.append(batch.kernel(Kernel.SUMSQ, pack_sumsq([segment])))
                if GRAD in flat.planes:
                    kept += self._sum_plane_on_device(batch, handles, flat)
        self._flight.submit_each(batch, handles)
        for unit in units:
            for flat in unit.flats:
                for index in sorted(flat.grad_pages):
                    self._sum_page(flat, index)
        self._flight.wait_all()
        return self.finished_norm()

    def finished_norm(self) -> float:
        """The norm, when the sums of every gradient of the step are there."""
        sums = []
        for flat_index, param in self._summed:
            place = self._flats[flat_index].spec.params[param]
            sums.append(math.fsum(self._sums[flat_index][place.elem_offset // RUN : -(-place.elem_end // RUN)]))
        return math.sqrt(math.fsum(sums))

    @property
    def summed(self) -> bool:
        """Is there a norm, now or when the updates are done?"""
        return bool(self._summed)

    def forget_norm(self) -> None:
        """The sums of another step begin."""
        self._summed.clear()

    def _sum_segment(self, flat: FlatParam, param: int, address: int, begin: int, end: int, is_bf16: bool) -> SumsqSegment:
        self._summed.add((flat.spec.index, param))
        sums = self._sums.get(flat.spec.index)
        if sums is None:
            sums = self._sums[flat.spec.index] = np.zeros(flat.spec.numel // RUN, np.float64)
        return SumsqSegment(address, int(sums.ctypes.data) + begin // RUN * 8, end - begin, is_bf16)

    def _sum_segments(self, flat: FlatParam, begin: int, end: int, address: int) -> list[SumsqSegment]:
        segments = []
        for place, first, last in flat.spec.segments(begin, end):
            param = flat.number_of(place)
            if flat.has_grad[param]:
                segments.append(self._sum_segment(flat, param, address + (first - begin) * 4, first, last, False))
        return segments

    def _sum_page(self, flat: FlatParam, index: int) -> None:
        page = self._planes.page(flat, GRAD, index)
        begin, end = flat.spec.page_elems(GRAD, index)
        self._run_chain(
            lambda chain: chain.kernel(Kernel.SUMSQ, pack_sumsq(self._sum_segments(flat, begin, end, chain.address(page))), covers=(page,)),
            read=(page,),
            priority=Priority.DEMAND,
        )

    def _sum_plane_on_device(self, batch: Batch, handles: list[int], flat: FlatParam) -> list[torch.Tensor]:
        if not any(flat.has_grad):
            return []
        self._wait_for_tail(flat, range(flat.spec.page_count(GRAD)))
        memory, _ = self._planes.on_device(flat, GRAD, 0, flat.spec.shard_numel * 4)
        handles.append(batch.kernel(Kernel.SUMSQ, pack_sumsq(self._sum_segments(flat, 0, flat.spec.shard_numel, memory.data_ptr()))))
        return [memory]

    def _wait_for_tail(self, flat: FlatParam, indices: Iterable[int]) -> None:
        tasks = [self._grad_tail[flat.spec.index, index] for index in indices if (flat.spec.index, index) in self._grad_tail]
        if tasks:
            self._flight.wait_for(tasks)

    # ---- update ----

    def update(self, unit: Unit, grad_factor: float) -> None:
        """Queues the update of every tile of ``unit`` that has a gradient; ``pump`` hands them over."""
        for flat in unit.flats:
            if flat.gradients or any(flat.has_grad):
                self._update_flat(unit, flat, grad_factor)

    def _update_flat(self, unit: Unit, flat: FlatParam, grad_factor: float) -> None:
        grads: dict[int, torch.Tensor] = {}
        nbytes = 0
        if _is_direct(flat):
            for gradient in flat.gradients:
                source = gradient.grad.detach().contiguous()
                grads[gradient.param] = self._source(flat, gradient.param, source) if self._device.host_addressable else source
                nbytes += gradient.charged_nbytes
            flat.gradients = []
            present = sorted(grads)
        else:
            if flat.gradients:
                self._reduce_flat(flat)
            present = [index for index, has in enumerate(flat.has_grad) if has]
        scalars = {}
        for index in present:
            flat.steps[index] += 1
            scalars[index] = self._optimizer.scalars(self._group_of(flat, index), flat.steps[index], grad_factor)
        flat.mark_updated(present)
        tiles = []
        for tile in range(flat.spec.n_tiles):
            numbered = ((flat.number_of(place), begin, end) for place, begin, end in flat.spec.segments(*flat.spec.tile_range(tile)))
            segments = [(number, begin, end) for number, begin, end in numbered if number in scalars]
            if segments:
                tiles.append(TileUpdate(unit, flat, tile, segments, grads, scalars))
        self._tiles_left[unit.index] = self._tiles_left.get(unit.index, 0) + len(tiles)
        self._flat_updates[flat.spec.index] = FlatUpdate(len(tiles), nbytes)
        self._waiting.extend(tiles)
        self._flight.irrevocable = True

    def is_updating(self, unit: Unit) -> bool:
        """Is an update of ``unit`` not done?"""
        return unit.index in self._tiles_left

    @property
    def is_idle(self) -> bool:
        """Is no update waiting or in flight?"""
        return not self._tiles_left

    def pump(self) -> None:
        """Hands over the updates that frames allow now; never waits."""
        while self._waiting:
            if not self._issue(self._waiting[0]):
                self.spill()
                return
            self._waiting.popleft()

    def is_waiting(self, unit: Unit) -> bool:
        """Is a part of the update of ``unit`` not handed over yet?"""
        return any(update.unit is unit for update in self._waiting)

    def hand_over(self, unit: Unit) -> None:
        """Hands the whole update of ``unit`` to the queue, before any other; waits for frames if need be, not for the update."""
        first = [update for update in self._waiting if update.unit is unit]
        if not first:
            return
        self._waiting = deque([*first, *(update for update in self._waiting if update.unit is not unit)])
        self.pump()
        while self.is_waiting(unit):
            self._flight.wait_any()
            self.pump()

    def finish(self, unit: Unit | None = None) -> None:
        """Waits until the updates of ``unit``, or all, are done."""
        if unit is not None:
            self.hand_over(unit)
        self.pump()
        while self._tiles_left if unit is None else self.is_updating(unit):
            self._flight.wait_any()
            self.pump()

    def _issue(self, update: TileUpdate) -> bool:
        """Hands one tile's chain over; False, and nothing has changed, where frames are short or a page is in use now."""
        with self._flight.bookkeeping:
            flat, spec = update.flat, update.flat.spec
            begin, end = spec.tile_range(update.tile)
            pages = {
                plane.name: [self._planes.page(flat, plane.name, index) for index in spec.tile_pages(plane.name, update.tile)]
                for plane in spec.planes
                if plane.name not in flat.planes
            }
            grad_pages = []
            if not update.grads and GRAD not in flat.planes:
                grad_pages = [
                    self._planes.page(flat, GRAD, index) for index in spec.tile_pages(GRAD, update.tile) if index in flat.grad_pages
                ]
            changed = [page for group in pages.values() for page in group]
            if any(self._store.state(page) in IN_FLIGHT or self._store.holds(page) for page in (*changed, *grad_pages)):
                return False
            if not update.grads and GRAD in flat.planes:
                self._wait_for_tail(flat, spec.tile_pages(GRAD, update.tile))
            wanted = sum(self._store.state(page) is PageState.ABSENT for page in changed)
            if wanted > self._store.frames_spare and self._in_flight:
                return False  # pages that are kept for updates to come are worth the wait
            scratch = 0
            if update.grads and not self._device.host_addressable:
                width = next(iter(update.grads.values())).element_size()
                scratch = -(-(end - begin) * width // self._page_nbytes)
            batch = Batch(Priority.WRITE_BACK)
            chain = self._store.chain(batch, update=changed, read=grad_pages, scratch=scratch, write_back=not self._store.fits_all)
            if chain is None:
                return False
            for page in pages.get(PARAM, ()):
                self._store.unkeep(page)
            staged: list[tuple[torch.Tensor, Callable[[], None] | None]] = []
            addresses: dict[str, list[int]] = {}
            for plane in spec.planes:
                if plane.name in pages:
                    addresses[plane.name] = [chain.address(page) for page in pages[plane.name]]
                    continue
                memory, put_back = self._planes.on_device(flat, plane.name, begin * plane.elem_nbytes, (end - begin) * plane.elem_nbytes)
                staged.append((memory, put_back))
                piece_nbytes = spec.page_numel(plane.name) * plane.elem_nbytes
                addresses[plane.name] = [memory.data_ptr() + at for at in range(0, memory.nbytes, piece_nbytes)]
            segments: list[Segment] = []
            sums: list[SumsqSegment] = []
            for number, seg_begin, seg_end in update.segments:
                for address, first, last, is_bf16 in self._grad_pieces(update, chain, grad_pages, staged, number, seg_begin, seg_end):
                    segments.append(Segment(address, first - begin, last - begin, is_bf16, update.scalars[number]))
                    sums.append(self._sum_segment(flat, number, address, first, last, is_bf16))
            chain.kernel(Kernel.SUMSQ, pack_sumsq(sums), covers=grad_pages)
            states = [addresses[plane.name] for plane in spec.planes if plane.name not in (PARAM, RESIDUAL)]
            residual = addresses[RESIDUAL][0] if RESIDUAL in addresses else 0
            piece_numel = min(spec.page_numel(plane.name) for plane in spec.planes)
            args = self._optimizer.pack(addresses[PARAM][0], residual, states, piece_numel, segments)
            chain.kernel(self._optimizer.kernel, args, covers=(*changed, *grad_pages))

            def done() -> None:
                for _, put_back in staged:
                    if put_back is not None:
                        put_back()
                self._tile_done(update, grad_pages)

            self._flight.submit_work(batch, chain.close(), done)
            self._in_flight += 1
            return True

    def _grad_pieces(
        self,
        update: TileUpdate,
        chain: Chain,
        grad_pages: list[PageId],
        staged: list[tuple[torch.Tensor, Callable[[], None] | None]],
        number: int,
        begin: int,
        end: int,
    ) -> Iterator[tuple[int, int, int, bool]]:
        """(address, begin, end, is bf16) of the gradient of elements [begin, end) of a parameter, each in one piece of host memory."""
        flat, spec = update.flat, update.flat.spec
        if update.grads:
            grad = update.grads[number]
            width = grad.element_size()
            offset = begin - spec.params[number].elem_offset
            if self._device.host_addressable:
                yield grad.data_ptr() + offset * width, begin, end, width == 2
                return
            tile_begin = spec.tile_range(update.tile)[0]
            raw = grad.view(-1).view(torch.uint8)
            frame_numel = self._page_nbytes // width
            for index, first, last in _cut(begin - tile_begin, end - tile_begin, frame_numel):
                address = chain.scratch(index) + first % frame_numel * width
                at = first + tile_begin - spec.params[number].elem_offset
                self._device.wait(self._device.copy_to_host(address, raw, at * width, (last - first) * width))
                yield address, first + tile_begin, last + tile_begin, width == 2
            return
        if GRAD in flat.planes:
            memory, _ = self._planes.on_device(flat, GRAD, begin * 4, (end - begin) * 4)
            staged.append((memory, None))
            yield memory.data_ptr(), begin, end, False
            return
        page_numel = spec.page_numel(GRAD)
        for index, first, last in _cut(begin, end, page_numel):
            yield chain.address(self._planes.page(flat, GRAD, index)) + first % page_numel * 4, first, last, False

    def _tile_done(self, update: TileUpdate, grad_pages: list[PageId]) -> None:
        self._in_flight -= 1
        flat, unit = update.flat, update.unit
        for page in grad_pages:
            self._store.discard(page)
            flat.grad_pages.discard(page.index)
        left = self._flat_updates[flat.spec.index]
        left.tiles_left -= 1
        if left.tiles_left == 0:
            del self._flat_updates[flat.spec.index]
            self._device.refund(left.grad_nbytes)
            flat.has_grad = [False] * len(flat.params)
            update.grads.clear()
        self._tiles_left[unit.index] -= 1
        if self._tiles_left[unit.index] == 0:
            del self._tiles_left[unit.index]
            self._flight.irrevocable = bool(self._tiles_left)


def _is_direct(flat: FlatParam) -> bool:
    """Is every gradient that arrived the only one of its parameter?"""
    return not any(flat.has_grad) and len({gradient.param for gradient in flat.gradients}) == len(flat.gradients)


def _cut(begin: int, end: int, piece: int) -> Iterator[tuple[int, int, int]]:
    """(piece, begin, end) of the parts of [begin, end) that lie in one piece each."""
    while begin < end:
        index = begin // piece
        stop = min(end, (index + 1) * piece)
        yield index, begin, stop
        begin = stop


def _based(segments: Iterable[AccumulateSegment], base: int) -> list[AccumulateSegment]:
    return [AccumulateSegment(base + part.to, part.source, part.numel, part.source_is_bf16, part.add) for part in segments]
