"""What goes wrong, what is said about it, and what still works afterwards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.errors import (
    BudgetError,
    ConfigError,
    ConsumedGradientError,
    EngineClosedError,
    EngineFailedError,
    InfinityError,
    ModelError,
    StaleStepError,
)
from tests.support import models, runs

overlaps = pytest.mark.parametrize("overlap", ["auto", "deferred"])


class UserError(Exception):
    """An error of the user's own."""


class Faulty(models.GPT):
    """A GPT that calls ``fault`` in the forward, or the backward, of its third block."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.in_forward: Callable[[], None] | None = None
        self.in_backward: Callable[[], None] | None = None
        self.blocks[2].attention = nn.Sequential(self.blocks[2].attention, Fault(self))


class Fault(nn.Module):
    def __init__(self, model: Faulty) -> None:
        super().__init__()
        self.ask = lambda: model  # not a child

    def forward(self, x: Tensor) -> Tensor:
        if fault := self.ask().in_forward:
            fault()
        return FaultInBackward.apply(x, self.ask())


class FaultInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, model: Faulty) -> Tensor:
        ctx.model = model
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if fault := ctx.model.in_backward:
            fault()
        return grad, None


def throw(error: BaseException) -> Callable[[], None]:
    def fault() -> None:
        raise error

    return fault


build = functools.partial(models.build, Faulty)


def plain_outcome(batches: list[models.Tokens]) -> runs.Outcome:
    return runs.train(runs.PlainTrainer(build()), batches)


def states_of(model: nn.Module) -> list[tuple[int, type, int, bytes]]:
    """Identity, class, address and bytes of each parameter."""
    return [(id(p), type(p), p.data_ptr(), runs.bits(p).numpy().tobytes()) for p in model.parameters()]


# ---- errors of the user's ----


@overlaps
@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("kind", [UserError, KeyboardInterrupt, RuntimeError])
def test_an_error_in_a_forward_surfaces_unchanged_and_training_goes_on(tmp_path: Path, kind: type, at: int, overlap: str) -> None:
    batches = models.token_batches(5)
    error = kind("of the user")
    with runs.EngineTrainer(build(), runs.engine_config(tmp_path, overlap=overlap)) as trainer:
        for step, args in enumerate(batches):
            if step == at:
                trainer.model.in_forward = throw(error)
                with pytest.raises(kind) as raised:
                    trainer(*args)
                assert raised.value is error
                trainer.model.in_forward = None
            trainer.backward(trainer(*args))
            trainer.step()
        runs.assert_same(plain_outcome(batches), trainer.outcome())


@overlaps
@pytest.mark.parametrize("kind", [UserError, KeyboardInterrupt])
def test_an_error_in_an_evaluation_changes_nothing(tmp_path: Path, kind: type, overlap: str) -> None:
    batches = models.token_batches(4)
    with runs.EngineTrainer(build(), runs.engine_config(tmp_path, overlap=overlap)) as trainer:
        for args in batches:
            trainer.model.in_forward = throw(kind())
            with pytest.raises(kind), torch.no_grad():
                trainer(*args)
            trainer.model.in_forward = None
            trainer.backward(trainer(*args))
            trainer.step()
        runs.assert_same(plain_outcome(batches), trainer.outcome())


@overlaps
def test_an_error_in_a_recomputed_forward_surfaces_unchanged(tmp_path: Path, overlap: str) -> None:
    args = models.token_batches(1)[0]
    error = UserError()
    model = models.build(functools.partial(Faulty, checkpoint="non_reentrant"))
    with runs.EngineTrainer(model, runs.engine_config(tmp_path, overlap=overlap)) as trainer:
        loss = trainer(*args)
        model.in_forward = throw(error)
        with pytest.raises(UserError) as raised:
            trainer.backward(loss)
        assert raised.value is error


@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("kind", [UserError, KeyboardInterrupt])
def test_after_an_error_in_a_deferred_backward_zero_grad_drops_what_it_left(tmp_path: Path, kind: type, at: int) -> None:
    batches = models.token_batches(5)
    error = kind("of the user")
    with runs.EngineTrainer(build(), runs.engine_config(tmp_path, overlap="deferred")) as trainer:
        for step, args in enumerate(batches):
            if step == at:
                loss = trainer(*args)
                trainer.model.in_backward = throw(error)
                with pytest.raises(kind) as raised:
                    trainer.engine.backward(loss)
                assert raised.value is error
                trainer.model.in_backward = None
                trainer.zero_grad()
            trainer.backward(trainer(*args))
            trainer.step()
        runs.assert_same(plain_outcome(batches), trainer.outcome())


def test_after_an_error_in_a_deferred_backward_the_weights_are_those_of_the_last_step(tmp_path: Path) -> None:
    batches = models.token_batches(3)
    with runs.EngineTrainer(build(), runs.engine_config(tmp_path, overlap="deferred")) as trainer:
        runs.train(trainer, batches[:2])
        loss = trainer(*batches[2])
        trainer.model.in_backward = throw(UserError())
        with pytest.raises(UserError):
            trainer.engine.backward(loss)
        runs.assert_same(plain_outcome(batches[:2]), trainer.outcome())


def test_an_error_after_the_first_update_of_a_fused_backward_fails_the_engine(tmp_path: Path) -> None:
    batches = models.token_batches(4)
    error = UserError("of the user")
    with runs.EngineTrainer(build(), runs.engine_config(tmp_path, overlap="fused")) as trainer:
        runs.train(trainer, batches[:3])
        loss = trainer(*batches[3])
        trainer.model.in_backward = throw(error)
        with pytest.raises(UserError) as raised:
            trainer.engine.backward(loss)
        assert raised.value is error
        for call in (lambda: trainer(*batches[0]), trainer.engine.step, trainer.engine.state_dict):
            with pytest.raises(EngineFailedError) as failed:
                call()
            assert failed.value.__cause__ is error


def test_an_error_in_the_recorded_fused_step_leaves_the_engine_usable(tmp_path: Path) -> None:
    batches = models.token_batches(4)
    with runs.EngineTrainer(build(), runs.engine_config(tmp_path, overlap="fused")) as trainer:
        loss = trainer(*batches[0])
        trainer.model.in_backward = throw(UserError())
        with pytest.raises(UserError):
            trainer.engine.backward(loss)
        trainer.model.in_backward = None
        trainer.zero_grad()
        runs.assert_same(plain_outcome(batches), runs.train(trainer, batches))


@overlaps
def test_an_error_in_the_loss_costs_nothing(tmp_path: Path, overlap: str) -> None:
    batches = models.token_batches(3)
    with runs.EngineTrainer(build(), runs.engine_config(tmp_path, overlap=overlap)) as trainer:
        for args in batches:
            with pytest.raises(ZeroDivisionError):
                _ = trainer(*args) / (1 // 0)
            trainer.backward(trainer(*args))
            trainer.step()
        runs.assert_same(plain_outcome(batches), trainer.outcome())


@overlaps
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_nan_loss_does_what_it_does_in_torch(tmp_path: Path, precision: str, overlap: str) -> None:
    batches = models.token_batches(4)

    def run(trainer: Any) -> runs.Outcome:
        for step, args in enumerate(batches):
            loss = trainer(*args)
            trainer.backward(loss * float("nan") if step == 2 else loss)
            trainer.step()
        return trainer.outcome()

    make = functools.partial(models.build, models.GPT, runs.DTYPES[precision])
    plain = run(runs.PlainTrainer(make()))
    with runs.EngineTrainer(make(), runs.engine_config(tmp_path, precision=precision, overlap=overlap)) as trainer:
        found = run(trainer)
    for kind in ("weights", "exp_avg", "exp_avg_sq"):
        for name, value in getattr(plain, kind).items():
            assert torch.equal(value.isnan(), getattr(found, kind)[name].isnan()), (kind, name)
            assert torch.equal(value.nan_to_num(), getattr(found, kind)[name].nan_to_num()), (kind, name)
    assert [x.isnan().item() for x in found.losses] == [False, False, True, True]


def test_a_nan_gradient_with_clipping_is_nan_everywhere(tmp_path: Path) -> None:
    args = models.token_batches(1)[0]
    with runs.EngineTrainer(build(), runs.engine_config(tmp_path, clip=1.0)) as trainer:
        trainer.backward(trainer(*args) * float("nan"))
        trainer.step()
        norm = trainer.engine.get_global_grad_norm()
        assert norm is not None
        assert norm != norm
        assert all(weight.isnan().all() for weight in trainer.outcome().weights.values())


# ---- models ----


@pytest.mark.parametrize("model", [nn.Identity(), nn.Sequential(nn.ReLU(), nn.Dropout())], ids=["identity", "sequential"])
def test_a_model_without_parameters_is_refused(tmp_path: Path, model: nn.Module) -> None:
    with pytest.raises(ModelError, match="no parameters"):
        infinity.Engine(model, runs.engine_config(tmp_path))


class OneParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 1, 16))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).square().mean()


@overlaps
def test_a_model_of_one_parameter_trains(tmp_path: Path, overlap: str) -> None:
    batches = [(torch.full((16,), 0.5 + i),) for i in range(5)]
    plain = runs.train(runs.PlainTrainer(OneParameter()), batches)
    runs.assert_same(plain, runs.engine_run(OneParameter(), runs.engine_config(tmp_path, overlap=overlap), batches))


class ZeroElements(OneParameter):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.linear = nn.Linear(16, 0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.linear(x).sum() + self.nothing.sum()


@overlaps
def test_parameters_of_zero_elements_stay_ordinary(tmp_path: Path, overlap: str) -> None:
    batches = [(torch.full((16,), 0.5 + i),) for i in range(5)]
    model = ZeroElements()
    plain = runs.train(runs.PlainTrainer(ZeroElements()), batches)
    with runs.EngineTrainer(model, runs.engine_config(tmp_path, overlap=overlap)) as trainer:
        found = runs.train(trainer, batches)
        assert type(model.nothing) is nn.Parameter
        assert set(trainer.engine.state_dict()) == {"w", "nothing", "linear.weight", "linear.bias"}
    runs.assert_same(plain, found)
    assert model.nothing.shape == (0, 4)


class Large(nn.Module):
    """One parameter of 4 MiB and its three planes."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.linspace(-1, 1, 1 << 20))

    def forward(self, x: Tensor) -> Tensor:
        return (self.large * x).square().mean() * 1000


