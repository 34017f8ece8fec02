"""The work of ``infinity bench io``: options into cases, cases measured, figures shown.

The order is: check everything, make the file, measure case by case, show. What is measured, and how, is ``io_bench`` and ``io_peers``.
"""

from __future__ import annotations

import itertools
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

import infinity
from infinity.errors import ConfigProblem, InfinityError, OptionsError, SpaceError
from infinity.io_bench import OPS, STAGES, Bench, Case, Direction, Run
from infinity.io_peers import FIO_ENGINES, DeepSpeed, Fio, Measured, Peer, PeerError, Spread, measure
from infinity.metrics import Histogram
from infinity.sizes import format_bytes, format_rate, format_seconds, parse_bytes
from infinity.task_queue import Backend

PEERS = ("fio", "deepspeed")
PERCENTILES = (50, 90, 99, 99.9)
BAR_WIDTH = 40
_MEMORY_SPARE_NBYTES = 256 << 20
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line says; ``bench.py`` has a text for each."""

    path: Path
    rw: str = "read,write,mixed"
    size: str = "2GiB"
    block_size: str = "1MiB"
    queue_depth: str = "32"
    backend: str = "auto"
    pages: str | None = None
    runs: int = 3
    against: tuple[str, ...] = ()
    peer_huge_pages: bool = False
    deepspeed_python: Path | None = None
    json: bool = False


def run(options: Options) -> None:
    """Measure and show.

    Errors: OptionsError with everything that is wrong, before anything is made; SpaceError, IoError.
    """
    out = Console(stderr=options.json, highlight=False, soft_wrap=True)
    directory, cases = check(options)
    notes: list[str] = []
    with ExitStack() as stack:
        progress = stack.enter_context(_progress(out))
        bench = stack.enter_context(_open_bench(directory, cases, progress))
        unaligned = [problem for case in cases for problem in case.problems(bench.alignment)]
        if unaligned:
            raise OptionsError([ConfigProblem("--block-size, --pages, --size", problem) for problem in dict.fromkeys(unaligned)])
        if not bench.direct:
            notes.append(f"{directory} does not take O_DIRECT: these are figures of the page cache, not of a drive")
        peers = _open_peers(options, stack, progress, notes)
        measured = []
        task = progress.add_task("", total=len(cases) * (options.runs + 1) * (len(peers) + 1))
        for case in cases:
            measured.append(measure(bench, case, runs=options.runs, peers=peers, step=_stepper(progress, task, case)))
            notes += measured[-1].failures
            if not out.is_terminal:
                out.print(f"{name_of(case)}: {format_rate(measured[-1].bytes_per_s.median)}")
        summary = summarize(directory, bench, measured, notes)
    _show(out, directory, summary["direct"], measured, notes)
    if options.json:
        Console(highlight=False, soft_wrap=True).print_json(data=summary)


# ---- before ----------------------------------------------------------------------------------------------------------------------


def check(options: Options) -> tuple[Path, list[Case]]:
    """The directory to measure, and the cases: every combination of what the options list.

    Errors: OptionsError.
    """
    problems: list[ConfigProblem] = []

    def each(option: str, text: str, read: Callable[[str], _T]) -> list[_T]:
        values = []
        for part in text.split(","):
            try:
                values.append(read(part.strip()))
            except ValueError as error:
                problems.append(ConfigProblem(option, str(error)))
        return list(dict.fromkeys(values))

    directory = _directory(options.path, problems)
    sizes = each("--size", options.size, _size)
    if len(sizes) > 1:
        problems.append(ConfigProblem("--size", f"{options.size!r} is a list; give one size"))
    directions = each("--rw", options.rw, lambda text: _one_of(Direction, text))
    blocks = each("--block-size", options.block_size, _size)
    depths = each("--queue-depth", options.queue_depth, _depth)
    backends = each("--backend", options.backend, lambda text: _one_of(Backend, text))
    for name in options.against:
        if name not in PEERS:
            problems.append(ConfigProblem("--against", f"{name!r} is not one of {', '.join(PEERS)}"))
    cases: list[Case] = []
    if not problems:
        pages = each("--pages", options.pages, lambda text: _page_nbytes(text, sizes[0])) if options.pages else [None]
        for direction, block, depth, page, backend in itertools.product(directions, blocks, depths, pages, backends):
            case = Case(direction=direction, nbytes=sizes[0], block_nbytes=block, queue_depth=depth, page_nbytes=page, backend=backend)
            problems += [ConfigProblem(name_of(case), problem) for problem in case.problems()]
            cases.append(case)
    if not problems:
        needed, available = max(case.memory_nbytes for case in cases) + _MEMORY_SPARE_NBYTES, psutil.virtual_memory().available
        if needed > available:
            what = f"the transfers need {format_bytes(needed)} of memory, and {format_bytes(available)} are available"
            problems.append(ConfigProblem("--size" if options.pages else "--block-size, --queue-depth", f"{what}. Give less."))
    if problems:
        raise OptionsError(list(dict.fromkeys(problems)))
    return directory, cases


def _directory(path: Path, problems: list[ConfigProblem]) -> Path:
    directory = path
    if not path.is_dir():
        directory = path.parent
        if path.exists():
            problems.append(ConfigProblem("PATH", f"{path} exists, and no file is written that was not made here. Name a directory."))
        elif not directory.is_dir():
            problems.append(ConfigProblem("PATH", f"{directory} is not a directory. Name one on the drive to measure."))
    if directory.is_dir() and not os.access(directory, os.W_OK | os.X_OK):
        problems.append(ConfigProblem("PATH", f"{directory} cannot be written by this user. Name another directory."))
    return directory


def _size(text: str) -> int:
    nbytes = parse_bytes(text)
    if nbytes == 0:
        raise ValueError("0 bytes are nothing to measure")
    return nbytes


def _depth(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 4096:
        raise ValueError(f"{text!r} is not a number from 1 to 4096")
    return int(text)


def _page_nbytes(text: str, nbytes: int) -> int:
    """A bare number is how many pages there are, one with a unit how large each is."""
    if not text.isdigit():
        return _size(text)
    if int(text) == 0 or nbytes % int(text):
        raise ValueError(f"{format_bytes(nbytes)} cannot be cut into {text} equal pages")
    return nbytes // int(text)


def _one_of(kind: Callable[[str], _T], text: str) -> _T:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{text!r} is not one of {', '.join(member.value for member in kind)}") from None  # type: ignore[attr-defined]


def _open_bench(directory: Path, cases: Sequence[Case], progress: Progress) -> Bench:
    nbytes = cases[0].nbytes
    task = progress.add_task("filling the file", total=nbytes)
    try:
        bench = Bench(
            directory,
            file_nbytes=nbytes,
            memory_nbytes=max(case.memory_nbytes for case in cases),
            progress=lambda done: progress.update(task, completed=done),
        )
    except SpaceError as error:
        reason = error.reason or "free some space, lower --size, or name another directory"
        raise SpaceError(error.path, needed_bytes=error.needed_bytes, free_bytes=error.free_bytes, reason=reason) from error
    progress.remove_task(task)
    return bench


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


def _progress(out: Console) -> Progress:
    columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), TimeRemainingColumn(compact=True))
    return Progress(*columns, console=out, transient=True, disable=not out.is_terminal)


def _stepper(progress: Progress, task: Any, case: Case) -> Callable[[str], None]:
    def step(who: str) -> None:
        progress.update(task, advance=1, description=f"{name_of(case)}: {who}")

    return step


def name_of(case: Case) -> str:
    """The case in a few words: 'read 1.00 MiB x 32'."""
    words = [case.direction.value, format_bytes(case.block_nbytes), "x", str(case.queue_depth)]
    if case.page_nbytes:
        words.append(f"in {case.nbytes // case.page_nbytes} pages of {format_bytes(case.page_nbytes)}")
    if case.backend is not Backend.AUTO:
        words.append(f"by {case.backend.value}")
    return " ".join(words)


# ---- after -----------------------------------------------------------------------------------------------------------------------


def summarize(directory: Path, bench: Bench, measured: Sequence[Measured], notes: Sequence[str]) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {
        "path": str(directory.resolve()),
        "direct": bench.direct,
        "alignment_bytes": bench.alignment,
        "file_bytes": bench.file_nbytes,
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
        "latency_us": {
            op: {stage: _latency_us(typical.latency[op, stage]) for stage in STAGES} for op in OPS if typical.latency[op, "total"].count
        },
        "in_flight": [{"from": int(low), "below": int(high), "count": count} for low, high, count in typical.depths.buckets()],
        "runs": [
            {"seconds": run.seconds, "read_bytes": run.read_nbytes, "write_bytes": run.write_nbytes, "cpu_s": run.cpu_s} for run in measured.runs
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


def _latency_us(histogram: Histogram) -> dict[str, float]:
    return {**{f"p{p:g}": histogram.percentile(p) * 1e6 for p in PERCENTILES}, "max": histogram.max * 1e6}


def _show(out: Console, directory: Path, direct: bool, measured: Sequence[Measured], notes: Sequence[str]) -> None:
    first = measured[0]
    how = "past the page cache" if direct else "through the page cache"
    runs = f"{len(first.runs)} run{'s' if len(first.runs) > 1 else ''}"
    out.print(f"{escape(str(directory))}: {format_bytes(first.case.nbytes)} each time, {how}, by {first.typical.backend}; median of {runs}")
    out.print(_rates_table(measured))
    out.print(_latency_table(measured))
    _show_bars(out, measured)
    for note in dict.fromkeys(notes):
        out.print(f"[yellow]note:[/] {escape(note)}")


def _rates_table(measured: Sequence[Measured]) -> Table:
    table = Table(title="Throughput", title_justify="left", title_style="bold")
    table.add_column("")
    for head in ("rate", "least", "most", "IOPS", "CPU per GB", "short", "retried"):
        table.add_column(head, justify="right")
    with_peers = any(one.peers for one in measured)
    if with_peers:
        table.add_column("infinity is", justify="right")
    for one in measured:
        run, rate = one.typical, one.bytes_per_s
        cells = [*map(format_rate, (rate.median, rate.min, rate.max)), f"{run.requests_per_s:,.0f}", format_seconds(run.cpu_s_per_gb)]
        cells += [str(sum(run.shorts for run in one.runs)), str(sum(run.retries for run in one.runs))]
        table.add_row(name_of(one.case), *cells, *([""] if with_peers else []), style="bold" if with_peers else "")
        for peer in one.peers:
            theirs = peer.bytes_per_s
            cpu = format_seconds(sorted(run.cpu_s / run.nbytes * 1e9 for run in peer.runs)[len(peer.runs) // 2])
            iops = f"{theirs.median / min(one.case.block_nbytes, one.case.task_nbytes):,.0f}"
            ratio = one.ratio(peer.name) if one.best(peer.name) is peer else None
            times = f"{ratio.median:.2f}x ({ratio.min:.2f} to {ratio.max:.2f})" if ratio else ""
            cells = [*map(format_rate, (theirs.median, theirs.min, theirs.max)), iops, cpu, "", "", times]
            table.add_row(f"  {peer.name} {peer.variant}", *cells)
        if with_peers:
            table.add_section()
    return table


def _latency_table(measured: Sequence[Measured]) -> Table:
    table = Table(title="Latency of a request, and how many were in flight", title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column("stage")
    for head in (*(f"p{p:g}" for p in PERCENTILES), "max"):
        table.add_column(head, justify="right")
    table.add_column("in flight")
    for one in measured:
        run = one.typical
        for op in OPS:
            for stage in STAGES:
                histogram = run.latency[op, stage]
                if not histogram.count:
                    continue
                name = name_of(one.case) + (f", {op}s" if one.case.direction is Direction.MIXED else "") if stage == STAGES[0] else ""
                cells = [format_seconds(histogram.percentile(p)) for p in PERCENTILES]
                depths = _depths_of(run) if name and op == ("write" if one.case.direction is Direction.WRITE else "read") else ""
                table.add_row(name, stage, *cells, format_seconds(histogram.max), depths)
    return table


def _depths_of(run: Run) -> str:
    """The three commonest numbers of requests in flight, and how common they are."""
    buckets = sorted(run.depths.buckets(), key=lambda bucket: -bucket[2])[:3]
    total = run.depths.count
    return ", ".join(
        f"{int(low)}{f'-{int(high) - 1}' if high > low + 1 else ''}: {count / total:.0%}" for low, high, count in sorted(buckets) if total
    )


def _show_bars(out: Console, measured: Sequence[Measured]) -> None:
    top = max(spread.median for one in measured for spread in (one.bytes_per_s, *(peer.bytes_per_s for peer in one.peers)))
    out.print("Throughput", style="bold")
    for one in measured:
        rows = [("infinity", one.bytes_per_s.median, "green"), *((f"{p.name} {p.variant}", p.bytes_per_s.median, "blue") for p in one.peers)]
        out.print(name_of(one.case))
        for name, rate, colour in rows:
            out.print(f"  {name:20} [{colour}]{_bar(rate / top)}[/] {format_rate(rate)}")


def _bar(part: float) -> str:
    eighths = round(part * BAR_WIDTH * 8)
    return "█" * (eighths // 8) + (" ▏▎▍▌▋▊▉"[eighths % 8] if eighths % 8 else "")
