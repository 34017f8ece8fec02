"""What an error or a Ctrl-C in the middle leaves behind: training goes on exactly, or the engine says that it cannot. Never a hang."""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity import weights
from infinity.engine import EngineState
from infinity.errors import EngineFailedError, InfinityError, IoError
from infinity.executor import Executor
from infinity.faults import Fault
from infinity.flat_param import UnitState
from infinity.flight import Flight
from infinity.optim.step import Step
from infinity.task_queue import FileOp, TaskQueue
from tests.support import models, runs

WIDTH = 32

overlaps = pytest.mark.parametrize("overlap", ["auto", "deferred"])


@pytest.fixture(autouse=True)
def hangs_are_shown() -> Iterator[None]:
    """A hang ends the tests and says where."""
    faulthandler.dump_traceback_later(120, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


class Residual(nn.Module):
    """Calls ``fault`` between two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.fault: Callable[[], object] = bool
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = x + block[2](block[1](block[0](x)))
            if index == 1:
                self.fault()
        return x.square().mean()


build = functools.partial(models.build, Residual)


def rows(n: int) -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(9)
    return [(torch.randn(4, WIDTH, generator=generator),) for _ in range(n)]


def least(make: Callable[[], nn.Module], config: dict[str, Any], device: str) -> dict[str, Any]:
    config = runs.with_device(config, runs.least_device_bytes(make, config, device))
    return runs.with_host(config, runs.least_host_bytes(make, config, device))


def open_trainer(directory: Path, device: str = "simulated", make: Callable[[], nn.Module] = build, **options: Any) -> runs.EngineTrainer:
    """At the smallest budgets: a use after a release is seen, and every step reads and writes."""
    return runs.EngineTrainer(make(), least(make, runs.engine_config(directory, **options), device), device=device)


def interrupt() -> None:
    raise KeyboardInterrupt


def assert_parameters_can_be_touched(model: nn.Module) -> None:
    for param in model.parameters():
        assert type(param) is nn.Parameter
        assert param.is_meta or param.detach().sum().isfinite()


# ---- in the user's code ----


@overlaps
def test_a_model_called_by_itself_after_an_interrupted_forward_trains_exactly(tmp_path: Path, overlap: str) -> None:
    expected = runs.train(runs.PlainTrainer(build()), rows(4))
    expected.losses = []
    with open_trainer(tmp_path, overlap=overlap) as trainer:
        for args in rows(4):
            trainer.model.fault = interrupt
            with pytest.raises(KeyboardInterrupt):
                trainer.model(*args)
            trainer.model.fault = bool
            trainer.model(*args).backward()
            trainer.step()
        runs.assert_same(expected, trainer.outcome())


class Catching(nn.Module):
    """Calls parts whose forward pre-hook raises, and goes on without them; all have parameters of their own."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.broken = nn.Linear(WIDTH, WIDTH)
        self.inner = Catching(depth - 1) if depth > 1 else nn.Linear(WIDTH, WIDTH)
        self.broken.register_forward_pre_hook(self._refuse)

    @staticmethod
    def _refuse(module: nn.Module, args: Any) -> None:
        raise ValueError("of the user")

    def body(self, x: Tensor) -> Tensor:
        for _ in range(3):
            try:
                x = self.broken(x)
            except ValueError:
                x = x @ self.weight
        inner = self.inner
        return torch.tanh(inner.body(x) if isinstance(inner, Catching) else inner(x)) @ self.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).square().mean()


