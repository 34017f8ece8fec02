"""Random transfers at odd places against a bytearray, and random tensors through a safetensors file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import infinity.io
from infinity.errors import SafetensorsError
from infinity.faults import Fault
from infinity.io import Future, Queue
from infinity.io.header import BITS, format_header, header_nbytes, parse_header
from infinity.io.safetensors import DTYPES
from infinity.task_queue import FileOp
from tests.support.files import PLACES, blank, bytes_of, directory_on
from tests.support.queues import WORKING_BACKENDS

FILE_NBYTES = 400_000

edges = st.sampled_from([0, 1, 511, 512, 4095, 4096, 4097, 65_536, 69_632, 70_000, 131_072, 300_000])
places = st.builds(lambda edge, shift: max(0, min(FILE_NBYTES, edge + shift)), edges, st.integers(-3, 3)) | st.integers(0, FILE_NBYTES)
operations = st.lists(
    st.tuples(
        st.sampled_from(["write", "write", "read", "read", "wait", "flush", "cut", "reopen"]),
        places,
        places,
        st.sampled_from([0, 1, 16, 512]),
    ),
    min_size=1,
    max_size=25,
)


@pytest.fixture(scope="module", params=[(place, backend) for place in PLACES for backend in WORKING_BACKENDS], ids="-".join)
def home(request: pytest.FixtureRequest) -> Iterator[tuple[Path, Queue]]:
    place, backend = request.param
    with directory_on(place) as path, Queue(backend=backend, block_size="64KiB", queue_depth=4) as queue:
        yield path, queue


def run(home: tuple[Path, Queue], program: list[tuple[str, int, int, int]], direct: str, seed: int) -> None:
    """Nothing is waited for but where the program says so: what touches the same bytes has to keep its order by itself."""
    directory, queue = home
    path = directory / "file"
    random = np.random.default_rng(seed)
    model = random.integers(0, 256, FILE_NBYTES, dtype=np.uint8)
    path.write_bytes(model.tobytes())
    expected: list[tuple[Future, Any, bytes]] = []
    file = infinity.io.open(path, "r+", direct=direct, queue=queue)
    for kind, one, other, shift in program:
        begin, end = sorted((one, other))
        if kind == "write":
            data = blank(end - begin, shift=shift)
            data[:] = random.integers(0, 256, end - begin, dtype=np.uint8)
            model[begin:end] = data
            expected.append((file.write_from(data, begin), data, data.tobytes()))
        elif kind == "read":
            array = blank(end - begin, shift=shift)
            expected.append((file.read_into(array, begin), array, model[begin:end].tobytes()))
        elif kind == "wait":
            infinity.io.wait(future for future, _, _ in expected)
        elif kind == "flush":
            file.flush().wait()
        elif kind == "cut":  # and lengthen again: zeros
            file.truncate(begin)
            file.truncate(FILE_NBYTES)
            model[begin:] = 0
        else:
            file.close()
            file = infinity.io.open(path, "r+", direct=direct, queue=queue)
    assert infinity.io.wait(future for future, _, _ in expected) == sum(len(content) for _, _, content in expected)
    file.close()
    for _, array, content in expected:
        assert array.tobytes() == content
    assert path.read_bytes() == model.tobytes()


@settings(max_examples=60, deadline=None)
@given(program=operations, direct=st.sampled_from(["auto", "off"]), seed=st.integers(0, 1000))
def test_a_file_is_a_bytearray(home: tuple[Path, Queue], program: list[tuple[str, int, int, int]], direct: str, seed: int) -> None:
    run(home, program, direct, seed)


@settings(max_examples=40, deadline=None)
@given(program=operations, direct=st.sampled_from(["auto", "off"]), seed=st.integers(0, 1000))
def test_a_file_is_a_bytearray_also_where_transfers_are_late_short_and_out_of_order(
    home: tuple[Path, Queue], program: list[tuple[str, int, int, int]], direct: str, seed: int
) -> None:
    files = home[1].files
    try:
        for op in (FileOp.READ, FileOp.WRITE):
            files.fault(op, Fault.short(4096), times=1000, one_in=5, seed=seed)
            files.fault(op, Fault.hold(2, us=500), times=1000, one_in=5, seed=seed + 1)
            files.fault(op, Fault.delay(200), times=1000, one_in=5, seed=seed + 2)
            files.fault(op, Fault.error(4), times=1000, one_in=10, seed=seed + 3)
        run(home, program, direct, seed)
    finally:
        files.mend()


def tensors_of(shapes: list[tuple[str, list[int], int]]) -> dict[str, torch.Tensor]:
    tensors = {}
    for i, (dtype, shape, seed) in enumerate(shapes):
        numel = int(np.prod(shape, dtype=int))
        raw = np.random.default_rng(seed).integers(0, 2 if dtype == "BOOL" else 256, numel * DTYPES[dtype].itemsize, dtype=np.uint8)
        tensor = torch.from_numpy(raw).view(DTYPES[dtype]).view(shape) if numel else torch.empty(shape, dtype=DTYPES[dtype])
        tensors[f"t{i}"] = tensor.transpose(0, -1) if seed % 2 and tensor.ndim else tensor
    return tensors


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(
            st.sampled_from([name for name in DTYPES if name != "F4"]), st.lists(st.integers(0, 70), max_size=3), st.integers(0, 100)
        ),
        max_size=8,
    ),
    chosen=st.sets(st.integers(0, 7)),
)
def test_tensors_come_back_as_they_were_and_the_library_agrees(
    home: tuple[Path, Queue], shapes: list[tuple[str, list[int], int]], chosen: set[int]
) -> None:
    library = pytest.importorskip("safetensors.torch", reason="the safetensors library is not installed")
    directory, queue = home
    tensors = tensors_of(shapes)
    infinity.io.save(tensors, directory / "tensors", queue=queue)
    names = [f"t{i}" for i in chosen if i < len(shapes)]
    for found in (
        infinity.io.load(directory / "tensors", queue=queue),
        library.load_file(directory / "tensors"),
        infinity.io.load(directory / "tensors", names, queue=queue),
    ):
        assert set(found) in (set(tensors), set(names))
        for name, tensor in found.items():
            assert tensor.shape == tensors[name].shape
            assert tensor.dtype == tensors[name].dtype
            assert bytes_of(tensor) == bytes_of(tensors[name])


values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 70) | st.floats() | st.text(max_size=5) | st.sampled_from(list(BITS)),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "a", "__metadata__"]), inner)
    ),
    max_leaves=15,
)


@settings(max_examples=300, deadline=None)
@given(
    header=st.one_of(values.map(repr), st.binary(max_size=200).map(lambda raw: raw.decode("latin1")), st.text(max_size=100)),
    nbytes=st.integers(0, 50),
)
def test_whatever_stands_where_a_header_should_is_a_header_or_a_typed_error(header: str, nbytes: int) -> None:
    raw = header.replace("'", '"').encode("utf-8", "surrogatepass")
    try:
        tensors, _ = parse_header(raw, nbytes, "file")
    except SafetensorsError:
        return
    assert sum(entry.end - entry.begin for entry in tensors.values()) == nbytes


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_a_header_with_a_wrong_byte_is_still_one_or_a_typed_error(at: int, flip: int) -> None:
    tensors = [("a", "F32", (3, 2)), ("b", "BF16", (7,)), ("c", "I64", ())]
    raw, data_nbytes = format_header(tensors, {"format": "pt"}, 8, "file")
    damaged = bytearray(raw)
    damaged[at % len(raw)] ^= flip
    try:
        nbytes = header_nbytes(damaged, len(raw) + data_nbytes, "file")
        found, _ = parse_header(bytes(damaged[8 : 8 + nbytes]), len(raw) + data_nbytes - 8 - nbytes, "file")
    except SafetensorsError:
        return
    assert sum(entry.end - entry.begin for entry in found.values()) == data_nbytes
