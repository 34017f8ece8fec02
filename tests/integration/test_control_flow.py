"""Whatever a model's forward does, the numbers are plain torch's."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import models, runs

WIDTH = 16
overlaps = pytest.mark.parametrize("overlap", ["auto", "deferred"])


def inputs(n: int, batch: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(batch, WIDTH, generator=generator) for _ in range(n)]


def compare(
    make: Callable[[], nn.Module],
    drive: Callable[[Any], None],
    directory: Path,
    *,
    overlap: str = "auto",
    precision: str = "fp32",
    **options: Any,
) -> runs.Outcome:
    """Runs ``drive`` on plain torch and on the engine; nothing may differ."""
    build = functools.partial(models.build, make, runs.DTYPES[precision])
    plain = runs.PlainTrainer(build(), accumulation=options.get("accumulation", 1))
    drive(plain)
    config = runs.engine_config(directory, precision=precision, overlap=overlap, **options)
    config = runs.with_host(config, runs.least_host_bytes(build, config))
    with runs.EngineTrainer(build(), config) as trainer:
        drive(trainer)
        outcome = trainer.outcome()
    runs.assert_same(plain.outcome(), outcome)
    return outcome


def drive_with(values: list[Any]) -> Callable[[Any], None]:
    """Forward, backward and step with each value."""

    def drive(trainer: Any) -> None:
        for value in values:
            trainer.backward(trainer(value))
            trainer.step()

    return drive


class Layers(nn.Module):
    """A stack of blocks; subclasses decide which run, and how often."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WIDTH)

    def loss(self, x: Tensor) -> Tensor:
        return self.head(x).float().square().mean()


# ---- which layers run ----


