"""Memory that people bring or ask for: where an array or tensor lies, and new ones that lie well.

Whoever moves bytes needs an address, a length, and something that keeps both true. torch is looked at only where it is loaded already.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from infinity.errors import ArrayError
from infinity.native import ffi

if TYPE_CHECKING:
    import torch

__all__ = ["Memory", "empty", "memory_of"]

_HUGE_PAGE_NBYTES = 2 << 20


class Memory(NamedTuple):
    """``nbytes`` bytes at ``address``, there for as long as ``owner`` is."""

    address: int
    nbytes: int
    owner: object


def memory_of(array: Any, *, writable: bool) -> Memory:
    """Where the bytes of a tensor, an array or another object with a buffer lie.

    Memory: ``owner`` keeps them there: a bytearray or an mmap cannot be resized or closed meanwhile.
    Errors: ArrayError when they are not one after the other, not in host memory, or may not be written.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _memory_of_tensor(array)
    if isinstance(array, np.ndarray):
        if array.dtype.hasobject:
            raise ArrayError(f"an array of {array.dtype} holds Python objects, which have no bytes. Convert it to numbers.")
        if not array.flags.c_contiguous:
            raise ArrayError(
                f"an array of shape {array.shape} is not contiguous. Take np.ascontiguousarray(array)"
                + (", or array.T, which is." if array.flags.f_contiguous else ".")
            )
    try:
        view = ffi.from_buffer(array, require_writable=writable)
    except (TypeError, ValueError, BufferError) as error:
        what = "read into" if writable else "written from"
        raise ArrayError(f"a {type(array).__name__} cannot be {what}: {error}. Give a contiguous array, tensor or buffer.") from error
    return Memory(int(ffi.cast("uintptr_t", view)), len(view), view)


def _memory_of_tensor(tensor: torch.Tensor) -> Memory:
    name = f"a tensor of shape {tuple(tensor.shape)}"
    if tensor.device.type != "cpu":
        raise ArrayError(f"{name} is on {tensor.device}, and files are read into and written from host memory. Take tensor.cpu().")
    if str(tensor.layout) != "torch.strided":
        raise ArrayError(f"{name} has the layout {tensor.layout}. Take tensor.to_dense().")
    if not tensor.is_contiguous():
        raise ArrayError(f"{name} and strides {tensor.stride()} is not contiguous. Take tensor.contiguous().")
    if tensor.is_conj() or tensor.is_neg():
        raise ArrayError(f"{name} is a view that conjugates or negates. Take tensor.resolve_conj().resolve_neg().")
    nbytes = tensor.numel() * tensor.element_size()
    try:
        storage = tensor.untyped_storage()
        there = storage.nbytes() - tensor.storage_offset() * tensor.element_size() >= nbytes
        address = tensor.data_ptr()
    except (RuntimeError, NotImplementedError) as error:
        raise ArrayError(f"{name} has no memory of its own: {error}") from error
    if nbytes and not (there and address):
        raise ArrayError(f"{name} has no memory behind it (a released parameter?). Take infinity.gathered(module).")
    return Memory(address, nbytes, (tensor, storage))


@overload
def empty(shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor: ...
@overload
def empty(shape: int | Sequence[int], dtype: DTypeLike = ...) -> NDArray[Any]: ...
def empty(shape: int | Sequence[int], dtype: torch.dtype | DTypeLike = np.uint8) -> torch.Tensor | NDArray[Any]:
    """A tensor where ``dtype`` is torch's, else a numpy array, whose memory files can be read into and written from without a copy.

    Memory: starts at a page (from 2 MiB on: at a huge page, which is advised), is zero, and is given back with the last view of it.
    """
    lengths = (shape,) if isinstance(shape, int) else tuple(shape)
    numel = math.prod(lengths)
    if numel < 0 or any(length < 0 for length in lengths):
        raise ValueError(f"shape {lengths}: a length cannot be negative")
    if type(dtype).__module__ == "torch":
        return _empty_tensor(lengths, cast("torch.dtype", dtype))
    kind = np.dtype(cast("DTypeLike", dtype))
    if kind.hasobject:
        raise ArrayError(f"an array of {kind} holds Python objects, which have no bytes. Take a dtype of numbers.")
    array: NDArray[Any] = _map(numel * kind.itemsize).view(kind).reshape(lengths)
    return array


def _empty_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    loaded = sys.modules["torch"]  # whoever has a dtype of torch's has it
    tensor: torch.Tensor = loaded.from_numpy(_map(math.prod(shape) * dtype.itemsize)).view(dtype).view(shape)
    return tensor


def _map(nbytes: int) -> NDArray[np.uint8]:
    """Private memory of its own. Unlike the engine's frames a forked child sees it, as it does any array."""
    huge = nbytes >= _HUGE_PAGE_NBYTES
    room = mmap.mmap(-1, max(nbytes, 1) + (_HUGE_PAGE_NBYTES if huge else 0), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    skip = 0
    if huge:
        skip = -int(ffi.cast("uintptr_t", ffi.from_buffer(room))) % _HUGE_PAGE_NBYTES
        with contextlib.suppress(OSError):  # advice: a kernel without huge pages is slower, no more
            room.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(room, np.uint8, nbytes, skip)
