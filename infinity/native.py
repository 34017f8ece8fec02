"""The only importer of ``infinity._native``: what it declares, and its codes as exceptions.

Every native function answers 0 (or a count) or ``-errno``; ``check`` is the one place that turns the latter into an exception. cffi
releases the GIL around each call. This module knows no files, tasks or pages.
"""

from __future__ import annotations

import os
from typing import Any, TypeAlias

from infinity._native import ffi, lib

__all__ = ["Bytes", "check", "crc32c", "ffi", "lib"]

Bytes: TypeAlias = "bytes | bytearray | memoryview"


def check(code: int, what: str, filename: str | None = None) -> int:
    """``code`` itself when it is not negative.

    Errors: ``OSError`` (the subclass that belongs to the errno) with ``what``, or with ``filename`` where there is one.
    """
    if code >= 0:
        return code
    if filename is None:
        raise OSError(-code, f"{what}: {os.strerror(-code)}")
    raise OSError(-code, os.strerror(-code), filename)


def crc32c(data: Bytes | Any | int, nbytes: int | None = None, seed: int = 0) -> int:
    """CRC-32C of a buffer, or of ``nbytes`` at an address; ``seed`` is the checksum of what came before.

    Memory: borrows ``data`` for the call.
    """
    if isinstance(data, int):
        if nbytes is None:
            raise TypeError("crc32c of an address needs nbytes")
        return int(lib.inf_crc32c(ffi.cast("void *", data), nbytes, seed))
    view = ffi.from_buffer(data)
    length = len(view) if nbytes is None else nbytes
    if length > len(view):
        raise ValueError(f"crc32c of {length} bytes, but the buffer has {len(view)}")
    return int(lib.inf_crc32c(view, length, seed))
