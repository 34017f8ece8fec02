"""Puts events on modules and parameters, and takes every one of them off again. Decides nothing.

[Note: saved tensors] Around each forward a pair of saved-tensor hooks keeps, of a tensor on our storage, only an alias: the memory
behind it is fetched again when backward unpacks it. Every other tensor is handed to the pair that was on top before, so that
activation checkpointing goes on to drop what it dropped; with none below, the pair does what autograd itself does, check of versions
included. Full module backward hooks are not used: they break in-place functions and do not fire in recomputation.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from infinity.coordinator import Coordinator
from infinity.errors import ModelError
from infinity.flat_param import FlatParam, Unit

Pair = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]

_INPLACE = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: "
    "a {kind} of shape {shape} is at version {now}; expected version {then} instead."
)


class SavedTensors:
    """The pack and unpack pair of one depth of saved-tensor hooks."""

    __slots__ = ("_below", "_coordinator", "_storages")

    def __init__(self, coordinator: Coordinator, storages: Mapping[int, FlatParam], below: Pair | None) -> None:
        self._coordinator = coordinator
        self._storages = storages
        self._below = below

    def belongs_to(self, coordinator: Coordinator) -> bool:
        """Is it of this engine?"""
        return self._coordinator is coordinator

    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd keeps instead of ``tensor``."""
        flat = self._storages.get(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else None
        if flat is not None:
            return flat, tensor.detach(), tensor._version
        if self._below is not None:
            return None, self._below[0](tensor), -1
        return None, tensor.detach(), tensor._version

    def unpack(self, packed: Any) -> torch.Tensor:
        """The tensor again; a unit it lies in is gathered first."""
        flat, kept, version = packed
        if flat is None and self._below is not None:
            return self._below[1](kept)
        if flat is not None:
            self._coordinator.check_fresh(flat)
        if kept._version != version:
            kind = "parameter" if flat is not None else "tensor"
            raise RuntimeError(_INPLACE.format(kind=kind, shape=tuple(kept.shape), now=kept._version, then=version))
        if flat is not None:
            self._coordinator.unpack(flat)
        return kept  # type: ignore[no-any-return]


class Hooks:
    """Every hook of one engine. Order: ``attach`` once, ``detach`` any number of times."""

    def __init__(self, coordinator: Coordinator, root: nn.Module, units: list[Unit]) -> None:
        self._coordinator = coordinator
        self._handles: list[Any] = []
        self._storages = {flat.storage_id: flat for unit in units for flat in unit.flats}
        self._pushed: list[tuple[object, bool]] = []
        """For whom ``push_pair`` was called, and did it push one?"""
        self._attach(root, units)

    def _attach(self, root: nn.Module, units: list[Unit]) -> None:
        coordinator = self._coordinator

        def enter_root(module: nn.Module, args: Any) -> None:
            if coordinator.is_interrupted():
                self.close_pairs()
                coordinator.close_visits()
            coordinator.enter_root(sys._getframe(1))
            self.push_pair(root)

        def leave_root(module: nn.Module, args: Any, output: Any) -> Any:
            try:
                own = self._own(output)
            finally:
                self.pop_pair(root)
                coordinator.leave_root()
            return own

        self._handles.append(root.register_forward_pre_hook(enter_root, prepend=True))
        for unit in units:
            self._attach_unit(unit)
        self._handles.append(root.register_forward_hook(leave_root, always_call=True))

    def _attach_unit(self, unit: Unit) -> None:
        coordinator = self._coordinator

        def reach(module: nn.Module, args: Any) -> None:
            try:
                coordinator.reach(unit)
            except BaseException:
                self._pushed.append((unit, False))  # the forward hook runs all the same
                raise
            self.push_pair(unit)

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            try:
                own = self._own(output)
            finally:
                self.pop_pair(unit)
                coordinator.leave(unit)
            return own

        self._handles.append(unit.module.register_forward_pre_hook(reach))
        self._handles.append(unit.module.register_forward_hook(leave, always_call=True))
        for flat in unit.flats:
            if flat.spec.trainable:
                for index, param in enumerate(flat.params):
                    arrived = self._arrival(flat, index)
                    self._handles.append(param.register_post_accumulate_grad_hook(arrived))  # type: ignore[no-untyped-call]

    def _own(self, output: Any) -> Any:
        """``output`` with copies in place of aliases of parameters (learned positions, say), which would outlive their memory."""
        if isinstance(output, torch.Tensor):
            if output.layout is torch.strided and output.untyped_storage()._cdata in self._storages:
                return output.clone()
            return output
        if type(output) in (tuple, list):
            items = [self._own(item) for item in output]
            return output if all(new is old for new, old in zip(items, output, strict=True)) else type(output)(items)
        if type(output) is dict:
            values = {key: self._own(value) for key, value in output.items()}
            return output if all(values[key] is output[key] for key in output) else values
        return output

    def _arrival(self, flat: FlatParam, index: int) -> Callable[[torch.Tensor], None]:
        # torch counts the dict of these hooks twice and shows it to the collector once, so what they hold is never collected with
        # their parameter. The module's own hooks are what keeps the coordinator alive.
        coordinator_of, flat_of = weakref.ref(self._coordinator), weakref.ref(flat)

        def arrived(param: torch.Tensor) -> None:
            coordinator, flat = coordinator_of(), flat_of()
            if coordinator is None or flat is None:
                return
            with torch._C.DisableTorchFunctionSubclass():
                grad = param.grad
                if grad is None:
                    return
                if grad.layout is not torch.strided:
                    name = flat.spec.params[index].spec.name
                    raise ModelError(f"parameter {name!r} got a sparse gradient; build its module with sparse=False.")
                if len(param._post_accumulate_grad_hooks) > 1:  # a hook of the user's comes after this one
                    coordinator.leave_gradient(flat, index)
                    return
                param.grad = None
            coordinator.accumulate(flat, index, grad)

        return arrived

    # ---- the saved-tensor pair ----

    def push_pair(self, owner: object) -> None:
        """What is saved for backward from now on is told to the coordinator, if it lies on our storage."""
        below = torch._C._autograd._top_saved_tensors_default_hooks(False)
        on_top = getattr(below[0], "__self__", None) if below is not None else None
        ours = isinstance(on_top, SavedTensors) and on_top.belongs_to(self._coordinator)
        if not ours:
            pair = SavedTensors(self._coordinator, self._storages, below)
            torch._C._autograd._push_saved_tensors_default_hooks(pair.pack, pair.unpack)
        self._pushed.append((owner, not ours))

    def is_foreign_pair_on_top(self) -> bool:
        """Does someone else, a checkpoint that recomputes, keep what is saved for backward now?"""
        below = torch._C._autograd._top_saved_tensors_default_hooks(False)
        owner = getattr(below[0], "__self__", None) if below is not None else None
        return below is not None and not (isinstance(owner, SavedTensors) and owner.belongs_to(self._coordinator))

    def pop_pair(self, owner: object) -> None:
        """Ends the latest ``push_pair`` of ``owner`` and all after it; nothing where there was none: a pre-hook of the user's raised."""
        if any(pushed_by is owner for pushed_by, _ in self._pushed):
            while self._pop() is not owner:
                pass

    def _pop(self) -> object:
        owner, pushed = self._pushed.pop()
        if pushed:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        return owner

    def close_pairs(self) -> None:
        """Takes off what an interrupted forward left pushed."""
        while self._pushed:
            self._pop()

    def detach(self) -> None:
        """Takes every hook off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
