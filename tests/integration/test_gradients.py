"""What users do with gradients between backward and step, and around them, means what it means in plain torch, or is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.errors import ConsumedGradientError, InfinityError, NotYetError, ReleasedParameterError
from tests.support import models, runs

WIDTH = 16
NAME = "blocks.1.up.weight"

build = functools.partial(models.build, functools.partial(models.GPT, blocks=2))
overlaps = pytest.mark.parametrize("overlap", ["auto", "deferred"])
placements = pytest.mark.parametrize("placement", [("nvme", "nvme"), ("none", "none")], ids="-".join)


def mlp() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def rows(n: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(n)]


def assert_runs_the_same(
    run: Callable[[Any], object],
    directory: Path,
    make: Callable[[], nn.Module] = build,
    *,
    device: str = "cpu",
    placement: tuple[str, str] = ("nvme", "nvme"),
    accumulation: int = 1,
    **options: Any,
) -> None:
    """``run`` in plain torch and on the engine, at the smallest host budget: no bit differs, and no norm."""
    plain = runs.PlainTrainer(make(), accumulation=accumulation)
    run(plain)
    config = runs.engine_config(directory, param=placement[0], optimizer=placement[1], accumulation=accumulation, **options)
    config = runs.with_host(config, runs.least_host_bytes(make, config, device))
    with runs.EngineTrainer(make(), config, device=device) as trainer:
        run(trainer)
        assert trainer._outcome.norms == plain._outcome.norms
        runs.assert_same(plain.outcome(), trainer.outcome())


def engine_after_two_steps(directory: Path, overlap: str = "deferred", **options: Any) -> runs.EngineTrainer:
    trainer = runs.EngineTrainer(build(), runs.engine_config(directory, overlap=overlap, **options))
    runs.train(trainer, models.token_batches(2))
    return trainer


# ---- sums of gradients ----


@pytest.mark.parametrize("page", [4 << 10, 16 << 10, 64 << 10])
@overlaps
def test_gradients_of_many_parameters_are_added_to_pages_that_come_back_from_the_disk(tmp_path: Path, overlap: str, page: int) -> None:
    """They arrive last parameter first, so a page is not filled in ascending order."""
    run = functools.partial(runs.train, batches=models.token_batches(6))
    assert_runs_the_same(run, tmp_path, placement=("cpu", "nvme"), accumulation=3, overlap=overlap, page=page)


# ---- right after a step, while its update is in flight ----


@overlaps
@placements
def test_right_after_a_step_every_gradient_is_none(tmp_path: Path, placement: tuple[str, str], overlap: str) -> None:
    def run(trainer: Any) -> None:
        for args in models.token_batches(3):
            trainer.backward(trainer(*args))
            trainer.step()
            for param in trainer.params.values():
                assert param.grad is None
                param.grad = None

    assert_runs_the_same(run, tmp_path, placement=placement, overlap=overlap)


@overlaps
def test_gradients_assigned_right_after_a_step_are_those_of_the_next(tmp_path: Path, overlap: str) -> None:
    def run(trainer: Any) -> None:
        for args in models.token_batches(3):
            trainer.backward(trainer(*args))
            trainer.step()
            for param in trainer.params.values():
                param.grad = torch.full(param.shape, 0.5)
            trainer.step()

    assert_runs_the_same(run, tmp_path, overlap=overlap)


@placements
def test_gradients_assigned_without_a_backward_are_stepped(tmp_path: Path, placement: tuple[str, str]) -> None:
    def run(trainer: Any) -> None:
        for value in (1.0, -0.25):
            for param in trainer.params.values():
                param.grad = torch.full(param.shape, value)
            trainer.step()

    assert_runs_the_same(run, tmp_path, placement=placement)


@overlaps
@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_a_resident_weight_read_or_written_right_after_a_step_is_that_of_the_step(tmp_path: Path, device: str, overlap: str) -> None:
    seen: list[list[Tensor]] = []

    def run(trainer: Any) -> None:
        seen.append([])
        for args in models.token_batches(4):
            trainer.backward(trainer(*args))
            trainer.step()
            for param in reversed(list(trainer.params.values())):  # those updated last are read first
                seen[-1].append(param.detach().clone())
                with torch.no_grad():
                    param.mul_(0.5)

    assert_runs_the_same(run, tmp_path, device=device, placement=("none", "none"), overlap=overlap)
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


# ---- backwards that are not the step's ----


def test_a_gradient_of_an_input_taken_between_micro_steps_is_not_a_micro_step(tmp_path: Path) -> None:
    def run(trainer: Any) -> None:
        for x in rows(6):
            x.requires_grad_()
            out = trainer(x)
            (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            trainer.backward(out.square().mean() + (grad.norm(dim=1) - 1).square().mean())
            trainer.step()
        if isinstance(trainer, runs.EngineTrainer):
            assert trainer.engine.global_steps == 3

    assert_runs_the_same(run, tmp_path, functools.partial(models.build, mlp), accumulation=2)


@overlaps
def test_zero_grad_at_every_micro_step_still_lets_the_last_one_step(tmp_path: Path, overlap: str) -> None:
    def run(trainer: Any) -> None:
        for args in models.token_batches(6):
            trainer.zero_grad()
            trainer.backward(trainer(*args))
            trainer.step()
        if isinstance(trainer, runs.EngineTrainer):
            assert trainer.engine.global_steps == 3

    assert_runs_the_same(run, tmp_path, accumulation=2, overlap=overlap)


def test_zero_grad_after_a_fused_backward_is_refused_and_the_step_can_be_ended(tmp_path: Path) -> None:
    batches = models.token_batches(4)
    with engine_after_two_steps(tmp_path, "auto") as trainer:
        trainer.backward(trainer(*batches[2]))
        with pytest.raises(ConsumedGradientError, match="deferred"):
            trainer.zero_grad()
        trainer.step()
        found = runs.train(trainer, batches[3:])
    runs.assert_same(runs.train(runs.PlainTrainer(build()), batches), found)


# ---- clipping ----


class Parts(nn.Module):
    """The second part is used when asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        out: Tensor = self.always(x) + (self.sometimes(x) if both else 0)
        return out.square().mean()