@overlaps
def test_a_parameter_larger_than_the_host_budget_trains(tmp_path: Path, overlap: str) -> None:
    batches = [(torch.tensor(0.5 + i),) for i in range(4)]
    config = runs.engine_config(tmp_path, overlap=overlap, page=64 << 10, host="1MiB")
    plain = runs.train(runs.PlainTrainer(Large()), batches)
    runs.assert_same(plain, runs.engine_run(Large(), config, batches))


class Recurrent(nn.Module):
    """Its parameters are referred to weakly, by torch itself."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(16, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0].square().mean()


def test_a_recurrent_layer_on_meta_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Recurrent()
    with pytest.raises(ModelError, match=r"gru\.weight_ih_l0"):
        infinity.Engine(model, runs.engine_config(tmp_path))
    assert all(param.is_meta and type(param) is nn.Parameter for param in model.parameters())
    assert not list(tmp_path.iterdir())


def test_weights_of_a_failed_engine_cannot_be_taken_for_trained_ones(tmp_path: Path) -> None:
    class Both(Recurrent):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)
            self.fail = False

        def forward(self, x: Tensor) -> Tensor:
            x.requires_grad_().register_hook(lambda grad: 1 // (not self.fail) and grad)
            return super().forward(self.linear(x))

    model = models.build(Both)
    trainer = runs.EngineTrainer(model, runs.engine_config(tmp_path, overlap="fused"))
    runs.train(trainer, [(torch.ones(2, 3, 16),)] * 2)
    model.fail = True
    with pytest.raises(ZeroDivisionError):
        trainer.backward(trainer(torch.ones(2, 3, 16)))
    trainer.engine.close()
    assert model.linear.weight.is_meta
    assert model.gru.weight_ih_l0.isnan().all()
    assert model.gru.weight_ih_l0.shape == (48, 16)


# ---- budgets ----

placements = pytest.mark.parametrize(
    ("param", "optimizer"), [(a, b) for a in ("none", "cpu", "nvme") for b in ("none", "cpu", "nvme") if (a, b) != ("none", "none")]
)


@placements
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_host_budget_below_the_minimum_is_refused_with_the_number(tmp_path: Path, param: str, optimizer: str, precision: str) -> None:
    model = models.build(models.GPT, runs.DTYPES[precision])
    config = runs.engine_config(tmp_path, param=param, optimizer=optimizer, precision=precision)
    before = states_of(model)
    with pytest.raises(BudgetError, match=r"memory\.host") as refused:
        infinity.Engine(model, runs.with_host(config, 8192))
    assert refused.value.knob == "memory.host"
    assert refused.value.given_bytes == 8192
    assert states_of(model) == before
    assert not list(tmp_path.iterdir())

    needed = refused.value.needed_bytes
    with pytest.raises(BudgetError) as refused:
        infinity.Engine(model, runs.with_host(config, needed - 1))
    assert refused.value.needed_bytes == needed
    runs.engine_run(model, runs.with_host(config, needed), models.token_batches(3))


def test_a_device_budget_below_the_minimum_is_refused_with_the_number(tmp_path: Path) -> None:
    model = models.build(models.GPT)
    before = states_of(model)
    with pytest.raises(BudgetError, match=r"memory\.device") as refused:
        infinity.Engine(model, runs.engine_config(tmp_path, device_memory=8192))
    assert refused.value.knob == "memory.device"
    assert refused.value.needed_bytes > 8192
    assert states_of(model) == before
    assert not list(tmp_path.iterdir())


@overlaps
@pytest.mark.parametrize(("param", "optimizer"), [(a, b) for a in ("none", "cpu", "nvme") for b in ("none", "cpu", "nvme")])
def test_the_smallest_budgets_that_are_not_refused_train(tmp_path: Path, param: str, optimizer: str, overlap: str) -> None:
    make = functools.partial(models.build, functools.partial(models.GPT, tied=True, checkpoint="non_reentrant"))
    batches = models.token_batches(8)
    config = runs.engine_config(tmp_path, param=param, optimizer=optimizer, accumulation=2, overlap=overlap)
    config = runs.with_device(config, runs.least_device_bytes(make, config))
    config = runs.with_host(config, runs.least_host_bytes(make, config))
    plain = runs.train(runs.PlainTrainer(make(), accumulation=2), batches)
    runs.assert_same(plain, runs.engine_run(make(), config, batches))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_state_that_stays_on_the_device_counts_against_its_budget(tmp_path: Path, precision: str) -> None:
    model = models.build(models.GPT, runs.DTYPES[precision])
    before = states_of(model)
    with pytest.raises(BudgetError, match=r"memory\.device") as refused:
        infinity.Engine(model, runs.engine_config(tmp_path, param="none", optimizer="none", precision=precision, device_memory=65536))
    assert refused.value.knob == "memory.device"
    assert states_of(model) == before


# ---- paths and configs ----


@pytest.mark.parametrize("path", ["missing", "a file"])
def test_an_unusable_path_is_refused_and_the_model_is_untouched(tmp_path: Path, path: str) -> None:
    (tmp_path / "a file").write_text("text")
    model = models.build(models.GPT)
    before = states_of(model)
    with pytest.raises(ConfigError) as refused:
        infinity.Engine(model, runs.engine_config(tmp_path / path))
    assert any("nvme_path" in problem.key for problem in refused.value.problems)
    assert states_of(model) == before


def test_a_wrong_key_and_a_wrong_path_are_in_one_error(tmp_path: Path) -> None:
    config = runs.engine_config(tmp_path / "missing")
    with pytest.raises(ConfigError) as refused:
        infinity.Engine(models.build(models.GPT), {**config, "optimiser": {}})
    assert len(refused.value.problems) >= 2


# ---- order of calls ----


def test_close_may_be_called_twice_and_anything_else_after_it_is_refused(tmp_path: Path) -> None:
    args = models.token_batches(1)[0]
    trainer = runs.EngineTrainer(build(), runs.engine_config(tmp_path))
    runs.train(trainer, [args])
    trainer.engine.close()
    trainer.engine.close()
    for call in (lambda: trainer(*args), trainer.engine.step, trainer.engine.zero_grad, lambda: trainer.engine.backward(torch.ones(()))):
        with pytest.raises(EngineClosedError):
            call()


def test_a_step_without_a_gradient_changes_and_counts_nothing(tmp_path: Path) -> None:
    with runs.EngineTrainer(build(), runs.engine_config(tmp_path)) as trainer:
        trainer.engine.step()
        trainer.engine.step()
        assert trainer.engine.global_steps == 0
        runs.assert_same(runs.PlainTrainer(build()).outcome(), trainer.outcome())


def test_changing_a_group_between_a_fused_backward_and_the_step_is_refused(tmp_path: Path) -> None:
    batches = models.token_batches(3)
    with runs.EngineTrainer(build(), runs.engine_config(tmp_path, overlap="fused")) as trainer:
        runs.train(trainer, batches[:2])
        trainer.backward(trainer(*batches[2]))
        trainer.optimizer.param_groups[0]["lr"] = 0.5
        with pytest.raises(InfinityError, match=r"group 0.*lr"):
            trainer.engine.step()


def test_a_gradient_read_after_a_fused_update_is_refused_until_the_step(tmp_path: Path) -> None:
    batches = models.token_batches(3)
    with runs.EngineTrainer(build(), runs.engine_config(tmp_path, overlap="fused")) as trainer:
        runs.train(trainer, batches[:2])
        trainer.backward(trainer(*batches[2]))
        param = trainer.params["blocks.1.up.weight"]
        with pytest.raises(ConsumedGradientError, match="deferred"):
            _ = param.grad
        trainer.step()
        assert param.grad is None


class TwoLosses(nn.Module):
    """Two losses that share weights and no node of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x).square().mean(), self.linear(2 * x).square().mean()


