"""WHEN things happen: turns the events of hooks into visits, and has the executor do what each visit needs.

::

    RECORD --the program ended--> REPLAY         a program's first run is recorded; later runs are compared with it,
    REPLAY --a visit differs----> RECORD         which is what lets gathers run ahead and updates stand in backward

A program is one known course of events, named by a key: a micro-step of training, or an evaluation. A differing visit is said once,
and the rest of that run is recorded anew: slower, never wrong.

Kept here:

* a unit that a node of autograd may still be using is not released (``is_busy``);
* no unit is used in a backward that has already updated it (P7): ``StaleStepError``.

[Note: when a node of autograd has ended] Events name the current node of the current graph task. A node that was seen is over as soon
as a later event of the same graph task names another one, or that task has ended. A node that runs a backward of its own (reentrant
checkpoint) stays open below it, as the stack ``_nodes`` shows.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import FrameType
from typing import Any

import torch
from torch import nn

from infinity.errors import StaleStepError
from infinity.executor import Executor
from infinity.flat_param import FlatParam, Unit, UnitState
from infinity.plan.trace import Phase, Trace, Visit
from infinity.released import ReleasedParameter

logger = logging.getLogger(__name__)

VISITS_MAX = 100_000
"""Visits of one run of a program that are remembered."""

LOOK_AHEAD_VISITS = 16
"""Visits ahead of the current one that gathers may be issued for; budgets usually end it earlier."""


class Mode(Enum):
    """Whether a program is being recorded or compared with its recording."""

    RECORD = "record"
    REPLAY = "replay"


@dataclass(slots=True)
class Program:
    """A program while it runs."""

    key: Hashable
    recorded: Trace | None
    mode: Mode
    seen: Trace = field(default_factory=Trace)

    @property
    def position(self) -> int:
        """Of the latest visit."""
        return len(self.seen.visits) - 1


@dataclass(slots=True)
class OpenVisit:
    """A forward that has begun and not ended, and every unit that it keeps gathered."""

    unit: Unit
    units: list[Unit]


class Coordinator:
    """The one place that knows which program runs, where in it we are, and what may be let go."""

    def __init__(self, units: Sequence[Unit], executor: Executor) -> None:
        self.units = units
        self.executor = executor
        self.micro_step = 0
        self.updates_in_backward = False
        """Set by the engine for the backward that ends a fused step."""
        self.plain_backward_seen = False
        """Was one of them not ``engine.backward``?"""
        self.step_began_s: float | None = None
        """When the first event of this step came."""
        self.trains: Callable[[nn.Parameter], bool] = lambda param: True
        """Is a parameter in a parameter group?"""
        self._traces: dict[Hashable, Trace] = {}
        self._said: set[Hashable] = set()
        self._program: Program | None = None
        self._suspended: list[Program | None] = []
        self._open: list[OpenVisit] = []
        self._root_depth = 0
        self._root_frame: FrameType | None = None
        """Where the outermost forward of the model runs."""
        self._root_units: list[Unit] = []
        """Units of which the model's own forward has an alias."""
        self._engine_backward = False
        self._plain_backward_open = False
        self._nodes: list[tuple[int, Any]] = []
        self._users: dict[int, list[Any]] = {}
        self._touched: dict[int, set[tuple[FlatParam, int]]] = {}
        self._latest: Unit | None = None
        self._left: dict[tuple[int, int], tuple[FlatParam, int]] = {}
        """Gradients that stay on their parameters until the backward has ended."""
        executor.is_busy = self.is_busy
        executor.next_use = self.next_use
        executor.is_backward = lambda: _graph_task() != -1

    # ---- programs ----

    def is_interrupted(self) -> bool:
        """Did a forward of the model begin that neither ended nor runs? A KeyboardInterrupt passes by the hooks that would have told."""
        if self._root_frame is None or _graph_task() != -1:
            return False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._root_frame:
            frame = frame.f_back
        return frame is None

    def enter_root(self, frame: FrameType) -> None:
        """The model's forward begins, in ``frame``."""
        if _graph_task() != -1:
            return
        self.end_plain_backward()
        self._root_depth += 1
        if self._root_depth == 1:
            self._root_frame = frame
        if not torch.is_grad_enabled():
            self._suspended.append(self._program)
            self._program = None

    def leave_root(self) -> None:
        """The model's forward ended, or raised."""
        if _graph_task() != -1 or self._root_depth == 0:
            return
        self._root_depth -= 1
        if self._root_depth == 0:
            self._root_frame = None
            self._close_root()
        if not torch.is_grad_enabled() and self._suspended:
            self._end_program()
            self._program = self._suspended.pop()

    def _running(self) -> Program:
        if self._program is None:
            key: tuple[Hashable, ...] = ("train", self.micro_step) if torch.is_grad_enabled() or _graph_task() != -1 else ("eval",)
            if key[0] == "train" and self.step_began_s is None:
                self.step_began_s = time.perf_counter()
            recorded = self._traces.get(key)
            self._program = Program(key, recorded, Mode.RECORD if recorded is None else Mode.REPLAY)
        return self._program

    def _end_program(self) -> None:
        program, self._program = self._program, None
        if program is None or not program.seen.visits:
            return
        if program.mode is Mode.RECORD or program.recorded is None or len(program.seen.visits) != len(program.recorded.visits):
            if program.recorded is None:
                logger.info("recorded program %s: %d visits", program.key, len(program.seen.visits))
            self._traces[program.key] = program.seen

    def _visit(self, unit: Unit, phase: Phase) -> None:
        program = self._running()
        if len(program.seen.visits) >= VISITS_MAX:  # forwards without end and no backward
            program.seen, program.mode = Trace(), Mode.RECORD
        visit = Visit(unit.index, phase)
        position = program.seen.append(visit)
        if program.mode is Mode.REPLAY and program.recorded is not None:
            expected = program.recorded.visits[position] if position < len(program.recorded.visits) else None
            if expected != visit:
                self._diverge(program, position, visit, expected)

    def _diverge(self, program: Program, position: int, visit: Visit, expected: Visit | None) -> None:
        program.mode = Mode.RECORD
        if program.key not in self._said:
            self._said.add(program.key)
            wanted = f"{expected.phase.value} of {self.units[expected.unit].name!r}" if expected else "the end"
            logger.warning(
                "program %s: visit %d is the %s of %r, the recorded one was %s; gathers on demand until it repeats. Said once.",
                program.key, position, visit.phase.value, self.units[visit.unit].name, wanted,
            )  # fmt: skip

    def next_use(self, unit: Unit) -> int | None:
        """How soon ``unit`` is needed, as a position in the running program; None when not again, or not known."""
        program = self._program
        if program is None:
            return None
        recorded = program.recorded if program.mode is Mode.REPLAY else None
        if unit is self._latest and _graph_task() != -1 and not (recorded and recorded.used_up(program.seen, unit.index)):
            return program.position  # its backward has begun and goes on
        return recorded.next_use(unit.index, program.position) if recorded else None

    @property
    def replaying(self) -> bool:
        """Is the running program a known one?"""
        return self._program is not None and self._program.mode is Mode.REPLAY

    def _look_ahead(self) -> None:
        program = self._program
        if program is None or program.mode is Mode.RECORD or program.recorded is None:
            return
        begin = program.position + 1
        for position in range(begin, min(begin + LOOK_AHEAD_VISITS, len(program.recorded.visits))):
            unit = self.units[program.recorded.visits[position].unit]
            for wanted in (unit, *unit.lenders):
                if wanted.state is UnitState.SHARDED and not self.executor.prefetch(wanted, position):
                    return

    # ---- forward ----

    def reach(self, unit: Unit) -> None:
        """A forward of ``unit`` begins: everything it uses is gathered when this returns."""
        in_backward = _graph_task() != -1
        if in_backward:
            self._note_node()
        else:
            self.end_plain_backward()
        program = self._running()
        visit = OpenVisit(unit, [unit, *unit.lenders])
        self._open.append(visit)
        for wanted in visit.units:
            wanted.open_visits += 1
            program.seen.forwards[wanted.index] += 1
        try:
            self._visit(unit, Phase.FORWARD)
            for wanted in visit.units:
                self._use(wanted)
            self._look_ahead()
        except BaseException:
            self._close(visit)
            raise

    def leave(self, unit: Unit) -> None:
        """The forward of ``unit`` ended, or raised."""
        for position in range(len(self._open) - 1, -1, -1):
            if self._open[position].unit is unit:
                while len(self._open) > position:
                    self._close(self._open[-1])
                return

    def borrow(self, unit: Unit) -> None:
        """The visit that is open uses ``unit``'s parameters: it keeps them gathered until it ends."""
        visit = self._open[-1]
        if unit not in visit.units:
            visit.units.append(unit)
            unit.open_visits += 1
            self._running().seen.forwards[unit.index] += 1
        self._use(unit)

    def open_gathered(self, unit: Unit) -> None:
        """Keeps ``unit`` gathered until ``close_gathered``, outside any program, as ordinary parameters."""
        self.hold(unit)
        if unit.open_visits == 1:
            unit.wear(nn.Parameter)

    def close_gathered(self, unit: Unit) -> None:
        """Ends ``open_gathered``."""
        self._leave_unit(unit)

    def _use(self, unit: Unit) -> None:
        if unit.updated and _graph_task() != -1:
            raise StaleStepError(unit.name)
        self.executor.gather(unit)
        if unit.open_visits == 1:
            unit.wear(nn.Parameter)

    def _close(self, visit: OpenVisit) -> None:
        self._open.remove(visit)
        for unit in visit.units:
            self._leave_unit(unit)

    def _leave_unit(self, unit: Unit) -> None:
        self.unhold(unit)
        if unit.open_visits == 0:
            unit.wear(ReleasedParameter)

    def hold(self, unit: Unit) -> None:
        """Keeps ``unit`` gathered for an operation outside every forward."""
        self.end_plain_backward()
        unit.open_visits += 1
        try:
            self.executor.gather(unit)
        except BaseException:
            unit.open_visits -= 1
            raise

    def unhold(self, unit: Unit) -> None:
        """Ends ``hold``; what was written in place goes to where it rests."""
        unit.open_visits -= 1
        if unit.open_visits == 0:
            self.executor.write_back_modified(unit)

    def close_visits(self) -> None:
        """Closes what an interrupted forward left open; the engine calls it wherever no forward can be running."""
        if _graph_task() == -1:
            while self._open:
                self._close(self._open[-1])
            self._root_depth = 0
            self._root_frame = None
            self._close_root()
            while self._suspended:
                self._program = self._suspended.pop()

    @property
    def in_root(self) -> bool:
        """Is the model's own forward running, outside every unit's?"""
        return self._root_depth > 0 and not self._open and _graph_task() == -1

    def borrow_for_root(self, unit: Unit) -> None:
        """The model's own forward uses an alias of ``unit``'s memory: it keeps it gathered until it ends."""
        if unit not in self._root_units:
            self._root_units.append(unit)
            unit.open_visits += 1
            self._running().seen.forwards[unit.index] += 1
        self._use(unit)

    def _close_root(self) -> None:
        while self._root_units:
            self._leave_unit(self._root_units.pop())

    @property
    def in_visit(self) -> bool:
        """Is a forward of some unit running?"""
        return bool(self._open)

    # ---- backward ----

    def begin_backward(self, *, fused: bool) -> None:
        """``engine.backward`` begins; ``fused``: a unit may be updated as soon as its recorded uses are over."""
        self.end_plain_backward()
        self.close_visits()
        self._engine_backward = True
        self.updates_in_backward = self.executor.keeps_pages = fused and self._repeats()

    def _repeats(self) -> bool:
        """Is this the backward of a known program, with the same parameters asking for gradients?"""
        program = self._running()
        with torch._C.DisableTorchFunctionSubclass():
            program.seen.wanted = tuple(param.requires_grad for unit in self.units for flat in unit.flats for param in flat.params)
        if program.mode is Mode.REPLAY and program.recorded is not None and program.recorded.wanted != program.seen.wanted:
            program.mode = Mode.RECORD
        return program.mode is Mode.REPLAY

    def end_backward(self) -> None:
        """A backward ended: every gradient is complete."""
        self._take_left_gradients()
        self._forget_nodes()
        fused = self.updates_in_backward and self.replaying
        for unit in self.units:
            if any(flat.gradients for flat in unit.flats):
                self._finish_gradients(unit, fused=fused)
        self.updates_in_backward = self.executor.keeps_pages = False
        self._engine_backward = False
        self._end_program()

    def abort_backward(self) -> None:
        """A backward raised: what it left is as it is, and its recording is worth nothing."""
        self._forget_nodes()
        self.updates_in_backward = self.executor.keeps_pages = False
        self._engine_backward = self._plain_backward_open = False
        self._program = None
        while self._open:
            self._close(self._open[-1])

    def end_plain_backward(self) -> None:
        """Notices that a ``loss.backward()`` of the user's has ended."""
        if self._plain_backward_open and _graph_task() == -1:
            self._plain_backward_open = False
            if self.plain_backward_seen:
                self.end_backward()
            else:  # torch.autograd.grad: nothing was accumulated, and the forward's own backward is still to come
                self._forget_nodes()

    def end_step(self) -> None:
        """The step is over, or its gradients were dropped."""
        self.plain_backward_seen = False
        self.micro_step = 0
        self.step_began_s = None
        self._program = None
        for unit in self.units:
            unit.updated = False

    def wear_released(self) -> None:
        """At the start: every parameter wears the subclass until a forward of its unit begins."""
        for unit in self.units:
            unit.wear(ReleasedParameter)

    def check_fresh(self, flat: FlatParam) -> None:
        """Errors: StaleStepError when a backward asks for a unit that this step has updated already."""
        unit = self.executor.unit_of(flat)
        if unit.updated and _graph_task() != -1:
            raise StaleStepError(unit.name)

    def unpack(self, flat: FlatParam) -> None:
        """Autograd asks for a tensor that was saved on ``flat``'s storage: it is there when this returns."""
        unit = self.executor.unit_of(flat)
        if _graph_task() == -1:
            self.executor.gather(unit)
            return
        self._enter_backward()
        node = self._note_node()
        users = self._users.setdefault(unit.index, [])
        if node is not None and (not users or users[-1] is not node):
            users.append(node)
        self._running().seen.unpacks[unit.index] += 1
        self._use_in_backward(unit)

    def touch_in_backward(self, flat: FlatParam, index: int) -> None:
        """A recompute that passes no hook of the unit uses a parameter; tensors it saves hold our storage until the gradient is there."""
        unit = self.executor.unit_of(flat)
        self._enter_backward()
        self._note_node()
        self._touched.setdefault(unit.index, set()).add((flat, index))
        self._running().seen.unpacks[unit.index] += 1
        self._use_in_backward(unit)

    def _use_in_backward(self, unit: Unit) -> None:
        if unit.updated:
            raise StaleStepError(unit.name)
        if self._latest is not unit:
            self._move_on(unit)
            self._visit(unit, Phase.BACKWARD)
        self.executor.gather(unit)
        self._look_ahead()

    def accumulate(self, flat: FlatParam, index: int, grad: torch.Tensor) -> None:
        """A gradient arrived at parameter ``index`` of ``flat``."""
        unit = self.executor.unit_of(flat)
        self._enter_backward()
        self._note_node()
        if unit.updated:
            raise StaleStepError(unit.name)
        touched = self._touched.get(unit.index)
        if touched:
            touched.discard((flat, index))
        if not self._engine_backward:
            self.plain_backward_seen = True
        program = self._running()
        program.seen.accumulations[unit.index] += 1
        if self.trains(flat.params[index]):
            self.executor.take_gradient(flat, index, grad)
        if self._latest is not unit:
            self._move_on(unit)
        if program.mode is Mode.REPLAY and program.recorded is not None and program.recorded.used_up(program.seen, unit.index):
            self._complete(unit)
        self.executor.pump()

    def leave_gradient(self, flat: FlatParam, index: int) -> None:
        """A gradient arrived at a parameter that has hooks of the user's: it stays there until the backward has ended."""
        self._enter_backward()
        if not self._engine_backward:
            self.plain_backward_seen = True
        self._left.setdefault((flat.spec.index, index), (flat, index))

    def _take_left_gradients(self) -> None:
        left, self._left = self._left, {}
        for flat, index in left.values():
            param = flat.params[index]
            with torch._C.DisableTorchFunctionSubclass():
                grad, param.grad = param.grad, None
            if grad is not None:
                self.accumulate(flat, index, grad)

    def _complete(self, unit: Unit) -> None:
        if not self.is_busy(unit):
            self._finish_gradients(unit, fused=self.updates_in_backward)

    def _finish_gradients(self, unit: Unit, *, fused: bool) -> None:
        if fused:
            self.executor.update(unit)
        else:
            self.executor.reduce(unit)

    def _move_on(self, unit: Unit) -> None:
        """Backward came to another unit: what the one before it left can be put away."""
        before, self._latest = self._latest, unit
        if before is None or before.updated or not any(flat.gradients for flat in before.flats):
            return
        program = self._running()
        known = program.mode is Mode.REPLAY and program.recorded is not None
        if known and program.recorded is not None and program.recorded.used_up(program.seen, before.index):
            self._complete(before)
        elif not (known and self.updates_in_backward):
            self.executor.reduce(before)

    def _enter_backward(self) -> None:
        if not self._engine_backward and not self._plain_backward_open and _graph_task() != -1:
            self._plain_backward_open = True
            self.updates_in_backward = False
            self._latest = None

    def _note_node(self) -> Any:
        task, node = _graph_task(), torch._C._current_autograd_node()
        if task != -1 and all(open_task != task for open_task, _ in self._nodes):
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._close_task(task))
        self._close_task(task)
        self._nodes.append((task, node))
        return node

    def _close_task(self, task: int) -> None:
        """The node of ``task`` that was open is over, and so is all that ran below it."""
        for position, (open_task, _) in enumerate(self._nodes):
            if open_task == task:
                del self._nodes[position:]
                return

    def _forget_nodes(self) -> None:
        self._nodes.clear()
        self._users.clear()
        self._touched.clear()
        self._latest = None

    def is_busy(self, unit: Unit) -> bool:
        """May something still be reading ``unit``'s device memory?"""
        if unit.open_visits or self._touched.get(unit.index):
            return True
        users = self._users.get(unit.index)
        if not users:
            return False
        users[:] = [user for user in users if any(node is user for _, node in self._nodes)]
        return bool(users)


def _graph_task() -> int:
    """The graph task that runs on this thread, -1 outside any backward."""
    return torch._C._current_graph_task_id()
