"""The engine: owns everything, in one visible order, and is the door through which people train.

::

    READY --an error after an update began--> FAILED --close--> CLOSED
    READY --close--> CLOSED
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from enum import Enum
from os import PathLike
from typing import Any

import torch
from torch import nn

from infinity import weights
from infinity.budgets import Budgets
from infinity.comm import open_comm
from infinity.config import Config, load_config
from infinity.coordinator import Coordinator
from infinity.errors import ConsumedGradientError, EngineClosedError, InfinityError, ModelError, NotYetError
from infinity.executor import Executor
from infinity.figures import StepMetrics, Totals
from infinity.flat_param import FlatParam, Unit
from infinity.flight import Flight
from infinity.hooks import Hooks
from infinity.io_trace import IoTrace
from infinity.layout import GRAD
from infinity.optim.adamw import AdamW
from infinity.optim.groups import EngineOptimizer, changed_hyper_parameters, hyper_parameters, parameter_groups
from infinity.optim.step import Step, clip_factor
from infinity.placement import Placement, describe
from infinity.planes import Planes
from infinity.released import owner_of, register, unregister
from infinity.sizes import format_bytes
from infinity.store import PageStore
from infinity.task_queue import Files, TaskQueue
from infinity.tiers.device import Device, DeviceKind, available_bytes, open_device
from infinity.tiers.frames import FramePool
from infinity.tiers.nvme import NvmeBacking
from infinity.tiers.nvme_path import check_paths
from infinity.touch import EngineDoor
from infinity.units import FoundUnit, find_units

logger = logging.getLogger(__name__)


class EngineState(Enum):
    """Drawn above."""

    READY = "ready"
    FAILED = "failed"
    CLOSED = "closed"


class Engine:
    """Trains ``model`` with its state in tiers, exactly.

    ``config`` is DeepSpeed's JSON shape: a dict, a path, a JSON text, or a loaded ``Config``. ``model_parameters`` are parameters or
    torch's parameter groups; without them every parameter is trained. ``device`` is "auto", "cpu", "cuda", or "simulated" (for tests).

    Order: use it as a context manager, or call ``close``. Per micro-step ``loss = engine(...)``,
    ``engine.backward(loss)``, ``engine.step()``.
    Memory: takes over the model's parameters; ``close`` gives them back.
    Errors: ConfigError, BudgetError, SpaceError and ModelError before the model is touched.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config | dict[str, Any] | str | PathLike[str],
        *,
        model_parameters: Iterable[Any] | None = None,
        device: str = "auto",
        seed: int = 0,
    ) -> None:
        self._closed = False
        self._released = False
        self.module = model
        self.config = load_config(config, check_paths=check_paths)
        self.comm = open_comm()
        for notice in self.config.notices:
            logger.info("%s", notice)
        kind: DeviceKind = _device_kind(device)
        zero = self.config.zero_optimization
        found = find_units(model, classes=zero.leaf_module.classes, names=zero.leaf_module.names)
        weights.check_meta(model)
        self._algorithm = AdamW(**self.config.optimizer.params.model_dump())
        taken = [name for name, param in model.named_parameters() if owner_of(param) is not None]
        if taken:
            raise ModelError(f"parameter {taken[0]!r} belongs to another engine. Close that one first.")
        special = [f"{name} ({type(param).__name__})" for name, param in model.named_parameters() if type(param) is not nn.Parameter]
        if special:
            raise ModelError(f"subclasses of Parameter are not managed: {', '.join(special[:8])}. Make them ordinary parameters first.")
        groups = parameter_groups(model, model_parameters)
        self._group_index: dict[int, dict[str, Any]] = {}
        self.optimizer = EngineOptimizer(self, groups, self._algorithm)
        self.optimizer.validate()
        budgets = Budgets(self.config, found, self._algorithm, kind)

        self._files = Files()
        self._frames = FramePool(budgets.n_frames * budgets.page_nbytes, budgets.page_nbytes)
        self._queue: TaskQueue | None = None
        self._backing: NvmeBacking | None = None
        self._device: Device | None = None
        self._hooks: Hooks | None = None
        self._finalizer: weakref.finalize[Any, Engine] | None = None
        self._units: list[Unit] = []
        self._params: list[nn.Parameter] = []
        bound = False
        try:
            aio = self.config.aio
            self._queue = TaskQueue(
                self._files,
                backend=aio.backend,
                queue_depth=aio.queue_depth,
                block_nbytes=aio.block_size,
                workers=_workers(self.config, kind),
                io_threads=aio.intra_op_parallelism,
                in_flight_nbytes=aio.in_flight,
                n_paths=max(1, len(self.config.nvme_paths)),
                stall_s=aio.stall_s,
            )
            if budgets.n_slots:
                self._queue.add_memory(self._frames.base_address, self._frames.nbytes)
                self._backing = NvmeBacking(
                    self._files,
                    self.config.nvme_paths,
                    page_nbytes=budgets.page_nbytes,
                    n_slots=budgets.n_slots,
                    weights=None if aio.path_weights == "auto" else aio.path_weights,
                    queue=self._queue,
                    frames=self._frames,
                    direct_required=aio.direct_io == "required",
                )
                for fd, path in self._backing.files():
                    self._queue.add_file(fd, path)
            self._device = open_device(kind, budgets.device_bytes, seed=seed)
            if self.config.pin_memory:
                try:
                    self._device.register_host(self._frames.base_address, self._frames.nbytes)
                except OSError as error:
                    logger.warning("host memory is not page-locked, and copies will not overlap: %s", error)
            self._store = PageStore(
                self._queue,
                self._frames,
                self._backing,
                budgets.paged_spaces,
                budgets.rests,
                verify=self.config.verify != "off",
                dynamic=[space.id for space in budgets.paged_spaces if space.plane == GRAD],
                scratch_reserve=budgets.reserve_frames,
            )
            self._flight = Flight(self._queue, self._store)
            self._planes = Planes(budgets.layout, self._flight, self._device)
            step = Step(self._flight, self._planes, self._device, self._algorithm, budgets.page_nbytes, self._group_of)
            bound = True
            self._open_units(found, budgets)
            self._executor = Executor(
                self._flight,
                self._planes,
                step,
                self._device,
                self._units,
                max_live_numel=zero.stage3_max_live_parameters,
                prefetch_numel=zero.stage3_prefetch_bucket_size,
            )
        except BaseException:
            if bound:
                with contextlib.suppress(InfinityError):  # what went wrong first says more
                    self._give_back(failed=self._flight.failure is not None)
            self._release_resources()
            raise
        self._finalizer = weakref.finalize(self, _release, os.getpid(), self._queue, self._backing, self._device, self._frames)
        self._finalizer.atexit = False
        self.layout = budgets.layout
        self._coordinator = Coordinator(self._units, self._executor)
        self._coordinator.trains = self._trains
        self._hooks = Hooks(self._coordinator, model, self._units)
        self._door = EngineDoor(self._coordinator, self._executor, self._hooks)
        for unit in self._units:
            for flat in unit.flats:
                for index, param in enumerate(flat.params):
                    register(self._door, param, unit, flat, index)
        self._coordinator.end_step()
        self._coordinator.wear_released()
        self._budgets = budgets
        self.global_steps = 0
        self.micro_steps = 0
        self._micro_of_step = 0
        self._micro_ended = False
        """Has the latest micro-step had its backward, and no ``step`` yet?"""
        self._applied = False
        self._said_nothing_pending = False
        self._user_factor: float | None = None
        self._groups_seen: list[dict[str, Any]] | None = None
        self._pending: StepMetrics | None = None
        self._finished: deque[StepMetrics] = deque(maxlen=100_000)
        self._last: StepMetrics | None = None
        self._norm: float | None = None
        self._before = self.totals()
        self._began_s = time.perf_counter()
        logger.info("engine ready: %s", self.placement().summary())

    # ---- start ----

    def _open_units(self, found: list[FoundUnit], budgets: Budgets) -> None:
        assert self._device is not None
        by_id: dict[int, Unit] = {}
        managed: set[int] = set()
        in_units = {id(module) for unit in found for module in unit.modules()}
        weights.make_real((module for module in self.module.modules() if id(module) not in in_units), managed)
        specs = {spec.name: [flat for flat in budgets.layout.flats if flat.unit == spec.name] for spec in budgets.unit_specs}
        for found_unit in found:
            weights.make_real(found_unit.modules(), managed)
            params = dict(found_unit.owned)
            flats = []
            for spec in specs[found_unit.name]:
                names = [place.spec.name for place in spec.params]
                resident = budgets.resident_planes(spec)
                flats.append(FlatParam(spec, [params[name] for name in names], self._device, resident_planes=resident, name=spec.name))
            unit = Unit(len(self._units), found_unit.name, found_unit.module, flats)
            weights.write_unit(unit, self._planes)
            for flat in flats:
                flat.bind()
                self._params += flat.params
                managed.update(map(id, flat.params))
            _cast_empty(found_unit, budgets.cast)
            self._units.append(unit)
            by_id.update({id(param): unit for param in params.values()})
        for unit, found_unit in zip(self._units, found, strict=True):
            lenders = {by_id[id(param)].index: by_id[id(param)] for _, param in found_unit.borrowed if id(param) in by_id}
            unit.lenders = tuple(lender for lender in lenders.values() if lender is not unit)
        self._flight.wait_all()
        weights.return_heap()
        self._device.reset_peak()

    # ---- what people call ----

    @property
    def state(self) -> EngineState:
        """READY, FAILED after something that leaves the weights in doubt, or CLOSED."""
        if self._closed:
            return EngineState.CLOSED
        return EngineState.READY if self._flight.failure is None else EngineState.FAILED

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward; with ``bf16.auto_cast`` floating inputs are cast first."""
        self._enter()
        if torch.is_grad_enabled():
            self._micro_ended = False
        if self.config.bf16.enabled and self.config.bf16.auto_cast:
            args, kwargs = _cast(args), _cast(kwargs)
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Backward of ``loss``, divided by ``gradient_accumulation_steps`` unless ``scale_wrt_gas`` is False. Gives the loss back."""
        self._enter()
        steps = self.config.gradient_accumulation_steps
        boundary = self._micro_of_step + 1 == steps
        scaled = loss / steps if steps > 1 and scale_wrt_gas else loss
        fused = boundary and not retain_graph and self.config.gradient_clipping == 0 and self.config.optimizer_overlap != "deferred"
        fused = fused and not any(unit.open_visits for unit in self._units)
        if fused:
            self.optimizer.validate()
        self._check_frozen()
        self._coordinator.begin_backward(fused=fused)
        try:
            torch.autograd.backward(scaled, retain_graph=retain_graph)
            self._coordinator.end_backward()
        except BaseException as error:
            self._coordinator.abort_backward()
            if any(unit.updated for unit in self._units):
                self._flight.fail(error)
            raise
        self._micro_of_step += 1
        self._micro_ended = True
        self._coordinator.micro_step = self._micro_of_step
        self.micro_steps += 1
        return loss

    def step(self) -> None:
        """Updates the weights at the end of the last micro-step; before that it does nothing."""
        self._enter()
        self._micro_ended = False
        self._coordinator.end_plain_backward()
        if 0 < self._micro_of_step < self.config.gradient_accumulation_steps and not self._coordinator.plain_backward_seen:
            self._applied = False
            return
        self.optimizer.step()

    def apply_step(self) -> None:
        """What ``optimizer.step()`` does: norm, clip, update of whatever was not updated in backward; then the step is closed."""
        self._enter()
        self._coordinator.end_plain_backward()
        self._check_frozen()
        held = [unit.name for unit in self._units if unit.open_visits]
        if held:
            raise InfinityError(
                f"step() inside infinity.gathered(): {', '.join(held)} would change under the reader. Step after the block."
            )
        updated = [unit for unit in self._units if unit.updated]
        waiting = [unit for unit in self._units if not unit.updated and self._executor.step.has_pending(unit)]
        if not updated and not waiting:
            if not self._said_nothing_pending:
                self._said_nothing_pending = True
                logger.warning("engine.step() was called and no gradient is pending: nothing changes. Said once.")
            self._applied = False
            self._end_step()
            return
        factor = 1.0
        if waiting and self.config.gradient_clipping > 0:
            self._norm = self._executor.step.norm(waiting)
            factor = clip_factor(self._norm, self.config.gradient_clipping)
        if waiting and self._user_factor is not None:
            factor = self._user_factor
        for unit in waiting:
            self._executor.update(unit, factor)
        changed = changed_hyper_parameters(self._groups_seen, self.optimizer) if self._groups_seen is not None else ""
        self._applied = True
        self.global_steps += 1
        self._close_step(factor)
        if changed:
            raise InfinityError(
                f"{changed} between backward and step, after units had been updated with the old value. "
                "Change groups after step(), or set optimizer_overlap to 'deferred'."
            )

    def zero_grad(self) -> None:
        """Drops pending gradients, also those that a failed backward left."""
        self._enter()
        self._coordinator.end_plain_backward()
        if any(unit.updated for unit in self._units):
            raise ConsumedGradientError(
                "zero_grad() between backward and step: the gradients went into the weights during backward. "
                "Set optimizer_overlap to 'deferred' to be able to drop them."
            )
        if any(self._executor.step.has_pending(unit) for unit in self._units):
            self._finish_norm()
            self._executor.forget(self._units)
        self._norm = self._user_factor = None

    def train(self, mode: bool = True) -> Engine:
        """The module's ``train``."""
        self._enter()
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """The module's ``eval``."""
        return self.train(False)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The module's parameters."""
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's parameters by name."""
        return self.module.named_parameters()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Full copies of all weights and buffers, as forward reads them, on the CPU."""
        self._enter()
        self._executor.finish()
        found: dict[str, torch.Tensor] = {}
        copies: dict[int, torch.Tensor] = {}
        for name, param in self.module.named_parameters(remove_duplicate=False):
            if id(param) not in copies:
                where = owner_of(param)
                copies[id(param)] = weights.compute_weight(where[2], where[3], self._planes) if where else param.detach().cpu().clone()
            found[name] = copies[id(param)]
        persistent = self.module.state_dict(keep_vars=True)
        found.update({name: tensor.detach().cpu().clone() for name, tensor in persistent.items() if not isinstance(tensor, nn.Parameter)})
        return {name: found[name] for name in persistent if name in found}

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's gradients before clipping; None before the first step. Waits for updates in flight."""
        self._enter()
        self._finish_norm()
        return self._last.grad_norm if self._last is not None else None

    def was_step_applied(self) -> bool:
        """Did the last ``step`` change weights?"""
        return self._applied

    def is_gradient_accumulation_boundary(self) -> bool:
        """Does the ``step`` of this micro-step update? Before its backward and after it, until ``step``."""
        return self._micro_of_step + (0 if self._micro_ended else 1) >= self.config.gradient_accumulation_steps

    def train_batch_size(self) -> int:
        """Samples per step over all ranks."""
        return self.config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per micro-step of one rank."""
        return self.config.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        """Micro-steps per step."""
        return self.config.gradient_accumulation_steps

    @property
    def device(self) -> torch.device:
        """Where inputs belong."""
        assert self._device is not None
        return torch.device("cpu") if self._device.kind == "simulated" else self._device.torch_device

    # ---- figures ----

    def placement(self) -> Placement:
        """What lives where, in bytes."""
        assert self._queue is not None
        return describe(self._budgets, self._queue.backend, self._backing.shares if self._backing is not None else ())

    def totals(self) -> Totals:
        """Bytes read and written, and time waited, since the start."""
        assert self._queue is not None
        stats = self._queue.stats()
        return Totals(
            stats.read_nbytes,
            stats.write_nbytes,
            self._flight.stall_s,
            self._executor.prefetch_hits,
            self._executor.demand_gathers,
        )

    @contextlib.contextmanager
    def record_io(self, trace: IoTrace) -> Iterator[None]:
        """What the task queue is handed meanwhile goes into ``trace``, which ends when that is done.

        Errors: OSError when the trace cannot be written. A block that ends in an exception leaves the trace without its end.
        """
        assert self._queue is not None
        self._enter()
        self._flight.wait_all()
        aio = self.config.aio
        options = {"backend": self._queue.backend, "queue_depth": aio.queue_depth, "block_nbytes": aio.block_size}
        before = self._queue.stats()
        trace.begin(options, self._files.path)
        self._queue.recorder = trace.record
        try:
            yield
            self._flight.wait_all()
        finally:
            self._queue.recorder = None
        after = self._queue.stats()
        trace.end(
            {
                "read_nbytes": after.read_nbytes - before.read_nbytes,
                "write_nbytes": after.write_nbytes - before.write_nbytes,
                "io_busy_s": after.io_busy_s - before.io_busy_s,
            }
        )

    @property
    def last_step(self) -> StepMetrics | None:
        """The figures of the last step; its norm when it is known."""
        if self._pending is not None and self._executor.step.is_idle:
            self._finish_norm()
        return self._last

    def take_finished_steps(self) -> list[StepMetrics]:
        """The steps whose figures are complete and have not been taken, oldest first."""
        if self._pending is not None and self.state is EngineState.READY:
            self._executor.pump()
            if self._executor.step.is_idle:
                self._finish_norm()
        steps = list(self._finished)
        self._finished.clear()
        return steps

    def finish(self) -> None:
        """Waits until every update is done and nothing is in flight."""
        self._enter()
        self._executor.finish()
        self._finish_norm()

    # ---- end ----

    def close(self) -> None:
        """Gives the trained weights back as ordinary tensors, if they fit ``memory.host``, and everything else to the system."""
        if self._closed:
            self._release_resources()  # does something where an earlier call was interrupted, or the queue stood still
            return
        failed = self.state is EngineState.FAILED
        self._closed = True
        try:
            if not failed:
                self._coordinator.close_visits()
                self._executor.finish()
                self._finish_norm()
        finally:
            if self._hooks is not None:
                self._hooks.close_pairs()
                self._hooks.detach()
            failed = failed or self._flight.failure is not None
            if failed and self._queue is not None:
                with contextlib.suppress(EngineClosedError):  # in a forked child it is not ours
                    self._queue.cancel()  # nobody wants what was not begun
            try:
                self._give_back(failed=failed)
            finally:
                self._release_resources()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except InfinityError as closing:
            if error is None:
                raise
            logger.error("closing failed too: %s", closing)  # what went wrong first says more

    def _give_back(self, *, failed: bool = False) -> None:
        unregister(self._params)
        assert self._device is not None
        nbytes = sum(flat.nbytes for unit in self._units for flat in unit.flats)
        fits = nbytes <= max(
            self._frames.nbytes, self._device.budget_bytes, available_bytes("cpu") // 2 if self._device.kind == "cpu" else 0
        )
        if failed:
            logger.error("the engine failed: its weights cannot be trusted, and the model is left on the meta device.")
        elif not fits:
            logger.warning("the trained weights (%s) do not fit memory.host; the model is left on the meta device.", format_bytes(nbytes))
        planes = None if failed or not fits else self._planes
        error: InfinityError | None = None
        for unit in self._units:
            try:
                weights.give_back(unit, planes, self.device)
            except InfinityError as caught:  # a disk that fails: no parameter is left on memory that goes away
                error, planes = caught, None
                weights.give_back(unit, None, self.device)
        if error is not None:
            raise error

    def _release_resources(self) -> None:
        if not self._released:
            _release(os.getpid(), self._queue, self._backing, self._device, self._frames)
            self._released = True
            if self._finalizer is not None:
                self._finalizer.detach()

    # ---- inside ----

    def _enter(self) -> None:
        if self._closed:
            raise EngineClosedError("this engine was closed; open another one.")
        self._flight.check()
        if torch._C._current_graph_task_id() == -1:
            assert self._hooks is not None
            self._hooks.close_pairs()
            self._coordinator.close_visits()

    def _check_frozen(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for flat in (flat for unit in self._units for flat in unit.flats if not flat.spec.trainable):
                for index, param in enumerate(flat.params):
                    if param.requires_grad:
                        name = flat.spec.params[index].spec.name
                        raise NotYetError(
                            f"parameter {name!r} was frozen when the engine was opened and requires a gradient "
                            "now: training what was frozen is not built yet. Close the engine and open another one."
                        )

    def _trains(self, param: nn.Parameter) -> bool:
        """Is ``param`` in a group? Called when a gradient arrives; the first of a step closes the one before."""
        if self._pending is not None:
            self._finish_norm()
        if self._user_factor is not None:
            raise InfinityError("another gradient arrived after clip_grad_norm_(): clip after the last backward, just before step().")
        return id(param) in self._groups_by_param()

    def _groups_by_param(self) -> dict[int, dict[str, Any]]:
        if not self._group_index:
            self._group_index = {id(member): group for group in self.optimizer.param_groups for member in group["params"]}
        return self._group_index

    def groups_changed(self) -> None:
        """The optimizer has other groups, or other objects for them, than before."""
        self._group_index = {}

    def _group_of(self, flat: FlatParam, index: int) -> dict[str, Any]:
        if self._groups_seen is None and self._coordinator.updates_in_backward:
            self._groups_seen = hyper_parameters(self.optimizer)
        return self._groups_by_param()[id(flat.params[index])]

    def _close_step(self, factor: float) -> None:
        now, totals = time.perf_counter(), self.totals()
        spent = totals.since(self._before)
        assert self._device is not None
        self._pending = self._last = StepMetrics(
            step=self.global_steps,
            lr=float(self.optimizer.param_groups[0]["lr"]),
            grad_norm=None,
            clip_factor=factor,
            step_s=now - (self._coordinator.step_began_s or self._began_s),
            stall_s=spent.stall_s,
            read_bytes=spent.read_bytes,
            write_bytes=spent.write_bytes,
            host_bytes=(self._frames.n_frames - self._store.frames_free) * self._frames.frame_nbytes,
            device_bytes=self._device.peak_bytes,
            prefetch_hits=spent.prefetch_hits,
            demand_gathers=spent.demand_gathers,
        )
        self._before = totals
        self._device.reset_peak()
        self._end_step()

    def _end_step(self) -> None:
        self._began_s = time.perf_counter()
        self._micro_of_step = 0
        self._micro_ended = False
        self._user_factor = None
        self._groups_seen = None
        self._group_index = {}
        self._coordinator.end_step()

    def _finish_norm(self) -> None:
        if self._pending is None:
            return
        self._executor.step.finish()
        norm = self._executor.step.finished_norm() if self._norm is None else self._norm
        self._executor.step.forget_norm()
        self._last = replace(self._pending, grad_norm=norm)
        self._finished.append(self._last)
        self._pending = self._norm = None

    def clip_gradients(self, max_norm: float) -> float:
        """What ``infinity.clip_grad_norm_`` does: the norm of the pending gradients; the coming step multiplies them by the clip factor.

        Errors: InfinityError when some were consumed in backward.
        """
        self._enter()
        self._coordinator.end_plain_backward()
        if any(unit.updated for unit in self._units):
            raise InfinityError(
                "gradients went into the weights during backward and can no longer be clipped. Set gradient_clipping in the config, "
                "or optimizer_overlap to 'deferred'."
            )
        if self._pending is not None:
            self._finish_norm()
        self._norm = self._executor.step.norm(self._units)
        self._user_factor = clip_factor(self._norm, max_norm)
        return self._norm


def _release(pid: int, queue: TaskQueue | None, backing: NvmeBacking | None, device: Device | None, frames: FramePool) -> None:
    """Gives everything to the system, the queue first: it may be using all the others."""
    if os.getpid() != pid:
        return  # a forked child owns nothing of its parent's
    if queue is not None:
        queue.close()
    if backing is not None:
        backing.close()
    if device is not None:
        device.unregister_host(frames.base_address, frames.nbytes)
        device.close()
    frames.close()


def _device_kind(device: str) -> DeviceKind:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda", "simulated"):
        raise ValueError(f"device {device!r}: it must be 'auto', 'cpu', 'cuda' or 'simulated'")
    return device  # type: ignore[return-value]


def _workers(config: Config, kind: DeviceKind) -> int:
    if config.optimizer_threads != "auto":
        return config.optimizer_threads
    cores = len(os.sched_getaffinity(0))
    return max(1, cores // 2 if kind == "cuda" else cores // 4)  # where compute is the cores', most are left to it


def _cast(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.bfloat16() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _cast(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_cast(item) for item in value)
    return value


def _cast_empty(unit: FoundUnit, cast: torch.dtype | None) -> None:
    """Parameters without elements have no place in a flat parameter; they only follow the dtype."""
    for _, param in unit.owned:
        if param.numel() == 0 and cast is not None and param.is_floating_point():
            param.data = param.data.to(cast)
