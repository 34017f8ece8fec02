"""The CUDA kind of infinity/tiers/device.py, on a real GPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from infinity.tiers.device import Device, available_bytes, open_device
from infinity.tiers.frames import FramePool

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU: torch.cuda.is_available() is False here"),
]

MIB = 1 << 20


@pytest.fixture
def device() -> Iterator[Device]:
    opened = open_device("cuda", 256 * MIB)
    yield opened
    opened.close()


@pytest.fixture
def frames(device: Device) -> Iterator[FramePool]:
    pool = FramePool(8 * MIB, 4 * MIB)
    device.register_host(pool.base_address, pool.nbytes)
    yield pool
    device.unregister_host(pool.base_address, pool.nbytes)
    pool.close()


def test_bytes_copied_in_come_out(device: Device, frames: FramePool) -> None:
    opened = device.open_range(4 * MIB)
    assert opened.fill()
    frames.memory(0)[:] = np.arange(4 * MIB, dtype=np.uint32).astype(np.uint8)
    device.order(device.copy_to_device(opened.tensor, 0, frames.address(0), 4 * MIB))
    device.wait(device.copy_to_host(frames.address(1), opened.tensor, 0, 4 * MIB))
    assert (frames.memory(0) == frames.memory(1)).all()


def test_a_drained_range_gives_its_memory_back_and_keeps_its_storage(device: Device) -> None:
    opened = device.open_range(64 * MIB)
    identity = opened.tensor.untyped_storage()._cdata
    before = torch.cuda.memory_allocated()
    opened.fill()
    assert torch.cuda.memory_allocated() - before == opened.charged_nbytes == device.used_bytes
    opened.drain()
    assert torch.cuda.memory_allocated() == before
    assert opened.tensor.untyped_storage()._cdata == identity


def test_a_copy_ordered_before_compute_is_seen_by_it_and_bumps_no_version(device: Device, frames: FramePool) -> None:
    opened = device.open_range(4 * MIB)
    weight = opened.tensor.view(torch.float32)
    for value in (1.0, 2.0, 3.0):
        opened.fill()
        frames.memory(0).view(np.float32)[:] = value
        ticket = device.copy_to_device(opened.tensor, 0, frames.address(0), 4 * MIB)
        device.order(ticket)
        assert weight.sum().item() == value * MIB
        assert device.done(ticket)
        opened.drain()
    assert weight._version == 0


def test_autograd_accepts_a_refilled_weight(device: Device, frames: FramePool) -> None:
    opened = device.open_range(4 * MIB)
    frames.memory(0).view(np.float32)[:] = 3.0

    def gather() -> None:
        opened.fill()
        device.order(device.copy_to_device(opened.tensor, 0, frames.address(0), 4 * MIB))

    gather()
    weight = torch.nn.Parameter(opened.tensor.view(torch.float32))
    x = torch.ones(MIB, device="cuda", requires_grad=True)
    loss = (x * weight).sum()
    opened.drain()
    gather()
    loss.backward()
    assert x.grad is not None
    assert x.grad.eq(3.0).all()


def test_a_gradient_dropped_after_its_copy_was_issued_is_copied_whole(device: Device, frames: FramePool) -> None:
    a = torch.ones(1024, 1024, device="cuda")
    for _ in range(20):
        a = (a @ a) / 1024
    ticket = device.copy_to_host(frames.address(1), a, 0, 4 * MIB)
    del a
    torch.full((1024, 1024), 7.0, device="cuda")
    device.wait(ticket)
    assert (frames.memory(1).view(np.float32) == 1.0).all()


def test_a_copy_of_a_drained_range_is_refused(device: Device, frames: FramePool) -> None:
    opened = device.open_range(4 * MIB)
    with pytest.raises(ValueError, match="drained"):
        device.copy_to_device(opened.tensor, 0, frames.address(0), 100)


def test_a_fill_above_the_budget_is_false(device: Device) -> None:
    assert device.charge(255 * MIB)
    assert not device.open_range(2 * MIB).fill()


def test_what_is_available_is_positive_and_at_most_what_the_device_has() -> None:
    assert 0 < available_bytes("cuda") <= torch.cuda.get_device_properties(0).total_memory
