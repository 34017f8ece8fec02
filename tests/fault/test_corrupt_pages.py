"""A bit flips on the disk while a model is trained: the page is named, nothing that comes of it is written, and no weight is wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from infinity.errors import CorruptPageError, EngineFailedError
from infinity.flat_param import FlatParam
from infinity.layout import GRAD, PARAM, PageId
from infinity.residency import PageState
from tests.support import models, runs
from tests.support.kernels import table_crc

WIDTH = 48
STEPS = 4
STATE = {"fp32": ("exp_avg", "exp_avg_sq"), "bf16": ("residual", "exp_avg", "exp_avg_sq")}


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class Place(NamedTuple):
    """Where a page rests."""

    page: PageId
    flat: FlatParam
    fd: int
    offset: int
    nbytes: int

    def read(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        reader = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY)
        try:
            return np.frombuffer(os.pread(reader, self.nbytes, self.offset), np.uint8).copy()
        finally:
            os.close(reader)

    def flip(self, byte: int) -> None:
        writer = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR)
        try:
            os.pwrite(writer, bytes([os.pread(writer, 1, self.offset + byte)[0] ^ 0x04]), self.offset + byte)
        finally:
            os.close(writer)


class Training:
    """A run with as little memory as it can have, so that nearly every page is at rest between steps."""

    def __init__(self, directory: Path, *, device: str, precision: str, **options: Any) -> None:
        self.dtype = runs.DTYPES[precision]
        config = runs.engine_config(directory, precision=precision, **options)
        config = runs.with_device(config, runs.least_device_bytes(self.build, config, device))
        config = runs.with_host(config, runs.least_host_bytes(self.build, config, device))
        self.trainer = runs.EngineTrainer(self.build(), config, device=device)
        self.engine = self.trainer.engine
        self.store = self.engine._store

    def build(self) -> nn.Module:
        return models.build(Residual, self.dtype)

    def batches(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(7)
        return [torch.randn(4, WIDTH, generator=generator).to(self.dtype) for _ in range(STEPS)]

    def step(self, x: Tensor) -> None:
        self.engine.backward(self.trainer(x))
        self.engine.step()
        self.engine.finish()

    def finish_accumulation(self, x: Tensor) -> None:
        """The second micro-step of two, and the update."""
        self.engine.step()
        self.step(x)

    def place(self, flat: FlatParam, plane: str, index: int) -> Place:
        page = self.engine._planes.page(flat, plane, index)
        key = self.store._key(page)
        backing = self.engine._backing
        assert backing is not None
        return Place(page, flat, *backing.place(self.store._slots[key]), self.store._used[key])

    def at_rest(self, plane: str) -> Place:
        """The first page of a plane that is at rest only."""
        for unit in self.engine._units:
            for flat in unit.flats:
                for index in range(flat.spec.page_count(plane)):
                    page = self.engine._planes.page(flat, plane, index)
                    if self.store.state(page) is PageState.ABSENT and self.store.has_content(page):
                        return self.place(flat, plane, index)
        raise RuntimeError(f"no page of {plane} is at rest")

    def tile(self, place: Place, plane: str) -> list[Place]:
        """The pages of all stored planes of the tile of a page, itself included."""
        spec = place.flat.spec
        tile = spec.tile_of_page(plane, place.page.index)
        return [self.place(place.flat, stored.name, index) for stored in spec.planes for index in spec.tile_pages(stored.name, tile)]

    def assert_named(self, error: CorruptPageError, place: Place, expected: int) -> None:
        backing = self.engine._backing
        assert backing is not None
        assert error.page == self.store.name(place.page)
        assert error.path == backing.path(self.store._slots[self.store._key(place.page)])
        assert (error.offset, error.nbytes) == (place.offset, place.nbytes)
        assert (error.expected, error.found) == (expected, table_crc(place.read()))


def positions(nbytes: int) -> list[int]:
    return [0, nbytes // 2, nbytes - 1]


@pytest.mark.parametrize("which", range(3), ids=["first byte", "middle byte", "last byte"])
@pytest.mark.parametrize("device", ["cpu", "simulated"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_flipped_bit_of_a_weight_is_not_delivered_and_training_goes_on_when_it_is_mended(
    tmp_path: Path, precision: str, device: str, which: int
) -> None:
    training = Training(tmp_path, device=device, precision=precision)
    expected = runs.train(runs.PlainTrainer(training.build()), [(x,) for x in training.batches()])
    expected.losses = []
    first, *rest = training.batches()
    training.step(first)
    place = training.at_rest(PARAM)
    before = table_crc(place.read())
    byte = positions(place.nbytes)[which]
    place.flip(byte)
    with pytest.raises(CorruptPageError) as caught:
        training.trainer(rest[0])
    training.assert_named(caught.value, place, before)
    unit = next(unit for unit in training.engine._units if place.flat in unit.flats)
    assert unit.state.name != "GATHERED"
    assert training.store.state(place.page) is PageState.ABSENT
    with pytest.raises(CorruptPageError):
        training.trainer(rest[0])
    place.flip(byte)
    for x in rest:
        training.step(x)
    runs.assert_same(expected, training.trainer.outcome())
    training.engine.close()


@pytest.mark.parametrize("which", range(3), ids=["first byte", "middle byte", "last byte"])
@pytest.mark.parametrize("overlap", ["fused", "deferred"])
@pytest.mark.parametrize(("precision", "plane"), [(precision, plane) for precision, planes in STATE.items() for plane in planes])
def test_a_flipped_bit_of_the_state_stops_the_engine_before_its_tile_is_written(
    tmp_path: Path, precision: str, plane: str, overlap: str, which: int
) -> None:
    training = Training(tmp_path, device="cpu", precision=precision, overlap=overlap)
    first, second, *_ = training.batches()
    training.step(first)
    place = training.at_rest(plane)
    before = table_crc(place.read())
    place.flip(positions(place.nbytes)[which])
    tile = training.tile(place, plane)
    contents = [page.read() for page in tile]
    with pytest.raises(CorruptPageError) as caught:
        training.step(second)
    training.assert_named(caught.value, place, before)
    for page, content in zip(tile, contents, strict=True):
        assert np.array_equal(page.read(), content), training.store.name(page.page)
    with pytest.raises(EngineFailedError):
        training.step(second)
    with pytest.raises(EngineFailedError):
        training.engine.state_dict()
    training.engine.close()
    assert all(param.is_meta for param in training.trainer.model.parameters())


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_flipped_bit_of_a_gradient_that_waits_on_the_disk_stops_the_engine_before_any_weight_changes(
    tmp_path: Path, precision: str, clip: float
) -> None:
    training = Training(tmp_path, device="cpu", precision=precision, overlap="deferred", clip=clip, accumulation=2)
    first, second, third, _ = training.batches()
    for x in (first, second):
        training.engine.backward(training.trainer(x))
        training.engine.step()
    training.engine.backward(training.trainer(third))
    training.engine.finish()
    place = training.at_rest(GRAD)
    before = table_crc(place.read())
    place.flip(place.nbytes // 2)
    tile = training.tile(place, GRAD)
    contents = [page.read() for page in tile]
    with pytest.raises(CorruptPageError) as caught:
        training.finish_accumulation(second)
    training.assert_named(caught.value, place, before)
    for page, content in zip(tile, contents, strict=True):
        assert np.array_equal(page.read(), content), training.store.name(page.page)
    with pytest.raises(EngineFailedError):
        training.engine.state_dict()
    training.engine.close()
