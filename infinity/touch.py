"""What a touch of a released parameter does in one engine: the answers that ``released.ReleasedParameter`` asks for.

::

    in a forward of some unit      that forward borrows the parameter's unit until it ends
    in a backward, in no forward   the unit is gathered as for an unpack
    in the model's own forward     the unit is gathered for that one operation, or, where it gave an alias, until the model's forward ends
    outside all                    the unit is gathered for that one operation; an alias of its memory is refused
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from infinity.coordinator import Coordinator
from infinity.errors import ConsumedGradientError
from infinity.executor import Executor
from infinity.flat_param import FlatParam, Unit
from infinity.hooks import Hooks
from infinity.released import ALIASES, Door, refuse_alias


class GradientSnapshot(torch.Tensor):
    """A copy of a gradient that rests elsewhere: it can be read; changing it in place would change nothing, so it raises."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        name: str = getattr(func, "__name__", "")
        if (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"):
            raise RuntimeError(
                f"{name!r} on param.grad changes a copy: gradients rest outside the parameter. "
                "Use infinity.clip_grad_norm_(engine, max_norm) "
                "to clip, or assign param.grad = new_gradient."
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class EngineDoor(Door):
    """The answers of one engine."""

    def __init__(self, coordinator: Coordinator, executor: Executor, hooks: Hooks) -> None:
        self.coordinator = coordinator
        self.executor = executor
        self._hooks = hooks
        self._outside: list[bool] = []

    def read_grad(self, unit: Unit, flat: FlatParam, index: int) -> torch.Tensor | None:
        """A snapshot of the gradient so far.

        Errors: ConsumedGradientError when it went into the weights during backward.
        """
        self.coordinator.end_plain_backward()
        if unit.updated and self.coordinator.awaiting_step:
            name = flat.spec.params[index].spec.name
            raise ConsumedGradientError(
                f"the gradient of {name!r} went into the weights during backward. Set optimizer_overlap to 'deferred' to read gradients."
            )
        grad = self.executor.step.read_grad(unit, flat, index)
        return None if grad is None else grad.as_subclass(GradientSnapshot)

    def write_grad(self, unit: Unit, flat: FlatParam, index: int, grad: torch.Tensor | None) -> None:
        """Replaces the gradient so far, or drops it."""
        self.coordinator.end_plain_backward()
        if grad is not None:
            grad = grad.as_subclass(torch.Tensor).detach().to(flat.dtype).clone()
            self.coordinator.backward_seen = self.coordinator.plain_backward_seen = True
        self.executor.step.write_grad(unit, flat, index, None if grad is None else self.executor.charged(index, grad))

    def before_touch(self, unit: Unit, flat: FlatParam, index: int, name: str) -> None:
        """Sees to it that the memory is there."""
        if self.coordinator.in_visit:
            self.coordinator.borrow(unit)
        elif torch._C._current_graph_task_id() != -1:
            self.coordinator.touch_in_backward(flat, index)
        elif unit.resident:
            self.executor.gather(unit)
        else:
            if name in ALIASES and self.coordinator.in_root:
                self.coordinator.borrow_for_root(unit)
            elif name in ALIASES:
                refuse_alias([flat.spec.params[index].spec.name], name)
            self.coordinator.end_plain_backward()
            self.executor.gather(unit)

    def begin_operation(self) -> None:
        """What the operation saves for backward on our storage is told to us, unless a forward's pair stands already."""
        outside = not self.coordinator.in_visit and torch._C._current_graph_task_id() == -1
        self._outside.append(outside)
        if outside:
            self._hooks.push_pair()

    def end_operation(self, units: list[Unit], given: set[int], result: Any) -> str | None:
        """Writes back what the operation changed; names the flat parameter of which it gave an alias, where that must not be."""
        if not self._outside.pop():
            return None
        self._hooks.pop_pair()
        released = {flat.storage_id: (unit, flat) for unit in units if not unit.resident for flat in unit.flats}
        for unit in units:
            self.executor.write_back_modified(unit)
        for tensor in _tensors(result):
            if id(tensor) not in given and tensor.layout is torch.strided:
                owner = released.get(tensor.untyped_storage()._cdata)
                if owner is not None:
                    if not self.coordinator.in_root:
                        return owner[1].name
                    self.coordinator.borrow_for_root(owner[0])
        return None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
