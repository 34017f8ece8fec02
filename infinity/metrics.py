"""Counters and spans, and one JSON line per step. Knows not what it counts.

Names end in their unit (``read_bytes``, ``stall_s``); a bare name is a count.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TextIO


class Span:
    """Adds the seconds spent inside its ``with`` block to one counter; nested entries of the same span count once."""

    __slots__ = ("_began_s", "_counters", "_depth", "_name")

    def __init__(self, counters: Counters, name: str) -> None:
        self._counters = counters
        self._name = name
        self._depth = 0
        self._began_s = 0.0

    def __enter__(self) -> Span:
        if self._depth == 0:
            self._began_s = time.perf_counter()
        self._depth += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._counters.add(self._name, time.perf_counter() - self._began_s)


class Counters:
    """Named running sums and peaks. A name that was never touched reads as 0."""

    __slots__ = ("_spans", "_values")

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._spans: dict[str, Span] = {}

    def add(self, name: str, amount: float = 1) -> None:
        self._values[name] = self._values.get(name, 0) + amount

    def set(self, name: str, value: float) -> None:
        self._values[name] = value

    def peak(self, name: str, value: float) -> None:
        """Keeps the largest value seen."""
        if value > self._values.get(name, -math.inf):
            self._values[name] = value

    def span(self, name: str) -> Span:
        """The span that adds to counter ``name``, the same object each time: ``with counters.span("stall_s"): ...``"""
        span = self._spans.get(name)
        if span is None:
            span = self._spans[name] = Span(self, name)
        return span

    def __getitem__(self, name: str) -> float:
        return self._values.get(name, 0)

    def snapshot(self) -> dict[str, float]:
        return dict(self._values)

    def since(self, before: Mapping[str, float]) -> dict[str, float]:
        """What was added to each counter since the snapshot ``before``."""
        return {name: value - before.get(name, 0) for name, value in self._values.items()}


class JsonLines:
    """Writes one JSON object per line; each line is in the file when ``write`` returns. A file of that name is replaced.

    JSON has no NaN and no infinity: they are written as the texts "NaN", "Infinity" and "-Infinity", which ``float()`` reads.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file: TextIO | None = open(path, "w", encoding="utf-8")  # noqa: SIM115 - owned until close

    def write(self, record: Mapping[str, object]) -> None:
        if self._file is None:
            raise ValueError("this JsonLines is closed")
        self._file.write(json.dumps(_plain(record), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _plain(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