def test_a_backward_of_a_unit_that_was_updated_in_this_step_is_refused_by_name(tmp_path: Path) -> None:
    x = torch.ones(2, 16)
    with runs.EngineTrainer(models.build(TwoLosses), runs.engine_config(tmp_path, overlap="fused")) as trainer:
        for _ in range(2):
            first, second = trainer(x)
            trainer.backward(first + second)
            trainer.step()
        first, second = trainer(x)
        trainer.engine.backward(first)
        with pytest.raises(StaleStepError) as refused:
            trainer.engine.backward(second)
        assert refused.value.unit == "linear"


@overlaps
def test_more_backwards_than_the_program_has_add_up_exactly_or_are_refused(tmp_path: Path, overlap: str) -> None:
    batches = models.token_batches(8)

    def run(trainer: Any) -> runs.Outcome:
        runs.train(trainer, batches[:4])
        for a, b in ((batches[4], batches[5]), (batches[6], batches[7])):
            trainer.backward(trainer(*a))
            trainer.backward(trainer(*b))
            trainer.step()
        return trainer.outcome()

    plain = run(runs.PlainTrainer(build()))
    with runs.EngineTrainer(build(), runs.engine_config(tmp_path, overlap=overlap)) as trainer:
        try:
            found = run(trainer)
        except StaleStepError:
            assert overlap != "deferred"
        else:
            runs.assert_same(plain, found)


