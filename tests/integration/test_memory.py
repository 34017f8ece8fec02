"""Memory: budgets are kept, nothing stays behind, and activations live exactly as long as torch lets them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.tiers.device import CpuDevice
from tests.support import models, runs


@contextmanager
def counting_only() -> Iterator[None]:
    """No collection of cycles inside: what dies there dies by its reference count."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


# ---- budgets ----


@pytest.mark.parametrize("overlap", ["auto", "deferred"])
@pytest.mark.parametrize("placement", [("nvme", "nvme"), ("cpu", "nvme"), ("nvme", "none"), ("none", "cpu")], ids="+".join)
def test_no_step_uses_more_than_its_budgets(tmp_path: Path, placement: tuple[str, str], overlap: str) -> None:
    config = runs.engine_config(tmp_path, param=placement[0], optimizer=placement[1], overlap=overlap)
    least = runs.least_host_bytes(lambda: models.build(models.GPT), config)
    with runs.EngineTrainer(models.build(models.GPT), runs.with_host(config, least)) as trainer:
        placement_ = trainer.engine.placement()
        assert placement_.host_budget_bytes <= least
        for args in models.token_batches(4):
            trainer.backward(trainer(*args))
            trainer.step()
            metrics = trainer.engine.last_step
            assert metrics is not None
            assert 0 < metrics.device_bytes <= placement_.device_budget_bytes
            assert 0 <= metrics.host_bytes <= placement_.host_budget_bytes


def test_with_room_for_everything_nothing_is_read_or_written_after_the_second_step(tmp_path: Path) -> None:
    with runs.EngineTrainer(models.build(models.GPT), runs.engine_config(tmp_path, device_memory="128MiB")) as trainer:
        for step, args in enumerate(models.token_batches(5)):
            trainer.backward(trainer(*args))
            trainer.step()
            if step == 1:
                before = trainer.engine.totals()
        after = trainer.engine.totals()
    assert after.read_bytes == before.read_bytes
    assert after.write_bytes == before.write_bytes


# ---- bytes ----

BLOCKS = 6


class Stack(nn.Module):
    """Blocks whose planes fill their pages to the last byte."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(128, 128, bias=False) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.float().square().mean()


def bytes_per_param(directory: Path, overlap: str) -> list[tuple[float, float]]:
    """Bytes read and written per parameter in the third step and later ones, in bf16, with the least host and device memory."""

    def make() -> nn.Module:
        return models.build(Stack, torch.bfloat16)

    config = runs.engine_config(directory, precision="bf16", overlap=overlap)
    config = runs.with_device(config, runs.least_device_bytes(make, config))
    config = runs.with_host(config, runs.least_host_bytes(make, config))
    moved = []
    with runs.EngineTrainer(make(), config) as trainer:
        for _ in range(6):
            before = trainer.engine.totals()
            trainer.backward(trainer(torch.ones(4, 128, dtype=torch.bfloat16)))
            trainer.step()
            trainer.engine.finish()
            spent = trainer.engine.totals().since(before)
            numel = BLOCKS * 128 * 128
            moved.append((spent.read_bytes / numel, spent.write_bytes / numel))
    return moved[2:]


def test_a_fused_step_with_nothing_cached_reads_16_and_writes_12_bytes_per_parameter_at_most(tmp_path: Path) -> None:
    for read, written in bytes_per_param(tmp_path, "fused"):
        assert 14 <= read <= 16
        assert written == 12


def test_a_deferred_step_spills_its_gradient_once_where_there_is_no_room_for_it(tmp_path: Path) -> None:
    for read, written in bytes_per_param(tmp_path, "deferred"):
        assert 18 <= read <= 20
        assert written <= 16


# ---- nothing stays behind ----


def test_close_gives_descriptors_threads_and_files_back(tmp_path: Path) -> None:
    config = runs.engine_config(tmp_path)
    runs.engine_run(models.build(models.GPT), config, models.token_batches(2))
    before = descriptors(), threads()
    for _ in range(3):
        runs.engine_run(models.build(models.GPT), config, models.token_batches(2))
    assert (descriptors(), threads()) == before
    assert list(tmp_path.iterdir()) == []


def test_while_an_engine_runs_its_directory_holds_no_named_file(tmp_path: Path) -> None:
    with runs.EngineTrainer(models.build(models.GPT), runs.engine_config(tmp_path)) as trainer:
        runs.train(trainer, models.token_batches(1))
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_an_engine_that_nobody_closed_is_collected_with_all_it_had(tmp_path: Path) -> None:
    config = runs.engine_config(tmp_path)

    def forget() -> weakref.ref[infinity.Engine]:
        trainer = runs.EngineTrainer(models.build(models.GPT), config)
        runs.train(trainer, models.token_batches(2))
        return weakref.ref(trainer.engine)

    gone = forget()
    gc.collect()
    assert gone() is None
    before = descriptors(), threads()
    for _ in range(3):
        forget()
        gc.collect()
    assert (descriptors(), threads()) == before
    assert list(tmp_path.iterdir()) == []


def test_a_closed_engine_is_not_kept_alive_by_its_module(tmp_path: Path) -> None:
    model = models.build(models.GPT)
    trainer = runs.EngineTrainer(model, runs.engine_config(tmp_path))
    runs.train(trainer, models.token_batches(2))
    trainer.engine.close()
    engine = weakref.ref(trainer.engine)
    del trainer
    gc.collect()
    assert engine() is None
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    assert all(not param._backward_hooks and not param._post_accumulate_grad_hooks for param in model.parameters())


@pytest.mark.parametrize("overlap", ["auto", "deferred"])
def test_steps_leave_no_objects_behind(tmp_path: Path, overlap: str) -> None:
    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    with runs.EngineTrainer(models.build(models.GPT), runs.engine_config(tmp_path, overlap=overlap)) as trainer:
        counts = []
        for args in models.token_batches(8):
            trainer.engine.backward(trainer(*args))
            trainer.engine.step()
            trainer.engine.get_global_grad_norm()  # waits for the updates
            counts.append(tensors())
    assert len(set(counts[3:])) == 1


# ---- activations ----


class Watched(nn.Module):
    """Remembers, weakly, the memory of a tensor that autograd saves in each block: inside a checkpoint, where there is one."""

    def __init__(self, how: models.Checkpoint) -> None:
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.seen: list[StorageWeakRef] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self._call(self._inner(block), x)
        return x.square().mean()

    def _inner(self, block: nn.Module) -> Any:
        def inner(x: Tensor) -> Tensor:
            hidden = torch.tanh(block(x))
            self.seen.append(StorageWeakRef(hidden.untyped_storage()))
            return hidden * hidden

        return inner

    def _call(self, inner: Any, x: Tensor) -> Tensor:
        if self.how == "none":
            return inner(x)
        return checkpoint(inner, x.requires_grad_() if x.is_leaf else x, use_reentrant=self.how == "reentrant")

    def alive(self) -> int:
        return sum(not ref.expired() for ref in self.seen)


@pytest.mark.parametrize("how", ["reentrant", "non_reentrant"])
def test_what_a_checkpoint_drops_is_dropped(tmp_path: Path, how: models.Checkpoint) -> None:
    model = Watched(how)
    with runs.EngineTrainer(model, runs.engine_config(tmp_path)) as trainer, counting_only():
        for _ in range(3):
            model.seen.clear()
            loss = trainer(torch.randn(2, 16))
            assert (len(model.seen), model.alive()) == (3, 0)
            trainer.backward(loss)
            del loss
            assert model.alive() == 0
            trainer.step()


def test_an_activation_dies_with_its_graph(tmp_path: Path) -> None:
    model = Watched("none")
    with runs.EngineTrainer(model, runs.engine_config(tmp_path)) as trainer, counting_only():
        for backward in (True, False, True):
            model.seen.clear()
            loss = trainer(torch.randn(2, 16))
            assert model.alive() == 3
            if backward:
                trainer.engine.backward(loss)
                assert model.alive() == 0
                trainer.step()
            del loss
            assert model.alive() == 0


# ---- the process ----

HIGH_WATER = """
    import re, sys
    import torch
    import infinity
    from infinity.models.gpt import GPT, GPTConfig
    torch.set_num_threads(1)
    layers, width, device, host, directory = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]

    def field(name):
        return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10

    with torch.device("meta"):
        model = GPT(GPTConfig(layers=layers, heads=4, width=width, context=64, checkpoint=True))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "offload_param": {"device": "nvme", "nvme_path": directory},
            "offload_optimizer": {"device": "nvme", "nvme_path": directory},
        },
        "memory": {"device": device, "host": host},
    }
    with infinity.Engine(model, config, device="cpu") as engine:
        text = torch.randint(0, 256, (2, 65))
        engine.backward(engine(text[:, :-1], text[:, 1:]))
        engine.step()
        open("/proc/self/clear_refs", "w").write("5")
        for _ in range(3):
            engine.backward(engine(text[:, :-1], text[:, 1:]))
            engine.step()
        print(field("VmHWM"), engine.placement().n_params)
