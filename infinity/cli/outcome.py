"""How a command ends: what people see of an error, and the exit code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from infinity.errors import InfinityError

EXIT_ERROR = 1
EXIT_INTERRUPTED = 130
"""128 + SIGINT, as a shell reports it."""


@contextmanager
def errors_as_messages(traceback: bool) -> Iterator[None]:
    """Turns an InfinityError into a message and exit code 1, and Ctrl-C into exit code 130; anything else is our fault and passes.

    With ``traceback`` errors pass too, and Python prints where they came from.
    """
    try:
        yield
    except InfinityError as error:
        if traceback:
            raise
        typer.secho("error: ", fg=typer.colors.RED, bold=True, nl=False, err=True)
        typer.echo(str(error), err=True)
        raise typer.Exit(EXIT_ERROR) from None
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
