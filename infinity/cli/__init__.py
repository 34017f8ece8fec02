"""The command line: one file per command below this one, each thin, with the work beside it.

A command's module imports only the standard library and typer, so that ``--help`` and ``--version`` are quick; the work, which needs
torch, is imported when the command runs.
"""

from __future__ import annotations

import faulthandler
import sys
from typing import Annotated

import typer

import infinity
from infinity.cli import bench, doctor, train, tune

app = typer.Typer(name="infinity", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
app.command("train")(train.command)
app.command("doctor")(doctor.command)
app.add_typer(bench.app, name="bench")
app.add_typer(tune.app, name="tune")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"infinity {infinity.__version__}")
        raise typer.Exit


@app.callback()
def _infinity(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")] = False,
) -> None:
    """Train models whose parameters, gradients and optimizer state do not fit in memory."""


def main() -> None:
    """The console script ``infinity`` and ``python -m infinity``."""
    if sys.stderr is not None:
        faulthandler.enable()
    app(prog_name="infinity")
