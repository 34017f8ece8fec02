"""One JSON line per step, and counts of values. Knows not what it writes.

Names end in their unit (``read_bytes``, ``stall_s``); a bare name is a count.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TextIO


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


_SUBS = 16
"""Buckets to each doubling."""


class Histogram:
    """Counts of values in buckets whose width grows with the value; a bucket is at most 1/16 as wide as its values are large.

    ``counts[i]`` counts the whole numbers of bucket i: below 16 the number i itself, above that 16 buckets to each doubling. ``total``
    and ``maximum`` are of the same numbers.
    Units: whatever the numbers are, times ``unit``: a histogram of nanoseconds with a unit of 1e-9 answers in seconds.
    """

    __slots__ = ("_counts", "_maximum", "_total", "_unit", "count")

    def __init__(self, counts: Sequence[int], total: int, maximum: int, unit: float = 1.0) -> None:
        self.count = sum(counts)
        """How many values there are."""
        self._counts = tuple(counts)
        self._total = total
        self._maximum = maximum
        self._unit = unit

    @property
    def total(self) -> float:
        """The sum of all values."""
        return self._total * self._unit

    @property
    def mean(self) -> float:
        """NaN where there is no value."""
        return self.total / self.count if self.count else math.nan

    @property
    def max(self) -> float:
        """The largest value; 0 where there is none."""
        return self._maximum * self._unit

    def percentile(self, p: float) -> float:
        """A value that p percent of all do not exceed, at most 1/16 above the least such; NaN where there is no value."""
        if not 0 <= p <= 100:
            raise ValueError(f"percentile {p:g}: give a number from 0 to 100")
        if not self.count:
            return math.nan
        wanted = max(1, math.ceil(self.count * p / 100))
        seen = 0
        for bucket, count in enumerate(self._counts):
            seen += count
            if seen >= wanted:
                return min(_first(bucket + 1) - 1, self._maximum) * self._unit
        raise AssertionError("percentiles end at the last value")

    def buckets(self) -> list[tuple[float, float, int]]:
        """(least value, the next bucket's least value, count) of every bucket that has any."""
        unit = self._unit
        return [(_first(i) * unit, _first(i + 1) * unit, count) for i, count in enumerate(self._counts) if count]


def _first(bucket: int) -> int:
    doublings, sub = divmod(bucket, _SUBS)
    return bucket if doublings == 0 else (_SUBS + sub) << (doublings - 1)
