"""Where the bytes of arrays and tensors lie, what is refused, and new memory."""

from __future__ import annotations

import gc
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import infinity.io
from infinity.errors import ArrayError
from infinity.io.arrays import memory_of
from infinity.native import ffi


def mapped_nbytes() -> int:
    return sum(
        int(line.split()[0].split("-")[1], 16) - int(line.split()[0].split("-")[0], 16)
        for line in Path("/proc/self/maps").read_text().splitlines()
    )


@pytest.mark.parametrize(
    "array", [np.arange(6.0).reshape(2, 3), torch.arange(6.0).double(), bytearray(48), memoryview(bytearray(48)).cast("d")]
)
def test_memory_of_knows_address_and_length(array: object) -> None:
    memory = memory_of(array, writable=True)
    assert memory.nbytes == 48
    if isinstance(array, np.ndarray):
        assert memory.address == array.ctypes.data
    if isinstance(array, torch.Tensor):
        assert memory.address == array.data_ptr()


@pytest.mark.parametrize("dtype", ["datetime64[s]", "float16", "S3", [("a", "i4"), ("b", "u1")]])
def test_numpy_dtypes_without_a_format_have_bytes_too(dtype: object) -> None:
    assert memory_of(np.zeros(4, dtype), writable=True).nbytes == np.zeros(4, dtype).nbytes  # type: ignore[call-overload]


def test_a_view_of_a_tensor_begins_where_it_begins() -> None:
    tensor = torch.arange(10, dtype=torch.int32)
    memory = memory_of(tensor[3:5], writable=True)
    assert (memory.address, memory.nbytes) == (tensor.data_ptr() + 12, 8)


def test_bytes_can_be_written_from_and_not_read_into() -> None:
    assert memory_of(b"abc", writable=False).nbytes == 3
    with pytest.raises(ArrayError, match="read into"):
        memory_of(b"abc", writable=True)


def test_a_read_only_array_is_not_read_into() -> None:
    array = np.zeros(3)
    array.flags.writeable = False
    assert memory_of(array, writable=False).nbytes == 24
    with pytest.raises(ArrayError):
        memory_of(array, writable=True)


def released() -> torch.Tensor:
    tensor = torch.zeros(8)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("array", "remedy"),
    [
        (np.zeros((4, 4))[:, :2], "ascontiguousarray"),
        (np.zeros((4, 3)).T, r"array\.T"),
        (np.array([object()]), "numbers"),
        (torch.zeros(4, 4).t()[:2], r"\.contiguous\(\)"),
        (torch.zeros(4, device="meta"), r"meta, .*\.cpu\(\)"),
        (torch.zeros(4, 4).to_sparse(), "to_dense"),
        (torch.zeros(4, dtype=torch.complex64).conj(), "resolve_conj"),
        (released(), "gathered"),
        ([1, 2], "contiguous array"),
        ("text", "contiguous array"),
    ],
)
def test_what_has_no_bytes_one_after_the_other_is_refused_with_the_remedy(array: object, remedy: str) -> None:
    with pytest.raises(ArrayError, match=remedy):
        memory_of(array, writable=True)


def test_a_tensor_on_an_accelerator_is_refused_and_cpu_is_named() -> None:
    with torch._subclasses.FakeTensorMode(), pytest.raises(ArrayError, match=r"is on cuda:0.*tensor\.cpu\(\)"):
        memory_of(torch.empty(4, device="cuda"), writable=True)


def test_the_owner_keeps_a_bytearray_from_moving() -> None:
    data = bytearray(10)
    memory = memory_of(data, writable=True)
    with pytest.raises(BufferError):
        data.extend(bytes(100_000))
    del memory
    gc.collect()
    data.extend(bytes(10))


def test_the_owner_keeps_the_storage_of_a_tensor_that_is_set_to_another() -> None:
    tensor = torch.zeros(4)
    memory = memory_of(tensor, writable=True)
    tensor.set_(torch.ones(2).untyped_storage())
    _, storage = memory.owner  # type: ignore[misc]
    assert storage.data_ptr() == memory.address


@pytest.mark.parametrize(
    "dtype", [np.float32, "u1", np.dtype("complex128"), torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), 5, (3, 4), (0, 7), [1 << 20]])
def test_empty_has_the_shape_and_dtype_asked_for_at_a_page_and_is_zero(dtype: object, shape: object) -> None:
    array = infinity.io.empty(shape, dtype)  # type: ignore[call-overload]
    assert isinstance(array, torch.Tensor) == isinstance(dtype, torch.dtype)
    assert tuple(array.shape) == ((shape,) if isinstance(shape, int) else tuple(shape))  # type: ignore[arg-type]
    assert array.dtype == (dtype if isinstance(dtype, torch.dtype) else np.dtype(dtype))  # type: ignore[call-overload]
    memory = memory_of(array, writable=True)
    assert memory.nbytes == 0 or memory.address % mmap.PAGESIZE == 0
    assert not any(ffi.buffer(ffi.cast("char *", memory.address), memory.nbytes)[:])


def test_large_memory_begins_at_a_huge_page() -> None:
    assert infinity.io.empty(5 << 20).ctypes.data % (2 << 20) == 0
    assert infinity.io.empty(5 << 20, torch.uint8).data_ptr() % (2 << 20) == 0


@pytest.mark.parametrize("dtype", [np.uint8, torch.uint8])
def test_memory_is_given_back_with_its_last_view(dtype: object) -> None:
    gc.collect()
    before = mapped_nbytes()
    array = infinity.io.empty(64 << 20, dtype)  # type: ignore[call-overload]
    view = array[10:20]
    del array
    assert mapped_nbytes() - before >= 64 << 20
    view[:] = 7
    del view
    gc.collect()
    assert mapped_nbytes() - before < 8 << 20


def test_a_forked_child_sees_the_memory() -> None:
    array = infinity.io.empty(4 << 20)
    array[:] = 3
    child = os.fork()
    if child == 0:
        os._exit(0 if int(array[-1]) == 3 else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(("shape", "dtype", "error"), [(-1, "u1", ValueError), ((2, -2), "u1", ValueError), (3, object, ArrayError)])
def test_what_cannot_be_is_refused(shape: object, dtype: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        infinity.io.empty(shape, dtype)  # type: ignore[call-overload]