def test_the_norm_of_dropped_gradients_is_in_no_later_norm(tmp_path: Path) -> None:
    def run(trainer: Any) -> None:
        x, *later = rows(3)
        trainer.backward(trainer(x, True))
        if isinstance(trainer, runs.EngineTrainer):
            infinity.clip_grad_norm_(trainer.engine, 1e-3)
        trainer.zero_grad()
        for x in later:
            trainer.backward(trainer(x, False))
            trainer.step()

    assert_runs_the_same(run, tmp_path, functools.partial(models.build, Parts), overlap="deferred")


def test_a_backward_after_clipping_is_refused(tmp_path: Path) -> None:
    args = models.token_batches(3)[2]
    with engine_after_two_steps(tmp_path) as trainer:
        trainer.backward(trainer(*args))
        infinity.clip_grad_norm_(trainer.engine, 0.1)
        with pytest.raises(InfinityError, match="clip after the last backward"):
            trainer.backward(trainer(*args))


@pytest.mark.parametrize("optimizer", ["none", "nvme"])
def test_gradients_of_resident_weights_can_be_read_after_a_plain_backward_and_torchs_clipping_fails(tmp_path: Path, optimizer: str) -> None:
    args = models.token_batches(1)[0]
    plain = build()
    plain(*args).backward()
    with runs.EngineTrainer(build(), runs.engine_config(tmp_path, param="none", optimizer=optimizer, overlap="deferred")) as trainer:
        trainer(*args).backward()
        for name, param in plain.named_parameters():
            assert torch.equal(trainer.params[name].grad, param.grad), name
        with pytest.raises(RuntimeError, match=r"infinity\.clip_grad_norm_"):
            torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1e-3)


# ---- snapshots ----

WRITES: dict[str, Callable[[Any], object]] = {
    "data": lambda p: p.grad.data.mul_(0),
    "set_data": lambda p: setattr(p.grad, "data", torch.zeros(p.shape)),
    "detach": lambda p: p.grad.detach().mul_(0),
    "index": lambda p: p.grad[0].zero_(),
    "setitem": lambda p: p.grad.__setitem__(0, 0.0),
    "view": lambda p: p.grad.view(-1).mul_(0),
    "out": lambda p: torch.mul(p.grad, 0, out=p.grad),
    "ipow": lambda p: p.grad.__ipow__(2),
    "foreach": lambda p: torch._foreach_mul_([p.grad], 0.0),
    "clip_grad_value_": lambda p: nn.utils.clip_grad_value_([p], 0.0),
}


