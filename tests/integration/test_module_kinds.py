"""Modules that use their weights in ways of their own: the numbers are plain torch's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.data import DataLoader, TensorDataset

import infinity
from infinity import coordinator
from infinity.errors import ModelError
from tests.support import models, runs

WIDTH = 16
overlaps = pytest.mark.parametrize("overlap", ["auto", "deferred"])
devices = pytest.mark.parametrize("device", ["cpu", "simulated"])


def values(n: int, shape: tuple[int, ...] = (3, WIDTH)) -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [(torch.randn(*shape, generator=generator),) for _ in range(n)]


def compare(
    make: Callable[[], nn.Module],
    directory: Path,
    batches: list[Any],
    *,
    overlap: str = "auto",
    device: str = "cpu",
    dtype: Any = torch.float32,
) -> None:
    """Trains on plain torch and on the engine, at the smallest host budget; nothing may differ."""
    build = functools.partial(models.build, make, dtype)
    plain = runs.train(runs.PlainTrainer(build()), batches)
    config = runs.engine_config(directory, overlap=overlap)
    config = runs.with_host(config, runs.least_host_bytes(build, config, device))
    runs.assert_same(plain, runs.engine_run(build(), config, batches, device=device))


class Loss(nn.Module):
    """The mean square of what ``inner`` gives."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = make()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(torch.tanh(self.first(x)))
        return self.last(y[0] if isinstance(y, tuple) else y).float().square().mean()


class SelfAttention(nn.MultiheadAttention):
    """Uses its child's weight without calling the child."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)[0]


class Shared(nn.Module):
    """One module in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([self.a, nn.Linear(WIDTH, WIDTH), self.a])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.a(x)


class GradientPenalty(nn.Module):
    """The gradient of a part of the model, in the forward, and a second derivative in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = x
        for block in self.blocks:
            y = torch.tanh(block(y))
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + slope.square().sum(dim=-1, keepdim=True)


class Nested(nn.Module):
    """A checkpoint inside a checkpoint."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return torch.tanh(self.blocks[1](torch.tanh(self.blocks[0](x))))

        def outer(x: Tensor) -> Tensor:
            x = checkpoint(inner, x, use_reentrant=self.reentrant)
            return torch.tanh(self.blocks[3](torch.tanh(self.blocks[2](x))))

        return checkpoint(outer, x, use_reentrant=self.reentrant)


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(self.blocks, 3, x, use_reentrant=False)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Conv1d(1 if i == 0 else 16, 16, 3, padding=1) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1)
        for block in self.blocks:
            x = torch.relu(block(x))
        return x.mean(1)


class IntegerParameter(nn.Module):
    """A parameter that is no float, and a frozen one of fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.order = nn.Parameter(torch.arange(WIDTH).flip(0), requires_grad=False)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5, dtype=torch.float64), requires_grad=False)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[:, self.order]) * self.scale.float()


class Registered(nn.Module):
    """Hooks of the user's on modules."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        for block in self.blocks:
            block.register_forward_hook(lambda module, args, output: output * 1.5)
            block.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 0.5,))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def weight_norm() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


def spectral_norm() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


def prelu() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.PReLU(WIDTH), nn.GroupNorm(2, WIDTH))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "attention": SelfAttention,
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True), 2),
    "lstm": lambda: nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True),
    "gru": lambda: nn.GRU(WIDTH, WIDTH, batch_first=True),
    "shared": Shared,
    "gradient penalty": GradientPenalty,
    "nested checkpoints": lambda: Nested(reentrant=False),
    "nested reentrant checkpoints": lambda: Nested(reentrant=True),
    "checkpoint_sequential": Sequence,
    "convolution": Convolution,
    "integer parameter": IntegerParameter,
    "hooks on modules": Registered,
    "weight norm": weight_norm,
    "spectral norm": spectral_norm,
    "prelu": prelu,
}

SEQUENCES = {"attention", "encoder", "lstm", "gru"}


@overlaps
@devices
@pytest.mark.parametrize("kind", KINDS)
def test_a_module_of_this_kind_trains_as_in_plain_torch(tmp_path: Path, kind: str, device: str, overlap: str) -> None:
    batches = values(5, (2, 4, WIDTH) if kind in SEQUENCES else (3, WIDTH))
    compare(lambda: Loss(KINDS[kind]), tmp_path, batches, overlap=overlap, device=device)


