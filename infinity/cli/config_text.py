"""Changes one block of a config as it is written, and leaves every other byte of it alone."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Collection, Mapping
from json import JSONDecoder
from pathlib import Path
from typing import Any, NamedTuple

_SPACE = (" ", "\t", "\r", "\n")


class _Member(NamedTuple):
    """A member of the outermost object: its name, and where in the text name and value are."""

    name: str
    begin: int
    value_begin: int
    end: int


def with_block(text: str, name: str, values: Mapping[str, object], drop: Collection[str] = ()) -> str:
    """``text``, a JSON object, with ``values`` in its block ``name`` and without the keys ``drop`` there.

    A block that is there stays where it is, on one line or on several as before, with its other keys; a new one comes last.
    Errors: ValueError where ``text`` is not a JSON object or ``name`` is not a block in it.
    """
    members = _members(text)
    unit = _indent(text, members)
    for member in members:
        if member.name == name:
            written = text[member.value_begin : member.end]
            block = json.loads(written)
            if not isinstance(block, dict):
                raise ValueError(f"{name!r} is not a block in it")
            block = {key: value for key, value in block.items() if key not in drop} | dict(values)
            return text[: member.value_begin] + _dumps(block, unit if "\n" in written else None) + text[member.end :]
    new = f"{json.dumps(name)}: {_dumps(dict(values), None)}"
    if not members:
        at = text.index("{") + 1
        return f"{text[:at]}{new}{text[at:].lstrip()}"
    gap = f",\n{unit}" if unit is not None else ", "
    end = members[-1].end
    return text[:end] + gap + new + text[end:]


def replace_text(path: Path, text: str) -> None:
    """Write ``path`` whole or not at all; it keeps its mode, and a link stays one."""
    real = Path(os.path.realpath(path))
    fd, name = tempfile.mkstemp(prefix=f".{real.name}.", dir=real.parent)
    try:
        with open(fd, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        if real.exists():
            shutil.copymode(real, name)
        else:
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(name, 0o666 & ~umask)
        os.replace(name, real)
    except BaseException:
        os.unlink(name)
        raise


def _members(text: str) -> list[_Member]:
    def skip(at: int) -> int:
        while text[at : at + 1] in _SPACE:
            at += 1
        return at

    if not isinstance(json.loads(text), dict):  # and all of what follows may rely on it
        raise ValueError("it is not a JSON object")
    decoder = JSONDecoder()
    members = []
    at = skip(skip(0) + 1)
    while text[at] != "}":
        begin = at
        name, at = decoder.raw_decode(text, begin)
        value_begin = skip(skip(at) + 1)
        _, end = decoder.raw_decode(text, value_begin)
        members.append(_Member(name, begin, value_begin, end))
        at = skip(end)
        if text[at] == ",":
            at = skip(at + 1)
    return members


def _indent(text: str, members: list[_Member]) -> str | None:
    """What stands before the first member on its line; None where it has no line of its own."""
    if not members:
        return None
    before = text[: members[0].begin]
    line = before.rpartition("\n")
    return line[2] if line[1] and not line[2].strip() else None


def _dumps(block: dict[str, Any], unit: str | None) -> str:
    if unit is None:
        return json.dumps(block, ensure_ascii=False)
    return json.dumps(block, ensure_ascii=False, indent=unit).replace("\n", f"\n{unit}")
