"""What happens when a parameter is touched whose memory may not be there: rules (a) to (e) of the design, gradients, and `gathered`."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.errors import InfinityError, NotYetError, ReleasedParameterError
from tests.support import models, runs

WIDTH = 16
NAME = "blocks.1.up.weight"


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[runs.EngineTrainer]:
    """An engine after two steps, deferred; every unit is released."""
    with runs.EngineTrainer(models.build(models.GPT), runs.engine_config(tmp_path, overlap="deferred")) as trainer:
        runs.train(trainer, models.token_batches(2))
        yield trainer


def plain_model() -> nn.Module:
    """The same after the same steps, in plain torch."""
    model = models.build(models.GPT)
    runs.train(runs.PlainTrainer(model), models.token_batches(2))
    return model


@pytest.fixture
def param(trainer: runs.EngineTrainer) -> nn.Parameter:
    """A released parameter."""
    return trainer.params[NAME]


@pytest.fixture
def expected() -> Tensor:
    """Its value."""
    return plain_model().get_parameter(NAME).detach()


# ---- (a) metadata ----

METADATA: dict[str, Callable[[Any], Any]] = {
    "shape": lambda p: p.shape,
    "size": lambda p: (p.size(), p.size(0), len(p)),
    "dim": lambda p: (p.dim(), p.ndim),
    "stride": lambda p: p.stride(),
    "numel": lambda p: (p.numel(), p.nelement(), p.nbytes, p.element_size(), p.itemsize),
    "dtype": lambda p: (p.dtype, p.device, p.layout),
    "flags": lambda p: (p.is_leaf, p.is_cuda, p.is_sparse, p.is_meta, p.is_contiguous(), p.is_floating_point(), p.is_complex()),
    "requires_grad": lambda p: (p.requires_grad, p.requires_grad_().requires_grad, p.grad_fn),
    "isinstance": lambda p: (isinstance(p, nn.Parameter), isinstance(p, Tensor), hash(p) == id(p)),
    "count": lambda p: sum(q.numel() for q in (p, p)),
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata_answer_without_a_gather(trainer: runs.EngineTrainer, param: nn.Parameter, expected: Tensor, name: str) -> None:
    before = trainer.engine.totals().read_bytes
    assert METADATA[name](param) == METADATA[name](nn.Parameter(expected))
    assert trainer.engine.totals().read_bytes == before


def test_named_parameters_and_their_count_are_the_models(trainer: runs.EngineTrainer) -> None:
    found = [(name, tuple(param.shape)) for name, param in trainer.model.named_parameters()]
    assert found == [(name, tuple(param.shape)) for name, param in plain_model().named_parameters()]


def test_a_parameter_is_the_same_object_all_along(tmp_path: Path) -> None:
    model = models.build(models.GPT)
    before = list(map(id, model.parameters()))
    with runs.EngineTrainer(model, runs.engine_config(tmp_path)) as trainer:
        runs.train(trainer, models.token_batches(3))
        assert list(map(id, model.parameters())) == before
        assert [id(p) for group in trainer.optimizer.param_groups for p in group["params"]] == before
    assert list(map(id, model.parameters())) == before
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_hooks_can_be_registered_on_a_released_parameter(tmp_path: Path) -> None:
    batches = models.token_batches(4)
    model = models.build(models.GPT)
    seen: list[float] = []
    with runs.EngineTrainer(model, runs.engine_config(tmp_path)) as trainer:
        runs.train(trainer, batches[:2])
        handle = model.get_parameter(NAME).register_hook(lambda grad: seen.append(grad.abs().sum().item()))
        runs.train(trainer, batches[2:3])
        handle.remove()
        found = runs.train(trainer, batches[3:])
    assert len(seen) == 1
    runs.assert_same(runs.train(runs.PlainTrainer(models.build(models.GPT)), batches), found)


def test_a_hook_that_changes_a_gradient_changes_it(tmp_path: Path) -> None:
    batches = models.token_batches(4)

    def run(trainer: Any) -> runs.Outcome:
        trainer.model.get_parameter(NAME).register_hook(lambda grad: grad * 0.25)
        return runs.train(trainer, batches)

    plain = run(runs.PlainTrainer(models.build(models.GPT)))
    with runs.EngineTrainer(models.build(models.GPT), runs.engine_config(tmp_path)) as trainer:
        runs.assert_same(plain, run(trainer))


# ---- (b) inside a visit ----


class Borrower(nn.Module):
    """The second block uses the first one's weight, its alias and its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.ModuleDict({"own": nn.Linear(WIDTH, WIDTH)}), nn.Linear(WIDTH, WIDTH)])
        self.blocks[1].forward = self._second  # type: ignore[method-assign]

    def _second(self, x: Tensor) -> Tensor:
        weight = self.blocks[0].weight
        return self.blocks[1]["own"](x) + x @ weight + x @ weight.t().tanh() + weight.view(-1)[:WIDTH] + weight.detach().sum()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


