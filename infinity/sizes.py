"""Bytes and seconds: read them as people write them, print them as people read them, align them.

Knows nothing of what is being measured.
"""

from __future__ import annotations

import re
from fractions import Fraction

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40, "p": 1 << 50}
_WRITTEN = re.compile(r"\s*(?P<number>[0-9]{1,20}(?:\.[0-9]{1,20})?)\s*(?P<prefix>[kmgtp]?)(?P<binary>i?)(?P<byte>b?)\s*", re.IGNORECASE)

BYTES_TEXT = "a number of bytes such as 1048576, '8MiB' or '2GB'"


def parse_bytes(value: int | str) -> int:
    """The number of bytes that ``value`` names; a fraction of a byte is dropped.

    Units: KiB, MiB, GiB, TiB, PiB and the bare letters K, M, G, T, P are powers of 1,024; KB, MB, GB, TB, PB are powers of 1,000.
        Upper and lower case are the same.
    Errors: ValueError says what was read and what is allowed.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"{value!r} is not {BYTES_TEXT}")
    if isinstance(value, int):
        if value < 0:
            raise ValueError("a number of bytes cannot be negative")
        return value
    match = _WRITTEN.fullmatch(value)
    if match is None:
        raise ValueError(f"{value!r} is not {BYTES_TEXT}")
    number, prefix, binary, byte = match["number"], match["prefix"].lower(), match["binary"], match["byte"]
    if not prefix and binary:
        raise ValueError(f"{value!r} is not {BYTES_TEXT}")
    if not prefix and "." in number:
        raise ValueError(f"{value!r} is a fraction of a byte; {BYTES_TEXT} is needed")
    unit = _UNITS[prefix]
    if byte and not binary and prefix:
        unit = 1000 ** (unit.bit_length() // 10)
    return int(Fraction(number) * unit)


def format_bytes(nbytes: float) -> str:
    """``nbytes`` for people, in powers of 1,024: '512 B', '1.50 MiB', '2.00 GiB'."""
    sign, left = ("-", -nbytes) if nbytes < 0 else ("", nbytes)
    if left < 1 << 10:
        return f"{sign}{left:.0f} B"
    for name in ("KiB", "MiB", "GiB", "TiB"):
        left /= 1 << 10
        if left < 1023.995:
            return f"{sign}{left:.2f} {name}"
    return f"{sign}{left / (1 << 10):.2f} PiB"


def format_rate(bytes_per_s: float) -> str:
    """A rate for people, in powers of 1,000 as drives state it: '850 kB/s', '1.95 GB/s'."""
    sign, left = ("-", -bytes_per_s) if bytes_per_s < 0 else ("", bytes_per_s)
    if left < 1e3:
        return f"{sign}{left:.0f} B/s"
    if left < 999_500:
        return f"{sign}{left / 1e3:.0f} kB/s"
    if left < 999.5e6:
        return f"{sign}{left / 1e6:.0f} MB/s"
    return f"{sign}{left / 1e9:.2f} GB/s"


def format_seconds(seconds: float) -> str:
    """A duration for people: '12 us', '3.4 ms', '1.25 s', '4 min 05 s', '2 h 03 min'."""
    sign, left = ("-", -seconds) if seconds < 0 else ("", seconds)
    if left < 999.5e-6:
        return f"{sign}{left * 1e6:.0f} us"
    if left < 0.99995:
        return f"{sign}{left * 1e3:.1f} ms"
    if left < 59.995:
        return f"{sign}{left:.2f} s"
    if left < 3599.5:
        minutes, rest = divmod(round(left), 60)
        return f"{sign}{minutes} min {rest:02d} s"
    hours, rest = divmod(round(left / 60), 60)
    return f"{sign}{hours} h {rest:02d} min"


def align_up(value: int, alignment: int) -> int:
    """The least multiple of ``alignment`` (> 0) that is not below ``value``."""
    return -(-value // alignment) * alignment


def align_down(value: int, alignment: int) -> int:
    """The greatest multiple of ``alignment`` (> 0) that is not above ``value``."""
    return value // alignment * alignment
