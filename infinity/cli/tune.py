"""``infinity tune``: its options. The work is in ``tune_io.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from infinity.cli.outcome import errors_as_messages

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", help="Find settings for this machine.")


@app.callback()
def _tune() -> None:
    """Find settings for this machine."""


@app.command("io")
def io(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A directory on the drive, as nvme_path will name it.", show_default=False)],
    size: Annotated[
        str, typer.Option(metavar="SIZE", help="How large the file is, and the memory to move it to and from; a run may move less of it.")
    ] = "1GiB",
    block_size: Annotated[str, typer.Option(metavar="SIZE,...", help="aio.block_size to try.")] = "256KiB,512KiB,1MiB,2MiB,4MiB,8MiB",
    queue_depth: Annotated[str, typer.Option(metavar="N,...", help="aio.queue_depth to try.")] = "4,8,16,32,64,128",
    backend: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="aio.backend to try.  [default: all that work here]", show_default=False)
    ] = None,
    threads: Annotated[str, typer.Option(metavar="N,...", help="aio.intra_op_parallelism to try, with backend 'threads'.")] = "2,4,8,16",
    budget: Annotated[str, typer.Option(metavar="SECONDS", help="About how long to measure, filling the file aside.")] = "60s",
    runs: Annotated[int, typer.Option(min=7, help="Rounds in which the best few are compared with the default.")] = 7,
    seed: Annotated[int, typer.Option(min=0, help="Of the order in which things are measured.")] = 0,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help='Write the result to this file: {"aio": {...}}.', show_default=False)
    ] = None,
    write_config: Annotated[
        Path | None,
        typer.Option(metavar="CONFIG", help="Put the result into this config; nothing else in it is touched.", show_default=False),
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Save a picture (needs matplotlib).", show_default=False)] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout, and all else to stderr.")] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error came from.")] = False,
) -> None:
    """Find how the drive of PATH is read and written fastest in training, and print it as the `aio` block of a config.

    Reads, writes and both at once are measured as training does them: pages through the task queue, on a file full of data that cannot be
    compressed. Everything is measured in turn with the default, which stays where nothing beats it by more than the noise. Ctrl-C ends it
    with the best so far, writes nothing, and has exit code 130.
    """
    with errors_as_messages(traceback):
        from infinity.cli import tune_io

        code = tune_io.run(
            tune_io.Options(
                path=path,
                size=size,
                block_size=block_size,
                queue_depth=queue_depth,
                backend=backend,
                threads=threads,
                budget=budget,
                runs=runs,
                seed=seed,
                output=output,
                write_config=write_config,
                plot=plot,
                json=json,
            )
        )
    raise typer.Exit(code)
