"""The header of a safetensors file: one test per way to be wrong."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

from infinity.errors import SafetensorsError
from infinity.io.header import BITS, HEADER_NBYTES_MAX, format_header, header_nbytes, parse_header

GOOD: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
    "none": {"dtype": "I64", "shape": [0, 5], "data_offsets": [26, 26]},
}


def entry(dtype: object = "U8", shape: object = (1,), offsets: object = (0, 1)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def parse(header: object, data_nbytes: int = 26) -> tuple[dict[str, Any], dict[str, str]]:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return parse_header(raw, data_nbytes, "file")


def test_a_good_header_gives_tensors_in_the_order_of_their_bytes_and_the_metadata() -> None:
    tensors, metadata = parse(dict(reversed(GOOD.items())))
    assert metadata == {"format": "pt"}
    assert {name: tuple(found) for name, found in tensors.items()} == {
        "a": ("F32", (2, 3), 0, 24),
        "b": ("BF16", (), 24, 26),
        "none": ("I64", (0, 5), 26, 26),
    }
    assert list(tensors) == ["a", "b", "none"]


@pytest.mark.parametrize("raw", [b"{}", b"{}   ", b'{"__metadata__":{}}'])
def test_a_header_without_tensors_is_good(raw: bytes) -> None:
    assert parse(raw, 0) == ({}, {})


def test_more_keys_of_a_tensor_are_ignored_as_the_library_does() -> None:
    assert list(parse({"a": {**entry(), "more": 1}}, 1)[0]) == ["a"]


@pytest.mark.parametrize(
    ("problem", "header", "data_nbytes"),
    [
        ("not_an_object", b"[]", 0),
        ("not_an_object", b" {}", 0),
        ("not_an_object", b"", 0),
        ("not_utf8", b'{"\xff":1}', 0),
        ("not_json", b'{"a":', 0),
        ("not_json", b"{} {}", 0),
        ("not_json", b"{}\0\0", 0),
        ("not_json", b'{"a":NaN}', 0),
        ("not_json", b'{"a":' + b"[" * 100_000, 0),
        ("not_json", b'{"a":' + b"9" * 5000 + b"}", 0),
        ("duplicate_name", b'{"a":%b,"a":%b}' % ((json.dumps(entry()).encode(),) * 2), 1),
        ("duplicate_name", b'{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1),
        ("bad_metadata", {"__metadata__": {"a": 1}}, 0),
        ("bad_metadata", {"__metadata__": "a"}, 0),
        ("bad_entry", {"a": 1}, 1),
        ("bad_entry", {"a": None}, 1),
        ("bad_entry", {"a": {"dtype": "U8", "shape": [1]}}, 1),
        ("unknown_dtype", {"a": entry("F33")}, 1),
        ("unknown_dtype", {"a": entry(["F32"])}, 1),
        ("unknown_dtype", {"a": entry("f32")}, 1),
        ("bad_shape", {"a": entry(shape=[-1])}, 1),
        ("bad_shape", {"a": entry(shape=[1.0])}, 1),
        ("bad_shape", {"a": entry(shape=[True])}, 1),
        ("bad_shape", {"a": entry(shape=1)}, 1),
        ("bad_offsets", {"a": entry(offsets=[0])}, 1),
        ("bad_offsets", {"a": entry(offsets=[1, 0])}, 1),
        ("bad_offsets", {"a": entry(offsets=[-1, 0])}, 1),
        ("bad_offsets", {"a": entry(offsets=[0.0, 1])}, 1),
        ("bad_offsets", {"a": entry(offsets={"0": 1})}, 1),
        ("size_mismatch", {"a": entry(shape=[2])}, 1),
        ("size_mismatch", {"a": entry("F4", [1], [0, 1])}, 1),
        ("size_mismatch", {"a": entry(shape=[1 << 62, 1 << 62])}, 1),
        ("hole", {"a": entry(offsets=[1, 2])}, 2),
        ("hole", {"a": entry(), "b": entry(offsets=[2, 3])}, 3),
        ("overlap", {"a": entry(shape=[2], offsets=[0, 2]), "b": entry(shape=[2], offsets=[1, 3])}, 3),
        ("overlap", {"a": entry(), "b": entry()}, 1),
        ("beyond_file", {"a": entry()}, 0),
        ("left_over", {"a": entry()}, 2),
        ("left_over", {}, 1),
    ],
)
def test_each_way_to_be_wrong_has_its_word(problem: str, header: object, data_nbytes: int) -> None:
    with pytest.raises(SafetensorsError) as caught:
        parse(header, data_nbytes)
    assert caught.value.problem == problem
    assert caught.value.path == "file"
    assert len(str(caught.value)) < 1000


def test_the_error_names_the_tensor() -> None:
    with pytest.raises(SafetensorsError, match=r"tensor 'layer\.0': dtype 'X'") as caught:
        parse({"layer.0": entry("X")}, 1)
    assert caught.value.name == "layer.0"


@pytest.mark.parametrize(
    ("problem", "first", "file_nbytes"),
    [
        ("no_header", b"", 0),
        ("no_header", b"1234567", 7),
        ("header_too_large", struct.pack("<Q", HEADER_NBYTES_MAX + 1), 1 << 40),
        ("header_too_large", b"\xff" * 8, 1 << 40),
        ("header_beyond_file", struct.pack("<Q", 3), 10),
    ],
)
def test_a_length_that_cannot_be_has_its_word(problem: str, first: bytes, file_nbytes: int) -> None:
    with pytest.raises(SafetensorsError) as caught:
        header_nbytes(first, file_nbytes, "file")
    assert caught.value.problem == problem


@pytest.mark.parametrize("alignment", [8, 4096])
@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt", "é": "ü" * 5000}])
def test_what_is_formatted_is_padded_and_parsed_again(alignment: int, metadata: dict[str, str] | None) -> None:
    tensors = [("b", "F64", (3, 2)), ("a é", "F4", (2, 4)), ("c", "BOOL", ())]
    raw, data_nbytes = format_header(tensors, metadata, alignment, "file")
    assert len(raw) % alignment == 0
    assert data_nbytes == 48 + 4 + 1
    assert header_nbytes(raw[:8], len(raw) + data_nbytes, "file") == len(raw) - 8
    found, again = parse_header(raw[8:], data_nbytes, "file")
    assert [(name, entry.dtype, entry.shape) for name, entry in found.items()] == tensors
    assert again == (metadata or {})


@pytest.mark.parametrize(
    ("problem", "name", "metadata"),
    [
        ("bad_name", "__metadata__", None),
        ("bad_name", 3, None),
        ("bad_name", "\ud800", None),
        ("bad_name", "a", {"a": "\ud800"}),
        ("bad_metadata", "a", {"a": 1}),
        ("bad_metadata", "a", {1: "a"}),
        ("header_too_large", "a" * HEADER_NBYTES_MAX, None),
    ],
)
def test_what_the_format_does_not_allow_is_not_formatted(problem: str, name: Any, metadata: Any) -> None:
    with pytest.raises(SafetensorsError) as caught:
        format_header([(name, "U8", (1,))], metadata, 8, "file")
    assert caught.value.problem == problem


def test_every_dtype_has_its_bits() -> None:
    assert set(BITS.values()) == {4, 6, 8, 16, 32, 64}
