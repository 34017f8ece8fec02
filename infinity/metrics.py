"""One JSON line per step. Knows not what it writes.

Names end in their unit (``read_bytes``, ``stall_s``); a bare name is a count.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
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
