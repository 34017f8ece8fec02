"""Other programs that do the jobs of ``io_bench``, on the same file and in turn with it: fio, and DeepSpeed's asynchronous I/O.

A peer is a process of its own and times itself, as it does for its own users. It is never needed: one that is not installed, or does
not work here, says so in a ``PeerError``, and whoever compares goes on without it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from statistics import median
from typing import Any

from infinity.errors import InfinityError
from infinity.io_bench import Bench, Case, Direction, Run

FIO_ENGINES = ("io_uring", "libaio")
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Lets a peer's memory have huge pages, as ours has where the kernel gives any (glibc 2.35)."""
_FIO_RW = {Direction.READ: "read", Direction.WRITE: "write", Direction.MIXED: "rw"}


class PeerError(InfinityError):
    """A peer is not installed or cannot do the job here; nothing else is the worse for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRun:
    """What a peer said of one run."""

    seconds: float
    nbytes: int
    cpu_s: float

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / self.seconds


class Peer(ABC):
    """Does a case."""

    name: str
    """Of the program."""
    variant: str
    """How it does it; the best variant of a program is what is compared with."""
    version: str

    @abstractmethod
    def run(self, case: Case, bench: Bench) -> PeerRun:
        """The whole case, once.

        Errors: PeerError.
        """

    def close(self) -> None:  # noqa: B027 - most have nothing to end
        """End its process; a second call does nothing."""


class Fio(Peer):
    """fio, one job, with its defaults for everything that is not the job itself."""

    name = "fio"

    def __init__(self, engine: str, *, huge_pages: bool = False) -> None:
        self.variant = engine
        self._environment = {**os.environ, **(HUGE_PAGES if huge_pages else {})}
        found = shutil.which("fio")
        if found is None:
            raise PeerError("fio is not installed. Debian, Ubuntu: apt install fio; Fedora: dnf install fio")
        self._program = found
        self.version = self._call("--version").strip().removeprefix("fio-")

    def run(self, case: Case, bench: Bench) -> PeerRun:
        answer = self._call(*fio_arguments(case, bench.path, self.variant))
        try:
            return parse_fio(json.loads(answer[answer.index("{") :]))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise PeerError(f"fio {self.version} answered something else than expected ({error!r}): {answer[:200]!r}") from error

    def _call(self, *arguments: str) -> str:
        command = [self._program, *arguments]
        with subprocess.Popen(command, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                out, err = process.communicate()
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            words = next((line for line in (err + out).splitlines() if line.strip()), f"exit code {process.returncode}")
            raise PeerError(f"fio with {self.variant} does not work here: {words.strip()}")
        return out


def fio_arguments(case: Case, path: str, engine: str) -> list[str]:
    """The case as fio's command line: an existing file, past the page cache, its offsets in order, nothing timed but the transfers."""
    return [
        "--name=infinity",
        f"--filename={path}",
        f"--size={case.nbytes}",
        f"--bs={case.block_nbytes}",
        f"--iodepth={case.queue_depth}",
        f"--rw={_FIO_RW[case.direction]}",
        f"--ioengine={engine}",
        "--rwmixread=50",
        "--numjobs=1",
        "--thread",
        "--direct=1",
        "--refill_buffers=0",
        "--allow_file_create=0",
        "--fallocate=none",
        "--invalidate=0",
        "--output-format=json",
    ]


