"""The names that people call, beside ``Engine``: DeepSpeed's ``initialize``, and access to state wherever it rests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from infinity import weights
from infinity.config import Config
from infinity.engine import Engine
from infinity.errors import ModelError, NotYetError
from infinity.flat_param import FlatParam, Unit
from infinity.optim.groups import EngineOptimizer
from infinity.released import owner_of
from infinity.touch import EngineDoor


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    config: Config | dict[str, Any] | str | PathLike[str] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config_params: Config | dict[str, Any] | str | PathLike[str] | None = None,
    device: str = "auto",
) -> tuple[Engine, EngineOptimizer, DataLoader[Any] | None, Any]:
    """DeepSpeed's entry: (engine, optimizer, loader, scheduler).

    ``args.deepspeed_config`` is read where ``config`` is not given. ``lr_scheduler`` is a callable that takes the optimizer, or None.
    Errors: NotYetError for an ``optimizer`` object: name it in the config.
    """
    if model is None:
        raise ModelError("initialize() needs model=.")
    if optimizer is not None:
        raise NotYetError("an optimizer object is not taken yet: name it in the config, {'optimizer': {'type': 'AdamW', 'params': {...}}}.")
    source = config if config is not None else config_params
    if source is None:
        source = getattr(args, "deepspeed_config", None)
    if source is None:
        raise ModelError("initialize() needs config=, a dict, a path or a JSON text.")
    engine = Engine(model, source, model_parameters=model_parameters, device=device)
    scheduler = lr_scheduler
    if callable(lr_scheduler):
        scheduler = lr_scheduler(engine.optimizer)
    elif lr_scheduler is not None:
        engine.close()
        raise NotYetError("lr_scheduler must be a callable that takes the optimizer, such as lambda opt: LambdaLR(opt, ...).")
    loader = None
    if training_data is not None:
        loader = DataLoader(training_data, batch_size=engine.train_micro_batch_size_per_gpu(), shuffle=True, collate_fn=collate_fn)
    return engine, engine.optimizer, loader, scheduler


@contextmanager
def gathered(params: nn.Module | torch.Tensor | Iterable[torch.Tensor], modify: bool = False) -> Iterator[None]:
    """Full parameters are there, as ordinary ones, inside the block; read them.

    Errors: NotYetError for ``modify=True``.
    """
    if modify:
        raise NotYetError("gathered(modify=True) is not built yet; read with gathered(), change weights before the engine is opened.")
    if isinstance(params, nn.Module):
        params = list(params.parameters())
    elif isinstance(params, torch.Tensor):
        params = [params]
    found = [where for param in params if (where := owner_of(param)) is not None]
    units: dict[tuple[int, int], tuple[EngineDoor, Unit]] = {}
    for door, unit, _, _ in found:
        assert isinstance(door, EngineDoor)
        units[id(door), unit.index] = door, unit
    opened: list[tuple[EngineDoor, Unit]] = []
    try:
        for door, unit in units.values():
            door.coordinator.open_gathered(unit)
            opened.append((door, unit))
        yield
    finally:
        for door, unit in reversed(opened):
            door.coordinator.close_gathered(unit)


def clip_grad_norm_(engine: Engine, max_norm: float) -> torch.Tensor:
    """The norm of the pending gradients before clipping; the coming ``step`` multiplies them by min(1, max_norm / (norm + 1e-6))."""
    if not isinstance(engine, Engine):
        raise TypeError("infinity.clip_grad_norm_ takes the engine: clip_grad_norm_(engine, max_norm).")
    return torch.tensor(engine.clip_gradients(float(max_norm)))


def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """The fp32 master value of ``param`` as a copy, wherever it rests; None for a parameter that no engine manages."""
    where = _where(param)
    return None if where is None else weights.master(where[1], where[2], where[0].executor.finished_planes())


def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """A copy of ``exp_avg`` or ``exp_avg_sq`` of ``param`` in fp32; None where it has none."""
    where = _where(param)
    if where is None or optim_state_key not in where[1].spec.grids:
        return None
    return read_plane(param, optim_state_key)


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """A copy of the gradient of ``param`` so far, between backward and step; None where there is none."""
    where = _where(param)
    if where is None:
        return None if param.grad is None else param.grad.detach().clone()
    door, flat, index = where
    grad = door.read_grad(door.executor.unit_of(flat), flat, index)
    return None if grad is None else grad.as_subclass(torch.Tensor)


def read_plane(param: torch.Tensor, plane: str) -> torch.Tensor:
    """A copy of one stored plane of ``param`` in its stored dtype: "param", "residual" (int16), "exp_avg", "exp_avg_sq"."""
    where = _where(param)
    if where is None:
        raise ModelError("read_plane: no engine manages this parameter.")
    door, flat, index = where
    place = flat.spec.params[index]
    raw = door.executor.finished_planes().read(flat, plane, place.elem_offset, place.elem_end)
    dtype = {"param": flat.dtype, "residual": torch.int16}.get(plane, torch.float32)
    return torch.from_numpy(np.ascontiguousarray(raw)).view(dtype).view(place.spec.shape)


def _where(param: torch.Tensor) -> tuple[EngineDoor, FlatParam, int] | None:
    owner = owner_of(param)
    if owner is None:
        return None
    door, _, flat, index = owner
    assert isinstance(door, EngineDoor)
    return door, flat, index
