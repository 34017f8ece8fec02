"""The same training twice: by plain torch (bf16: by the reference optimizer) and by the engine, with everything that can be compared.

Both trainers have one shape - call, backward, step, train, eval - so a test writes its loop once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import infinity
from infinity.errors import BudgetError
from tests.support import reference

HYPER: Mapping[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


# ---- what is compared ----


@dataclass(slots=True)
class Outcome:
    """What a run leaves behind; per-parameter values by name, trained parameters only where there is state."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    """Of each step, before clipping; empty where they were not read."""
    norms: list[float | None] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    residual: dict[str, Tensor] = field(default_factory=dict)
    exp_avg: dict[str, Tensor] = field(default_factory=dict)
    exp_avg_sq: dict[str, Tensor] = field(default_factory=dict)


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bytes; NaNs and signs of zeros count."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def differences(expected: Outcome, found: Outcome) -> list[str]:
    """Everything that differs in any bit, in words."""
    wrong = []
    for step, (a, b) in enumerate(zip(expected.losses, found.losses, strict=True)):
        if not torch.equal(bits(a), bits(b)):
            wrong.append(f"loss of micro-step {step}: {b.item()!r}, expected {a.item()!r}")
    if expected.gradients and found.gradients:
        for step, (grads, others) in enumerate(zip(expected.gradients, found.gradients, strict=True)):
            in_their_dtype = {name: None if (b := others.get(name)) is None or a is None else a.to(b.dtype) for name, a in grads.items()}
            wrong += _tensor_differences(f"gradient in step {step}", in_their_dtype, others)
    for kind in ("weights", "residual", "exp_avg", "exp_avg_sq"):
        wrong += _tensor_differences(kind, getattr(expected, kind), getattr(found, kind))
    return wrong


def _tensor_differences(kind: str, expected: Mapping[str, Tensor | None], found: Mapping[str, Tensor | None]) -> list[str]:
    if expected.keys() != found.keys():
        return [f"{kind}: of {sorted(found)}, expected {sorted(expected)}"]
    wrong = []
    for name, a in expected.items():
        b = found[name]
        if a is None or b is None:
            if a is not b:
                wrong.append(f"{kind} of {name}: {'none' if b is None else 'there'}, expected {'none' if a is None else 'one'}")
        elif bits(a).numel() != bits(b).numel():
            wrong.append(f"{kind} of {name}: {b.dtype} of {tuple(b.shape)}, expected {a.dtype} of {tuple(a.shape)}")
        elif not torch.equal(bits(a), bits(b)):
            first = int((bits(a) != bits(b)).nonzero()[0]) // a.element_size()
            wrong.append(f"{kind} of {name}: element {first} is {b.reshape(-1)[first]!s}, expected {a.reshape(-1)[first]!s}")
    return wrong


def assert_same(expected: Outcome, found: Outcome) -> None:
    """No bit differs."""
    wrong = differences(expected, found)
    assert not wrong, f"{len(wrong)} differences, the first: " + "; ".join(wrong[:5])


# ---- the two trainers ----


class Trainer(Protocol):
    """What both sides of a comparison can do."""

    model: nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def backward(self, loss: Tensor) -> None: ...

    def step(self) -> None: ...

    def zero_grad(self) -> None: ...

    def train(self) -> None: ...

    def eval(self) -> None: ...

    def outcome(self) -> Outcome: ...


def names_of(model: nn.Module, *, trained: bool = False) -> dict[str, nn.Parameter]:
    """Parameters by their first name, those with elements; ``trained``: only those that require a gradient."""
    return {name: param for name, param in model.named_parameters() if param.numel() and (param.requires_grad or not trained)}


class PlainTrainer:
    """Ordinary torch: fp32 by ``AdamW(fused=True)``; bf16 by the reference, gradients summed in fp32 in the order in which they fire."""

    def __init__(
        self,
        model: nn.Module,
        *,
        accumulation: int = 1,
        clip: float = 0.0,
        groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None,
        **hyper: Any,
    ) -> None:
        self.model = model
        self.accumulation = accumulation
        self.clip = clip
        self.params = names_of(model, trained=True)
        self._outcome = Outcome()
        self._micro_steps = 0
        self._sums: dict[nn.Parameter, Tensor] = {}
        self.is_bf16 = any(param.dtype == torch.bfloat16 for param in self.params.values())
        given: Any = list(self.params.values()) if groups is None else groups(model)
        settings = {**HYPER, **hyper}
        if self.is_bf16:
            self.optimizer: Any = reference.ReferenceAdamW(given, **settings)
            for param in self.params.values():
                param.register_post_accumulate_grad_hook(self._sum)
        else:
            self.optimizer = torch.optim.AdamW(given, fused=True, **settings)

    def _sum(self, param: Tensor) -> None:
        if param.grad is None:
            return
        grad, param.grad = param.grad.float(), None
        before = self._sums.get(param)
        self._sums[param] = grad if before is None else before + grad

    def gradient(self, param: nn.Parameter) -> Tensor | None:
        """The sum so far, in fp32."""
        return self._sums.get(param) if self.is_bf16 else param.grad

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        self._outcome.losses.append(loss.detach().clone())
        (loss / self.accumulation).backward()

    def step(self) -> None:
        self._micro_steps += 1
        if self._micro_steps % self.accumulation:
            return
        grads = {name: self.gradient(param) for name, param in self.params.items()}
        if all(grad is None for grad in grads.values()):
            return
        self._outcome.gradients.append({name: None if grad is None else grad.clone() for name, grad in grads.items()})
        norm = reference.grad_norm(list(grads.values()))
        self._outcome.norms.append(norm)
        factor = reference.clip_factor(norm, self.clip) if self.clip else 1.0
        if self.is_bf16:
            for group in self.optimizer.param_groups:
                for param in group["params"]:
                    if param in self._sums:
                        self.optimizer.update(param, self._sums[param], group, factor)
        else:
            if factor != 1.0:
                for grad in grads.values():
                    if grad is not None:
                        grad.mul_(torch.tensor(factor, dtype=torch.float32))
            self.optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        self._sums.clear()
        for param in self.params.values():
            param.grad = None

    def train(self) -> None:
        self.model.train()

    def eval(self) -> None:
        self.model.eval()

    def state(self, param: nn.Parameter) -> dict[str, Tensor]:
        """exp_avg, exp_avg_sq and, for bf16, residual; zeros before the first update."""
        state = self.optimizer.state.get(param) or {}
        zeros = torch.zeros(param.shape)
        found = {"exp_avg": state.get("exp_avg", zeros), "exp_avg_sq": state.get("exp_avg_sq", zeros)}
        if param.dtype == torch.bfloat16:
            found["residual"] = state.get("residual", zeros.to(torch.int16))
        return found

    def outcome(self) -> Outcome:
        out = self._outcome
        out.weights = {name: param.detach().clone() for name, param in names_of(self.model).items()}
        for name, param in self.params.items():
            for plane, value in self.state(param).items():
                getattr(out, plane)[name] = value.clone()
        return out


class EngineTrainer:
    """The engine; with ``read_gradients`` every gradient is read between backward and step (deferred updates only)."""

    def __init__(
        self,
        model: nn.Module,
        config: Mapping[str, Any],
        *,
        device: str = "cpu",
        groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None,
        read_gradients: bool = False,
    ) -> None:
        self.model = model
        self.params = names_of(model, trained=True)
        self.engine = infinity.Engine(model, config, device=device, model_parameters=None if groups is None else groups(model))
        self.optimizer = self.engine.optimizer
        self._read_gradients = read_gradients
        self._micro_steps = 0
        self._outcome = Outcome()

    def __enter__(self) -> EngineTrainer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.engine.close()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.engine(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        self._outcome.losses.append(loss.detach().clone())
        self.engine.backward(loss)

    def step(self) -> None:
        before = self.engine.global_steps
        self._micro_steps += 1
        if self._read_gradients and self._micro_steps % self.engine.gradient_accumulation_steps() == 0:
            grads = {name: infinity.safe_get_full_grad(param) for name, param in self.params.items()}
            if any(grad is not None for grad in grads.values()):
                self._outcome.gradients.append(grads)
        self.engine.step()
        if self.engine.global_steps != before:
            self._outcome.norms.append(self.engine.get_global_grad_norm())

    def zero_grad(self) -> None:
        self.engine.zero_grad()

    def train(self) -> None:
        self.engine.train()

    def eval(self) -> None:
        self.engine.eval()

    def outcome(self) -> Outcome:
        out = self._outcome
        state = self.engine.state_dict()
        out.weights = {name: state[name].clone() for name in names_of(self.model)}
        for name, param in self.params.items():
            out.exp_avg[name] = infinity.safe_get_full_optimizer_state(param, "exp_avg")
            out.exp_avg_sq[name] = infinity.safe_get_full_optimizer_state(param, "exp_avg_sq")
            if param.dtype == torch.bfloat16:
                out.residual[name] = infinity.read_plane(param, "residual")
        return out


def train(trainer: Trainer, batches: Iterable[Sequence[Any]]) -> Outcome:
    """Forward, backward and step for each micro-batch."""
    for args in batches:
        trainer.backward(trainer(*args))
        trainer.step()
    return trainer.outcome()


def engine_run(model: nn.Module, config: Mapping[str, Any], batches: Iterable[Sequence[Any]], **options: Any) -> Outcome:
    """What the engine makes of ``batches``."""
    with EngineTrainer(model, config, **options) as trainer:
        return train(trainer, batches)


# ---- configs ----


def engine_config(
    directory: Path | Sequence[Path],
    *,
    param: str = "nvme",
    optimizer: str = "nvme",
    precision: str = "fp32",
    accumulation: int = 1,
    clip: float = 0.0,
    overlap: str = "auto",
    page: int | str = 4 << 10,
    host: int | float | str = "auto",
    device_memory: int | float | str = "16MiB",
    backend: str = "auto",
    threads: int = 1,
    **hyper: Any,
) -> dict[str, Any]:
    """A config under which every unit moves: nothing persists, pages are small, and the device has room for a few units."""
    nvme_path = str(directory) if isinstance(directory, Path) else [str(path) for path in directory]
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "bf16": {"enabled": precision == "bf16"},
        "optimizer": {"type": "AdamW", "params": {**HYPER, **hyper, "betas": list({**HYPER, **hyper}["betas"])}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": param, "nvme_path": nvme_path},
            "offload_optimizer": {"device": optimizer, "nvme_path": nvme_path},
            "stage3_param_persistence_threshold": 0,
        },
        "memory": {"device": device_memory, "host": host},
        "optimizer_overlap": overlap,
        "optimizer_threads": threads,
        "page": page,
        "aio": {"backend": backend},
    }


def with_host(config: Mapping[str, Any], host_bytes: int) -> dict[str, Any]:
    """``config`` with another host budget."""
    return {**config, "memory": {**config["memory"], "host": host_bytes}}


def with_device(config: Mapping[str, Any], device_bytes: int | str) -> dict[str, Any]:
    """``config`` with another device budget."""
    return {**config, "memory": {**config["memory"], "device": device_bytes}}


def least_host_bytes(make: Callable[[], nn.Module], config: Mapping[str, Any], device: str = "cpu") -> int:
    """The smallest host budget that the engine takes, by its own word."""
    return _refused(make, with_host(config, 4096), device, "memory.host")


def least_device_bytes(make: Callable[[], nn.Module], config: Mapping[str, Any], device: str = "cpu") -> int:
    """The smallest device budget that the engine takes, by its own word."""
    return _refused(make, with_device(config, 4096), device, "memory.device")


def _refused(make: Callable[[], nn.Module], config: Mapping[str, Any], device: str, knob: str) -> int:
    try:
        infinity.Engine(make(), config, device=device).close()
    except BudgetError as error:
        if error.knob != knob:
            raise
        return error.needed_bytes
    return 4096


def useful_host_bytes(make: Callable[[], nn.Module], config: Mapping[str, Any], device: str = "cpu") -> int:
    """The host budget with which nothing has to be fetched twice, by the engine's own word."""
    with infinity.Engine(make(), {**config, "memory": {**config["memory"], "host": "auto"}}, device=device) as engine:
        return int(engine.placement().host_budget_bytes)