@overlaps
def test_two_forwards_and_then_two_backwards_add_up_exactly_or_are_refused(tmp_path: Path, overlap: str) -> None:
    batches = models.token_batches(8)

    def run(trainer: Any) -> runs.Outcome:
        runs.train(trainer, batches[:4])
        for a, b in ((batches[4], batches[5]), (batches[6], batches[7])):
            first, second = trainer(*a), trainer(*b)
            trainer.backward(first)
            trainer.backward(second)
            trainer.step()
        return trainer.outcome()

    plain = run(runs.PlainTrainer(build()))
    with runs.EngineTrainer(build(), runs.engine_config(tmp_path, overlap=overlap)) as trainer:
        try:
            found = run(trainer)
        except StaleStepError:
            assert overlap != "deferred"
        else:
            runs.assert_same(plain, found)


def test_the_boundary_is_that_of_the_micro_step_whose_step_comes_next(tmp_path: Path) -> None:
    seen = []
    with runs.EngineTrainer(build(), runs.engine_config(tmp_path, accumulation=3)) as trainer:
        for args in models.token_batches(6):
            loss = trainer(*args)
            before = trainer.engine.is_gradient_accumulation_boundary()
            trainer.backward(loss)
            seen.append((before, trainer.engine.is_gradient_accumulation_boundary()))
            trainer.step()
            assert trainer.engine.was_step_applied() == seen[-1][0]
    assert seen == [(False, False), (False, False), (True, True)] * 2


