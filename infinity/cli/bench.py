"""``infinity bench``: its options. The work is in ``bench_io.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from infinity.cli.outcome import errors_as_messages

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", help="Measure this machine.")


@app.callback()
def _bench() -> None:
    """Measure this machine."""


@app.command("io")
def io(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="A directory on the drive to measure (or a file to be made in one, and removed at once).",
            show_default=False,
        ),
    ],
    rw: Annotated[
        str | None,
        typer.Option(
            metavar="read|write|mixed,...",
            help="What to do; mixed: reads and writes in turn.  [default: read,write,mixed]",
            show_default=False,
        ),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="How much each run moves, and how long the file is.  [default: 2GiB]", show_default=False),
    ] = None,
    block_size: Annotated[
        str | None, typer.Option(metavar="SIZE,...", help="The largest request to the drive.  [default: 1MiB]", show_default=False)
    ] = None,
    queue_depth: Annotated[str | None, typer.Option(metavar="N,...", help="Requests in flight.  [default: 32]", show_default=False)] = None,
    backend: Annotated[str, typer.Option(metavar="auto|uring|libaio|threads,...", help="How requests reach the kernel.")] = "auto",
    pages: Annotated[
        str | None,
        typer.Option(
            metavar="N|SIZE",
            help="Have all of --size in memory, cut into N pages or pages of SIZE, each a task of its own as in training; 1 is one buffer. "
            "Without it there is memory for the requests in flight only, each a task of its own, as fio has it.",
            show_default=False,
        ),
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each case, after one that does not count; the median is shown.")] = 3,
    against: Annotated[
        list[str] | None,
        typer.Option(metavar="fio|deepspeed", help="Let this program do the same jobs in turn. May be given twice.", show_default=False),
    ] = None,
    peer_huge_pages: Annotated[
        bool,
        typer.Option(
            "--peer-huge-pages", help="Give the peers' memory huge pages too, as ours has; then only the engines differ (needs glibc 2.35)."
        ),
    ] = False,
    deepspeed_python: Annotated[
        Path | None, typer.Option(metavar="PYTHON", help="The Python that has DeepSpeed.  [default: this one]", show_default=False)
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Do again what `infinity train --io-trace FILE` recorded, as fast as it goes, on files of our own; kernels do nothing.",
            show_default=False,
        ),
    ] = None,
    paced: Annotated[bool, typer.Option("--paced", help="With --trace: hand nothing over earlier than it was recorded.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout, and all else to stderr.")] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error came from.")] = False,
) -> None:
    """Measure the drive of PATH through the task queue that training uses.

    Every combination of the lists is a case. The file is full of data that cannot be compressed, and read and written past the page cache
    where the file system lets it. A run is timed from the first submit to the last completion. Sizes are written as 1048576, 8MiB or 2GB.

    DeepSpeed's two jobs are `--pages 8MiB`, many pages, and `--size 1GiB --pages 1`, one buffer. Where there are no pages, DeepSpeed
    moves everything in one call, which is what it is fastest at.

    With --trace, block size and depth are the recorded ones unless they are given.
    """
    with errors_as_messages(traceback):
        from infinity.cli import bench_io

        bench_io.run(
            bench_io.Options(
                path=path,
                rw=rw,
                size=size,
                block_size=block_size,
                queue_depth=queue_depth,
                backend=backend,
                pages=pages,
                runs=runs,
                against=tuple(against or ()),
                peer_huge_pages=peer_huge_pages,
                deepspeed_python=deepspeed_python,
                trace=trace,
                paced=paced,
                json=json,
            )
        )
