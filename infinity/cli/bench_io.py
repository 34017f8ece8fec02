"""The work of ``infinity bench io``: options into cases, cases measured, figures shown.

The order is: check everything, make the file, measure case by case, show. What is measured, and how, is ``io_bench`` and ``io_peers``.
"""

from __future__ import annotations

import itertools
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import psutil
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

import infinity
from infinity.errors import ConfigProblem, OptionsError, SpaceError
from infinity.io_bench import OPS, STAGES, Bench, Case, Direction, Run
from infinity.io_peers import FIO_ENGINES, DeepSpeed, Fio, Measured, Peer, PeerError, Spread, measure
from infinity.metrics import Histogram
from infinity.sizes import format_bytes, format_rate, format_seconds, parse_bytes
from infinity.task_queue import Backend

PEERS = ("fio", "deepspeed")
PERCENTILES = (50, 90, 99, 99.9)
BAR_WIDTH = 40
UNLIKE_MEMORY = (
    "the peers' memory has pages of 4 KiB, ours huge pages where the kernel gives any: --peer-huge-pages compares the engines alone"
)
LOG_WIDTH = 132
"""Characters of a line where there is no terminal to say."""
MEMORY_SPARE_NBYTES = 256 << 20
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line says; ``bench.py`` has a text for each."""

    path: Path
    rw: str | None = None
    size: str | None = None
    block_size: str | None = None
    queue_depth: str | None = None
    backend: str = "auto"
    pages: str | None = None
    runs: int = 3
    against: tuple[str, ...] = ()
    peer_huge_pages: bool = False
    deepspeed_python: Path | None = None
    trace: Path | None = None
    paced: bool = False
    json: bool = False


def run(options: Options) -> None:
    """Measure and show.

    Errors: OptionsError with everything that is wrong, before anything is made; SpaceError, IoError.
    """
    out = Console(stderr=options.json, highlight=False, soft_wrap=True)
    if not out.is_terminal and "COLUMNS" not in os.environ:
        out.width = LOG_WIDTH
    if options.trace is not None:
        from infinity.cli import bench_trace

        bench_trace.run(options, options.trace, out)
        return
    directory, cases = check(options)
    notes: list[str] = []
    with ExitStack() as stack:
        progress = stack.enter_context(progress_on(out))
        nbytes, memory_nbytes = cases[0].nbytes, max(case.memory_nbytes for case in cases)
        with filling(progress, nbytes, "free some space, lower --size, or name another directory") as filled:
            bench = stack.enter_context(Bench(directory, file_nbytes=nbytes, memory_nbytes=memory_nbytes, progress=filled))
        unaligned = [problem for case in cases for problem in case.problems(bench.alignment)]
        if unaligned:
            raise OptionsError([ConfigProblem("--block-size, --pages, --size", problem) for problem in dict.fromkeys(unaligned)])
        if not bench.direct:
            notes.append(f"{directory} does not take O_DIRECT: these are figures of the page cache, not of a drive")
        peers = _open_peers(options, stack, progress, notes)
        if peers and not options.peer_huge_pages:
            notes.append(UNLIKE_MEMORY)
        measured = []
        task = progress.add_task("", total=len(cases) * (options.runs + 1) * (len(peers) + 1))
        for case in cases:
            measured.append(measure(bench, case, runs=options.runs, peers=peers, step=_stepper(progress, task, case)))
            notes += [*measured[-1].failures, *(note for run in measured[-1].runs for note in run.notes)]
            if not out.is_terminal:
                out.print(f"{name_of(case)}: {format_rate(measured[-1].bytes_per_s.median)}")
        summary = summarize(directory, bench, measured, notes)
    _show(out, directory, summary["direct"], measured, notes)
    if options.json:
        Console(highlight=False, soft_wrap=True).print_json(data=summary)


# ---- before ----------------------------------------------------------------------------------------------------------------------


class Reading:
    """Texts of options into values, and whatever is wrong with any of them."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.problems: list[ConfigProblem] = []

    def each(self, option: str, text: str, read: Callable[[str], _T]) -> list[_T]:
        """The values of a list."""
        values = []
        for part in text.split(","):
            try:
                values.append(read(part.strip()))
            except ValueError as error:
                self.problems.append(ConfigProblem(option, str(error)))
        return list(dict.fromkeys(values))

    def one(self, option: str, text: str, read: Callable[[str], _T]) -> _T | None:
        """The value of an option that takes no list."""
        if "," in text:
            self.problems.append(ConfigProblem(option, f"{text!r} is a list; give one value"))
            return None
        values = self.each(option, text, read)
        return values[0] if values else None

    def directory(self) -> Path:
        """The directory that PATH means."""
        path = directory = self.options.path
        problem = None
        if not path.is_dir():
            directory = path.parent
            if path.exists():
                problem = f"{path} exists, and no file is written that was not made here. Name a directory."
            elif not directory.is_dir():
                problem = f"{directory} is not a directory. Name one on the drive to measure."
        if problem is None and not os.access(directory, os.W_OK | os.X_OK):
            problem = f"{directory} cannot be written by this user. Name another directory."
        if problem is not None:
            self.problems.append(ConfigProblem("PATH", problem))
        return directory

    def check_memory(self, needed: int, option: str) -> None:
        available = psutil.virtual_memory().available
        if needed + MEMORY_SPARE_NBYTES > available:
            text = f"the transfers need {format_bytes(needed)} of memory, and {format_bytes(available)} are available. Give less."
            self.problems.append(ConfigProblem(option, text))

    def stop_if_wrong(self) -> None:
        if self.problems:
            raise OptionsError(list(dict.fromkeys(self.problems)))


