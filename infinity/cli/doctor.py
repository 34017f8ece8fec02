"""``infinity doctor``: its options, and the report as a table. What is looked at is in ``infinity/doctor.py``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infinity.cli.outcome import EXIT_ERROR, errors_as_messages

if TYPE_CHECKING:
    from rich.console import Console

    from infinity.doctor import Report


def command(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="PATH",
            help="Directories that are to hold pages, as nvme_path will name them.  [default: the current one]",
            show_default=False,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error came from.")] = False,
) -> None:
    """Look at this machine and say what infinity will find: problems, notices, and what to do about each.

    Nothing is changed, and no privileges are needed. The exit code is 1 where something keeps infinity from working, else 0.
    """
    with errors_as_messages(traceback):
        from rich.console import Console

        from infinity.doctor import Status, examine

        report = examine(paths or [Path()])
        console = Console(highlight=False, soft_wrap=json)
        if json:
            console.print_json(data=report.as_dict())
        else:
            show(console, report)
    raise typer.Exit(EXIT_ERROR if report.having(Status.PROBLEM) else 0)


def show(console: Console, report: Report) -> None:
    """The report as a table, each remedy below what it is for."""
    from rich.markup import escape
    from rich.table import Table

    from infinity.doctor import Status

    marks = {Status.OK: "[green]ok[/]", Status.NOTICE: "[yellow]notice[/]", Status.PROBLEM: "[bold red]problem[/]"}
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for section in report.sections:
        table.add_row("", "")
        table.add_row(f"[bold]{escape(section.name)}[/]")
        for row in section.rows:
            remedy = f"\n[dim]->[/] {escape(row.remedy)}" if row.remedy else ""
            table.add_row(f"  {marks[row.status]}", escape(row.name), escape(row.value) + remedy)
    console.print(table)
    problems, notices = len(report.having(Status.PROBLEM)), len(report.having(Status.NOTICE))
    verdict = "[bold red]infinity will not work here as it is[/]" if problems else "[green]infinity works here[/]"
    console.print(f"\n{verdict}: {_count(problems, 'problem')}, {_count(notices, 'notice')}")


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"