@pytest.mark.parametrize("overlap", ["auto", "deferred"])
@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_a_visit_borrows_what_it_touches_and_has_it_again_in_backward(tmp_path: Path, device: str, overlap: str) -> None:
    generator = torch.Generator().manual_seed(2)
    batches = [(torch.randn(3, WIDTH, generator=generator),) for _ in range(5)]
    plain = runs.train(runs.PlainTrainer(models.build(Borrower)), batches)
    config = runs.engine_config(tmp_path, overlap=overlap)
    runs.assert_same(plain, runs.engine_run(models.build(Borrower), config, batches, device=device))


class OwnForward(nn.Module):
    """The model's own forward, which is no unit's, uses weights of its parts, aliases among them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first, last = self.blocks[0].weight, self.blocks[2].weight.data
        for block in self.blocks:
            x = torch.tanh(block(x) + x @ first.t() + x @ block.weight.T + last[0]) + block.bias.detach()
        return x.square().mean() + first.float().square().sum() * 1e-3


@pytest.mark.parametrize("overlap", ["auto", "deferred"])
@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_the_models_own_forward_may_take_aliases_of_weights(tmp_path: Path, device: str, overlap: str) -> None:
    generator = torch.Generator().manual_seed(2)
    batches = [(torch.randn(3, WIDTH, generator=generator),) for _ in range(5)]
    plain = runs.train(runs.PlainTrainer(models.build(OwnForward)), batches)
    with runs.EngineTrainer(models.build(OwnForward), runs.engine_config(tmp_path, overlap=overlap), device=device) as trainer:
        runs.assert_same(plain, runs.train(trainer, batches))
        with pytest.raises(ReleasedParameterError):
            trainer.params["blocks.0.weight"].t()


# ---- (c) outside any visit ----

ALIASES: dict[str, Callable[[Any], Any]] = {
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "view": lambda p: p.view(-1),
    "view_as": lambda p: p.view_as(p),
    "t": lambda p: p.t(),
    "T": lambda p: p.T,
    "transpose": lambda p: torch.transpose(p, 0, 1),
    "index": lambda p: p[0],
    "narrow": lambda p: p.narrow(0, 0, 2),
    "reshape": lambda p: p.reshape(-1),
    "unbind": lambda p: p.unbind(0),
    "chunk": lambda p: torch.chunk(p, 2),
    "iterate": lambda p: list(p),
    "data_ptr": lambda p: p.data_ptr(),
    "untyped_storage": lambda p: p.untyped_storage(),
    "numpy": lambda p: p.detach().numpy(),
    "deepcopy": lambda p: copy.deepcopy(p),
    "pickle": lambda p: pickle.dumps(p),
    "set data": lambda p: setattr(p, "data", torch.zeros(64, WIDTH)),
}


@pytest.mark.parametrize("name", ALIASES)
def test_an_alias_is_refused_and_the_way_out_is_named(trainer: runs.EngineTrainer, param: nn.Parameter, name: str) -> None:
    with pytest.raises(ReleasedParameterError, match=r"infinity\.gathered|state_dict"):
        ALIASES[name](param)


def test_the_state_dict_of_the_module_is_refused_and_that_of_the_engine_has_copies(trainer: runs.EngineTrainer) -> None:
    with pytest.raises(ReleasedParameterError, match=r"engine\.state_dict"):
        trainer.model.state_dict()
    plain = plain_model().state_dict()
    found = trainer.engine.state_dict()
    assert list(found) == list(plain)
    assert all(torch.equal(found[name], plain[name]) for name in plain)


def test_a_deep_copy_of_the_module_is_refused(trainer: runs.EngineTrainer) -> None:
    with pytest.raises(ReleasedParameterError):
        copy.deepcopy(trainer.model)


READS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda p: p.sum(),
    "norm": lambda p: p.norm(),
    "arithmetic": lambda p: p * 2 + 1,
    "reflected": lambda p: 1 - p,
    "matmul": lambda p: torch.ones(2, 64) @ p,
    "stack": lambda p: torch.stack([p, p]),
    "clone": lambda p: p.clone(),
    "compare": lambda p: p > 0,
    "isfinite": lambda p: torch.isfinite(p).all(),
    "cast": lambda p: p.to(torch.float64),
    "functional": lambda p: nn.functional.linear(torch.ones(2, WIDTH), p),
    "tolist": lambda p: torch.tensor(p.tolist()),
}


@pytest.mark.parametrize("name", READS)
def test_an_operation_that_returns_no_alias_gathers_for_itself(param: nn.Parameter, expected: Tensor, name: str) -> None:
    found = READS[name](param)
    assert torch.equal(found.detach(), READS[name](expected))


def test_a_parameter_can_be_printed(trainer: runs.EngineTrainer, param: nn.Parameter, expected: Tensor) -> None:
    assert f"{expected[0, 0].item():.4f}" in repr(param)
    assert f"{expected[-1, -1].item():.4f}" in str(param)


WRITES: dict[str, Callable[[Any], Any]] = {
    "mul_": lambda p: p.mul_(0.5),
    "zero_": lambda p: p.zero_(),
    "copy_": lambda p: p.copy_(torch.arange(p.numel()).view(p.shape) / 100),
    "init": lambda p: nn.init.constant_(p, 0.25),
    "setitem": lambda p: p.__setitem__(0, 3.0),
    "out": lambda p: torch.add(torch.ones(p.shape), 1.0, out=p),
    "iadd": lambda p: p.__iadd__(1.0),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", WRITES)
def test_an_operation_in_place_is_written_back_and_trains_on(tmp_path: Path, name: str, precision: str) -> None:
    batches = models.token_batches(5)

    def run(trainer: Any) -> runs.Outcome:
        runs.train(trainer, batches[:2])
        param = trainer.params[NAME]
        with torch.no_grad():
            WRITES[name](param)
        if isinstance(trainer, runs.PlainTrainer) and precision == "bf16":
            trainer.optimizer.state[param]["residual"].zero_()
        return runs.train(trainer, batches[2:])

    dtype = runs.DTYPES[precision]
    plain = run(runs.PlainTrainer(models.build(models.GPT, dtype)))
    with runs.EngineTrainer(models.build(models.GPT, dtype), runs.engine_config(tmp_path, precision=precision)) as trainer:
        runs.assert_same(plain, run(trainer))


def test_initialising_the_whole_model_in_place_is_written_back(tmp_path: Path) -> None:
    model = models.build(models.GPT)
    with runs.EngineTrainer(model, runs.engine_config(tmp_path)) as trainer, torch.no_grad():
        for index, param in enumerate(model.parameters()):
            param.fill_(index)
        state = trainer.engine.state_dict()
        assert all((state[name] == index).all() for index, (name, _) in enumerate(model.named_parameters()))


# ---- (d) modified inside a visit ----


class Clamped(nn.Module):
    """Writes to its own weights, and to a later block's, in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ClampedBlock() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.head.bias.clamp_(-0.01, 0.01)
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().square().mean()


class ClampedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.1, 0.1)
        return torch.tanh(self.linear(x))


@pytest.mark.parametrize("device", ["cpu", "simulated"])
@pytest.mark.parametrize("overlap", ["auto", "deferred"])
def test_a_weight_written_inside_a_forward_stays_written(tmp_path: Path, overlap: str, device: str) -> None:
    generator = torch.Generator().manual_seed(2)
    batches = [(torch.randn(3, WIDTH, generator=generator),) for _ in range(5)]
    plain = runs.train(runs.PlainTrainer(models.build(Clamped)), batches)
    found = runs.engine_run(models.build(Clamped), runs.engine_config(tmp_path, overlap=overlap), batches, device=device)
    runs.assert_same(plain, found)


def test_a_weight_of_bf16_written_inside_a_forward_has_no_residual(tmp_path: Path) -> None:
    x = torch.ones(3, WIDTH, dtype=torch.bfloat16)
    model = models.build(Clamped, torch.bfloat16)
    with runs.EngineTrainer(model, runs.engine_config(tmp_path, precision="bf16")) as trainer:
        runs.train(trainer, [(x,)] * 3)
        assert trainer.outcome().residual["blocks.0.linear.weight"].count_nonzero() > 0
        trainer.eval()
        with torch.no_grad():
            trainer(x)
        outcome = trainer.outcome()
    assert outcome.residual["blocks.0.linear.weight"].count_nonzero() == 0
    assert outcome.residual["blocks.0.linear.bias"].count_nonzero() > 0
    assert outcome.weights["blocks.0.linear.weight"].abs().max() <= 0.1


