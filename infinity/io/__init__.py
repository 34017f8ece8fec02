"""The engine alone, for people: files whose bytes move past the page cache, many transfers at once, and tensors in safetensors files.

    with infinity.io.open("weights.bin") as file:
        futures = [file.read_into(array, offset) for array, offset in wanted]
        infinity.io.wait(futures)

Nothing here loads torch, but `save` and `load` do when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from infinity.io.arrays import empty
from infinity.io.file import File
from infinity.io.file import open_file as open
from infinity.io.futures import Future, as_completed, wait
from infinity.io.queue import Queue
from infinity.task_queue import Priority

if TYPE_CHECKING:
    from infinity.io.safetensors import load, save

__all__ = ["File", "Future", "Priority", "Queue", "as_completed", "empty", "load", "open", "save", "wait"]


def __getattr__(name: str) -> Any:
    if name in ("load", "save"):
        return getattr(import_module("infinity.io.safetensors"), name)
    raise AttributeError(f"module 'infinity.io' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
