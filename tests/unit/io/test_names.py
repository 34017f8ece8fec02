"""What `infinity.io` shows, and what it loads."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import infinity.io

ROOT = Path(__file__).resolve().parents[3]


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_the_public_names_are_these() -> None:
    assert infinity.io.__all__ == ["File", "Future", "Priority", "Queue", "as_completed", "empty", "load", "open", "save", "wait"]
    assert dir(infinity.io) == infinity.io.__all__
    assert {name for name in dir(infinity.io.File) if name[0] != "_"} == {
        "close",
        "direct",
        "flush",
        "nbytes",
        "read_into",
        "reserve",
        "truncate",
        "write_from",
    }
    members = {name for name in dir(infinity.io.Future) if name[0] != "_"}
    assert members == {"cancel", "done", "exception", "nbytes", "offset", "op", "path", "result", "wait"}
    assert {name for name in dir(infinity.io.Queue) if name[0] != "_"} == {"close"}


def test_the_public_signatures_are_these() -> None:
    assert parameters(infinity.io.open) == ["path", "mode", "direct", "queue"]
    assert parameters(infinity.io.File.read_into) == ["self", "array", "offset", "nbytes", "priority"]
    assert parameters(infinity.io.File.write_from) == ["self", "array", "offset", "nbytes", "priority"]
    assert parameters(infinity.io.Future.wait) == ["self", "timeout"]
    assert parameters(infinity.io.wait) == parameters(infinity.io.as_completed) == ["futures", "timeout"]
    assert parameters(infinity.io.Queue) == ["backend", "queue_depth", "block_size", "in_flight", "io_threads", "paths"]
    assert parameters(infinity.io.empty) == ["shape", "dtype"]
    assert parameters(infinity.io.save) == ["tensors", "path", "metadata", "queue"]
    assert parameters(infinity.io.load) == ["path", "names", "device", "queue"]


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(infinity.io, "read")


ALONE = """
import infinity, pathlib, sys
def seen():
    names = [path.read_text() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
    return "torch" in sys.modules, any(name.startswith("infinity") for name in names)
infinity.io.Queue
print(*seen())
file = infinity.io.open("README.md")
array = infinity.io.empty(file.nbytes)
file.read_into(array).wait()
print(*seen(), bytes(array[:2]))
"""


def test_files_and_arrays_load_no_torch_and_start_no_thread_before_they_are_used() -> None:
    done = run(ALONE)
    assert done.stdout == "False False\nFalse True b'# '\n", done.stderr