def check(options: Options) -> tuple[Path, list[Case]]:
    """The directory to measure, and the cases: every combination of what the options list.

    Errors: OptionsError.
    """
    reading = Reading(options)
    directory = reading.directory()
    size = reading.one("--size", options.size or "2GiB", size_of)
    directions = reading.each("--rw", options.rw or "read,write,mixed", lambda text: one_of(Direction, text))
    blocks = reading.each("--block-size", options.block_size or "1MiB", size_of)
    depths = reading.each("--queue-depth", options.queue_depth or "32", depth_of)
    backends = reading.each("--backend", options.backend, lambda text: one_of(Backend, text))
    pages: list[int | None] = [None]
    if options.pages and size:
        pages = list(reading.each("--pages", options.pages, lambda text: page_nbytes_of(text, size)))
    for name in options.against:
        if name not in PEERS:
            reading.problems.append(ConfigProblem("--against", f"{name!r} is not one of {', '.join(PEERS)}"))
    if options.paced:
        reading.problems.append(ConfigProblem("--paced", "paces a recorded run, and there is none. Give --trace FILE too."))
    cases = []
    for direction, block, depth, page, backend in itertools.product(directions, blocks, depths, pages, backends):
        case = Case(direction=direction, nbytes=size or 0, block_nbytes=block, queue_depth=depth, page_nbytes=page, backend=backend)
        reading.problems += [ConfigProblem(name_of(case), problem) for problem in (case.problems() if size else [])]
        cases.append(case)
    reading.check_memory(
        max((case.memory_nbytes for case in cases), default=0), "--pages, --size" if options.pages else "--block-size, --queue-depth"
    )
    reading.stop_if_wrong()
    return directory, cases


def size_of(text: str) -> int:
    nbytes = parse_bytes(text)
    if nbytes == 0:
        raise ValueError("0 bytes are nothing to measure")
    return nbytes


def depth_of(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 4096:
        raise ValueError(f"{text!r} is not a number from 1 to 4096")
    return int(text)


def page_nbytes_of(text: str, nbytes: int) -> int:
    """A bare number is how many pages there are, one with a unit how large each is."""
    if not text.isdigit():
        return size_of(text)
    if int(text) == 0 or nbytes % int(text):
        raise ValueError(f"{format_bytes(nbytes)} cannot be cut into {text} equal pages")
    return nbytes // int(text)


def one_of(kind: Callable[[str], _T], text: str) -> _T:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{text!r} is not one of {', '.join(member.value for member in kind)}") from None  # type: ignore[attr-defined]


@contextmanager
def filling(progress: Progress, nbytes: int, remedy: str) -> Iterator[Callable[[int], None]]:
    """Shows how far a file is filled, and says in the words of this command what to do where it does not fit."""
    task = progress.add_task("filling the file", total=nbytes)
    try:
        yield lambda done: progress.update(task, completed=done)
    except SpaceError as error:
        reason = error.reason or remedy
        raise SpaceError(error.path, needed_bytes=error.needed_bytes, free_bytes=error.free_bytes, reason=reason) from error
    finally:
        progress.remove_task(task)


def _open_peers(options: Options, stack: ExitStack, progress: Progress, notes: list[str]) -> list[Peer]:
    openers: list[Callable[[], Peer]] = []
    if "fio" in options.against:
        openers += [lambda engine=engine: Fio(engine, huge_pages=options.peer_huge_pages) for engine in FIO_ENGINES]  # type: ignore[misc]
    if "deepspeed" in options.against:
        python = {"python": str(options.deepspeed_python)} if options.deepspeed_python else {}
        openers.append(lambda: DeepSpeed(**python, huge_pages=options.peer_huge_pages))
    task = progress.add_task("looking for peers (DeepSpeed builds its native part the first time: minutes)", total=None)
    peers = []
    for opener in openers:
        try:
            peers.append(opener())
            stack.callback(peers[-1].close)
        except PeerError as error:
            notes.append(f"{error}. Everything else was measured")
    progress.remove_task(task)
    return peers


# ---- during ----------------------------------------------------------------------------------------------------------------------


def progress_on(out: Console) -> Progress:
    columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), TimeRemainingColumn(compact=True))
    return Progress(*columns, console=out, transient=True, disable=not out.is_terminal)