def test_a_weight_written_between_forward_and_backward_raises_torchs_error(tmp_path: Path) -> None:
    x = torch.ones(3, WIDTH)

    def run(trainer: Any) -> None:
        loss = trainer(x)
        with torch.no_grad():
            trainer.model.blocks[1].linear.weight.mul_(0.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            trainer.backward(loss)

    run(runs.PlainTrainer(models.build(Clamped)))
    with runs.EngineTrainer(models.build(Clamped), runs.engine_config(tmp_path, overlap="deferred")) as trainer:
        run(trainer)


# ---- (e) while a backward runs ----


class Recomputing(torch.autograd.Function):
    """Keeps the module instead of the weight, and reads it again in backward: as some fused layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, linear: nn.Linear) -> Tensor:
        ctx.linear = linear
        ctx.save_for_backward(x)
        return x @ linear.weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = torch.nn.functional.linear(x, ctx.linear.weight)
        torch.autograd.backward(y, grad)
        extra = ctx.linear.weight.detach().view(-1)[:WIDTH] * 0.01
        return x.grad + extra, None, None


class RecomputingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(Recomputing.apply(x, x, self.linear) + self.linear.bias)


class RecomputingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RecomputingBlock() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().square().mean()


@pytest.mark.parametrize("device", ["cpu", "simulated"])
@pytest.mark.parametrize("overlap", ["auto", "deferred"])
def test_a_recompute_that_passes_no_hook_of_the_unit_finds_its_weights(tmp_path: Path, overlap: str, device: str) -> None:
    generator = torch.Generator().manual_seed(2)
    values = [torch.randn(3, WIDTH, generator=generator) for _ in range(5)]
    plain = runs.train(runs.PlainTrainer(models.build(RecomputingModel)), [(x.clone(),) for x in values])
    config = runs.engine_config(tmp_path, overlap=overlap)
    found = runs.engine_run(models.build(RecomputingModel), config, [(x.clone(),) for x in values], device=device)
    runs.assert_same(plain, found)


# ---- .grad between backward and step ----


def test_grad_is_a_snapshot_of_the_sum(trainer: runs.EngineTrainer, param: nn.Parameter) -> None:
    args = models.token_batches(3)[2]
    plain = plain_model()
    plain(*args).backward()
    trainer.backward(trainer(*args))
    assert torch.equal(param.grad, plain.get_parameter(NAME).grad)
    assert all(torch.equal(trainer.params[name].grad, p.grad) for name, p in plain.named_parameters())
    trainer.step()
    assert param.grad is None


def test_a_snapshot_of_a_gradient_takes_no_operation_in_place(trainer: runs.EngineTrainer, param: nn.Parameter) -> None:
    trainer.backward(trainer(*models.token_batches(1)[0]))
    for write in (lambda grad: grad.mul_(2), lambda grad: grad.zero_(), lambda grad: grad.add_(1), lambda grad: grad.__setitem__(0, 1.0)):
        with pytest.raises((InfinityError, RuntimeError)):
            write(param.grad)


def test_torchs_clip_grad_norm_fails_loudly_and_ours_is_named(trainer: runs.EngineTrainer) -> None:
    trainer.backward(trainer(*models.token_batches(1)[0]))
    with pytest.raises((InfinityError, RuntimeError), match=r"infinity\.clip_grad_norm_"):
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1e-3)


def test_our_clip_grad_norm_equals_clipping_by_the_config(tmp_path: Path) -> None:
    batches = models.token_batches(4)
    plain = runs.train(runs.PlainTrainer(models.build(models.GPT), clip=0.5), batches)
    with runs.EngineTrainer(models.build(models.GPT), runs.engine_config(tmp_path, overlap="deferred")) as trainer:
        for args in batches:
            trainer.backward(trainer(*args))
            infinity.clip_grad_norm_(trainer.engine, 0.5)
            trainer.step()
        runs.assert_same(plain, trainer.outcome())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("value", ["halved", "none"])
def test_an_assigned_gradient_takes_the_place_of_the_sum(tmp_path: Path, value: str, precision: str) -> None:
    batches = models.token_batches(4)

    def run(trainer: Any) -> runs.Outcome:
        for args in batches:
            trainer.backward(trainer(*args))
            param = trainer.params[NAME]
            if isinstance(trainer, runs.EngineTrainer) or precision == "fp32":
                param.grad = param.grad * 0.5 if value == "halved" else None
            elif value == "halved":
                trainer._sums[param] = (trainer._sums[param].bfloat16() * 0.5).float()
            else:
                del trainer._sums[param]
            trainer.step()
        outcome: runs.Outcome = trainer.outcome()
        return outcome

    dtype = runs.DTYPES[precision]
    plain = run(runs.PlainTrainer(models.build(models.GPT, dtype)))
    with runs.EngineTrainer(
        models.build(models.GPT, dtype), runs.engine_config(tmp_path, precision=precision, overlap="deferred")
    ) as trainer:
        runs.assert_same(plain, run(trainer))


def test_a_plain_backward_is_deferred_and_adds_what_torch_adds(tmp_path: Path) -> None:
    batches = models.token_batches(6)
    plain = runs.train(runs.PlainTrainer(models.build(models.GPT)), batches)
    with runs.EngineTrainer(models.build(models.GPT), runs.engine_config(tmp_path)) as trainer:
        for step, args in enumerate(batches):
            loss = trainer(*args)
            trainer._outcome.losses.append(loss.detach().clone())
            loss.backward() if step % 2 else trainer.engine.backward(loss)
            trainer.step()
        runs.assert_same(plain, trainer.outcome())


def test_a_step_right_after_a_plain_backward_sees_every_gradient(tmp_path: Path) -> None:
    args = models.token_batches(1)[0]
    plain = plain_of = models.build(models.GPT)
    plain(*args).backward()
    with runs.EngineTrainer(models.build(models.GPT), runs.engine_config(tmp_path)) as trainer:
        trainer(*args).backward()
        for name, param in plain_of.named_parameters():
            assert torch.equal(trainer.params[name].grad, param.grad), name


# ---- requires_grad ----


@pytest.mark.parametrize("overlap", ["auto", "deferred"])
def test_a_parameter_switched_off_is_left_alone_until_it_is_switched_on(tmp_path: Path, overlap: str) -> None:
    batches = models.token_batches(7)

    def run(trainer: Any) -> runs.Outcome:
        for step, args in enumerate(batches):
            for name, param in trainer.params.items():
                if name.startswith("blocks.1."):
                    param.requires_grad_(not 2 <= step < 5)
            trainer.backward(trainer(*args))
            trainer.step()
        outcome: runs.Outcome = trainer.outcome()
        return outcome

    plain = run(runs.PlainTrainer(models.build(models.GPT)))
    with runs.EngineTrainer(models.build(models.GPT), runs.engine_config(tmp_path, overlap=overlap)) as trainer:
        runs.assert_same(plain, run(trainer))


# ---- gathered ----


def test_inside_gathered_everything_can_be_read(trainer: runs.EngineTrainer, param: nn.Parameter, expected: Tensor) -> None:
    with infinity.gathered(trainer.model):
        assert torch.equal(param.detach(), expected)
        assert torch.equal(param.data, expected)
        assert torch.equal(param[0], expected[0])
        copied = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    assert all(torch.equal(copied[name], value) for name, value in plain_model().state_dict().items())
    with pytest.raises(ReleasedParameterError):
        _ = param.data


def test_gathered_takes_one_parameter_or_a_list(trainer: runs.EngineTrainer, param: nn.Parameter, expected: Tensor) -> None:
    with infinity.gathered(param):
        assert torch.equal(param.data, expected)
    with infinity.gathered([param, trainer.params["head.weight"]]):
        assert torch.equal(param.data, expected)


def test_gathered_for_changes_is_not_there_yet(trainer: runs.EngineTrainer, param: nn.Parameter) -> None:
    with pytest.raises(NotYetError), infinity.gathered(param, modify=True):
        pass


def test_training_goes_on_after_gathered(tmp_path: Path) -> None:
    batches = models.token_batches(4)
    with runs.EngineTrainer(models.build(models.GPT), runs.engine_config(tmp_path)) as trainer:
        for args in batches:
            with infinity.gathered(trainer.params[NAME]):
                pass
            trainer.backward(trainer(*args))
            trainer.step()
        runs.assert_same(runs.train(runs.PlainTrainer(models.build(models.GPT)), batches), trainer.outcome())
