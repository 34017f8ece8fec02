"""The parameter groups as torch shows them: what people and LR schedulers hold. It has no state of its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from infinity.errors import EngineClosedError, ModelError, NotYetError
from infinity.optim.base import Optimizer

if TYPE_CHECKING:
    from collections.abc import Sequence


class StepOwner(Protocol):
    """What the groups need of an engine."""

    def apply_step(self) -> None:
        """Updates the weights."""

    def zero_grad(self) -> None:
        """Drops pending gradients."""

    def groups_changed(self) -> None:
        """The groups are others than before."""


class EngineOptimizer(torch.optim.Optimizer):
    """``param_groups`` is live: a scheduler may change ``lr`` between steps. ``step`` and ``zero_grad`` are the engine's."""

    def __init__(self, engine: StepOwner, groups: Sequence[dict[str, Any]], algorithm: Optimizer) -> None:
        self._engine = weakref.ref(engine)
        self._algorithm = algorithm
        super().__init__([dict(group) for group in groups], dict(algorithm.defaults))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As ``engine.step()`` at the end of the last micro-step; a closure is evaluated first, as torch's optimizers do."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.validate()
        self._owner().apply_step()
        return loss

    def validate(self) -> None:
        """Errors: ValueError for a group that cannot be used; the message names the hyper-parameter and what is allowed."""
        for group in self.param_groups:
            self._algorithm.validate_group(group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``engine.zero_grad()``."""
        self._owner().zero_grad()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes hyper-parameters of the groups; moments rest in the engine.

        Errors: NotYetError when there are moments in it.
        """
        if state_dict.get("state"):
            raise NotYetError("loading optimizer states is not built yet; parameter groups alone can be loaded.")
        super().load_state_dict(state_dict)
        self._owner().groups_changed()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; parameters of the model that were in no group are trained from now on."""
        super().add_param_group(param_group)
        self._owner().groups_changed()

    def _owner(self) -> StepOwner:
        engine = self._engine()
        if engine is None:
            raise EngineClosedError("the engine of this optimizer is gone.")
        return engine


def parameter_groups(model: nn.Module, model_parameters: Iterable[Any] | None) -> list[dict[str, Any]]:
    """``model_parameters`` as torch's list of groups; without them one group of every parameter that requires a gradient.

    Errors: ModelError for a parameter that is not the model's.
    """
    given: list[Any] = list(model.parameters()) if model_parameters is None else list(model_parameters)
    listed: list[dict[str, Any]] = given if given and isinstance(given[0], dict) else [{"params": given}]
    known = {id(param) for param in model.parameters()}
    groups = []
    for group in listed:
        params = group["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        if any(id(param) not in known for param in params):
            raise ModelError("model_parameters holds a parameter that is not one of the model's.")
        groups.append({**group, "params": [param for param in params if param.requires_grad or model_parameters is not None]})
    return groups


def hyper_parameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What the groups hold beside their parameters, as it is now."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def changed_hyper_parameters(before: Sequence[dict[str, Any]], optimizer: torch.optim.Optimizer) -> str:
    """The first thing that the groups hold otherwise than ``before``, in words; empty when there is none."""
    now = hyper_parameters(optimizer)
    if len(now) != len(before):
        return f"the number of parameter groups was changed from {len(before)} to {len(now)}"
    for index, (old, new) in enumerate(zip(before, now, strict=True)):
        for key in {**old, **new}:
            if key not in old or key not in new or old[key] != new[key]:
                return f"parameter group {index} had {key} changed from {old.get(key)!r} to {new.get(key)!r}"
    return ""
