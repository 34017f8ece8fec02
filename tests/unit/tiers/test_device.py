"""infinity/tiers/device.py: ranges, the budget and copies, on the kinds that need no accelerator."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from infinity.errors import BudgetError, EngineClosedError
from infinity.tiers.device import Device, DeviceKind, available_bytes, open_device

MIB = 1 << 20

KINDS: list[DeviceKind] = ["cpu", "simulated"]


@pytest.fixture
def cpu() -> Device:
    return open_device("cpu", 16 * MIB)


@pytest.fixture
def simulated() -> Device:
    return open_device("simulated", 16 * MIB, seed=3)


@pytest.fixture(params=KINDS)
def device(request: pytest.FixtureRequest) -> Device:
    return open_device(request.param, 16 * MIB, seed=1)


def host(nbytes: int, value: int = 0) -> np.ndarray:
    return np.full(nbytes, value, dtype=np.uint8)


def upload(device: Device, tensor: torch.Tensor, offset: int, source: np.ndarray) -> None:
    device.wait(device.copy_to_device(tensor, offset, source.ctypes.data, source.nbytes))


def download(device: Device, tensor: torch.Tensor, offset: int, nbytes: int) -> np.ndarray:
    target = host(nbytes)
    device.wait(device.copy_to_host(target.ctypes.data, tensor, offset, nbytes))
    return target


def test_an_unknown_kind_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="cpu, simulated, cuda"):
        open_device("tpu", MIB)  # type: ignore[arg-type]


# ---- ranges


def test_a_range_is_a_flat_uint8_tensor_of_its_length(device: Device) -> None:
    opened = device.open_range(3 * MIB + 5)
    assert opened.tensor.dtype == torch.uint8
    assert opened.tensor.shape == (3 * MIB + 5,)
    assert not opened.filled


def test_bytes_copied_in_come_out(device: Device) -> None:
    opened = device.open_range(3 * MIB)
    assert opened.fill()
    source = np.arange(5000, dtype=np.uint32).view(np.uint8)
    upload(device, opened.tensor, 1024, source)
    assert (download(device, opened.tensor, 1024, source.nbytes) == source).all()


def test_a_parameter_viewed_before_a_drain_is_right_after_the_next_fill(device: Device) -> None:
    opened = device.open_range(4096)
    opened.fill()
    weight = opened.tensor.view(torch.float32)[16:32].view(4, 4)
    transposed = weight.t()
    opened.drain()
    opened.fill()
    upload(device, opened.tensor, 64, np.arange(16, dtype=np.float32).view(np.uint8))
    assert transposed[1, 2].item() == 9.0


def test_the_storage_is_one_object_for_life(device: Device) -> None:
    opened = device.open_range(4096)
    identity, address = opened.tensor.untyped_storage()._cdata, opened.tensor.data_ptr()
    for _ in range(3):
        opened.fill()
        opened.drain()
    assert opened.tensor.untyped_storage()._cdata == identity
    assert opened.tensor.view(torch.bfloat16)[3:].untyped_storage()._cdata == identity
    if device.kind != "cuda":
        assert opened.tensor.data_ptr() == address


def test_filling_copying_and_draining_bump_no_version(device: Device) -> None:
    opened = device.open_range(4096)
    view = opened.tensor.view(torch.float32)[:10]
    opened.fill()
    upload(device, view, 0, host(40, 1))
    opened.drain()
    opened.fill()
    assert view._version == 0


def test_autograd_accepts_a_refilled_weight(device: Device) -> None:
    opened = device.open_range(4096)
    opened.fill()
    values = np.arange(4, dtype=np.float32).view(np.uint8)
    upload(device, opened.tensor, 0, values)
    weight = torch.nn.Parameter(opened.tensor.view(torch.float32)[:4])
    x = torch.ones(4, requires_grad=True)
    loss = (x * weight).sum()
    opened.drain()
    opened.fill()
    upload(device, opened.tensor, 0, values)
    loss.backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert x.grad.tolist() == [0, 1, 2, 3]


def test_filling_a_filled_range_and_draining_a_drained_one_change_nothing(device: Device) -> None:
    opened = device.open_range(4096)
    opened.drain()
    assert opened.fill()
    used = device.used_bytes
    assert opened.fill()
    assert device.used_bytes == used
    opened.drain()
    opened.drain()
    assert device.used_bytes == 0


# ---- the budget


def test_a_filled_range_is_charged_in_whole_grains(device: Device) -> None:
    opened = device.open_range(device.grain_nbytes + 1)
    assert device.used_bytes == 0
    opened.fill()
    assert device.used_bytes == opened.charged_nbytes == 2 * device.grain_nbytes == device.round_up(device.grain_nbytes + 1)
    opened.drain()
    assert device.used_bytes == 0


def test_a_fill_above_the_budget_is_false_and_changes_nothing(device: Device) -> None:
    first, second = device.open_range(12 * MIB), device.open_range(6 * MIB)
    assert first.fill()
    assert not second.fill()
    assert not second.filled
    assert device.used_bytes == 12 * MIB
    first.drain()
    assert second.fill()


def test_allocations_and_charges_leave_less_for_ranges(device: Device) -> None:
    kept = device.allocate(3 * MIB)
    assert kept.nbytes == 3 * MIB
    assert device.charge(4 * MIB)
    opened = device.open_range(10 * MIB)
    assert not opened.fill()
    device.refund(4 * MIB)
    assert opened.fill()
    assert device.free_bytes == 3 * MIB


def test_a_charge_above_the_budget_is_false_and_counts_nothing(device: Device) -> None:
    assert not device.charge(16 * MIB + 1)
    assert device.used_bytes == 0
    assert device.charge(16 * MIB)


def test_a_refund_above_what_is_used_is_refused(device: Device) -> None:
    device.charge(5)
    with pytest.raises(ValueError, match="giving 6 bytes"):
        device.refund(6)


def test_an_allocation_above_the_budget_names_the_need_and_the_knob(device: Device) -> None:
    device.charge(MIB)
    with pytest.raises(BudgetError, match="the embedding") as caught:
        device.allocate(16 * MIB, "the embedding")
    assert (caught.value.knob, caught.value.needed_bytes, caught.value.given_bytes) == ("memory.device", 17 * MIB, 16 * MIB)


def test_the_peak_is_what_was_used_at_most_since_it_was_reset(device: Device) -> None:
    opened = device.open_range(8 * MIB)
    opened.fill()
    opened.drain()
    device.charge(MIB)
    assert device.peak_bytes == 8 * MIB
    device.reset_peak()
    assert device.peak_bytes == MIB


def test_a_budget_below_one_grain_fills_nothing() -> None:
    device = open_device("cpu", MIB)
    assert not device.open_range(10).fill()


# ---- copies


def test_copies_beyond_the_tensor_are_refused(device: Device) -> None:
    kept = device.allocate(100)
    source = host(100)
    for offset, nbytes in [(1, 100), (-1, 10), (0, -1)]:
        with pytest.raises(ValueError, match="of a tensor of 100 bytes"):
            device.copy_to_device(kept, offset, source.ctypes.data, nbytes)
        with pytest.raises(ValueError, match="of a tensor of 100 bytes"):
            device.copy_to_host(source.ctypes.data, kept, offset, nbytes)


def test_copies_of_a_strided_tensor_are_refused(device: Device) -> None:
    kept = device.allocate(100).view(10, 10).t()
    with pytest.raises(ValueError, match="contiguous"):
        device.copy_to_host(host(100).ctypes.data, kept, 0, 100)


def test_a_gradient_of_autograd_can_be_copied_out(device: Device) -> None:
    gradient = torch.arange(8, dtype=torch.float32, device=device.torch_device).view(2, 4)
    assert download(device, gradient, 8, 8).view(np.float32).tolist() == [2, 3]


def test_a_copy_that_was_waited_for_is_done(device: Device) -> None:
    kept, source = device.allocate(100), host(100, 3)
    ticket = device.copy_to_device(kept, 0, source.ctypes.data, 100)
    device.order(ticket)
    device.wait(ticket)
    assert device.done(ticket)


# ---- the end


def test_a_closed_device_opens_fills_and_allocates_nothing(device: Device) -> None:
    opened = device.open_range(4096)
    device.close()
    device.close()
    with pytest.raises(EngineClosedError):
        device.open_range(4096)
    with pytest.raises(EngineClosedError):
        opened.fill()
    with pytest.raises(EngineClosedError):
        device.allocate(1)


def test_a_filled_range_can_be_read_and_drained_after_close(device: Device) -> None:
    opened = device.open_range(4096)
    opened.fill()
    upload(device, opened.tensor, 0, host(4096, 5))
    device.close()
    assert int(opened.tensor[7]) == 5
    opened.drain()
    assert device.used_bytes == 0


def test_the_last_tensor_keeps_the_memory_of_a_dropped_range() -> None:
    device = open_device("cpu", 16 * MIB)
    opened = device.open_range(4096)
    opened.fill()
    view = opened.tensor.view(torch.int16)[10:20]
    view.fill_(7)
    del opened, device
    gc.collect()
    assert view.tolist() == [7] * 10


def test_the_address_range_goes_with_the_last_tensor(cpu: Device) -> None:
    opened = cpu.open_range(4096)
    opened.fill()
    address = opened.address
    view = opened.tensor[5:]
    del opened
    assert cpu.used_bytes == 2 * MIB
    del view
    assert cpu.used_bytes == 0
    with open("/proc/self/maps") as maps:
        assert not any(line.startswith(f"{address:x}-") for line in maps)


def test_the_address_of_a_cpu_range_is_where_its_tensor_is(cpu: Device) -> None:
    opened = cpu.open_range(4096)
    assert cpu.host_addressable
    assert opened.address == opened.tensor.data_ptr()


def test_the_address_of_a_simulated_range_is_refused(simulated: Device) -> None:
    assert not simulated.host_addressable
    with pytest.raises(TypeError, match="use copies"):
        _ = simulated.open_range(4096).address


def test_simulated_memory_is_nan_until_something_is_copied_in(simulated: Device) -> None:
    opened = simulated.open_range(4096)
    opened.fill()
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        assert opened.tensor.view(dtype).isnan().all()
        assert simulated.allocate(64).view(dtype).isnan().all()


def test_simulated_memory_is_nan_after_a_drain(simulated: Device) -> None:
    opened = simulated.open_range(4096)
    opened.fill()
    upload(simulated, opened.tensor, 0, host(4096))
    assert not opened.tensor.view(torch.float32).isnan().any()
    opened.drain()
    assert opened.tensor.view(torch.float32).isnan().all()


def test_a_simulated_copy_comes_late_so_a_missing_wait_reads_nan(simulated: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr("infinity.tiers.device.sleep", lambda delay_s: gate.wait())
    opened, source = simulated.open_range(512), host(512)
    opened.fill()
    ticket = simulated.copy_to_device(opened.tensor, 0, source.ctypes.data, 512)
    assert not simulated.done(ticket)
    assert opened.tensor.view(torch.float32).isnan().all()
    gate.set()
    simulated.order(ticket)
    assert not opened.tensor.view(torch.float32).isnan().any()


def test_simulated_copies_of_one_direction_run_in_order(simulated: Device) -> None:
    kept = simulated.allocate(8)
    sources = [host(8, value) for value in range(30)]
    tickets = [simulated.copy_to_device(kept, 0, source.ctypes.data, 8) for source in sources]
    simulated.wait(tickets[-1])
    assert all(simulated.done(ticket) for ticket in tickets)
    assert kept.tolist() == [29] * 8


def test_a_gradient_dropped_after_its_copy_was_issued_is_copied_whole(simulated: Device) -> None:
    target = host(MIB)
    tickets = []
    for value in range(20):
        gradient = torch.full((MIB,), value, dtype=torch.uint8)
        tickets.append(simulated.copy_to_host(target.ctypes.data, gradient, 0, MIB))
        del gradient
    simulated.wait(tickets[-1])
    assert (target == 19).all()


def test_the_seed_decides_the_delays() -> None:
    def delays(seed: int) -> list[float]:
        device, source = open_device("simulated", MIB, seed=seed), host(1)
        kept = device.allocate(1)
        drawn = [device.copy_to_device(kept, 0, source.ctypes.data, 1).delay_s for _ in range(20)]  # type: ignore[attr-defined]
        device.close()
        return drawn

    assert delays(5) == delays(5)
    assert delays(5) != delays(6)


def test_closing_a_simulated_device_ends_its_threads_after_their_copies(simulated: Device) -> None:
    kept, source, threads = simulated.allocate(100), host(100, 4), threading.active_count()
    for _ in range(5):
        ticket = simulated.copy_to_device(kept, 0, source.ctypes.data, 100)
    simulated.close()
    assert simulated.done(ticket)
    assert kept.tolist() == [4] * 100
    assert threading.active_count() == threads


def test_a_dropped_simulated_device_ends_its_threads() -> None:
    threads = threading.active_count()
    device = open_device("simulated", MIB)
    device.wait(device.copy_to_device(device.allocate(8), 0, host(8).ctypes.data, 8))
    del device
    gc.collect()
    assert threading.active_count() == threads


def test_host_memory_can_be_registered_where_there_is_nothing_to_do(device: Device) -> None:
    source = host(4096)
    device.register_host(source.ctypes.data, 4096)
    device.unregister_host(source.ctypes.data, 4096)


def test_what_is_available_is_free_memory() -> None:
    assert 0 < available_bytes("cpu") == pytest.approx(available_bytes("simulated"), rel=0.5)


def test_touching_a_drained_cpu_range_faults() -> None:
    code = """