@pytest.mark.parametrize("name", WRITES)
def test_no_way_of_writing_into_a_snapshot_of_a_gradient_is_silent(tmp_path: Path, name: str) -> None:
    with engine_after_two_steps(tmp_path) as trainer:
        trainer.backward(trainer(*models.token_batches(1)[0]))
        param = trainer.params[NAME]
        with pytest.raises(RuntimeError, match=r"infinity\.clip_grad_norm_"):
            WRITES[name](param)


def test_the_array_of_a_snapshot_is_a_copy(tmp_path: Path) -> None:
    with engine_after_two_steps(tmp_path) as trainer:
        trainer.backward(trainer(*models.token_batches(1)[0]))
        param = trainer.params[NAME]
        before = param.grad.clone()
        param.grad.numpy().fill(0)
        assert torch.equal(param.grad, before)


# ---- hooks, groups, requires_grad ----


@pytest.mark.parametrize("when", ["before", "after"])
@placements
def test_a_users_post_accumulate_hook_sees_and_changes_the_gradient(tmp_path: Path, placement: tuple[str, str], when: str) -> None:
    def double(param: Tensor) -> None:
        assert param.grad is not None
        param.grad = param.grad * 2

    def hook(model: nn.Module) -> nn.Module:
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(double)
        return model

    def run(trainer: Any) -> None:
        if when == "after":
            hook(trainer.model)
        runs.train(trainer, models.token_batches(4))

    assert_runs_the_same(run, tmp_path, (lambda: hook(build())) if when == "before" else build, placement=placement)


def test_a_state_of_the_optimizer_loaded_between_backward_and_step_is_that_of_the_step(tmp_path: Path) -> None:
    def run(trainer: Any) -> None:
        for step, args in enumerate(models.token_batches(4)):
            trainer.backward(trainer(*args))
            if step == 2:
                state = trainer.optimizer.state_dict()
                for group in state["param_groups"]:
                    group["lr"] = 1e-4
                trainer.optimizer.load_state_dict(state)
            trainer.step()

    assert_runs_the_same(run, tmp_path, overlap="deferred")


@pytest.mark.parametrize("switched", [(True, True, False, False, False, False), (True, False) * 3], ids=["on_later", "in_turn"])
def test_parameters_switched_on_and_off_follow_in_fused_steps(tmp_path: Path, switched: tuple[bool, ...]) -> None:
    def run(trainer: Any) -> None:
        for off, args in zip(switched, models.token_batches(6), strict=True):
            for name, param in trainer.params.items():
                if name.startswith(("blocks.0.", "blocks.1.up")):
                    param.requires_grad_(not off)
            trainer.backward(trainer(*args))
            trainer.step()

    assert_runs_the_same(run, tmp_path)


def test_training_what_was_frozen_at_the_start_is_refused_by_name(tmp_path: Path) -> None:
    model = build()
    model.get_submodule("blocks.1").requires_grad_(False)
    with runs.EngineTrainer(model, runs.engine_config(tmp_path)) as trainer:
        model.get_parameter(NAME).requires_grad_(True)
        with pytest.raises(NotYetError, match=NAME):
            trainer.backward(trainer(*models.token_batches(1)[0]))


def assign_data(model: Any) -> None:
    model.head.weight.data = torch.zeros(models.VOCAB, WIDTH)


@placements
@pytest.mark.parametrize("cast", [nn.Module.bfloat16, nn.Module.double, assign_data])
def test_cutting_a_weight_from_its_engine_is_refused(tmp_path: Path, cast: Callable[[Any], object], placement: tuple[str, str]) -> None:
    batches = models.token_batches(3)
    with runs.EngineTrainer(build(), runs.engine_config(tmp_path, param=placement[0], optimizer=placement[1])) as trainer:
        runs.train(trainer, batches[:2])
        with pytest.raises(ReleasedParameterError):
            cast(trainer.model)
        found = runs.train(trainer, batches[2:])
    runs.assert_same(runs.train(runs.PlainTrainer(build()), batches), found)
