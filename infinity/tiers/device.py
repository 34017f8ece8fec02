"""Device memory: address ranges for life whose memory comes and goes, a budget, and copies.

The only file that knows what the accelerator is.

  cpu        Ordinary memory; a pool's physical pages are moved behind addresses (native/memory.cpp). The host may touch it, so copies are
             ordinary COPY tasks of the queue.
  simulated  For tests: ordinary memory that the host must not touch. Copies happen later, on another thread, after seeded random delays;
             memory that was taken away reads as NaN. A missing wait shows as a wrong number.
  cuda       Storages resized through torch's allocator; copies on side streams.

Invariants:
  * ``used_bytes`` never exceeds ``budget_bytes``: filled ranges (rounded to the grain), allocations, and what was charged.
  * The storage of ``DeviceRange.tensor`` is one object for life: what autograd saved is right again after the next fill.
  * Nothing here bumps a version counter.

Must not know: units, parameters, pages, when to move anything.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from functools import partial
from queue import SimpleQueue
from time import sleep
from typing import Any, Literal

import psutil
import torch

from infinity.errors import BudgetError, EngineClosedError
from infinity.native import check, ffi, lib
from infinity.tiers.mapped import MappedMemory

DeviceKind = Literal["cpu", "simulated", "cuda"]


class Ledger:
    """The bytes of one budget: what is used, and what was at most."""

    __slots__ = ("budget_bytes", "peak_bytes", "used_bytes")

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.peak_bytes = 0

    def take(self, nbytes: int) -> bool:
        """False, and nothing taken, when the budget does not allow it."""
        if nbytes < 0:
            raise ValueError(f"taking {nbytes} bytes from a budget")
        used = self.used_bytes + nbytes
        if used > self.budget_bytes:
            return False
        self.used_bytes = used
        if used > self.peak_bytes:
            self.peak_bytes = used
        return True

    def give(self, nbytes: int) -> None:
        if not 0 <= nbytes <= self.used_bytes:
            raise ValueError(f"giving {nbytes} bytes back to a budget of which {self.used_bytes} are used")
        self.used_bytes -= nbytes


class Ticket:
    """A copy that was issued. This one is of a device whose copies have ended when they return."""

    __slots__ = ()


_ENDED = Ticket()


class DeviceRange(ABC):
    """A 1-D uint8 ``tensor`` of ``nbytes`` whose memory comes with `fill` and goes with `drain`.

    Memory: borrowed by every tensor made on the storage. The address range goes when the last of them dies.
    Order: drained only after its copies were waited for or ordered.
    """

    tensor: torch.Tensor

    def __init__(self, device: Device, nbytes: int) -> None:
        self.nbytes = nbytes
        self.charged_nbytes = device.round_up(nbytes)
        self._device = device
        self._state = _FillState(device.ledger, self.charged_nbytes)

    @property
    def filled(self) -> bool:
        return self._state.filled

    @property
    def address(self) -> int:
        """Where the host finds it, filled or not."""
        raise TypeError(f"memory of a {self._device.kind} device has no host address: use copies")

    def fill(self) -> bool:
        """Puts memory behind the range, content undefined; False, and nothing changed, when the budget does not allow it."""
        self._device.require_open()
        if self._state.filled:
            return True
        if not self._state.ledger.take(self.charged_nbytes):
            return False
        try:
            self._fill()
        except BaseException:
            self._state.ledger.give(self.charged_nbytes)
            raise
        self._state.filled = True
        self._device.keep_to_budget()
        return True

    def drain(self) -> None:
        """Takes the memory away. What a touch then does depends on the kind: a fault, NaN, or torch's error."""
        if self._state.filled:
            self._drain()
            self._state.empty()

    @abstractmethod
    def _fill(self) -> None: ...

    @abstractmethod
    def _drain(self) -> None: ...


class _FillState:
    """Outlives its range, until the memory is gone: it knows what the ledger gets back then."""

    __slots__ = ("charged_nbytes", "filled", "ledger")

    def __init__(self, ledger: Ledger, charged_nbytes: int) -> None:
        self.ledger = ledger
        self.charged_nbytes = charged_nbytes
        self.filled = False

    def empty(self) -> None:
        if self.filled:
            self.filled = False
            self.ledger.give(self.charged_nbytes)