from infinity.tiers.device import open_device
opened = open_device("cpu", 1 << 23).open_range(4096)
opened.fill(); opened.tensor.fill_(1); alias = opened.tensor[3:]; opened.drain()
alias.sum()
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, stderr=subprocess.DEVNULL)
    assert done.returncode == -11


def test_a_forked_child_leaves_the_ranges_alone() -> None:
    code = """
import os, sys
from infinity.tiers.device import open_device
device = open_device("cpu", 1 << 23)
opened = device.open_range(4096)
opened.fill(); opened.tensor.fill_(9)
child = os.fork()
if child == 0:
    del opened
    device.close()
    sys.exit(0)
ok = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
sys.exit(0 if ok and int(opened.tensor.sum()) == 9 * 4096 else 1)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_process_ends_cleanly_with_filled_ranges_alive() -> None:
    code = """
import atexit
from infinity.tiers.device import open_device
device = open_device("cpu", 1 << 23)
opened = device.open_range(4096)
opened.fill(); opened.tensor.fill_(9)
atexit.register(lambda: opened.tensor.sum())
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_memory_that_is_neither_used_nor_allowed_is_given_back(cpu: Device) -> None:
    """The pool is warm with 16 MiB; a charge of 6 leaves at most 10 of them resident."""
    opened, small = cpu.open_range(16 * MIB), cpu.open_range(10 * MIB)
    opened.fill()
    opened.tensor.fill_(1)
    opened.drain()
    before = resident_nbytes()
    assert cpu.charge(6 * MIB)
    assert before - resident_nbytes() > 5 * MIB
    assert small.fill()


def resident_nbytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
