"""The whole engine while transfers fail: the run ends with the right weights or a typed error, never hangs, and can always be closed."""

from __future__ import annotations

import errno
import faulthandler
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from infinity.engine import EngineState
from infinity.errors import InfinityError, IoError
from infinity.faults import Fault
from infinity.task_queue import FileOp, Files
from tests.support import models, runs

WIDTH = 32
STEPS = 4


@pytest.fixture(autouse=True)
def hangs_are_shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hang ends the tests and says where."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(120, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
    torch.set_num_threads(threads)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def build() -> nn.Module:
    return models.build(Residual)


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(STEPS)]


def least_config(directory: Path, device: str, **options: Any) -> dict[str, Any]:
    config = runs.engine_config(directory, **options)
    config = runs.with_device(config, runs.least_device_bytes(build, config, device))
    return runs.with_host(config, runs.least_host_bytes(build, config, device))


def train(trainer: runs.EngineTrainer) -> tuple[runs.Outcome, int]:
    """Every step, and what came of them; each is tried again after an error, as long as the engine takes it. And how many there were."""
    errors = 0
    for x in batches():
        steps = trainer.engine.global_steps
        while trainer.engine.global_steps == steps:
            try:
                trainer.engine.backward(trainer(x))
                trainer.engine.step()
            except IoError:
                errors += 1
                trainer.engine.zero_grad()
    try:
        return trainer.outcome(), errors
    except IoError:
        return trainer.outcome(), errors + 1


@pytest.mark.parametrize("device", ["cpu", "simulated"])
@pytest.mark.parametrize("overlap", ["fused", "deferred"])
@pytest.mark.parametrize("op", [FileOp.READ, FileOp.WRITE], ids=lambda op: op.name)
def test_the_nth_transfer_fails_and_the_weights_are_right_or_the_engine_says_that_they_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: FileOp, overlap: str, device: str
) -> None:
    expected = runs.train(runs.PlainTrainer(build()), [(x,) for x in batches()])
    expected.losses = []
    config = least_config(tmp_path, device, overlap=overlap)
    ended_well = 0
    for nth in range(1, 100_000, 19):
        files = Files()
        files.fault(op, Fault.error(errno.EIO), nth=nth)
        monkeypatch.setattr("infinity.engine.Files", lambda files=files: files)
        model = build()
        try:
            trainer = runs.EngineTrainer(model, config, device=device)
        except IoError:
            assert all(p.is_meta or torch.equal(p, q) for p, q in zip(model.parameters(), build().parameters(), strict=True))
            continue
        try:
            found, errors = train(trainer)
        except InfinityError:
            assert trainer.engine._flight.failure is not None
        else:
            ended_well += 1
            assert errors <= 1
            runs.assert_same(expected, found)
        close(trainer)
        if files.count(op) < nth:
            assert ended_well > 1
            return


def close(trainer: runs.EngineTrainer) -> None:
    """Whatever happened, every parameter can be touched afterwards."""
    try:
        trainer.engine.close()
    except InfinityError:
        assert trainer.engine.state is EngineState.CLOSED
    for param in trainer.model.parameters():
        assert type(param) is nn.Parameter
        assert param.is_meta or param.detach().sum().isfinite()
