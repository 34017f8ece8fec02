"""Runs native kernels on numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from infinity.kernel_args import Kernel
from infinity.native import ffi, lib

Array = np.ndarray[Any, np.dtype[Any]]


def run(kernel: Kernel, args: bytes) -> tuple[int, int]:
    """(status, value)."""
    value = ffi.new("uint64_t *")
    status = lib.inf_kernel_run(int(kernel), ffi.from_buffer(args), len(args), value)
    return status, value[0]


def run_well(kernel: Kernel, args: bytes) -> int:
    """The value of a kernel that must end well."""
    status, value = run(kernel, args)
    assert status == 0
    return value


def crc32c_by(version: int, data: Any, nbytes: int, seed: int) -> int:
    """By one version (``INF_CRC_...``), which this machine must have."""
    crc = ffi.new("uint32_t *")
    assert lib.inf_crc32c_by(version, data, nbytes, seed, crc) == 0
    return int(crc[0])


def crc_versions() -> list[int]:
    """Those that this machine has, the table aside."""
    crc = ffi.new("uint32_t *")
    versions = range(lib.INF_CRC_TABLE + 1, lib.INF_CRC_VERSIONS)
    return [version for version in versions if lib.inf_crc32c_by(version, ffi.NULL, 0, 0, crc) == 0]


def table_crc(array: Array) -> int:
    """The reference's crc32c of the bytes of an array."""
    return int(lib.inf_crc32c_table(ffi.cast("void *", address(array)), array.nbytes, 0))


def address(array: Array) -> int:
    """Of the first element."""
    return array.ctypes.data


def at_odd_offset(array: Array, elems: int) -> Array:
    """A copy that starts ``elems`` elements after a multiple of 64 bytes."""
    per_line = 64 // array.itemsize
    room = np.empty(array.size + elems + per_line, array.dtype)
    start = (-room.ctypes.data % 64) // array.itemsize + elems
    moved = room[start : start + array.size]
    moved[:] = array
    return moved


def bits(array: Array) -> Array:
    """For comparing bit for bit, NaNs included."""
    return array.view({2: np.uint16, 4: np.uint32, 8: np.uint64}[array.itemsize])
