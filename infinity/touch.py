"""What a touch of a released parameter does in one engine: the answers that ``released.ReleasedParameter`` asks for.

::

    in a forward of some unit      that forward borrows the parameter's unit until it ends
    in a backward, in no forward   the unit is gathered as for an unpack
    in the model's own forward     the unit is gathered for that one operation, or, where it gave an alias, until the model's forward ends
    outside all                    the unit is gathered for that one operation; an alias of its memory is refused
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from infinity.coordinator import Coordinator
from infinity.errors import ConsumedGradientError, ReleasedParameterError
from infinity.executor import Executor
from infinity.flat_param import FlatParam, Unit
from infinity.hooks import Hooks
from infinity.released import ALIASES, Door, refuse_alias

_IN_PLACE = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__ipow__", "__imod__"})


class GradientSnapshot(torch.Tensor):
    """A copy of a gradient that rests elsewhere: it can be read; changing it in place would change nothing, so it raises."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name: str = getattr(func, "__name__", "")
        attribute: str = getattr(getattr(func, "__self__", None), "__name__", "")
        in_place = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE or (name == "__set__" and attribute == "data")
        if in_place or isinstance(kwargs.get("out"), cls):
            raise RuntimeError(
                f"{name!r} on param.grad changes a copy: gradients rest outside the parameter. "
                "Use infinity.clip_grad_norm_(engine, max_norm) to clip, or assign param.grad = new_gradient."
            )
        with torch._C.DisableTorchFunctionSubclass():
            if name == "numpy":
                return args[0].clone().numpy()
            result = func(*args, **kwargs)
            shared = {arg.untyped_storage()._cdata for arg in args if isinstance(arg, cls)}
            if isinstance(result, torch.Tensor) and result.layout is torch.strided and result.untyped_storage()._cdata in shared:
                return result.as_subclass(cls)
        return result


@dataclass(slots=True)
class Operation:
    """One operation on parameters, while it runs."""

    units: list[Unit]
    outside: bool
    """Does it run outside every unit's forward and every backward?"""
    held: list[Unit] = field(default_factory=list)


class EngineDoor(Door):
    """The answers of one engine."""

    def __init__(self, coordinator: Coordinator, executor: Executor, hooks: Hooks) -> None:
        self.coordinator = coordinator
        self.executor = executor
        self._hooks = hooks

    def read_grad(self, unit: Unit, flat: FlatParam, index: int) -> torch.Tensor | None:
        """A snapshot of the gradient so far.

        Errors: ConsumedGradientError when it went into the weights during backward.
        """
        self.coordinator.end_plain_backward()
        if unit.updated:
            name = flat.spec.params[index].spec.name
            raise ConsumedGradientError(
                f"the gradient of {name!r} went into the weights during backward. Set optimizer_overlap to 'deferred' to read gradients."
            )
        if not self.executor.step.has_pending(unit):
            return None
        grad = self.executor.step.read_grad(unit, flat, index)
        return None if grad is None else grad.as_subclass(GradientSnapshot)

    def write_grad(self, unit: Unit, flat: FlatParam, index: int, grad: torch.Tensor | None) -> None:
        """Replaces the gradient so far, or drops it."""
        self.coordinator.end_plain_backward()
        if grad is not None:
            grad = grad.as_subclass(torch.Tensor).detach().to(flat.dtype).clone()
            self.coordinator.plain_backward_seen = True
            if not self.coordinator.trains(flat.params[index]):
                return
        self.executor.step.finish(unit)
        self.executor.step.write_grad(unit, flat, index, None if grad is None else self.executor.charged(index, grad))

    def begin_operation(self, touched: list[tuple[Unit, FlatParam, int]], name: str) -> Operation:
        """Sees to it that the memory is there, and that what is saved for backward on it is told to us."""
        in_visit = self.coordinator.in_visit
        in_backward = torch._C._current_graph_task_id() != -1
        operation = Operation([unit for unit, _, _ in touched], outside=not in_visit and not in_backward)
        try:
            for unit, flat, index in touched:
                if in_visit:
                    self.coordinator.borrow(unit)
                elif in_backward:
                    if flat.params[index].requires_grad or self._hooks.is_foreign_pair_on_top():
                        self.coordinator.touch_in_backward(flat, index)
                    else:
                        self.coordinator.unpack(flat)  # no gradient will come; the current node uses what is saved
                else:
                    if name == "set:data":
                        param = flat.spec.params[index].spec.name
                        raise ReleasedParameterError(
                            f"assigning .data of parameter {param!r}, as model.to() and model.half() do, would cut it from its engine. "
                            "Write values with param.copy_(values) under torch.no_grad(), read them with infinity.gathered(params) or "
                            "engine.state_dict(), and cast or move the model before the engine is opened."
                        )
                    if name in ALIASES and not unit.resident:
                        if not self.coordinator.in_root:
                            refuse_alias([flat.spec.params[index].spec.name], name)
                        self.coordinator.borrow_for_root(unit)
                    self.coordinator.hold(unit)
                    operation.held.append(unit)
        except BaseException:
            self._unhold(operation)
            raise
        if operation.outside:
            self._hooks.push_pair()
        return operation

    def end_operation(self, operation: Operation, given: set[int], result: Any) -> str | None:
        """Writes back what the operation changed; names the flat parameter of which it gave an alias, where that must not be."""
        if not operation.outside:
            return None
        self._hooks.pop_pair()
        try:
            released = {flat.storage_id: (unit, flat) for unit in operation.units if not unit.resident for flat in unit.flats}
            for tensor in _tensors(result):
                owner = released.get(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else None
                if owner is not None and id(tensor) not in given:
                    if not self.coordinator.in_root:
                        return owner[1].name
                    self.coordinator.borrow_for_root(owner[0])
            return None
        finally:
            self._unhold(operation)

    def _unhold(self, operation: Operation) -> None:
        while operation.held:
            self.coordinator.unhold(operation.held.pop())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
