"""The work of ``infinity bench io --trace``: a recorded run's transfers done again, beside the recorded run's own time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.markup import escape

from infinity.cli.bench_io import (
    Options,
    Reading,
    depth_of,
    depths_table,
    filling,
    in_flight,
    latency_table,
    latency_us,
    one_of,
    progress_on,
    size_of,
    table_of,
)
from infinity.errors import ConfigProblem
from infinity.io_bench import Run
from infinity.io_replay import Replay, file_lengths, memory_spans
from infinity.io_trace import Trace, load_trace
from infinity.sizes import format_bytes, format_rate, format_seconds
from infinity.task_queue import Backend


def run(options: Options, path: Path, out: Console) -> None:
    """Replay and show.

    Errors: OptionsError and TraceError before anything is made; SpaceError, IoError.
    """
    reading = Reading(options)
    directory = reading.directory()
    backend = reading.one("--backend", options.backend, lambda text: one_of(Backend, text))
    depth = reading.one("--queue-depth", options.queue_depth, depth_of) if options.queue_depth else None
    block_nbytes = reading.one("--block-size", options.block_size, size_of) if options.block_size else None
    for option, value in (("--rw", options.rw), ("--size", options.size), ("--pages", options.pages), ("--against", options.against)):
        if value:
            reading.problems.append(ConfigProblem(option, "the trace says what is done; leave it out with --trace"))
    reading.stop_if_wrong()
    trace = load_trace(path)
    reading.check_memory(sum(end - begin for begin, end in memory_spans(trace)), "--trace")
    reading.stop_if_wrong()
    runs: list[Run] = []
    with progress_on(out) as progress:
        with filling(progress, sum(file_lengths(trace)), "free some space, or name another directory") as filled:
            replay = Replay(trace, directory, progress=filled)
        with replay:
            task = progress.add_task(f"doing {trace.end['tasks']:,} tasks again", total=options.runs)
            for _ in range(options.runs):
                runs.append(replay.run(backend=backend or Backend.AUTO, queue_depth=depth, block_nbytes=block_nbytes, paced=options.paced))
                progress.advance(task)
            summary = summarize(directory, path, trace, replay, runs, options)
    _show(out, summary, runs)
    if options.json:
        Console(highlight=False, soft_wrap=True).print_json(data=summary)


def summarize(directory: Path, path: Path, trace: Trace, replay: Replay, runs: Sequence[Run], options: Options) -> dict[str, Any]:
    """What ``--json`` prints."""
    typical = sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]
    ops = [task.op for task in trace.tasks()]
    return {
        "path": str(directory.resolve()),
        "direct": replay.direct,
        "trace": str(path),
        "paced": options.paced,
        "files": len(trace.files),
        "tasks": {op: ops.count(op) for op in ("read", "write", "flush", "kernel")},
        "recorded": dict(trace.end),
        "backend": typical.backend,
        "seconds": median(run.seconds for run in runs),
        "bytes_per_s": typical.bytes_per_s,
        "cpu_s_per_gb": typical.cpu_s_per_gb,
        "shorts": sum(run.shorts for run in runs),
        "retries": sum(run.retries for run in runs),
        "latency_us": latency_us(typical),
        "in_flight": in_flight(typical),
        "runs": [
            {"seconds": run.seconds, "read_bytes": run.read_nbytes, "write_bytes": run.write_nbytes, "cpu_s": run.cpu_s} for run in runs
        ],
        "notes": list(dict.fromkeys(note for run in runs for note in run.notes)),
    }


def _show(out: Console, summary: dict[str, Any], runs: Sequence[Run]) -> None:
    typical = sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]
    recorded, tasks = summary["recorded"], summary["tasks"]
    how = "past the page cache" if summary["direct"] else "through the page cache"
    out.print(
        f"{escape(summary['trace'])}: {tasks['read']:,} reads, {tasks['write']:,} writes, {tasks['flush']:,} flushes and "
        f"{tasks['kernel']:,} kernels (as empty tasks) on {summary['files']} file{'s' if summary['files'] != 1 else ''} in "
        f"{escape(summary['path'])}, {how}, by {summary['backend']}"
    )
    heads = ("", "time", "read", "written", "rate", "CPU/GB", "short", "retried")
    table = table_of("Transfers alone, and the run that was recorded", heads)

    def row(name: str, seconds: float, read: int, write: int, *cells: str) -> None:
        rate = format_rate((read + write) / seconds) if seconds else ""
        table.add_row(name, format_seconds(seconds), format_bytes(read), format_bytes(write), rate, *(cells or ("", "", "")))

    row(
        "replayed, paced" if summary["paced"] else "replayed, as fast as it goes",
        typical.seconds,
        typical.read_nbytes,
        typical.write_nbytes,
        format_seconds(typical.cpu_s_per_gb),
        str(summary["shorts"]),
        str(summary["retries"]),
    )
    if "read_nbytes" in recorded and "write_nbytes" in recorded:
        row("recorded, the whole run", recorded["seconds"], recorded["read_nbytes"], recorded["write_nbytes"])
        if "io_busy_s" in recorded:
            row("  while anything was at the drive", recorded["io_busy_s"], recorded["read_nbytes"], recorded["write_nbytes"])
    else:
        table.add_row("recorded, the whole run", format_seconds(recorded["seconds"]))
    out.print(table)
    out.print(latency_table([("replayed", typical)]))
    out.print(depths_table([("replayed", typical)]))
    if recorded["seconds"] and not summary["paced"]:
        part = typical.seconds / recorded["seconds"]
        out.print(f"the transfers alone take {part:.0%} of the recorded run's time")
    for note in summary["notes"]:
        out.print(f"[yellow]note:[/] {escape(note)}")