def test_fused_with_clipping_is_refused_by_the_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        infinity.Engine(build(), runs.engine_config(tmp_path, overlap="fused", clip=1.0))


def test_a_model_can_be_given_to_a_second_engine_after_the_first_was_closed(tmp_path: Path) -> None:
    batches = models.token_batches(4)
    model = build()
    config = runs.engine_config(tmp_path)
    first = runs.engine_run(model, config, batches[:2])
    second = runs.engine_run(model, config, batches[2:])
    plain = build()
    runs.assert_same(runs.train(runs.PlainTrainer(plain), batches[:2]), first)
    runs.assert_same(runs.train(runs.PlainTrainer(plain), batches[2:]), second)


def test_a_model_that_an_engine_has_is_refused_by_a_second_one(tmp_path: Path) -> None:
    model = build()
    config = runs.engine_config(tmp_path)
    with infinity.Engine(model, config), pytest.raises(ModelError):
        infinity.Engine(model, config)


class Outer(nn.Module):
    """Owns a parameter, and has parts that own some: both are open at once."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((16,), 0.5))
        self.first = nn.Linear(16, 16)
        self.last = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return (self.last(torch.tanh(self.first(x) * self.scale)) * self.scale).square().mean()


@overlaps
def test_the_minimum_of_the_device_knows_units_inside_units(tmp_path: Path, overlap: str) -> None:
    batches = [(torch.full((3, 16), 0.1 * i),) for i in range(4)]
    make = functools.partial(models.build, Outer)
    config = runs.engine_config(tmp_path, overlap=overlap)
    config = runs.with_device(config, runs.least_device_bytes(make, config))
    plain = runs.train(runs.PlainTrainer(make()), batches)
    runs.assert_same(plain, runs.engine_run(make(), config, batches))