class Mixed(nn.Module):
    """bf16 weights, fp32 norms."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.extra = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.extra.bias = nn.Parameter(self.extra.bias.detach().float())

    def forward(self, x: Tensor) -> Tensor:
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = torch.tanh(block(norm(x).bfloat16())).float()
        return (nn.functional.linear(x.bfloat16(), self.extra.weight).float() + self.extra.bias).square().mean()


@overlaps
def test_a_model_of_two_dtypes_keeps_both(tmp_path: Path, overlap: str) -> None:
    def build() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return Mixed()

    batches = values(6)
    plain = runs.train(runs.PlainTrainer(build()), batches)
    found = runs.engine_run(build(), runs.engine_config(tmp_path, overlap=overlap), batches)
    assert {tensor.dtype for tensor in found.weights.values()} == {torch.bfloat16, torch.float32}
    runs.assert_same(plain, found)


@overlaps
def test_the_model_may_be_called_instead_of_the_engine(tmp_path: Path, overlap: str) -> None:
    batches = models.token_batches(5)
    plain = runs.train(runs.PlainTrainer(models.build(models.GPT)), batches)
    with runs.EngineTrainer(models.build(models.GPT), runs.engine_config(tmp_path, overlap=overlap)) as trainer:
        for args in batches:
            trainer.backward(trainer.model(*args))
            trainer.step()
        runs.assert_same(plain, trainer.outcome())


def test_the_optimizers_own_step_and_zero_grad_are_the_engines(tmp_path: Path) -> None:
    batches = models.token_batches(5)
    plain = runs.train(runs.PlainTrainer(models.build(models.GPT)), batches)
    with runs.EngineTrainer(models.build(models.GPT), runs.engine_config(tmp_path)) as trainer:
        for args in batches:
            trainer.optimizer.zero_grad()
            loss = trainer(*args)
            trainer._outcome.losses.append(loss.detach().clone())
            loss.backward()
            trainer.optimizer.step()
        runs.assert_same(plain, trainer.outcome())


def test_a_loader_with_two_workers_feeds_an_engine(tmp_path: Path) -> None:
    data = TensorDataset(torch.stack([x for (x,) in values(12, (WIDTH,))]))
    make = functools.partial(models.build, lambda: Loss(nn.Tanh))
    plain = runs.train(runs.PlainTrainer(make()), DataLoader(data, batch_size=3))
    with runs.EngineTrainer(make(), runs.engine_config(tmp_path)) as trainer:
        for _ in range(2):
            loader = DataLoader(data, batch_size=3, num_workers=2)
            assert len(list(loader)) == 4
        runs.assert_same(plain, runs.train(trainer, DataLoader(data, batch_size=3, num_workers=2)))


def test_retained_graphs_add_up(tmp_path: Path) -> None:
    batches = models.token_batches(4)

    def run(trainer: Any) -> runs.Outcome:
        for args in batches:
            loss = trainer(*args)
            if isinstance(trainer, runs.EngineTrainer):
                trainer.engine.backward(loss, retain_graph=True)
            else:
                loss.backward(retain_graph=True)
            trainer.backward(loss * 0.5)
            trainer.step()
        outcome: runs.Outcome = trainer.outcome()
        return outcome

    plain = run(runs.PlainTrainer(models.build(models.GPT)))
    with runs.EngineTrainer(models.build(models.GPT), runs.engine_config(tmp_path, overlap="deferred")) as trainer:
        runs.assert_same(plain, run(trainer))


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


def test_attention_takes_the_same_fast_path_as_in_plain_torch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Attending().eval()
    torch.manual_seed(0)
    with infinity.Engine(Attending().eval(), runs.engine_config(tmp_path), device="cpu") as engine, torch.no_grad():
        x = torch.randn(2, 5, WIDTH)
        assert torch.equal(engine(x), plain(x))


class Marked(nn.Parameter):
    pass


def test_a_subclass_of_parameter_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.Linear(WIDTH, WIDTH)
    model.weight = Marked(model.weight.detach())
    with pytest.raises(ModelError, match=r"weight \(Marked\)"):
        infinity.Engine(model, runs.engine_config(tmp_path), device="cpu")
    assert type(model.weight) is Marked


def test_forwards_without_a_backward_do_not_add_up_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "VISITS_MAX", 10)
    torch.manual_seed(0)
    batch = values(1)[0]
    with infinity.Engine(Loss(lambda: nn.Linear(WIDTH, WIDTH)), runs.engine_config(tmp_path), device="cpu") as engine:
        first = engine(*batch)
        for _ in range(20):
            last = engine(*batch)
        program = engine._coordinator._program
        assert program is not None
        assert len(program.seen.visits) <= 10
        engine.backward(last)
        engine.step()
        assert torch.equal(first, last)
        assert not torch.equal(engine(*batch), last)


class Twin(nn.Module):
    """Owns a parameter itself, and a child that bears the name of its class."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.Twin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (self.Twin(x) * self.scale).square().mean()


@overlaps
def test_a_child_with_the_name_of_the_models_class_is_a_unit_of_its_own(tmp_path: Path, overlap: str) -> None:
    compare(Twin, tmp_path, values(3), overlap=overlap)
