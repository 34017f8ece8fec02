"""The header of a safetensors file, written and checked. Pure: knows no torch and reads no file.

Source: the format's README (github.com/huggingface/safetensors): 8 bytes, little endian, say how long the header is; the header is JSON in
UTF-8, an object from its first byte on, which spaces may follow; each name has ``dtype``, ``shape`` and ``data_offsets`` [begin, end)
counted from the end of the header; the tensors' bytes follow each other without a hole, up to the end of the file; ``__metadata__`` maps
text to text.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from infinity.errors import SafetensorsError
from infinity.sizes import align_up

__all__ = ["BITS", "HEADER_NBYTES_MAX", "LENGTH_NBYTES", "Entry", "format_header", "header_nbytes", "parse_header"]

LENGTH_NBYTES = 8
HEADER_NBYTES_MAX = 100_000_000
"""What the library of that name reads at most."""

BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Bits of one element, by the format's names."""

_METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")


class Entry(NamedTuple):
    """One tensor. Units: ``begin`` and ``end`` are bytes behind the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def format_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None, alignment: int, path: str
) -> tuple[bytes, int]:
    """The first bytes of a file with tensors of these names, dtypes and shapes in this order, padded so that the tensors begin at
    a multiple of ``alignment``; and how many bytes of tensors follow.

    Errors: SafetensorsError for what the format does not allow.
    """
    header: dict[str, Any] = {}
    if metadata is not None:
        if not all(isinstance(text, str) for pair in metadata.items() for text in pair):
            raise SafetensorsError("bad_metadata", path, "metadata must map text to text")
        header[_METADATA] = dict(metadata)
    end = 0
    for name, dtype, shape in tensors:
        if not isinstance(name, str) or name == _METADATA:
            raise SafetensorsError("bad_name", path, f"{name!r} cannot be the name of a tensor: text other than {_METADATA!r} is needed")
        begin, end = end, end + math.prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    try:
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise SafetensorsError("bad_name", path, f"a name or metadata is no Unicode text: {error}") from None
    nbytes = align_up(LENGTH_NBYTES + len(text), alignment) - LENGTH_NBYTES
    if nbytes > HEADER_NBYTES_MAX:
        raise SafetensorsError("header_too_large", path, f"the header has {nbytes} bytes, and at most {HEADER_NBYTES_MAX} are read")
    return _LENGTH.pack(nbytes) + text.ljust(nbytes), end


def header_nbytes(first: bytes | bytearray, file_nbytes: int, path: str) -> int:
    """How long the header is, from the first 8 bytes of the file."""
    if len(first) < LENGTH_NBYTES:
        raise SafetensorsError("no_header", path, f"the file has {file_nbytes} bytes, not even the {LENGTH_NBYTES} that begin a header")
    nbytes = int(_LENGTH.unpack_from(first)[0])
    if nbytes > HEADER_NBYTES_MAX:
        raise SafetensorsError("header_too_large", path, f"the header is to have {nbytes} bytes; {HEADER_NBYTES_MAX} are allowed")
    if LENGTH_NBYTES + nbytes > file_nbytes:
        raise SafetensorsError("header_beyond_file", path, f"the header is to have {nbytes} bytes, but the file has {file_nbytes}")
    return nbytes


def parse_header(raw: bytes, data_nbytes: int, path: str) -> tuple[dict[str, Entry], dict[str, str]]:
    """The tensors, in the order of their bytes, and the metadata; ``data_nbytes`` is what follows the header in the file.

    Errors: SafetensorsError, one ``problem`` for each way to be wrong.
    """
    header = _parse_json(raw, path)
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise SafetensorsError("bad_metadata", path, f"{_METADATA} does not map text to text")
    entries = sorted(
        ((name, _parse_entry(name, fields, path)) for name, fields in header.items()), key=lambda item: (item[1].begin, item[1].end)
    )
    at = 0
    for name, entry in entries:
        if entry.begin > at:
            raise SafetensorsError("hole", path, f"its bytes begin at {entry.begin}, and those before end at {at}", name)
        if entry.begin < at:
            raise SafetensorsError("overlap", path, f"its bytes begin at {entry.begin}, and those before end at {at}", name)
        at = entry.end
        if at > data_nbytes:
            raise SafetensorsError("beyond_file", path, f"its bytes end at {at}, and the file has {data_nbytes} behind the header", name)
    if at < data_nbytes:
        raise SafetensorsError("left_over", path, f"the last tensor ends at byte {at} behind the header, and the file at {data_nbytes}")
    return dict(entries), metadata


def _parse_json(raw: bytes, path: str) -> dict[str, Any]:
    if raw[:1] != b"{":
        raise SafetensorsError("not_an_object", path, f"the header begins with {raw[:1]!r}, not with '{{'")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise SafetensorsError("duplicate_name", path, "it is in the header twice", name)
            found[name] = value
        return found

    def refuse(text: str) -> None:
        raise ValueError(f"{text} is no JSON")

    try:
        found: dict[str, Any] = json.loads(raw.decode(), object_pairs_hook=unique, parse_constant=refuse)
    except SafetensorsError:
        raise
    except UnicodeDecodeError as error:
        raise SafetensorsError("not_utf8", path, f"the header is no UTF-8: {error}") from None
    except (ValueError, RecursionError) as error:
        raise SafetensorsError("not_json", path, f"the header is no JSON: {error}") from None
    return found


def _parse_entry(name: str, fields: Any, path: str) -> Entry:
    def whole_numbers(value: Any) -> bool:
        return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)

    if not isinstance(fields, dict) or not {"dtype", "shape", "data_offsets"} <= fields.keys():
        raise SafetensorsError("bad_entry", path, f"{str(fields)[:200]} is no object with dtype, shape and data_offsets", name)
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise SafetensorsError("unknown_dtype", path, f"dtype {str(dtype)[:200]!r} is none of {', '.join(BITS)}", name)
    if not whole_numbers(shape):
        raise SafetensorsError("bad_shape", path, f"shape {str(shape)[:200]} is no list of numbers from 0 on", name)
    if not whole_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise SafetensorsError("bad_offsets", path, f"data_offsets {str(offsets)[:200]} is no [begin, end]", name)
    nbits, nbytes = math.prod(shape) * BITS[dtype], offsets[1] - offsets[0]
    if nbits != 8 * nbytes:
        raise SafetensorsError("size_mismatch", path, f"{dtype} of shape {shape} has {nbits} bits, but its bytes are {nbytes}", name)
    return Entry(dtype, tuple(shape), offsets[0], offsets[1])