"""


def high_water(layers: int, width: int, device: str, host: str, directory: Path) -> tuple[int, int]:
    """Bytes resident at most during three steps, and the number of parameters; in a process of its own."""
    program = textwrap.dedent(HIGH_WATER)
    arguments = [str(layers), str(width), device, host, str(directory)]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    peak, n_params = map(int, done.stdout.split())
    return peak, n_params


def test_four_times_the_layers_need_no_more_memory(tmp_path: Path) -> None:
    small, n_small = high_water(4, 256, "14MiB", "16MiB", tmp_path)
    large, n_large = high_water(16, 256, "14MiB", "16MiB", tmp_path)
    more_state = (n_large - n_small) * 12
    assert more_state > 100 << 20
    assert large - small < 24 << 20


@pytest.mark.slow
@pytest.mark.parametrize("host", ["64MiB", "128MiB", "256MiB"])
def test_a_model_of_240_million_parameters_needs_no_more_memory_than_one_of_60(tmp_path: Path, host: str) -> None:
    small, n_small = high_water(8, 768, "80MiB", host, tmp_path)
    large, n_large = high_water(32, 768, "80MiB", host, tmp_path)
    assert n_small > 55e6
    assert n_large > 220e6
    assert large - small < 48 << 20


@pytest.mark.parametrize("pin_memory", [True, False])
def test_frames_are_page_locked_where_it_is_asked_for_and_training_goes_on_where_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, pin_memory: bool
) -> None:
    asked: list[int] = []

    def refuse(device: CpuDevice, address: int, nbytes: int) -> None:
        asked.append(nbytes)
        raise OSError("no memory may be locked")

    monkeypatch.setattr(CpuDevice, "register_host", refuse)
    config = runs.engine_config(tmp_path)
    for block in ("offload_param", "offload_optimizer"):
        config["zero_optimization"][block]["pin_memory"] = pin_memory
    with infinity.Engine(nn.Linear(16, 16), config, device="cpu") as engine:
        engine.backward(engine(torch.ones(2, 16)).sum())
        engine.step()
        assert engine.was_step_applied()
    assert len(asked) == pin_memory
    assert ("not page-locked" in caplog.text) == pin_memory