class Nested(nn.Module):
    """Calls the parts as modules, each inside the one above."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Called(Called(Called(None)))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.part(x)).square().mean()


class Called(Catching):
    def __init__(self, inner: nn.Module | None) -> None:
        super().__init__(depth=1)
        if inner is not None:
            self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@overlaps
@pytest.mark.parametrize("kind", [Catching, Nested])
def test_a_users_pre_hook_that_raises_and_is_caught_leaves_nothing_behind(tmp_path: Path, kind: type, overlap: str) -> None:
    make = functools.partial(models.build, kind)
    expected = runs.train(runs.PlainTrainer(make()), rows(4))
    with open_trainer(tmp_path, make=make, overlap=overlap) as trainer:
        runs.assert_same(expected, runs.train(trainer, rows(4)))


# ---- in the engine's ----


@pytest.mark.parametrize("nth", [2, 5])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("owner", "name", "cuts_bookkeeping"),
    [
        (TaskQueue, "submit", True),
        (TaskQueue, "poll", True),
        (Step, "_update_flat", True),
        (Executor, "release", False),
        (Flight, "wait_for", False),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value),
)
def test_a_ctrl_c_anywhere_in_the_engine_is_harmless_or_stops_it_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, cuts_bookkeeping: bool, when: str, nth: int
) -> None:
    with open_trainer(tmp_path, "cpu", overlap="deferred") as trainer:
        runs.train(trainer, rows(5)[:2])
        original, calls = getattr(owner, name), 0

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            result = original(*args, **kwargs) if when == "after" else None
            if calls == nth:
                raise KeyboardInterrupt
            return result if when == "after" else original(*args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(owner, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                runs.train(trainer, rows(5)[2:])
        goes_on = pytest.raises(EngineFailedError) if trainer.engine._flight.failure else contextlib.nullcontext()
        with goes_on as refused:
            trainer.engine.zero_grad()
            runs.train(trainer, rows(5)[2:])
            trainer.engine.finish()
        assert isinstance(refused.value.__cause__, KeyboardInterrupt) if refused else not cuts_bookkeeping
        trainer.engine.close()
        assert_parameters_can_be_touched(trainer.model)


def test_a_failed_sum_of_gradients_stops_the_engine_instead_of_waiting_for_ever(tmp_path: Path) -> None:
    failed = 0
    for nth in range(1, 40, 3):
        with open_trainer(tmp_path, "cpu", overlap="deferred", accumulation=2) as trainer:
            runs.train(trainer, rows(4)[:3])
            loss = trainer(*rows(4)[3])
            trainer.engine._flight.wait_all()
            trainer.engine._files.fault(FileOp.READ, Fault.error(errno.EIO), nth=nth)
            try:
                trainer.engine.backward(loss)
                trainer.engine._flight.wait_all()
            except InfinityError:
                pass
            trainer.engine._files.mend(FileOp.READ)
            if trainer.engine._store.has_failed_chains:
                failed += 1
                for call in (trainer.engine.zero_grad, lambda: trainer(*rows(1)[0])):
                    with pytest.raises(EngineFailedError) as raised:
                        call()
                    assert isinstance(raised.value.__cause__, IoError)
            trainer.engine.close()
            assert_parameters_can_be_touched(trainer.model)
    assert failed


def call_three_times(trainer: runs.EngineTrainer, args: tuple[Tensor]) -> None:
    for _ in range(3):
        trainer(*args)


@pytest.mark.parametrize("device", ["cpu", "simulated"])
@overlaps
def test_a_read_that_failed_in_a_forward_is_made_again_by_the_next(tmp_path: Path, overlap: str, device: str) -> None:
    expected = runs.train(runs.PlainTrainer(build()), rows(4))
    with open_trainer(tmp_path, device, overlap=overlap) as trainer:
        for args in rows(4):
            trainer.engine.finish()
            trainer.engine._files.fault(FileOp.READ, Fault.error(errno.EIO), nth=2)
            with pytest.raises(IoError):
                call_three_times(trainer, args)
            trainer.backward(trainer(*args))
            trainer.step()
        runs.assert_same(expected, trainer.outcome())


def test_a_rate_that_is_no_number_is_refused_before_a_fused_backward_and_nothing_is_lost(tmp_path: Path) -> None:
    expected = runs.train(runs.PlainTrainer(build()), rows(4))
    with open_trainer(tmp_path, overlap="fused") as trainer:
        runs.train(trainer, rows(4)[:2])
        group = trainer.optimizer.param_groups[0]
        right, group["lr"] = group["lr"], float("nan")
        with pytest.raises((InfinityError, ValueError), match="lr"):
            trainer.engine.backward(trainer(*rows(4)[2]))
        group["lr"] = right
        runs.assert_same(expected, runs.train(trainer, rows(4)[2:]))


# ---- at the ends ----


@pytest.mark.parametrize("nth", [1, 4, 8])
def test_close_with_a_disk_that_fails_leaves_parameters_that_can_be_touched(tmp_path: Path, nth: int) -> None:
    trainer = open_trainer(tmp_path, "cpu")
    runs.train(trainer, rows(2))
    trainer.engine.finish()
    trainer.engine._files.fault(FileOp.READ, Fault.error(errno.EIO), nth=nth, times=1_000_000)
    with pytest.raises(IoError):
        trainer.engine.close()
    assert trainer.engine.state is EngineState.CLOSED
    trainer.engine.close()
    assert_parameters_can_be_touched(trainer.model)
    assert list(tmp_path.iterdir()) == []


def same_group_twice(model: nn.Module, patched: pytest.MonkeyPatch) -> dict[str, Any]:
    params = list(model.parameters())
    return {"model_parameters": [{"params": params}, {"params": params[:1]}]}


def failure_at_the_third_unit(model: nn.Module, patched: pytest.MonkeyPatch) -> dict[str, Any]:
    original = weights.write_unit

    def write_unit(unit: Any, planes: Any) -> None:
        if unit.index == 2:
            raise InfinityError("of the test")
        original(unit, planes)

    patched.setattr(weights, "write_unit", write_unit)
    return {}


def failure_when_all_is_bound(model: nn.Module, patched: pytest.MonkeyPatch) -> dict[str, Any]:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise InfinityError("of the test")

    patched.setattr(Executor, "__init__", refuse)
    return {}


@pytest.mark.parametrize("refusal", [same_group_twice, failure_at_the_third_unit, failure_when_all_is_bound])
def test_a_refusal_at_any_point_of_the_start_leaves_an_ordinary_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Callable[[nn.Module, pytest.MonkeyPatch], dict[str, Any]]
) -> None:
    model = build()
    with monkeypatch.context() as patched:
        options = refusal(model, patched)
        with pytest.raises((InfinityError, ValueError)):
            infinity.Engine(model, runs.engine_config(tmp_path), device="cpu", **options)
    assert_parameters_can_be_touched(model)
    plain = runs.train(runs.PlainTrainer(build()), rows(3))
    runs.assert_same(plain, runs.train(runs.PlainTrainer(model), rows(3)))
    assert list(tmp_path.iterdir()) == []


def test_a_backward_that_a_failed_write_ended_gives_all_that_it_charged_back(tmp_path: Path) -> None:
    make = functools.partial(models.build, lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))))
    config = runs.engine_config(tmp_path, overlap="deferred")
    config = runs.with_host(config, runs.least_host_bytes(make, config, "cpu"))
    x = torch.randn(4, 64)
    failed = 0
    with infinity.Engine(make(), config, device="cpu") as engine:

        def used_bytes() -> int:
            engine.finish()
            gathered = sum(unit.nbytes for unit in engine._units if unit.state is UnitState.GATHERED)
            assert engine._device is not None
            return engine._device.used_bytes - gathered

        before = used_bytes()
        for _ in range(4):
            engine._files.fault(FileOp.WRITE, Fault.error(errno.EIO))
            try:
                engine.backward(engine(x).square().mean())
            except IoError:
                failed += 1
            engine._files.mend(FileOp.WRITE)
            engine.zero_grad()
            assert used_bytes() == before
        assert failed > 0
        engine.backward(engine(x).square().mean())
        engine.step()
        assert used_bytes() == before
