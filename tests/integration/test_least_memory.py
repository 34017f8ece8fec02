"""At the smallest budgets that are taken, everything finds its memory and nothing is read that went away.

The simulated device fills what it lets go with NaN, and its budget has no grain: a use after a release is seen in the weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.errors import BudgetError, InfinityError
from tests.support import models, runs

WIDTH = 32

devices = pytest.mark.parametrize("device", ["cpu", "simulated"])
overlaps = pytest.mark.parametrize("overlap", ["auto", "deferred"])


def rows(n: int) -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(4, WIDTH, generator=generator),) for _ in range(n)]


def least(make: Callable[[], nn.Module], config: dict[str, Any], device: str) -> dict[str, Any]:
    """``config`` with the smallest budgets that the engine takes."""
    config = runs.with_host({**config, "memory": {"device": "64MiB", "host": "8MiB"}}, runs.least_host_bytes(make, config, device))
    return runs.with_device(config, runs.least_device_bytes(make, config, device))


def assert_trains(make: Callable[[], nn.Module], config: dict[str, Any], device: str, n: int = 4) -> None:
    plain = runs.train(runs.PlainTrainer(make()), rows(n))
    runs.assert_same(plain, runs.engine_run(make(), least(make, config, device), rows(n), device=device))


# ---- models that need more than their largest unit ----


class Outer(nn.Module):
    """Three modules deep, each with a parameter of its own: all are open at once."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.75))
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner: nn.Module = Outer(depth - 1) if depth > 1 else nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(torch.tanh(self.first(x * self.scale))) * self.scale
        return out if isinstance(self.inner, nn.Linear) else out.square().mean() if out.dim() else out + (x * self.scale).mean()


class Shared(nn.Module):
    """One block used three times, which recomputes itself: a gradient arrives while earlier ones wait, and makes room for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 8) for _ in range(2))
        self.root = nn.ModuleList([Recomputed(), nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        block, last = self.root
        x = x.clone().requires_grad_()
        for _ in range(3):
            x = block(x)
        return last(x).square().mean()


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 8) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        return checkpoint(lambda x: torch.tanh(x @ self.first) @ self.last, x, use_reentrant=True)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


@devices
@overlaps
@pytest.mark.parametrize("kind", [Outer, Shared, Residual])
def test_the_least_budgets_are_enough_and_no_gradient_is_lost(tmp_path: Path, kind: type, overlap: str, device: str) -> None:
    assert_trains(functools.partial(models.build, kind), runs.engine_config(tmp_path, overlap=overlap), device)


@devices
@pytest.mark.parametrize(
    "placement", [("nvme", "none"), ("none", "nvme"), ("nvme", "cpu"), ("cpu", "nvme"), ("none", "cpu"), ("cpu", "cpu")], ids="-".join
)
def test_the_least_budgets_of_every_placement_are_enough(tmp_path: Path, placement: tuple[str, str], device: str) -> None:
    config = runs.engine_config(tmp_path, param=placement[0], optimizer=placement[1])
    assert_trains(functools.partial(models.build, Residual), config, device)


@devices
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_least_budgets_hold_the_sums_of_several_backwards(tmp_path: Path, accumulation: int, device: str) -> None:
    make = functools.partial(models.build, Residual)
    config = least(make, runs.engine_config(tmp_path, overlap="deferred", accumulation=accumulation), device)

    def run(trainer: Any) -> runs.Outcome:
        for (x,) in rows(4):
            trainer.backward(trainer(x))
            if accumulation == 1:
                trainer.backward(trainer(x * 2))
            trainer.step()
        outcome: runs.Outcome = trainer.outcome()
        return outcome

    plain = run(runs.PlainTrainer(make(), accumulation=accumulation))
    with runs.EngineTrainer(make(), config, device=device) as trainer:
        runs.assert_same(plain, run(trainer))


# ---- memory that must stay while it is used ----


class Positions(nn.Module):
    """Gives a view of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, n: int) -> Tensor:
        return self.weight[:n]


class WithPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        positions = self.positions(len(x))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x + positions).square().mean()


@overlaps
def test_a_view_of_a_parameter_given_by_its_module_outlives_the_modules_forward(tmp_path: Path, overlap: str) -> None:
    assert_trains(functools.partial(models.build, WithPositions), runs.engine_config(tmp_path, overlap=overlap), "simulated")


class GradientInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return self.linear(x).square().sum()


def test_a_unit_entered_without_gradients_that_enables_them_has_its_weights_in_backward(tmp_path: Path) -> None:
    def gradients(model: nn.Module) -> list[Tensor]:
        x = rows(1)[0][0].requires_grad_()
        with torch.no_grad():
            outs = [module(x) for module in model]  # type: ignore[union-attr]
        return [torch.autograd.grad(out, x)[0] for out in outs]

    make = functools.partial(models.build, lambda: nn.Sequential(*(GradientInside() for _ in range(4))))
    expected = gradients(make())
    config = least(make, runs.engine_config(tmp_path), "simulated")
    with runs.EngineTrainer(make(), config, device="simulated") as trainer:
        assert all(torch.equal(a, b) for a, b in zip(expected, gradients(trainer.model), strict=True))


@pytest.mark.parametrize("room", [1, 2, 3])
def test_an_operation_on_parameters_of_several_units_has_all_of_them_or_says_what_it_needs(tmp_path: Path, room: int) -> None:
    make = functools.partial(models.build, lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))))
    config = runs.engine_config(tmp_path)
    unit_bytes = WIDTH * WIDTH * 4
    config = runs.with_device(config, max((room + 1) * unit_bytes - 1, runs.least_device_bytes(make, config, "simulated")))
    expected = torch._foreach_norm(list(make().parameters()))
    with runs.EngineTrainer(make(), config, device="simulated") as trainer, torch.no_grad():
        params = list(trainer.model.parameters())
        units_with_room = trainer.engine.placement().device_budget_bytes // unit_bytes
        for n in (1, 2, 3):
            if n <= units_with_room:
                assert all(torch.equal(a, b) for a, b in zip(torch._foreach_norm(params[:n]), expected, strict=False))
            else:
                with pytest.raises(BudgetError, match=r"memory\.device"):
                    torch._foreach_norm(params[:n])


@overlaps
def test_a_step_inside_gathered_is_refused_and_can_be_made_after_it(tmp_path: Path, overlap: str) -> None:
    make = functools.partial(models.build, Residual)
    with runs.EngineTrainer(make(), runs.engine_config(tmp_path, overlap=overlap), device="simulated") as trainer:
        runs.train(trainer, rows(3)[:2])
        param = trainer.model.get_parameter("blocks.0.0.weight")
        with infinity.gathered(param):
            before = param.detach().clone()
            trainer.backward(trainer(*rows(3)[2]))
            with pytest.raises(InfinityError, match="gathered"):
                trainer.step()
            assert torch.equal(param.detach(), before)
        trainer.step()
        runs.assert_same(runs.train(runs.PlainTrainer(make()), rows(3)), trainer.outcome())