class RandomDepth(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.draw = torch.Generator().manual_seed(11)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if torch.rand((), generator=self.draw) < 0.6:
                x = x + block(x)
        return self.loss(x)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@overlaps
def test_layers_skipped_at_random(tmp_path: Path, overlap: str, precision: str) -> None:
    values = [x.to(runs.DTYPES[precision]) for x in inputs(12)]
    compare(RandomDepth, drive_with(values), tmp_path, overlap=overlap, precision=precision)


class OddSteps(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for index, block in enumerate(self.blocks):
            if index % 2 == 0 or self.calls % 2:
                x = x + block(x)
        return self.loss(x)


@overlaps
def test_layers_used_in_odd_steps_only(tmp_path: Path, overlap: str) -> None:
    compare(OddSteps, drive_with(inputs(8)), tmp_path, overlap=overlap)


class OtherOrder(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for block in list(self.blocks)[:: 1 if self.calls % 3 else -1]:
            x = x + block(x)
        return self.loss(x)


@overlaps
def test_layers_in_another_order_every_third_step(tmp_path: Path, overlap: str) -> None:
    compare(OtherOrder, drive_with(inputs(8)), tmp_path, overlap=overlap)


class Twice(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *self.blocks):
            x = x + block(x)
        return self.loss(self.head(x))


@overlaps
def test_modules_called_twice(tmp_path: Path, overlap: str) -> None:
    compare(Twice, drive_with(inputs(6)), tmp_path, overlap=overlap)


class DataDependent(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1 + int(x[0, 0].abs() * 10) % 4):
            for block in self.blocks:
                x = x + block(x)
                if x.mean() > 0.02:
                    break
        return self.loss(x)


def test_a_loop_as_long_as_the_data_says(tmp_path: Path) -> None:
    compare(DataDependent, drive_with(inputs(12)), tmp_path, overlap="deferred")


class InPlace(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(x).clone()
            y.mul_(0.5).add_(x)
            x = torch.relu_(y)
        return self.loss(x)


@overlaps
def test_functions_in_place(tmp_path: Path, overlap: str) -> None:
    compare(InPlace, drive_with(inputs(6)), tmp_path, overlap=overlap)


class Functional(Layers):
    """Weights used outside their modules, transposed and in another module's forward."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + x @ block[0].weight.t() + torch.nn.functional.linear(x, self.head.weight, block[0].bias)
        return self.loss(x)


@overlaps
def test_weights_used_without_calling_their_module(tmp_path: Path, overlap: str) -> None:
    compare(Functional, drive_with(inputs(6)), tmp_path, overlap=overlap)


class Penalty(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.loss(x) + sum(param.float().square().sum() for param in self.parameters()) * 1e-3


@overlaps
def test_a_penalty_on_every_weight_in_the_root_forward(tmp_path: Path, overlap: str) -> None:
    compare(Penalty, drive_with(inputs(6)), tmp_path, overlap=overlap)


# ---- what goes in and comes out ----


@dataclasses.dataclass
class Output:
    loss: Tensor
    extras: dict[str, Any]


class Containers(Layers):
    """Takes a dict, hands a dataclass of containers with None from block to block."""

    def __init__(self) -> None:
        super().__init__()
        self.wrapped = nn.ModuleList(Wrapped() for _ in range(3))

    def forward(self, batch: dict[str, Tensor | None]) -> Output:
        x = batch["x"]
        assert x is not None
        state: Any = Output(x, {"hidden": None, "list": [x, None]})
        for block in self.wrapped:
            state = block(state=state)
        return Output(self.loss(state.extras["list"][0]), {"nothing": None, "hidden": state.extras})


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, *, state: Output) -> Output:
        y = torch.tanh(self.linear(state.extras["list"][0]))
        return Output(state.loss, {"hidden": {"deep": (y, None)}, "list": [y, None]})


@overlaps
def test_dicts_dataclasses_and_none_in_and_out(tmp_path: Path, overlap: str) -> None:
    def drive(trainer: Any) -> None:
        for x in inputs(6):
            output = trainer({"x": x, "mask": None})
            assert output.extras["nothing"] is None
            trainer.backward(output.loss)
            trainer.step()

    compare(Containers, drive, tmp_path, overlap=overlap)


class Integers(nn.Module):
    """Integer inputs only, an embedding bag of them, and a part of the output unused."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(50, WIDTH)
        self.table = nn.Embedding(50, WIDTH, padding_idx=0)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, numbers: Tensor) -> Tensor:
        return self.head(self.bag(numbers) + self.table(numbers).mean(1))[:, 1].float().square().mean()


@overlaps
def test_integer_inputs(tmp_path: Path, overlap: str) -> None:
    generator = torch.Generator().manual_seed(9)
    compare(Integers, drive_with([torch.randint(0, 50, (4, 6), generator=generator) for _ in range(6)]), tmp_path, overlap=overlap)


class Buffers(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.loss(self.norm(x))


@overlaps
def test_buffers_are_the_models_own(tmp_path: Path, overlap: str) -> None:
    values = inputs(5)
    plain = models.build(Buffers)
    drive_with(values)(runs.PlainTrainer(plain))
    model = models.build(Buffers)
    with runs.EngineTrainer(model, runs.engine_config(tmp_path, overlap=overlap)) as trainer:
        drive_with(values)(trainer)
    assert torch.equal(model.norm.running_mean, plain.norm.running_mean)
    assert torch.equal(model.norm.running_var, plain.norm.running_var)


# ---- when it runs ----


def gpt(**options: Any) -> Callable[[], nn.Module]:
    return lambda: models.GPT(**options)


@overlaps
def test_evaluation_between_steps_changes_nothing(tmp_path: Path, overlap: str) -> None:
    batches = models.token_batches(6)

    def drive(trainer: Any) -> None:
        for args in batches:
            trainer.backward(trainer(*args))
            trainer.step()
            trainer.eval()
            with torch.no_grad():
                trainer._outcome.losses += [trainer(*batch) for batch in batches[:2]]
            trainer.train()

    compare(gpt(), drive, tmp_path, overlap=overlap)


@overlaps
def test_evaluation_first(tmp_path: Path, overlap: str) -> None:
    batches = models.token_batches(5)

    def drive(trainer: Any) -> None:
        trainer.eval()
        with torch.no_grad():
            trainer._outcome.losses += [trainer(*batch) for batch in batches]
        trainer.train()
        runs.train(trainer, batches)

    compare(gpt(), drive, tmp_path, overlap=overlap)


@overlaps
def test_evaluation_with_gradients_enabled_and_no_backward(tmp_path: Path, overlap: str) -> None:
    batches = models.token_batches(5)

    def drive(trainer: Any) -> None:
        for args in batches:
            trainer.eval()
            trainer._outcome.losses.append(trainer(*args).detach())
            trainer.train()
            trainer.backward(trainer(*args))
            trainer.step()

    compare(gpt(), drive, tmp_path, overlap=overlap)


@overlaps
def test_a_forward_without_gradients_in_train_mode(tmp_path: Path, overlap: str) -> None:
    batches = models.token_batches(5)

    def drive(trainer: Any) -> None:
        for args in batches:
            with torch.no_grad():
                trainer._outcome.losses.append(trainer(*args))
            trainer.backward(trainer(*args))
            trainer.step()

    compare(gpt(dropout=0.0), drive, tmp_path, overlap=overlap)


def test_inference_mode(tmp_path: Path) -> None:
    batches = models.token_batches(5)

    def drive(trainer: Any) -> None:
        for args in batches:
            trainer.backward(trainer(*args))
            trainer.step()
            trainer.eval()
            with torch.inference_mode():
                trainer._outcome.losses.append(trainer(*args).clone())
            trainer.train()

    compare(gpt(), drive, tmp_path)


def test_evaluation_between_the_micro_steps_of_a_step(tmp_path: Path) -> None:
    batches = models.token_batches(6)

    def drive(trainer: Any) -> None:
        for args in batches:
            trainer.backward(trainer(*args))
            trainer.step()
            with torch.no_grad():
                trainer._outcome.losses.append(trainer(*args))

    compare(gpt(), drive, tmp_path, accumulation=2)


def test_evaluation_between_backward_and_a_deferred_step(tmp_path: Path) -> None:
    batches = models.token_batches(5)

    def drive(trainer: Any) -> None:
        for args in batches:
            trainer.backward(trainer(*args))
            with torch.no_grad():
                trainer._outcome.losses.append(trainer(*args))
            trainer.step()

    compare(gpt(), drive, tmp_path, overlap="deferred")


def test_two_forwards_before_one_backward_of_their_sum(tmp_path: Path) -> None:
    batches = models.token_batches(6)

    def drive(trainer: Any) -> None:
        for a, b in zip(batches[::2], batches[1::2], strict=True):
            trainer.backward(trainer(*a) + trainer(*b))
            trainer.step()

    compare(gpt(), drive, tmp_path)


def test_two_backwards_of_two_losses_add_up_in_deferred(tmp_path: Path) -> None:
    batches = models.token_batches(6)

    def drive(trainer: Any) -> None:
        for a, b in zip(batches[::2], batches[1::2], strict=True):
            trainer.backward(trainer(*a))
            trainer.backward(trainer(*b))
            trainer.step()

    compare(gpt(), drive, tmp_path, overlap="deferred")


def test_a_forward_whose_loss_is_thrown_away(tmp_path: Path) -> None:
    batches = models.token_batches(6)

    def drive(trainer: Any) -> None:
        for index, args in enumerate(batches):
            if index % 3 == 1:
                trainer(*args)
            trainer.backward(trainer(*args))
            trainer.step()

    compare(gpt(), drive, tmp_path)


def test_zero_grad_drops_what_was_accumulated(tmp_path: Path) -> None:
    batches = models.token_batches(6)

    def drive(trainer: Any) -> None:
        for index, args in enumerate(batches):
            if index % 2:
                trainer.backward(trainer(*args))
                trainer.zero_grad()
            trainer.backward(trainer(*args))
            trainer.step()

    compare(gpt(), drive, tmp_path, overlap="deferred")


def test_batches_of_changing_size(tmp_path: Path) -> None:
    batches = [models.token_batches(1, batch=size, seed=size)[0] for size in (1, 4, 2, 3, 4)]
    compare(gpt(), lambda trainer: runs.train(trainer, batches) and None, tmp_path)


def test_two_engines_do_not_know_of_each_other(tmp_path: Path) -> None:
    batches = models.token_batches(5)
    build = functools.partial(models.build, gpt())
    other = functools.partial(models.build, gpt(blocks=2), seed=3)
    plains = [runs.train(runs.PlainTrainer(make()), batches) for make in (build, other)]
    config = runs.engine_config(tmp_path)
    with runs.EngineTrainer(build(), config) as first, runs.EngineTrainer(other(), config) as second:
        for args in batches:
            for trainer in (first, second):
                trainer.backward(trainer(*args))
            for trainer in (second, first):
                trainer.step()
        runs.assert_same(plains[0], first.outcome())
        runs.assert_same(plains[1], second.outcome())


def test_a_closed_engine_leaves_a_module_that_trains_on_in_plain_torch(tmp_path: Path) -> None:
    batches = models.token_batches(6)
    plain = models.build(gpt())
    runs.train(runs.PlainTrainer(plain), batches[:3])
    model = models.build(gpt())
    with runs.EngineTrainer(model, runs.engine_config(tmp_path)) as trainer:
        runs.train(trainer, batches[:3])
    assert all(type(param) is nn.Parameter for param in model.parameters())
    runs.assert_same(runs.train(runs.PlainTrainer(plain), batches[3:]), runs.train(runs.PlainTrainer(model), batches[3:]))