def _stepper(progress: Progress, task: Any, case: Case) -> Callable[[str], None]:
    def step(who: str) -> None:
        progress.update(task, advance=1, description=f"{name_of(case)}: {who}")

    return step


def name_of(case: Case) -> str:
    """The case in a few words: 'read 1MiB x 32', and what else was asked for."""
    words = [case.direction.value, _short(case.block_nbytes), "x", str(case.queue_depth)]
    if case.page_nbytes:
        words.append(f"in {case.nbytes // case.page_nbytes} of {_short(case.page_nbytes)}")
    if case.backend is not Backend.AUTO:
        words.append(f"by {case.backend.value}")
    return " ".join(words)


def _short(nbytes: int) -> str:
    return format_bytes(nbytes).replace(".00", "").replace(" ", "")


# ---- after -----------------------------------------------------------------------------------------------------------------------


def summarize(directory: Path, bench: Bench, measured: Sequence[Measured], notes: Sequence[str]) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {
        "path": str(directory.resolve()),
        "direct": bench.direct,
        "alignment_bytes": bench.alignment,
        "file_bytes": bench.file_nbytes[0],
        "versions": {"infinity": infinity.__version__, "python": platform.python_version(), "linux": platform.release()},
        "cpus": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "cases": [summary_of(one) for one in measured],
        "notes": list(dict.fromkeys(notes)),
    }


def summary_of(measured: Measured) -> dict[str, Any]:
    """One case of what ``--json`` prints: rates over all runs, latencies and depths of the run whose rate is the median."""
    case, typical = measured.case, measured.typical
    return {
        "rw": case.direction.value,
        "size_bytes": case.nbytes,
        "block_bytes": case.block_nbytes,
        "queue_depth": case.queue_depth,
        "page_bytes": case.page_nbytes,
        "backend": typical.backend,
        "bytes_per_s": _spread(measured.bytes_per_s),
        "requests_per_s": typical.requests_per_s,
        "cpu_s_per_gb": typical.cpu_s_per_gb,
        "shorts": sum(run.shorts for run in measured.runs),
        "retries": sum(run.retries for run in measured.runs),
        "latency_us": latency_us(typical),
        "in_flight": in_flight(typical),
        "runs": [
            {"seconds": run.seconds, "read_bytes": run.read_nbytes, "write_bytes": run.write_nbytes, "cpu_s": run.cpu_s}
            for run in measured.runs
        ],
        "peers": [
            {
                "name": peer.name,
                "variant": peer.variant,
                "version": peer.version,
                "bytes_per_s": _spread(peer.bytes_per_s),
                "runs": [{"seconds": run.seconds, "bytes": run.nbytes, "cpu_s": run.cpu_s} for run in peer.runs],
            }
            for peer in measured.peers
        ],
        "ratios": {
            name: {"variant": best.variant, **_spread(ratio)}
            for name in dict.fromkeys(peer.name for peer in measured.peers)
            if (best := measured.best(name)) and (ratio := measured.ratio(name))
        },
    }


def _spread(spread: Spread) -> dict[str, float]:
    return {"median": spread.median, "min": spread.min, "max": spread.max}


def latency_us(run: Run) -> dict[str, dict[str, dict[str, float]]]:
    """By operation, stage and percentile; an operation that did not happen is left out."""

    def figures(histogram: Histogram) -> dict[str, float]:
        return {**{f"p{p:g}": histogram.percentile(p) * 1e6 for p in PERCENTILES}, "max": histogram.max * 1e6}

    return {op: {stage: figures(run.latency[op, stage]) for stage in STAGES} for op in OPS if run.latency[op, "total"].count}


def in_flight(run: Run) -> list[dict[str, int]]:
    """How often a request came to so many at the backend, itself included."""
    return [{"from": int(low), "below": int(high), "count": count} for low, high, count in run.depths.buckets()]


