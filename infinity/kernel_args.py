"""The arguments of native kernels, as the bytes that a task carries: the Python side of the structs of ``native/abi.h``.

Addresses are plain numbers; whoever packs one keeps the memory until the task is complete. This file knows no tensor, no page and no
queue. A packer runs once per tile, so none checks what the kernel checks itself (it answers -EINVAL).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from struct import Struct


class Kernel(IntEnum):
    """``INF_KERNEL_...``"""

    COPY = 0
    CHECKSUM = 1
    VERIFY = 2
    ADAMW = 3
    ACCUMULATE = 4
    SUMSQ = 5
    SPLIT = 6
    JOIN = 7
    SLEEP = 8


class Simd(IntEnum):
    """``INF_SIMD_...``: which form of a kernel runs. All give the same bits; AUTO is the fastest that this machine has."""

    AUTO = 0
    SCALAR = 1
    AVX2 = 2


class Check(IntFlag):
    """``INF_CHECK_...``: what a kernel does about the checksum of a page while it works on it."""

    BEFORE = 1
    """The page must have the expected one before the kernel changes it."""
    AFTER = 2
    """Store the one that the page has when the kernel is done."""


CHECKS_MAX = 16
"""``INF_CHECKS_MAX``: pages that one kernel can check."""

_F32, _BF16 = 0, 1

_COPY = Struct("=3Q")
_CHECKSUM = Struct("=2Q2I")
_CHECK = Struct("=3Q4I")
_SLEEP = Struct("=QiI")
_SPLIT = Struct("=4Q")
_SEGMENTS = Struct("=2I")
_ACCUMULATE_SEGMENT = Struct("=3QiI")
_SUMSQ_SEGMENT = Struct("=3QiI")
_ADAMW = Struct("=7Q2I")
_ADAMW_SEGMENT = Struct("=Q2IiI32s")


@dataclass(slots=True)
class Segment:
    """Elements [begin, end) of a tile, all of one parameter, and how they are updated.

    ``grad`` is the address of the gradient of element ``begin``, ``scalars`` what the optimizer's ``scalars`` gave.
    """

    grad: int
    begin: int
    end: int
    grad_is_bf16: bool
    scalars: bytes


@dataclass(slots=True)
class AccumulateSegment:
    """``to`` (fp32) becomes ``source`` widened (``add`` false: what it held is overwritten), or is increased by it."""

    to: int
    source: int
    numel: int
    source_is_bf16: bool
    add: bool


@dataclass(slots=True)
class SumsqSegment:
    """``sums`` (fp64) gets one sum of squares for each run of 1,024 elements from ``source`` on; the last run may be shorter."""

    source: int
    sums: int
    numel: int
    source_is_bf16: bool


def pack_copy(to: int, source: int, nbytes: int) -> bytes:
    """For COPY; the ranges may overlap where no check follows."""
    return _COPY.pack(to, source, nbytes)


def pack_checksum(address: int, nbytes: int) -> bytes:
    """For CHECKSUM: the completion's value is the crc32c."""
    return _CHECKSUM.pack(address, nbytes, 0, 0)


def pack_verify(address: int, nbytes: int, expected: int) -> bytes:
    """For VERIFY: as CHECKSUM, and fails with EBADMSG when the crc32c is not ``expected``."""
    return _CHECKSUM.pack(address, nbytes, expected, 0)


def pack_check(address: int, nbytes: int, flags: int, expected: int, result: int, tag: int) -> bytes:
    """For COPY, ADAMW, ACCUMULATE and SUMSQ, behind their own arguments: a page to check while it is worked on, ``flags`` says how.

    BEFORE: unless the crc32c is ``expected``, the kernel fails with EBADMSG, and ``tag << 32 | crc32c`` as its value. AFTER: the crc32c
    is stored in the four bytes at ``result``.
    """
    return _CHECK.pack(address, nbytes, result, expected, flags, tag, 0)


def pack_sleep(microseconds: int, status: int = 0, value: int = 0) -> bytes:
    """For SLEEP: waits, then ends with ``status`` (0 or -errno) and ``value``."""
    return _SLEEP.pack(microseconds, status, value)


def pack_split(master: int, param: int, residual: int, numel: int) -> bytes:
    """For SPLIT (fp32 at ``master`` into two 16-bit planes) and for JOIN (the way back)."""
    return _SPLIT.pack(master, param, residual, numel)


def pack_accumulate(segments: Sequence[AccumulateSegment], variant: Simd = Simd.AUTO) -> bytes:
    """For ACCUMULATE."""
    parts = [_SEGMENTS.pack(len(segments), variant)]
    parts += [
        _ACCUMULATE_SEGMENT.pack(segment.to, segment.source, segment.numel, _BF16 if segment.source_is_bf16 else _F32, segment.add)
        for segment in segments
    ]
    return b"".join(parts)


def pack_sumsq(segments: Sequence[SumsqSegment], variant: Simd = Simd.AUTO) -> bytes:
    """For SUMSQ."""
    parts = [_SEGMENTS.pack(len(segments), variant)]
    parts += [
        _SUMSQ_SEGMENT.pack(segment.source, segment.sums, segment.numel, _BF16 if segment.source_is_bf16 else _F32, 0)
        for segment in segments
    ]
    return b"".join(parts)


def pack_adamw(
    param: int,
    residual: int,
    exp_avg: Sequence[int],
    exp_avg_sq: Sequence[int],
    exp_piece_numel: int,
    segments: Sequence[Segment],
    variant: Simd = Simd.AUTO,
) -> bytes:
    """For ADAMW over a tile whose planes are at these addresses; ``residual`` 0 says that ``param`` is fp32.

    A moment is one or two pieces (pages): element e of the tile is in piece e // ``exp_piece_numel``.
    """
    parts = [
        _ADAMW.pack(
            param,
            residual,
            exp_avg[0],
            exp_avg[1] if len(exp_avg) > 1 else 0,
            exp_avg_sq[0],
            exp_avg_sq[1] if len(exp_avg_sq) > 1 else 0,
            exp_piece_numel,
            len(segments),
            variant,
        )
    ]
    parts += [
        _ADAMW_SEGMENT.pack(segment.grad, segment.begin, segment.end, _BF16 if segment.grad_is_bf16 else _F32, 0, segment.scalars)
        for segment in segments
    ]
    return b"".join(parts)
