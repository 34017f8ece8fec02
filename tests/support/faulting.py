"""One short training run per injection: the n-th call of one file operation goes wrong in one way. What becomes of the run?

Each run is a forked child of its own, so that one that hangs or crashes is a row of the table and not the end of it.

    python -m tests.support.faulting --help
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import functools
import json
import logging
import os
import random
import select
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import infinity.engine
from infinity.engine import EngineState
from infinity.errors import InfinityError
from infinity.faults import Fault
from infinity.task_queue import FileOp, Files
from tests.support import models, runs
from tests.support.queues import WORKING_BACKENDS, native_threads

STEPS = 3
LIMIT_S = 60.0
"""A run takes a twentieth of a second; one that takes this long does not end."""

TRANSFERS = (FileOp.READ, FileOp.WRITE)
OPS = (FileOp.OPEN, FileOp.UNLINK, FileOp.FALLOCATE, FileOp.WRITE, FileOp.READ, FileOp.DATASYNC, FileOp.CLOSE)


@dataclass(frozen=True, slots=True)
class Kind:
    """One way to go wrong, and what it may lead to."""

    name: str
    fault: Fault
    ops: tuple[FileOp, ...] = OPS
    masked: tuple[FileOp, ...] = ()
    """Operations of which nobody above may notice anything: the result is right, and there was no error."""
    silent: bool = False
    """Does only a checksum tell? Without one the result may be wrong."""


KINDS = (
    Kind("EIO", Fault.error(errno.EIO)),
    Kind("ENOSPC", Fault.error(errno.ENOSPC)),
    Kind("EAGAIN", Fault.error(errno.EAGAIN), masked=(*TRANSFERS, FileOp.DATASYNC)),
    Kind("EINTR", Fault.error(errno.EINTR), masked=(*TRANSFERS, FileOp.DATASYNC)),
    Kind("short", Fault.short(1000), ops=TRANSFERS, masked=TRANSFERS),
    Kind("delay", Fault.delay(3_000), masked=OPS),
    Kind("reorder", Fault.hold(3, us=6_000), ops=(*TRANSFERS, FileOp.DATASYNC), masked=OPS),
    Kind("flipped bit", Fault.flip(40, bit=5), ops=TRANSFERS, silent=True),
    Kind("torn write", Fault.tear(40), ops=(FileOp.WRITE,), silent=True),
    Kind("lost write", Fault.lose(), ops=(FileOp.WRITE,), silent=True),
)


@dataclass(frozen=True, slots=True)
class Setup:
    """The run that is disturbed: everything moves through as few frames as the engine takes."""

    backend: str = "threads"
    verify: str = "write+read"
    precision: str = "fp32"
    overlap: str = "fused"

    def model(self) -> nn.Module:
        return models.build(lambda: models.GPT(width=16, blocks=2), runs.DTYPES[self.precision])

    def batches(self) -> list[models.Tokens]:
        return models.token_batches(STEPS)

    def config(self, directory: Path) -> dict[str, Any]:
        device_bytes, host_bytes = _least(self)
        return runs.with_host(runs.with_device(self._config(directory), device_bytes), host_bytes)

    def _config(self, directory: Path) -> dict[str, Any]:
        config = runs.engine_config(directory, precision=self.precision, overlap=self.overlap, backend=self.backend)
        return {**config, "verify": self.verify}


@functools.cache
def _least(setup: Setup) -> tuple[int, int]:
    """The smallest budgets of device and host that the engine takes."""
    with tempfile.TemporaryDirectory() as directory:
        config = setup._config(Path(directory))
        device_bytes = runs.least_device_bytes(setup.model, config)
        return device_bytes, runs.least_host_bytes(setup.model, runs.with_device(config, device_bytes))


@dataclass(frozen=True, slots=True)
class Expected:
    """What plain torch makes of the same batches."""

    outcome: runs.Outcome
    weights: list[dict[str, Tensor]]
    """After so many steps."""

    @classmethod
    def of(cls, setup: Setup) -> Expected:
        trainer = runs.PlainTrainer(setup.model())
        weights = []
        for args in setup.batches():
            weights.append({name: param.detach().clone() for name, param in trainer.model.named_parameters()})
            trainer.backward(trainer(*args))
            trainer.step()
        outcome = trainer.outcome()
        outcome.losses = []
        return cls(outcome, [*weights, outcome.weights])


@dataclass(frozen=True, slots=True)
class Injection:
    kind: Kind
    op: FileOp
    nth: int

    def __str__(self) -> str:
        return f"{self.kind.name} at {self.op.name.lower()} {self.nth}"


@dataclass(slots=True)
class Ending:
    """What became of one run."""

    reached: bool = False
    """Was there an n-th call?"""
    finished: bool = False
    """Did it get through all steps and was everything read back?"""
    error: str = ""
    """The class of the first error, if there was any."""
    wrong: list[str] = field(default_factory=list)
    """Everything that must not be."""
    hung: bool = False

    @property
    def word(self) -> str:
        if self.hung:
            return "hung"
        if self.wrong:
            return "wrong"
        return self.error or "right"


def run(setup: Setup, expected: Expected, injection: Injection | None, directory: Path) -> tuple[Ending, Files]:
    """One run in this process."""
    ending = Ending()
    files = Files()
    config = setup.config(directory)
    threads, descriptors = native_threads(), sorted(os.listdir("/proc/self/fd"))
    if injection is not None:
        files.fault(injection.op, injection.kind.fault, nth=injection.nth)
    make_files, infinity.engine.Files = infinity.engine.Files, lambda: files  # type: ignore[misc, assignment]
    try:
        _train(setup, expected, config, ending, injection)
    finally:
        infinity.engine.Files = make_files  # type: ignore[misc]
    if native_threads() - threads:
        ending.wrong.append("threads are left")
    if sorted(os.listdir("/proc/self/fd")) != descriptors:
        ending.wrong.append("descriptors are left")
    if os.listdir(directory):
        ending.wrong.append(f"files are left: {os.listdir(directory)}")
    if injection is not None:
        ending.reached = files.count(injection.op) >= injection.nth
        if ending.error and injection.op in injection.kind.masked:
            ending.wrong.append(f"{ending.error} where nothing was to be noticed")
    return ending, files


def _train(setup: Setup, expected: Expected, config: dict[str, Any], ending: Ending, injection: Injection | None) -> None:
    model = setup.model()

    def note(error: InfinityError) -> None:
        ending.error = ending.error or type(error).__name__
        if not _names_the_place(error, injection):
            ending.wrong.append(f"an error without file, offset or errno: {error!r}, because of {error.__cause__!r}")

    try:
        trainer = runs.EngineTrainer(model, config)
    except InfinityError as error:
        note(error)
        ending.wrong += [f"{name} was changed" for name in _changed(model, expected.weights[0])]
        return
    engine = trainer.engine
    try:
        for args in setup.batches():
            _step(trainer, args, note)
        found = trainer.outcome()
        found.losses, found.norms = [], expected.outcome.norms
        ending.wrong += runs.differences(expected.outcome, found)[:3]
        ending.finished = True
    except InfinityError as error:
        note(error)
    steps, failed = engine.global_steps, engine.state is EngineState.FAILED
    try:
        engine.close()
    except InfinityError as error:
        note(error)
        if engine.state is not EngineState.CLOSED:
            ending.wrong.append("it cannot be closed")
    changed = _changed(model, {} if failed else expected.weights[steps])
    ending.wrong += [f"{name} was given back wrong after {steps} steps" for name in changed]


def _step(trainer: runs.EngineTrainer, args: models.Tokens, note: Callable[[InfinityError], None]) -> None:
    """A step, and another try after an error, as a user would who knows that it may be the last."""
    try:
        trainer.backward(trainer(*args))
        trainer.step()
    except InfinityError as error:
        note(error)
        if trainer.engine.state is EngineState.FAILED:
            raise
        trainer.zero_grad()
        trainer.backward(trainer(*args))
        trainer.step()


def _changed(model: nn.Module, weights: dict[str, Tensor]) -> list[str]:
    """The parameters that are here (on meta there is nothing to be trusted) and are not what they must be."""
    here = {name: param for name, param in model.named_parameters() if not param.is_meta}
    return [name for name, param in here.items() if name not in weights or not torch.equal(runs.bits(param), runs.bits(weights[name]))]


def _names_the_place(error: BaseException | None, injection: Injection | None) -> bool:
    """Whether the error, or what caused it, says which file, where in it, and what the system said."""
    while error is not None:
        if getattr(error, "path", None):
            if injection is None or injection.op not in TRANSFERS:
                return True
            if getattr(error, "offset", None) is not None and (
                injection.kind.silent or getattr(error, "errno", None) == injection.kind.fault.value
            ):
                return True
        error = error.__cause__
    return False


# ---- many of them ----


def injections(calls: dict[FileOp, int], *, sample: int | None = None, seed: int = 0) -> list[Injection]:
    """Each way to go wrong at each call that a clean run makes; ``sample``: the first, the last and so many of each."""
    draw = random.Random(seed)
    found = []
    for kind in KINDS:
        for op in kind.ops:
            every: Sequence[int] = range(1, calls[op] + 1)
            if sample is not None and len(every) > sample + 2:
                every = sorted({1, len(every), *draw.sample(every, sample)})
            found += [Injection(kind, op, nth) for nth in every]
    return found


def clean_calls(setup: Setup, expected: Expected) -> dict[FileOp, int]:
    """How often a run without faults calls each operation; it must end well."""
    with tempfile.TemporaryDirectory() as directory:
        ending, files = run(setup, expected, None, Path(directory))
    assert ending.finished, ending
    assert ending.word == "right", ending
    return {op: files.count(op) for op in FileOp}


def run_each(
    setup: Setup, expected: Expected, every: Iterable[Injection], *, jobs: int = 1, limit_s: float = LIMIT_S
) -> Iterator[tuple[Injection, Ending]]:
    """The ending of every injection, in a child each; ``jobs`` at a time."""
    waiting = iter(every)
    children: dict[int, _Child] = {}
    while True:
        while len(children) < jobs and (injection := next(waiting, None)) is not None:
            child = _Child(setup, expected, injection, limit_s)
            children[child.answer] = child
        if not children:
            return
        soonest = min(child.deadline for child in children.values())
        ready, _, _ = select.select(list(children), [], [], max(0.0, soonest - time.monotonic()))
        late = [answer for answer, child in children.items() if child.deadline <= time.monotonic()]
        for answer in {*ready, *late}:
            child = children[answer]
            if not child.read(is_late=answer in late and answer not in ready):
                continue
            del children[answer]
            yield child.injection, child.ending


class _Child:
    """A run in a forked process, and what it says before it ends."""

    def __init__(self, setup: Setup, expected: Expected, injection: Injection, limit_s: float) -> None:
        self.injection = injection
        self.deadline = time.monotonic() + limit_s
        self.ending = Ending(reached=True)
        self._said = b""
        self._directory = tempfile.TemporaryDirectory()
        self.answer, write_end = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            status = 1
            try:
                os.close(self.answer)
                self._be_it(setup, expected, write_end)
                status = 0
            finally:
                os._exit(status)
        os.close(write_end)

    def _be_it(self, setup: Setup, expected: Expected, answer: int) -> None:
        with open(Path(self._directory.name) / "stacks", "w") as stacks:
            faulthandler.enable(stacks)
            faulthandler.register(signal.SIGUSR1, stacks)
            pages = Path(self._directory.name) / "pages"
            pages.mkdir()
            torch.set_num_threads(1)
            logging.disable()
            try:
                ending, _ = run(setup, expected, self.injection, pages)
            except BaseException:
                ending = Ending(reached=True, wrong=[f"an error that is not of infinity:\n{traceback.format_exc()}"])
            os.write(answer, json.dumps(asdict(ending)).encode())
            os.close(answer)

    def read(self, *, is_late: bool) -> bool:
        """Take what the child says; True when it has ended, or was ended because it was late."""
        if is_late:
            self.ending.hung = True
            os.kill(self._pid, signal.SIGUSR1)
            time.sleep(0.2)
            os.kill(self._pid, signal.SIGKILL)
        else:
            self._said += (said := os.read(self.answer, 65536))
            if said:
                return False
        os.close(self.answer)
        _, status = os.waitpid(self._pid, 0)
        if self.ending.hung or status != 0:
            stacks = (Path(self._directory.name) / "stacks").read_text()
            self.ending.wrong.append(f"it {'hung' if self.ending.hung else f'ended with {status}'}:\n{stacks}")
        else:
            self.ending = Ending(**json.loads(self._said))
        with contextlib.suppress(OSError):
            self._directory.cleanup()
        return True


# ---- the table ----


def tally(endings: Iterable[tuple[Injection, Ending]]) -> dict[tuple[str, str], Counter[str]]:
    """(operation, kind) -> how often each ending; injections without an n-th call are left out."""
    table: dict[tuple[str, str], Counter[str]] = {}
    for injection, ending in endings:
        if ending.reached:
            table.setdefault((injection.op.name.lower(), injection.kind.name), Counter())[ending.word] += 1
    return table


def _main(arguments: Sequence[str]) -> int:
    import argparse

    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    parser = argparse.ArgumentParser(prog="python -m tests.support.faulting", description="Every file operation goes wrong in turn.")
    parser.add_argument("--backend", choices=WORKING_BACKENDS, action="append", help="default: each that works here")
    parser.add_argument("--verify", choices=("write+read", "off"), default="write+read")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--overlap", choices=("fused", "deferred"), default="fused")
    parser.add_argument("--sample", type=int, help="only so many calls of each operation, beside the first and the last")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--json", action="store_true", help="one line per backend, operation and kind")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console, failed = Console(stderr=given.json, width=None if sys.stdout.isatty() else 140), False
    for backend in given.backend or WORKING_BACKENDS:
        setup = Setup(backend, given.verify, given.precision, given.overlap)
        expected = Expected.of(setup)
        calls = clean_calls(setup, expected)
        every = injections(calls, sample=given.sample)
        began = time.monotonic()
        endings = list(
            track(run_each(setup, expected, every, jobs=given.jobs), f"{backend}: {len(every)} runs", len(every), console=console)
        )
        title = f"{backend}, verify {given.verify}, {given.precision}, {given.overlap}: {time.monotonic() - began:.0f} s"
        rows = tally(endings)
        if given.json:
            for (op, kind), counts in rows.items():
                print(json.dumps({**asdict(setup), "op": op, "kind": kind, "injections": counts.total(), **counts}))
        else:
            errors = sorted({word for counts in rows.values() for word in counts} - {"right", "wrong", "hung"})
            table = Table("operation", "goes wrong", "injections", "right", *errors, "wrong", "hung", title=title)
            for column in table.columns[2:]:
                column.justify = "right"
            for (op, kind), counts in sorted(rows.items()):
                words = ("right", *errors, "wrong", "hung")
                table.add_row(op, kind, str(counts.total()), *(str(counts[word] or "-") for word in words))
            total = sum(rows.values(), Counter[str]())
            table.add_section()
            table.add_row("all", "", str(total.total()), *(str(total[word] or "-") for word in ("right", *errors, "wrong", "hung")))
            console.print(table)
        bad = [(injection, ending) for injection, ending in endings if ending.wrong]
        for injection, ending in bad[:20]:
            console.print(f"{injection}: {'; '.join(ending.wrong)}", markup=False, highlight=False)
        failed = failed or (bool(bad) and given.verify != "off")
    return int(failed)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