def parse_fio(answer: dict[str, Any]) -> PeerRun:
    """fio's JSON of one job.

    Errors: KeyError, IndexError, TypeError, ValueError where it is something else; PeerError where the job failed.
    """
    job = answer["jobs"][0]
    if job["error"]:
        raise PeerError(f"fio failed: {os.strerror(job['error'])}")
    read, write = job["read"], job["write"]
    seconds = max(read["runtime"], write["runtime"]) / 1e3
    nbytes = read["io_bytes"] + write["io_bytes"]
    if seconds <= 0 or nbytes <= 0:
        raise PeerError(f"fio's clock counts milliseconds, and {nbytes} bytes took less than one. Raise the size")
    return PeerRun(seconds=seconds, nbytes=nbytes, cpu_s=(job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3)


class DeepSpeed(Peer):
    """DeepSpeed's ``aio_handle`` in the interpreter ``python``: a call per page, or one for everything where there are no pages.

    Loading it builds its native op when that was never done, which takes minutes.
    """

    name = "deepspeed"
    variant = "aio_handle"

    def __init__(self, python: str = sys.executable, *, huge_pages: bool = False) -> None:
        self._process: subprocess.Popen[str] | None = None
        source = (files("infinity") / "deepspeed_worker.py").read_text()
        environment = {**os.environ, **(HUGE_PAGES if huge_pages else {})}
        environment.setdefault("DS_ACCELERATOR", "cpu")
        environment["PATH"] = os.pathsep.join([os.path.dirname(python), environment.get("PATH", os.defpath)])  # its ninja may be there
        try:
            self._process = subprocess.Popen(
                [python, "-c", source],
                cwd="/",
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                bufsize=1,
            )
        except OSError as error:
            raise PeerError(f"{python} cannot be run: {error.strerror}") from error
        try:
            hello = self._answer()
            if "missing" in hello:
                raise PeerError(
                    f"DeepSpeed is not installed in {python} ({hello['missing']}). pip install deepspeed, "
                    "or name the Python that has it with --deepspeed-python"
                )
            if "broken" in hello:
                raise PeerError(
                    f"DeepSpeed's async_io does not load in {python}: {hello['broken'].strip()}. `ds_report` says what it misses"
                )
            self.version = str(hello["version"])
        except BaseException:
            self.close()
            raise

    def run(self, case: Case, bench: Bench) -> PeerRun:
        assert self._process is not None
        assert self._process.stdin is not None
        page_nbytes = case.page_nbytes or (case.nbytes if case.direction is not Direction.MIXED else case.nbytes // 2)
        if case.page_nbytes:
            transfers = [(transfer.reads, transfer.offset) for transfer in case.transfers()]
        elif case.direction is Direction.MIXED:
            transfers = [(True, 0), (False, 0)]
        else:
            transfers = [(case.direction is Direction.READ, 0)]
        job = {
            "path": bench.path,
            "nbytes": case.nbytes,
            "block_nbytes": case.block_nbytes,
            "queue_depth": case.queue_depth,
            "page_nbytes": page_nbytes,
            "transfers": transfers,
        }
        self._process.stdin.write(json.dumps(job) + "\n")
        answer = self._answer()
        if "error" in answer:
            raise PeerError(f"DeepSpeed {self.version} failed: {answer['error']}")
        return PeerRun(seconds=answer["seconds"], nbytes=case.nbytes, cpu_s=answer["cpu_s"])

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"DeepSpeed's process ended with exit code {self._process.wait()}. Run it by hand to see why")
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and most."""

    median: float
    min: float
    max: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class PeerRuns:
    """The runs of one peer, in the order of the rounds."""

    name: str
    variant: str
    version: str
    runs: tuple[PeerRun, ...]

    @property
    def bytes_per_s(self) -> Spread:
        return Spread.of([run.bytes_per_s for run in self.runs])


@dataclass(frozen=True, slots=True)
class Measured:
    """A case, our runs of it, and those of the peers, round by round."""

    case: Case
    runs: tuple[Run, ...]
    peers: tuple[PeerRuns, ...] = ()
    failures: tuple[str, ...] = ()
    """Peers that could not do this case, and why."""

    @property
    def bytes_per_s(self) -> Spread:
        return Spread.of([run.bytes_per_s for run in self.runs])

    @property
    def typical(self) -> Run:
        """The run whose rate is the median, or the better of the two next to it."""
        return sorted(self.runs, key=lambda run: run.bytes_per_s)[len(self.runs) // 2]

    def best(self, name: str) -> PeerRuns | None:
        """The variant of program ``name`` with the highest median."""
        return max((peer for peer in self.peers if peer.name == name), key=lambda peer: peer.bytes_per_s.median, default=None)

    def ratio(self, name: str) -> Spread | None:
        """Our rate over that of the best variant of ``name``, round by round."""
        peer = self.best(name)
        if peer is None:
            return None
        return Spread.of([ours.bytes_per_s / theirs.bytes_per_s for ours, theirs in zip(self.runs, peer.runs, strict=True)])


def measure(
    bench: Bench, case: Case, *, runs: int, peers: Sequence[Peer] = (), step: Callable[[str], None] = lambda name: None
) -> Measured:
    """``runs`` rounds; in each we and every peer do the case once, and each round begins with another one. One warm-up first, of all.

    ``step`` is told whose turn it is, warm-ups included: ``(runs + 1) * (1 + len(peers))`` times, or fewer where a peer fails.
    """
    step("warm-up")
    bench.warm_up(case)
    failures = []
    able = []
    for peer in peers:
        step("warm-up")
        try:
            peer.run(case, bench)
            able.append(peer)
        except PeerError as error:
            failures.append(str(error))
    ours: list[Run] = []
    theirs: list[list[PeerRun]] = [[] for _ in able]
    turns = len(able) + 1
    for round_ in range(runs):
        for turn in range(turns):
            index = (round_ + turn) % turns
            if index == 0:
                step("infinity")
                ours.append(bench.run(case))
            else:
                peer = able[index - 1]
                step(f"{peer.name} {peer.variant}")
                theirs[index - 1].append(peer.run(case, bench))
    return Measured(
        case=case,
        runs=tuple(ours),
        peers=tuple(PeerRuns(peer.name, peer.variant, peer.version, tuple(done)) for peer, done in zip(able, theirs, strict=True)),
        failures=tuple(failures),
    )
