"""What this machine has and lacks for infinity: every check a function from what it reads to a row, every problem with its remedy.

A problem keeps infinity from working at all; a notice is a thing to know, most often one that costs speed. What cannot be read is said in
its row, and no check needs privileges or fails for want of them. The files of the kernel are read below a ``root``, so that tests can give
another machine's; the directories examined are this machine's own. Nothing here prints.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from infinity.doctor import machine, software
from infinity.doctor.paths import path_rows
from infinity.doctor.rows import Report, Row, Section, Status, guarded

__all__ = ["Report", "Row", "Section", "Status", "examine"]


def examine(paths: Sequence[Path], root: Path = Path("/")) -> Report:
    """Look at everything; ``paths`` are directories that are to hold pages."""
    return Report(
        (
            _section("system", machine.SYSTEM, root),
            _section("versions", software.VERSIONS, root),
            _section("processor", machine.PROCESSOR, root),
            _section("memory", machine.MEMORY, root),
            _section("I/O backends", software.BACKENDS, root),
            _section("limits of this process", machine.LIMITS, root),
            *(Section(f"path {path}", tuple(path_rows(path, root))) for path in paths),
            _section("tools", software.TOOLS, root),
        )
    )


def _section(name: str, checks: Mapping[str, Callable[[Path], Row]], root: Path) -> Section:
    return Section(name, tuple(guarded(row, functools.partial(check, root)) for row, check in checks.items()))