def _show(out: Console, directory: Path, direct: bool, measured: Sequence[Measured], notes: Sequence[str]) -> None:
    first = measured[0]
    how = "past the page cache" if direct else "through the page cache"
    runs = f"{len(first.runs)} run{'s' if len(first.runs) > 1 else ''}"
    out.print(f"{escape(str(directory))}: {format_bytes(first.case.nbytes)} each time, {how}, by {first.typical.backend}; median of {runs}")
    out.print(_rates_table(measured))
    named = [(name_of(one.case), one.typical) for one in measured]
    out.print(latency_table(named))
    out.print(depths_table(named))
    _show_bars(out, measured)
    for note in dict.fromkeys(notes):
        out.print(f"[yellow]note:[/] {escape(note)}")


def _rates_table(measured: Sequence[Measured]) -> Table:
    with_peers = any(one.peers for one in measured)
    table = table_of(
        "Throughput", ("", "rate", "from - to", "IOPS", "CPU/GB", "short", "retried", *(["infinity is"] if with_peers else []))
    )
    for one in measured:
        run = one.typical
        counts = [str(sum(run.shorts for run in one.runs)), str(sum(run.retries for run in one.runs))]
        style = "bold" if with_peers else ""
        table.add_row(name_of(one.case), *_rate_cells(one.bytes_per_s, run.requests_per_s, run.cpu_s_per_gb), *counts, style=style)
        for peer in one.peers:
            spread = peer.bytes_per_s
            cpu_s = median(run.cpu_s / run.nbytes * 1e9 for run in peer.runs)
            ratio = one.ratio(peer.name) if one.best(peer.name) is peer else None
            times = f"{ratio.median:.2f}x ({ratio.min:.2f} - {ratio.max:.2f})" if ratio else ""
            cells = _rate_cells(spread, spread.median / min(one.case.block_nbytes, one.case.task_nbytes), cpu_s)
            table.add_row(f"  {peer.name} {peer.variant}", *cells, "", "", times)
    return table


def _rate_cells(rates: Spread, requests_per_s: float, cpu_s_per_gb: float) -> list[str]:
    spread = f"{rates.min / 1e9:.2f} - {rates.max / 1e9:.2f}"
    return [format_rate(rates.median), spread, f"{requests_per_s:,.0f}", format_seconds(cpu_s_per_gb)]


def table_of(title: str, heads: Sequence[str]) -> Table:
    """The first column is text, the others are figures; nothing is broken into lines."""
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for index, head in enumerate(heads):
        table.add_column(head, justify="right" if index else "left", no_wrap=True)
    return table


def latency_table(named: Sequence[tuple[str, Run]]) -> Table:
    """A row per operation and stage."""
    table = table_of("Latency of a request", ("", "", *(f"p{p:g}" for p in PERCENTILES), "max"))
    for name, run in named:
        ops = [op for op in OPS if run.latency[op, "total"].count]
        for op in ops:
            for stage in STAGES:
                histogram = run.latency[op, stage]
                cells = [format_seconds(histogram.percentile(p)) for p in PERCENTILES]
                first = f"{name}, {op}s" if len(ops) > 1 else name
                table.add_row(first if stage == STAGES[0] else "", stage, *cells, format_seconds(histogram.max))
    return table


def depths_table(named: Sequence[tuple[str, Run]]) -> Table:
    """How often a request came to so many at the backend, as parts of all, in powers of two."""
    tops = sorted({_power(low) for _, run in named for low, _, _ in run.depths.buckets()})
    heads = [f"{top // 2 + 1}-{top}" if top > 2 else str(top) for top in tops]
    table = table_of("Requests in flight, itself included, when one more was handed to the drive", ("", *heads))
    for name, run in named:
        parts = dict.fromkeys(tops, 0)
        for low, _, count in run.depths.buckets():
            parts[_power(low)] += count
        table.add_row(name, *(f"{count / run.depths.count:.0%}" if count else "" for count in parts.values()))
    return table


def _power(depth: float) -> int:
    """The least power of two that is not below ``depth``."""
    return 1 << (max(1, int(depth)) - 1).bit_length()


def _show_bars(out: Console, measured: Sequence[Measured]) -> None:
    top = max(spread.median for one in measured for spread in (one.bytes_per_s, *(peer.bytes_per_s for peer in one.peers)))
    for one in measured:
        rows = [
            ("infinity", one.bytes_per_s.median, "green"),
            *((f"{p.name} {p.variant}", p.bytes_per_s.median, "blue") for p in one.peers),
        ]
        out.print(name_of(one.case))
        for name, rate, colour in rows:
            out.print(f"  {name:20} [{colour}]{_bar(rate / top)}[/] {format_rate(rate)}")


def _bar(part: float) -> str:
    eighths = round(part * BAR_WIDTH * 8)
    return "█" * (eighths // 8) + (" ▏▎▍▌▋▊▉"[eighths % 8] if eighths % 8 else "")