class Device(ABC):
    """One accelerator's memory under a budget.

    Order: one call at a time. A copy sees what the compute stream was given before it. Copies of one direction run in the order of issue;
    between the two directions only `order` and `wait` say what comes first.
    """

    kind: DeviceKind
    host_addressable: bool
    """The host may read and write filled ranges and allocations at their addresses."""
    copies_in_queue: bool
    """Copies are COPY tasks between addresses; `copy_to_device` and `copy_to_host` are for start and end."""
    grain_nbytes: int
    """A filled range is charged in multiples of it."""
    torch_device: torch.device

    def __init__(self, budget_bytes: int) -> None:
        if budget_bytes < 0:
            raise ValueError(f"a device budget of {budget_bytes} bytes")
        self.ledger = Ledger(budget_bytes)
        self._closed = False

    @property
    def budget_bytes(self) -> int:
        return self.ledger.budget_bytes

    @property
    def used_bytes(self) -> int:
        return self.ledger.used_bytes

    @property
    def free_bytes(self) -> int:
        return self.ledger.budget_bytes - self.ledger.used_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was used since the start or `reset_peak`."""
        return self.ledger.peak_bytes

    def reset_peak(self) -> None:
        self.ledger.peak_bytes = self.ledger.used_bytes

    def round_up(self, nbytes: int) -> int:
        """What a range of ``nbytes`` is charged when it is filled."""
        return -(-nbytes // self.grain_nbytes) * self.grain_nbytes

    @abstractmethod
    def open_range(self, nbytes: int) -> DeviceRange:
        """An address range for life, drained."""

    def allocate(self, nbytes: int, what: str = "state that stays on the device") -> torch.Tensor:
        """Ordinary memory for life as a uint8 tensor, content undefined.

        Errors: BudgetError, which names ``what``.
        """
        self.require_open()
        if not self.charge(nbytes):
            raise BudgetError(
                f"{what} needs {nbytes} bytes of device memory, but memory.device leaves {self.free_bytes} "
                f"({self.budget_bytes} minus {self.used_bytes} in use). Raise memory.device to at least {self.used_bytes + nbytes}.",
                knob="memory.device",
                needed_bytes=self.used_bytes + nbytes,
                given_bytes=self.budget_bytes,
            )
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def charge(self, nbytes: int) -> bool:
        """Counts memory that someone else allocated (gradients of autograd); False, and nothing counted, when it is too much."""
        if not self.ledger.take(nbytes):
            return False
        self.keep_to_budget()
        return True

    def refund(self, nbytes: int) -> None:
        self.ledger.give(nbytes)

    @abstractmethod
    def copy_to_device(self, tensor: torch.Tensor, offset: int, host_address: int, nbytes: int) -> Ticket:
        """Copies into the bytes of a contiguous ``tensor`` from ``offset`` on.

        Memory: the host bytes stay as they are until the ticket is done.
        """

    @abstractmethod
    def copy_to_host(self, host_address: int, tensor: torch.Tensor, offset: int, nbytes: int) -> Ticket:
        """Copies out of the bytes of a contiguous ``tensor`` from ``offset`` on.

        Memory: the tensor is kept alive until the copy has ended; the host bytes belong to the copy until the ticket is done.
        """

    @abstractmethod
    def wait(self, ticket: Ticket) -> None:
        """Returns when the copy has ended."""

    @abstractmethod
    def done(self, ticket: Ticket) -> bool: ...

    @abstractmethod
    def order(self, ticket: Ticket) -> None:
        """What the compute stream is given from now on comes after the copy."""

    def register_host(self, address: int, nbytes: int) -> None:  # noqa: B027 - nothing to do on most kinds
        """Page-locks host memory for copies that overlap. Order: undone by `unregister_host` before the memory is unmapped."""

    def unregister_host(self, address: int, nbytes: int) -> None:  # noqa: B027
        """Ends `register_host`."""

    def keep_to_budget(self) -> None:  # noqa: B027
        """Gives physical memory that is neither used nor allowed back to the system."""

    def require_open(self) -> None:
        if self._closed:
            raise EngineClosedError(f"the {self.kind} device was closed")

    def close(self) -> None:
        """Idempotent. Ranges that are still alive can be read and drained, not filled."""
        self._closed = True


def _span(tensor: torch.Tensor, offset: int, nbytes: int) -> int:
    """The address of those bytes of the tensor, checked."""
    if not tensor.is_contiguous():
        raise ValueError("copies need a contiguous tensor")
    if offset < 0 or nbytes < 0 or offset + nbytes > tensor.nbytes:
        raise ValueError(f"bytes {offset} to {offset + nbytes} of a tensor of {tensor.nbytes} bytes")
    return tensor.data_ptr() + offset


class CpuRange(DeviceRange):
    def __init__(self, device: CpuDevice, nbytes: int, pool: ffi.CData) -> None:
        super().__init__(device, nbytes)
        base = ffi.new("void **")
        check(lib.inf_range_open(pool, self.charged_nbytes, base), f"reserving an address range of {self.charged_nbytes} bytes")
        self._pool = pool
        self._base = base[0]
        self._address = int(ffi.cast("uintptr_t", base[0]))
        memory = MappedMemory(self._address, nbytes, partial(_close_range, pool, base[0], self._state))
        self.tensor = torch.from_numpy(memory.array())

    @property
    def address(self) -> int:
        return self._address

    def _fill(self) -> None:
        check(lib.inf_range_fill(self._pool, self._base), f"putting {self.charged_nbytes} bytes of memory behind a range")

    def _drain(self) -> None:
        check(lib.inf_range_drain(self._pool, self._base), f"taking {self.charged_nbytes} bytes of memory from a range")


def _close_range(pool: ffi.CData, base: ffi.CData, state: _FillState) -> None:
    lib.inf_range_close(pool, base)
    state.empty()


class CpuDevice(Device):
    """Ordinary memory. The pool's home has the size of the budget; it takes physical memory as it is used."""

    kind = "cpu"
    host_addressable = True
    copies_in_queue = True
    grain_nbytes = 2 << 20

    def __init__(self, budget_bytes: int) -> None:
        super().__init__(budget_bytes)
        self.torch_device = torch.device("cpu")
        pool = ffi.new("inf_pool **")
        capacity = max(budget_bytes // self.grain_nbytes, 1) * self.grain_nbytes
        check(lib.inf_pool_open(capacity, pool), f"reserving {capacity} bytes for the device pool")
        self._pool = pool[0]
        self._capacity = capacity
        self._close_pool = weakref.finalize(self, _close_pool, os.getpid(), self._pool)
        self._close_pool.atexit = False

    def open_range(self, nbytes: int) -> DeviceRange:
        self.require_open()
        return CpuRange(self, nbytes, self._pool)

    def keep_to_budget(self) -> None:
        if self._closed:
            return
        in_ranges = self._capacity - int(lib.inf_pool_free_nbytes(self._pool))
        allowed = self.budget_bytes - (self.used_bytes - in_ranges)
        if lib.inf_pool_warm_nbytes(self._pool) > allowed:
            check(lib.inf_pool_trim(self._pool, max(allowed, 0)), "giving memory of the device pool back")

    def copy_to_device(self, tensor: torch.Tensor, offset: int, host_address: int, nbytes: int) -> Ticket:
        ctypes.memmove(_span(tensor, offset, nbytes), host_address, nbytes)
        return _ENDED

    def copy_to_host(self, host_address: int, tensor: torch.Tensor, offset: int, nbytes: int) -> Ticket:
        ctypes.memmove(host_address, _span(tensor, offset, nbytes), nbytes)
        return _ENDED

    def wait(self, ticket: Ticket) -> None:
        """Nothing to wait for."""

    def done(self, ticket: Ticket) -> bool:
        return True

    def order(self, ticket: Ticket) -> None:
        """Nothing to order."""

    def close(self) -> None:
        super().close()
        self._close_pool()


def _close_pool(owner_pid: int, pool: ffi.CData) -> None:
    if os.getpid() == owner_pid:
        lib.inf_pool_close(pool)


class _LateCopy(Ticket):
    __slots__ = ("delay_s", "ended", "kept", "nbytes", "source", "target")

    def __init__(self, target: int, source: int, nbytes: int, kept: torch.Tensor, delay_s: float) -> None:
        self.target = target
        self.source = source
        self.nbytes = nbytes
        self.kept: torch.Tensor | None = kept
        self.delay_s = delay_s
        self.ended = threading.Event()


_DELAYS_S = (0.0, 0.0, 0.0001, 0.0005, 0.002)
_NAN_BYTE = 0xFF
"""Every float of such bytes is NaN: bf16, fp16, fp32, fp64."""


class _Link:
    """One direction of copies: in the order of issue, each some time later, on a thread of its own."""

    def __init__(self, seed: str) -> None:
        self._copies: SimpleQueue[_LateCopy | None] = SimpleQueue()
        self._rng = random.Random(seed)
        self._thread: threading.Thread | None = None

    def issue(self, target: int, source: int, nbytes: int, kept: torch.Tensor) -> _LateCopy:
        if self._thread is None:
            self._thread = threading.Thread(target=_carry_out, args=(self._copies,), name="infinity-simulated-copies", daemon=True)
            self._thread.start()
        copy = _LateCopy(target, source, nbytes, kept, self._rng.choice(_DELAYS_S))
        self._copies.put(copy)
        return copy

    def close(self) -> None:
        """Ends the thread after the copies that were issued."""
        if self._thread is not None:
            self._copies.put(None)
            self._thread.join()
            self._thread = None


def _carry_out(copies: SimpleQueue[_LateCopy | None]) -> None:
    while (copy := copies.get()) is not None:
        sleep(copy.delay_s)
        ctypes.memmove(copy.target, copy.source, copy.nbytes)
        copy.kept = None
        copy.ended.set()


class SimulatedRange(DeviceRange):
    def __init__(self, device: SimulatedDevice, nbytes: int) -> None:
        super().__init__(device, nbytes)
        self.tensor = torch.full((nbytes,), _NAN_BYTE, dtype=torch.uint8)
        weakref.finalize(self, self._state.empty).atexit = False

    def _fill(self) -> None:
        """It reads as NaN until something is copied in."""

    def _drain(self) -> None:
        ctypes.memset(self.tensor.data_ptr(), _NAN_BYTE, self.nbytes)


class SimulatedDevice(Device):
    """Ordinary memory that stands for an accelerator's; the host reaches it through copies only.

    Order: what is not waited for is not there. `order` waits, because the compute stream is the caller itself.
    """

    kind = "simulated"
    host_addressable = False
    copies_in_queue = False
    grain_nbytes = 512

    def __init__(self, budget_bytes: int, seed: int) -> None:
        super().__init__(budget_bytes)
        self.torch_device = torch.device("cpu")
        self._links = (_Link(f"{seed} to device"), _Link(f"{seed} to host"))
        self._close_links = weakref.finalize(self, _close_links, os.getpid(), self._links)
        self._close_links.atexit = False

    def open_range(self, nbytes: int) -> DeviceRange:
        self.require_open()
        return SimulatedRange(self, nbytes)

    def allocate(self, nbytes: int, what: str = "state that stays on the device") -> torch.Tensor:
        return super().allocate(nbytes, what).fill_(_NAN_BYTE)

    def copy_to_device(self, tensor: torch.Tensor, offset: int, host_address: int, nbytes: int) -> Ticket:
        self.require_open()
        return self._links[0].issue(_span(tensor, offset, nbytes), host_address, nbytes, tensor)

    def copy_to_host(self, host_address: int, tensor: torch.Tensor, offset: int, nbytes: int) -> Ticket:
        self.require_open()
        return self._links[1].issue(host_address, _span(tensor, offset, nbytes), nbytes, tensor)

    def wait(self, ticket: Ticket) -> None:
        assert isinstance(ticket, _LateCopy)
        ticket.ended.wait()

    def done(self, ticket: Ticket) -> bool:
        assert isinstance(ticket, _LateCopy)
        return ticket.ended.is_set()

    def order(self, ticket: Ticket) -> None:
        self.wait(ticket)

    def close(self) -> None:
        super().close()
        self._close_links()


def _close_links(owner_pid: int, links: tuple[_Link, ...]) -> None:
    if os.getpid() == owner_pid:
        for link in links:
            link.close()


_cuda: Any = torch.cuda  # only partly typed
_REGISTERED_NBYTES = 1 << 30


class _CudaCopy(Ticket):
    __slots__ = ("event", "kept")

    def __init__(self, event: Any, kept: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.event = event
        self.kept = kept


class CudaRange(DeviceRange):
    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        super().__init__(device, nbytes)
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, device=device.torch_device)
        self.tensor.untyped_storage().resize_(0)
        weakref.finalize(self, self._state.empty).atexit = False

    def _fill(self) -> None:
        self.tensor.untyped_storage().resize_(self.nbytes)

    def _drain(self) -> None:
        self.tensor.untyped_storage().resize_(0)


class CudaDevice(Device):
    """The current CUDA device at the time it is opened. One side stream per direction.

    Memory: a copy and what it touches are kept until its event has passed, so torch's allocator never hands memory on under a copy; that is
    why ranges may be drained once their copies were *ordered*, and `record_stream` is not needed.
    """

    kind = "cuda"
    host_addressable = False
    copies_in_queue = False
    grain_nbytes = 512  # of torch's allocator

    def __init__(self, budget_bytes: int) -> None:
        super().__init__(budget_bytes)
        self.torch_device = torch.device("cuda", _cuda.current_device())
        self._to_device = _cuda.Stream(self.torch_device)
        self._to_host = _cuda.Stream(self.torch_device)
        self._in_flight: deque[_CudaCopy] = deque()
        self._registered: dict[int, list[int]] = {}

    def open_range(self, nbytes: int) -> DeviceRange:
        self.require_open()
        return CudaRange(self, nbytes)

    def copy_to_device(self, tensor: torch.Tensor, offset: int, host_address: int, nbytes: int) -> Ticket:
        return self._copy(self._to_device, _cuda_bytes(tensor, offset, nbytes), _host_bytes(host_address, nbytes))

    def copy_to_host(self, host_address: int, tensor: torch.Tensor, offset: int, nbytes: int) -> Ticket:
        return self._copy(self._to_host, _host_bytes(host_address, nbytes), _cuda_bytes(tensor, offset, nbytes))

    def _copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> Ticket:
        self.require_open()
        while self._in_flight and self._in_flight[0].event.query():
            self._in_flight.popleft()
        stream.wait_stream(_cuda.current_stream(self.torch_device))
        with _cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        event = _cuda.Event()
        event.record(stream)
        copy = _CudaCopy(event, (target, source))
        self._in_flight.append(copy)
        return copy

    def wait(self, ticket: Ticket) -> None:
        assert isinstance(ticket, _CudaCopy)
        ticket.event.synchronize()

    def done(self, ticket: Ticket) -> bool:
        assert isinstance(ticket, _CudaCopy)
        return bool(ticket.event.query())

    def order(self, ticket: Ticket) -> None:
        assert isinstance(ticket, _CudaCopy)
        _cuda.current_stream(self.torch_device).wait_event(ticket.event)

    def register_host(self, address: int, nbytes: int) -> None:
        """In pieces of 1 GiB, so no copy may cross a multiple of it from ``address`` on: pages, which are powers of two, do not."""
        pieces: list[int] = []
        self._registered[address] = pieces
        for begin in range(address, address + nbytes, _REGISTERED_NBYTES):
            code = int(_cuda.cudart().cudaHostRegister(begin, min(_REGISTERED_NBYTES, address + nbytes - begin), 0))
            if code != 0:
                self.unregister_host(address, nbytes)
                raise OSError(errno.ENOMEM, f"page-locking {nbytes} bytes of frames for CUDA: error {code}. Lower memory.host")
            pieces.append(begin)

    def unregister_host(self, address: int, nbytes: int) -> None:
        for begin in self._registered.pop(address, ()):
            code = int(_cuda.cudart().cudaHostUnregister(begin))
            if code != 0:
                raise OSError(errno.EINVAL, f"ending the page-lock of {nbytes} bytes of frames: CUDA error {code}")

    def close(self) -> None:
        if not self._closed:
            self._to_device.synchronize()
            self._to_host.synchronize()
            self._in_flight.clear()
        super().close()


def _cuda_bytes(tensor: torch.Tensor, offset: int, nbytes: int) -> torch.Tensor:
    """Those bytes of a tensor, on its storage, with a version counter of their own (`data` has one)."""
    _span(tensor, offset, nbytes)
    if tensor.untyped_storage().nbytes() < (tensor.storage_offset() * tensor.element_size() + offset + nbytes):
        raise ValueError("a copy to or from a drained range")
    return tensor.data.view(-1).view(torch.uint8)[offset : offset + nbytes]


def _host_bytes(address: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


def open_device(kind: DeviceKind, budget_bytes: int, *, seed: int = 0) -> Device:
    """A device of this kind; ``seed`` is for the delays of the simulated one."""
    if kind == "cpu":
        return CpuDevice(budget_bytes)
    if kind == "simulated":
        return SimulatedDevice(budget_bytes, seed)
    if kind == "cuda":
        return CudaDevice(budget_bytes)
    raise ValueError(f"device kind {kind!r}: known are cpu, simulated, cuda")


def available_bytes(kind: DeviceKind) -> int:
    """What is free on such a device now, whoever asks."""
    if kind == "cuda":
        return int(_cuda.mem_get_info()[0])
    try:
        return int(psutil.virtual_memory().available)
    except OSError:  # no descriptor is left to read /proc with; what is free is less than what is available
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
