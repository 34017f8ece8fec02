"""Short trainings with their state in files, each in a child of one warm process, so that every one can be limited in its own way.

``python -m tests.support.limited`` reads lines of ``case directory argument...`` and answers each with a line of JSON: what the case's
training gave (``digest`` of losses, weights and moments), or the error that it ended with.
"""

from __future__ import annotations

import cProfile
import hashlib
import json
import logging
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from infinity.errors import InfinityError
from tests.support import limits, models, runs

STEPS = 3


def train(directory: str, backend: str = "auto", page: int = 4 << 10) -> dict[str, Any]:
    """What a tiny GPT trained from files gives, and how its files were moved."""
    config = runs.engine_config(Path(directory), precision="bf16", backend=backend, page=page, host="512KiB", device_memory="128MiB")
    model = models.build(lambda: models.GPT(width=32, blocks=3, tied=True), runs.DTYPES["bf16"])
    with runs.EngineTrainer(model, config) as trainer:
        outcome = runs.train(trainer, models.token_batches(STEPS))
        queue = trainer.engine._queue
        assert queue is not None
        info = queue.info()[0]
    digest = hashlib.sha256()
    for kind in (dict(enumerate(outcome.losses)), outcome.weights, outcome.residual, outcome.exp_avg, outcome.exp_avg_sq):
        for name, tensor in kind.items():
            digest.update(f"{name} {tuple(tensor.shape)}".encode())
            digest.update(runs.bits(tensor).contiguous().numpy().tobytes())
    return {
        "digest": digest.hexdigest(),
        "backend": info.backend,
        "memory_registered_nbytes": info.memory_registered_nbytes,
        "files_registered": info.files_registered,
        "notes": info.notes,
    }


# ---- the cases ----


class Signals:
    """Counts signals in Python's own handler, which runs between two lines of whatever is running."""

    def __init__(self, which: int, timer: int) -> None:
        self.n = 0
        signal.signal(which, self._count)
        signal.setitimer(timer, 0.001, 0.001)

    def _count(self, number: int, frame: FrameType | None) -> None:
        self.n += 1


def signalled(directory: str, timer: str) -> dict[str, Any]:
    real = timer == "real"
    signals = Signals(signal.SIGALRM if real else signal.SIGPROF, signal.ITIMER_REAL if real else signal.ITIMER_PROF)
    return {**train(directory), "signals": signals.n}


def profiled(directory: str, how: str) -> dict[str, Any]:
    calls = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += 1

    if how == "sys.setprofile":
        sys.setprofile(count)
        found = train(directory)
        sys.setprofile(None)
        return {**found, "calls": calls}
    profile = cProfile.Profile()
    found = profile.runcall(train, directory)
    return {**found, "calls": sum(entry.callcount for entry in profile.getstats())}


def few_files(directory: str, n: str) -> dict[str, Any]:
    """So many more files than are open now."""
    used = max(map(int, os.listdir("/proc/self/fd"))) + 1  # the directory's own descriptor is among them, and is free again
    resource.setrlimit(resource.RLIMIT_NOFILE, (used - 1 + int(n), used - 1 + int(n)))
    return train(directory)


def little_locked_memory(directory: str, nbytes: str) -> dict[str, Any]:
    limits.forbid_locked_memory(int(nbytes))
    return train(directory)


def small_files(directory: str, nbytes: str) -> dict[str, Any]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(nbytes), int(nbytes)))
    return train(directory, page=16 << 10)


def forbidden(directory: str, code: str, *calls: str) -> dict[str, Any]:
    limits.forbid(int(code), *map(int, calls))
    return train(directory)


def used_up(directory: str) -> dict[str, Any]:
    """io_uring is forbidden, and nothing is left of fs.aio-max-nr."""
    limits.forbid(limits.errno.EPERM, limits.IO_URING_SETUP)
    limits.forbid(limits.errno.EAGAIN, limits.IO_SETUP)
    return train(directory)


CASES: dict[str, Callable[..., dict[str, Any]]] = {
    "train": train,
    "signalled": signalled,
    "profiled": profiled,
    "few_files": few_files,
    "little_locked_memory": little_locked_memory,
    "small_files": small_files,
    "forbidden": forbidden,
    "used_up": used_up,
}


class _Lines(logging.Handler):
    """Keeps warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def answer(case: str, arguments: list[str]) -> dict[str, Any]:
    warnings = _Lines()
    logging.getLogger("infinity").addHandler(warnings)
    try:
        found = CASES[case](*arguments)
    except limits.Impossible as error:
        found = {"impossible": str(error)}
    except InfinityError as error:
        numbers = {name: value for name, value in vars(error).items() if isinstance(value, int)}
        found = {"error": type(error).__name__, "text": str(error), **numbers}
    return {**found, "warnings": warnings.lines}


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        train(directory)  # what is imported late is here then, and children need not
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("a process with threads cannot be forked from")
    for line in sys.stdin:
        case, *arguments = line.rstrip("\n").split("\t")
        end, start = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(end)
            try:
                result = json.dumps(answer(case, arguments)).encode()
            except BaseException as error:
                result = json.dumps({"error": type(error).__name__, "text": str(error)}).encode()
            os.write(start, result)
            os._exit(0)
        os.close(start)
        with os.fdopen(end, "rb") as file:
            result = file.read()
        status = os.waitpid(child, 0)[1]
        print((result or json.dumps({"error": "died", "text": f"status {status}"}).encode()).decode(), flush=True)


if __name__ == "__main__":
    main()
