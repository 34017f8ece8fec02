"""Reading and writing the planes of a flat parameter as bytes, wherever they rest. Off the training path.

A plane rests on the device, in frames, or in a backing; whoever reads or writes one here need not know which.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from infinity.flat_param import FlatParam
from infinity.flight import Flight
from infinity.kernel_args import Kernel, pack_copy
from infinity.layout import Layout, PageId
from infinity.residency import PageState
from infinity.task_queue import Batch
from infinity.tiers.device import Device

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Planes:
    """Every plane of one engine."""

    def __init__(self, layout: Layout, flight: Flight, device: Device) -> None:
        self._layout = layout
        self._flight = flight
        self._store = flight.store
        self._device = device

    def page(self, flat: FlatParam, plane: str, index: int) -> PageId:
        """The id of a page of a plane that has pages."""
        return self._layout.page_id(flat.spec.index, plane, index)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` where the host may read it: itself, or a copy. Contiguous."""
        tensor = tensor.detach().contiguous()
        if self._device.host_addressable:
            return tensor
        copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        if tensor.nbytes:
            self._device.wait(self._device.copy_to_host(copy.data_ptr(), tensor.view(-1).view(torch.uint8), 0, tensor.nbytes))
        return copy

    def on_device(self, flat: FlatParam, plane: str, offset: int, nbytes: int) -> tuple[torch.Tensor, Callable[[], None] | None]:
        """Bytes of a plane that rests on the device as host memory, and what puts them back (None: they are the plane itself)."""
        tensor = flat.planes[plane][offset : offset + nbytes]
        copy = self.to_host(tensor)
        if self._device.host_addressable:
            return copy, None

        def put_back() -> None:
            self._device.wait(self._device.copy_to_device(flat.planes[plane], offset, copy.data_ptr(), nbytes))

        return copy, put_back

    def read(self, flat: FlatParam, plane: str, begin: int, end: int) -> Bytes:
        """Elements [begin, end) of a plane; waits for what is in flight."""
        self._flight.wait_all()
        grid = flat.spec.grids[plane]
        width = grid.plane.elem_nbytes
        if plane in flat.planes:
            memory, _ = self.on_device(flat, plane, begin * width, (end - begin) * width)
            return np.array(memory.numpy())
        out = np.empty((end - begin) * width, np.uint8)
        for index in range(begin // grid.page_numel, -(-end // grid.page_numel)):
            page_begin, page_end = flat.spec.page_elems(plane, index)
            first, last = max(begin, page_begin), min(end, page_end)
            content = np.frombuffer(self._store.read_page(self.page(flat, plane, index)), np.uint8)
            out[(first - begin) * width : (last - begin) * width] = content[(first - page_begin) * width : (last - page_begin) * width]
        return out

    def write(self, flat: FlatParam, plane: str, begin: int, data: Bytes) -> None:
        """Elements from ``begin`` on become ``data``, where they rest; a gathered copy is not refreshed. Waits for what is in flight."""
        self._flight.wait_all()
        grid = flat.spec.grids[plane]
        width = grid.plane.elem_nbytes
        end = begin + data.size // width
        if plane in flat.planes:
            if data.size:
                self._device.wait(self._device.copy_to_device(flat.planes[plane], begin * width, int(data.ctypes.data), data.size))
            return
        for index in range(begin // grid.page_numel, -(-end // grid.page_numel)):
            page_begin, page_end = flat.spec.page_elems(plane, index)
            first, last = max(begin, page_begin), min(end, page_end)
            page = self.page(flat, plane, index)
            part = data[(first - begin) * width : (last - begin) * width]
            if (first, last) != (page_begin, page_end):
                whole = np.array(np.frombuffer(self._store.read_page(page), np.uint8))
                whole[(first - page_begin) * width : (last - page_begin) * width] = part
                part = whole
            self._store.write_page(page, part.data)
            self._write_back(page)

    def fill(self, flat: FlatParam, plane: str, begin: int, data: Bytes) -> None:
        """As ``write``, for whole pages that have no content worth keeping: handed to the queue, not waited for.

        Memory: keeps ``data`` until it is written.
        """
        if plane in flat.planes:
            self.write(flat, plane, begin, data)
            return
        grid = flat.spec.grids[plane]
        width = grid.plane.elem_nbytes
        for index in range(begin // grid.page_numel, -(-(begin + data.size // width) // grid.page_numel)):
            first, last = flat.spec.page_elems(plane, index)
            part = data[(first - begin) * width : (last - begin) * width]
            page = self.page(flat, plane, index)
            batch = Batch()
            while (chain := self._store.chain(batch, write=(page,), write_back=True)) is None:
                self._flight.wait_any()
            chain.keep(part)
            chain.kernel(Kernel.COPY, pack_copy(chain.address(page), int(part.ctypes.data), part.size), covers=(page,))
            self._flight.submit_work(batch, chain.close())

    def _write_back(self, page: PageId) -> None:
        """A page that was written in its frame goes to its slot, so that the frame can be had again."""
        if self._store.state(page) is PageState.DIRTY and self._store.has_slot(page) and not self._store.fits_all:
            batch = Batch()
            self._flight.submit_work(batch, self._store.write_back(page, batch))
            self._flight.wait_all()
