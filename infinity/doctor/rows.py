"""What a check answers, and how the files of the kernel are read below a root."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import infinity


class Status(Enum):
    """How a row stands."""

    OK = "ok"
    NOTICE = "notice"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Row:
    """One thing looked at.

    ``value`` is for people; ``facts`` has the same in numbers, names ending in their unit; ``remedy`` says what to do, and no problem is
    without one.
    """

    name: str
    status: Status
    value: str
    remedy: str = ""
    facts: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Section:
    """Rows about one thing: the system, one path."""

    name: str
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """All that was found."""

    sections: tuple[Section, ...]

    def having(self, status: Status) -> list[Row]:
        return [row for section in self.sections for row in section.rows if row.status is status]

    def as_dict(self) -> dict[str, object]:
        """The report as JSON has it."""
        return {
            "infinity": infinity.__version__,
            "problems": len(self.having(Status.PROBLEM)),
            "notices": len(self.having(Status.NOTICE)),
            "sections": [
                {
                    "name": section.name,
                    "rows": [
                        {"name": row.name, "status": row.status.value, "value": row.value, "remedy": row.remedy, "facts": dict(row.facts)}
                        for row in section.rows
                    ],
                }
                for section in self.sections
            ],
        }


def ok(name: str, value: str, **facts: object) -> Row:
    return Row(name, Status.OK, value, "", facts)


def notice(name: str, value: str, remedy: str = "", **facts: object) -> Row:
    return Row(name, Status.NOTICE, value, remedy, facts)


def problem(name: str, value: str, remedy: str, **facts: object) -> Row:
    return Row(name, Status.PROBLEM, value, remedy, facts)


def guarded(name: str, check: Callable[[], Row]) -> Row:
    """A check that meets what nobody thought of is a row that says so: the others are wanted all the same."""
    try:
        return check()
    except Exception as error:
        return notice(name, f"could not be examined: {type(error).__name__}: {error}")


def read_text(root: Path, name: str) -> str | None:
    """The text of a file of the kernel, stripped, or None where it cannot be read."""
    try:
        return (root / name).read_text(errors="replace").strip()
    except OSError:
        return None


def read_number(root: Path, name: str) -> int | None:
    text = read_text(root, name)
    return int(text) if text is not None and re.fullmatch(r"-?\d+", text) else None


def version_of(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: '6.1.0-13-amd64' is (6, 1, 0)."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()


def status_field(root: Path, name: str) -> str | None:
    """A field of /proc/self/status."""
    found = re.search(rf"^{name}:\s*(\S+)", read_text(root, "proc/self/status") or "", re.MULTILINE)
    return found[1] if found else None
