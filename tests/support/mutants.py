"""Small wrongs put into copies of the sources, one at a time: the tests must notice each of them.

python -m tests.support.mutants --help
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("infinity", "native", "tests", "setup.py", "pyproject.toml", "README.md", "LICENSE")
TESTS = (
    "tests/native/test_queue.py",
    "tests/fault/test_queue_faults.py",
    "tests/unit/test_task_queue.py",
    "tests/unit/test_store.py",
    "tests/fault/test_store_faults.py",
    "tests/unit/tiers",
    "tests/native/test_kernels.py",
    "tests/native/test_checks.py",
    "tests/native/test_queue_order.py",
    "tests/property/test_task_queue.py",
    "tests/property/test_task_queue_faults.py",
    "tests/fault/test_every_operation.py",
)
"""The fast tests of what is changed here, the quickest to notice first."""


class Mutant(NamedTuple):
    """``new`` in place of the only ``old`` in a file."""

    name: str
    path: str
    old: str
    new: str


_DISPATCHER, _THREADS, _LIBAIO = "native/queue/dispatcher.hpp", "native/queue/threads.cpp", "native/queue/libaio.cpp"
_REQUEST, _LANE, _QUEUE, _TASK = "native/queue/request.hpp", "native/queue/lane.cpp", "native/queue/queue.cpp", "native/queue/task.hpp"
_FILES, _STORE, _FLIGHT, _NVME = "native/files.cpp", "infinity/store.py", "infinity/flight.py", "infinity/tiers/nvme_path.py"
_PREAD = "pread(fd, call.address(), call.nbytes(), static_cast<off_t>(offset));\n"
_PWRITE = "pwrite(fd, call.address(), call.nbytes(), static_cast<off_t>(offset));\n"
_MOVED = "    return call.end(moved < 0 ? -errno : moved);"
_BELIEVED = "    return call.end(moved < 0 ? static_cast<ssize_t>(nbytes) : moved);"
_END = "if (follow(slot, slot->call.end(result))) issue(slot);"
_ENDED = "const int64_t moved = slot->call.end(result);"
_LEFT = "static_cast<int64_t>(slot->request.nbytes - slot->request.done)"

MUTANTS = (
    Mutant(
        "uring, libaio: a failed call counts as done",
        _DISPATCHER,
        _END,
        f"{_ENDED} if (follow(slot, moved < 0 ? {_LEFT} : moved)) issue(slot);",
    ),
    Mutant(
        "uring, libaio: a short count is whole", _DISPATCHER, _END, f"{_ENDED} if (follow(slot, moved > 0 ? {_LEFT} : moved)) issue(slot);"
    ),
    Mutant(
        "libaio: a call that is refused counts as done",
        _LIBAIO,
        "= {iocb.data, 0, result, 0};",
        "= {iocb.data, 0, static_cast<int64_t>(iocb.nbytes), 0};",
    ),
    Mutant(
        "threads: a read that failed counts as done",
        _FILES,
        _PREAD + _MOVED,
        _PREAD + _BELIEVED,
    ),
    Mutant(
        "threads: a write that failed counts as done",
        _FILES,
        _PWRITE + _MOVED,
        _PWRITE + _BELIEVED,
    ),
    Mutant(
        "threads: a short count is whole",
        _THREADS,
        "switch (request->advance(transfer(*request))) {",
        "const int64_t moved = transfer(*request), left = static_cast<int64_t>(request->nbytes - request->done);\n"
        "            switch (request->advance(moved > 0 ? left : moved)) {",
    ),
    Mutant("every backend: a short count is whole", _REQUEST, "if (done >= nbytes) return Next::kFinish;", "return Next::kFinish;"),
    Mutant(
        "what a short transfer moved is moved again elsewhere",
        _REQUEST,
        "done += static_cast<uint64_t>(result);",
        "done += static_cast<uint64_t>(result) + (static_cast<uint64_t>(result) < nbytes - done);",
    ),
    Mutant("a read behind the end of the file succeeds", _REQUEST, "finish(-ENODATA) : retry(-EIO)", "finish(0) : retry(-EIO)"),
    Mutant("a write that wrote nothing succeeds", _REQUEST, "finish(-ENODATA) : retry(-EIO)", "finish(-ENODATA) : finish(0)"),
    Mutant(
        "EINTR is not retried",
        _REQUEST,
        "if (code == -EINTR || code == -EAGAIN) return retry(code);",
        "if (code == -EAGAIN) return retry(code);",
    ),
    Mutant(
        "EAGAIN is not retried",
        _REQUEST,
        "if (code == -EINTR || code == -EAGAIN) return retry(code);",
        "if (code == -EINTR) return retry(code);",
    ),
    Mutant("EAGAIN is retried for ever", _REQUEST, "if (++tries >= kTriesMax) return finish(code);", "++tries;"),
    Mutant("the sign of an errno is wrong", _REQUEST, "status = code;", "status = -code;"),
    Mutant("every error is EIO", _REQUEST, "status = code;", "status = -EIO;"),
    Mutant("O_DIRECT goes on inside a block", _REQUEST, "done -= done % kBlock;", ""),
    Mutant(
        "a flush that failed succeeds",
        _REQUEST,
        "return result == 0 ? Next::kFinish : failed(static_cast<int>(result));",
        "return Next::kFinish;",
    ),
    Mutant(
        "splitting loses the last piece",
        _LANE,
        "(task->nbytes - 1) / options_.block_nbytes + 1)",
        "task->nbytes > options_.block_nbytes ? task->nbytes / options_.block_nbytes : 1)",
    ),
    Mutant(
        "splitting moves each piece to the start of memory",
        _LANE,
        "request->address = task->address + task->issued;",
        "request->address = task->address;",
    ),
    Mutant(
        "splitting moves each piece to the start of the extent",
        _LANE,
        "request->offset = task->offset + task->issued;",
        "request->offset = task->offset;",
    ),
    Mutant("a failed task goes on with its other pieces", _LANE, "if (task->unissued > 0) ready_.drop(task);", ""),
    Mutant(
        "a task ends while a piece of it is at the backend",
        _LANE,
        "if (task->requests == 0 && task->unissued == 0) queue_->complete(task);",
        "if (task->unissued == 0 && (task->requests == 0 || request.done == request.nbytes)) queue_->complete(task);",
    ),
    Mutant(
        "the first error of a split task is forgotten",
        _LANE,
        "if (request.status < 0 && task->status == 0) {",
        "if (request.status < 0 && task->requests == 0) {",
    ),
    Mutant(
        "bytes in flight have no bound",
        _LANE,
        "const bool fits = task && (nbytes_ == 0 || nbytes_ + next_nbytes(task) <= options_.in_flight_nbytes);",
        "const bool fits = task;",
    ),
    Mutant(
        "write-back takes the whole depth beside demand",
        _LANE,
        "if (ready_.demand() > 0 || requests_demand_ > 0) return background_beside_;",
        "",
    ),
    Mutant(
        "only the first dependency counts",
        _QUEUE,
        "if (Task *earlier = live(id)) {",
        "if (Task *earlier = j > from.after_begin ? nullptr : live(id)) {",
    ),
    Mutant("a failed task does not cancel what depends on it", _QUEUE, "if (task->status < 0) dependent->doomed = true;", ""),
    Mutant(
        "what is submitted after a failure is not cancelled",
        _QUEUE,
        "} else if (is_failed(id)) {\n                task->doomed = true;",
        "} else if (is_failed(id)) {\n                task->doomed = false;",
    ),
    Mutant(
        "a cancelled task ends before what it depends on",
        _QUEUE,
        "if (--dependent->pending == 0) make_ready(dependent, ended);",
        "if (dependent->pending > 1 && task->status < 0) dependent->pending = 1;\n"
        "            if (dependent->pending > 0 && --dependent->pending == 0) make_ready(dependent, ended);",
    ),
    Mutant("priorities are ignored", _QUEUE, "task->priority = from.priority;", "task->priority = INF_DEMAND;"),
    Mutant("waiting raises nothing", _QUEUE, "if (task->raised) return;", "return;"),
    Mutant(
        "cancelling does nothing",
        _QUEUE,
        "void inf_queue::cancel(Task *task, TaskList *ended) {",
        "void inf_queue::cancel(Task *task, TaskList *ended) {\n    if (task->block || !ended->empty()) return;",
    ),
    Mutant(
        "closing does not wait for what is in flight",
        _QUEUE,
        "while (in_flight_ > 0 || n_waiting_ > 0) ended_.wait(lock);",
        "while (n_waiting_ > 0) ended_.wait(lock);",
    ),
    Mutant("a kernel's status is not read", _QUEUE, "task->status = status < 0 ? status : 0;", "task->status = status < 0 ? 0 : 0;"),
    Mutant(
        "pages are not verified",
        _STORE,
        "        crc = self._crc[key]\n        if crc is None:",
        "        crc = self._crc[key]\n        if crc is None or key >= 0:",
    ),
    Mutant(
        "the checksum of an earlier write is kept",
        _STORE,
        "self._crc[key] = self._crc_found[key] if self._verify else None",
        "self._crc[key] = self._crc[key] or (self._crc_found[key] if self._verify else None)",
    ),
    Mutant(
        "a page is believed by the kernel that verifies it",
        "native/kernels/kernels.cpp",
        "return *value == static_cast<const inf_checksum_args *>(args)->expected ? 0 : -EBADMSG;",
        "return 0;",
    ),
    Mutant(
        "a page is believed by a kernel that verifies it while it works",
        "native/kernels/checks.hpp",
        "if (pages_[i].crc_before == first_[i].expected) return 0;",
        "return 0;",
    ),
    Mutant(
        "what a kernel leaves is not all in its checksum",
        "native/kernels/checks.hpp",
        "page.crc_after = sum(i, page.left, end, page.crc_after);",
        "page.crc_after = sum(i, page.left, end - 1, page.crc_after);",
    ),
    Mutant("a read that failed counts as fetched", _STORE, "self._end_transfer(key, status)", "self._end_transfer(key, 0)"),
    Mutant("a chain that failed counts as ended", _STORE, "self._end_chain(ends, status)", "self._end_chain(ends, 0)"),
    Mutant(
        "errors of completions are not raised",
        _STORE,
        "            self._error = error\n            raise error",
        "            self._error = error",
    ),
    Mutant(
        "a frame passes to its next page while tasks read it",
        _STORE,
        "return tuple(task for task in (self._writer[frame], *readers) if task < 0 or task in tasks)",
        "return self._after_writer(frame)",
    ),
    Mutant(
        "after a failed update the engine goes on",
        _FLIGHT,
        "if self.irrevocable or self.store.has_failed_chains:",
        "if self.irrevocable and not self.store.has_failed_chains:",
    ),
    Mutant("a file that could not be unlinked is left", _NVME, "os.unlink(path)\n        raise", "pass\n        raise"),
    Mutant(
        "space that could not be reserved is taken as reserved",
        _NVME,
        '            raise IoError("fallocate", path, 0, nbytes, code) from error',
        "            pass",
    ),
)


class Build:
    """A copy of the sources whose native module is made again from what changed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("_native*", "__pycache__"))
            else:
                shutil.copy(ROOT / name, root)
        self._recipe = _load(root / "native/build.py")
        self._recipe.ffi.emit_c_code(str(root / "native/_native.cpp"))
        self._sources = sorted((root / "native").rglob("*.cpp"))
        self._link(self._sources)

    def apply(self, mutant: Mutant) -> str:
        """The whole text before."""
        path = self.root / mutant.path
        text = path.read_text()
        if text.count(mutant.old) != 1:
            raise SystemExit(
                f"mutant {mutant.name!r}: its text is {text.count(mutant.old)} times in {mutant.path}; it must be there once. Renew it."
            )
        self.write(mutant, text.replace(mutant.old, mutant.new))
        return text

    def write(self, mutant: Mutant, text: str) -> None:
        path = self.root / mutant.path
        path.write_text(text)
        if path.suffix == ".cpp":
            self._link([path])
        elif path.suffix == ".hpp":
            self._link([source for source in self._sources if source.parent == path.parent])

    def _link(self, changed: list[Path]) -> None:
        compiler = os.environ.get("CXX", "g++")
        flags = [flag for flag in self._recipe.FLAGS if flag not in ("-O3", "-Werror")]
        include = ["-I", str(self.root / "native"), "-I", sysconfig.get_path("include")]

        def compile_one(source: Path) -> None:
            subprocess.run(
                [compiler, *flags, "-O1", "-w", "-fPIC", "-DPy_LIMITED_API=0x030a0000", *include, "-c", source, "-o", f"{source}.o"],
                check=True,
            )

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(compile_one, changed))
        objects = [f"{source}.o" for source in self._sources]
        subprocess.run([compiler, "-shared", *objects, "-pthread", "-ldl", "-o", self.root / "infinity/_native.abi3.so"], check=True)

    def survives(self, limit_s: float) -> str:
        """Empty when the tests notice; else what they say."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout", str(limit_s), *TESTS]
        environment = {**os.environ, "PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(command, cwd=self.root, env=environment, capture_output=True, text=True, timeout=20 * limit_s)
        except subprocess.TimeoutExpired:
            return ""
        return done.stdout if done.returncode == 0 else ""


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("native_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.mutants", description=__doc__.split("\n")[0])
    parser.add_argument("words", nargs="*", help="only mutants in whose file or name one of these is")
    parser.add_argument("--limit-s", type=float, default=60.0, help="how long one test may take; one that hangs has noticed")
    given = parser.parse_args(arguments)
    chosen = [mutant for mutant in MUTANTS if not given.words or any(word in f"{mutant.path} {mutant.name}" for word in given.words)]
    with tempfile.TemporaryDirectory() as scratch:
        build = Build(Path(scratch))
        if not build.survives(given.limit_s):
            print("the tests fail without any mutant: nothing can be said about mutants")
            return 1
        survivors = 0
        for mutant in chosen:
            began = time.monotonic()
            before = build.apply(mutant)
            survived = bool(build.survives(given.limit_s))
            build.write(mutant, before)
            survivors += survived
            print(f"{'SURVIVED' if survived else 'killed':9}{time.monotonic() - began:5.0f} s  {mutant.path:28}  {mutant.name}", flush=True)
    print(f"{len(chosen)} mutants, {survivors} survived")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
