"""What /proc/self/mountinfo says: which file system a path is on."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mount:
    """A line of /proc/self/mountinfo."""

    device: str
    point: str
    kind: str
    source: str
    options: frozenset[str]


def parse_mounts(text: str) -> list[Mount]:
    """The mounts of a /proc/self/mountinfo, in its order; a line that is not one is left out."""
    mounts = []
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        if separator and len(fields) >= 6 and len(rest) >= 2:
            options = fields[5].split(",") + (rest[2].split(",") if len(rest) > 2 else [])
            mounts.append(Mount(fields[2], _unescape(fields[4]), rest[0], _unescape(rest[1]), frozenset(options)))
    return mounts


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def mount_of(path: str, mounts: Iterable[Mount]) -> Mount | None:
    """The mount that an absolute path without links is on: the deepest, and of those at one place the last."""
    best = None
    for mount in mounts:
        point = mount.point.rstrip("/")
        if (path == point or path.startswith(point + "/")) and (best is None or len(point) >= len(best.point.rstrip("/"))):
            best = mount
    return best
