"""Training where a process is disturbed or may not do as it likes: the same bits, or one error that names the limit."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.limits import IO_SETUP, IO_URING_SETUP
from tests.support.queues import REFUSALS, WORKING_BACKENDS

Run = Callable[..., dict[str, Any]]

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
COMMAND = [sys.executable, "-m", "tests.support.limited"]

needs_uring = pytest.mark.skipif(bool(REFUSALS["uring"]), reason=REFUSALS["uring"] or "-")
needs_libaio = pytest.mark.skipif(bool(REFUSALS["libaio"]), reason=REFUSALS["libaio"] or "-")


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(COMMAND, cwd=ROOT, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def ask(server: subprocess.Popen[str], case: str, directory: Path, *arguments: object) -> dict[str, Any]:
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write("\t".join(map(str, (case, directory, *arguments))) + "\n")
    server.stdin.flush()
    found: dict[str, Any] = json.loads(server.stdout.readline())
    return found


@pytest.fixture
def run(server: subprocess.Popen[str], tmp_path: Path) -> Run:
    """Runs a case of tests/support/limited.py; nothing may be left in its directory."""

    def run_one(case: str, *arguments: object) -> dict[str, Any]:
        found = ask(server, case, tmp_path, *arguments)
        if "impossible" in found:
            pytest.skip(f"cannot be set here: {found['impossible']}")
        assert list(tmp_path.iterdir()) == []
        return found

    return run_one


@pytest.fixture(scope="module")
def plain(server: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What training gives that nothing limits."""
    found = ask(server, "train", tmp_path_factory.mktemp("plain"))
    assert "digest" in found, found
    return found


def assert_same(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert found.get("digest") == plain["digest"], found


def test_the_plain_run_takes_the_best_backend_and_warns_of_nothing(plain: dict[str, Any]) -> None:
    assert plain["backend"] == WORKING_BACKENDS[0]
    assert plain["warnings"] == []


@pytest.mark.parametrize("backend", WORKING_BACKENDS)
def test_every_backend_gives_the_same(run: Run, plain: dict[str, Any], backend: str) -> None:
    found = run("train", backend)
    assert_same(found, plain)
    assert found["backend"] == backend


# ---- disturbed ----


@pytest.mark.parametrize("timer", ["real", "profiling"])
def test_a_signal_every_millisecond_changes_nothing(run: Run, plain: dict[str, Any], timer: str) -> None:
    found = run("signalled", timer)
    assert_same(found, plain)
    assert found["signals"] > (20 if timer == "real" else 5)  # the kernel counts CPU time in ticks of some milliseconds


@pytest.mark.parametrize("how", ["cProfile", "sys.setprofile"])
def test_a_profiler_changes_nothing(run: Run, plain: dict[str, Any], how: str) -> None:
    found = run("profiled", how)
    assert_same(found, plain)
    assert found["calls"] > 1000


# ---- limits of the process ----


def test_with_too_few_open_files_the_error_names_the_limit_and_with_enough_nothing_changes(run: Run, plain: dict[str, Any]) -> None:
    found: dict[str, Any] = {}
    for n in range(30):
        found = run("few_files", n)
        if "digest" in found:
            break
        assert found["error"] in ("IoError", "ConfigError"), found
        assert "ulimit -n" in found["text"], found
    assert_same(found, plain)
    assert n > 1


@needs_uring
@pytest.mark.parametrize("nbytes", [0, 64 << 10])
def test_with_little_memory_to_lock_it_is_not_registered_and_nothing_changes(run: Run, plain: dict[str, Any], nbytes: int) -> None:
    """Where rings count as locked memory too, there may be none."""
    found = run("little_locked_memory", nbytes)
    assert_same(found, plain)
    assert plain["memory_registered_nbytes"] > nbytes
    assert found["memory_registered_nbytes"] == 0
    assert "RLIMIT_MEMLOCK" in found["notes"][0]
    if nbytes:
        assert found["backend"] == "uring"
    assert found["warnings"] == []


def test_where_files_may_not_be_long_enough_the_error_names_the_limit_and_the_bytes(run: Run, plain: dict[str, Any]) -> None:
    refused = run("small_files", 8 << 10)
    assert refused["error"] == "SpaceError", refused
    assert "RLIMIT_FSIZE" in refused["text"]
    assert refused["free_bytes"] == 8 << 10
    needed = refused["needed_bytes"]
    assert run("small_files", needed - 1)["error"] == "SpaceError"
    assert_same(run("small_files", needed), plain)


@pytest.mark.parametrize("nbytes", [0, 4095])
def test_where_next_to_nothing_can_be_written_the_config_is_refused_with_the_limit(run: Run, nbytes: int) -> None:
    refused = run("small_files", nbytes)
    assert refused["error"] == "ConfigError", refused
    assert "RLIMIT_FSIZE" in refused["text"]


# ---- containers ----


@needs_libaio
@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_where_io_uring_is_forbidden_libaio_is_taken_and_nothing_changes(run: Run, plain: dict[str, Any], code: int) -> None:
    found = run("forbidden", code, IO_URING_SETUP)
    assert_same(found, plain)
    assert found["backend"] == "libaio"
    assert found["warnings"] == []
    assert "a seccomp filter forbids io_uring" in found["notes"][0]


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_where_both_are_forbidden_threads_are_taken_and_nothing_changes(run: Run, plain: dict[str, Any], code: int) -> None:
    found = run("forbidden", code, IO_URING_SETUP, IO_SETUP)
    assert_same(found, plain)
    assert found["backend"] == "threads"
    assert len(found["warnings"]) == 1
    assert "a seccomp filter forbids asynchronous I/O" in found["warnings"][0]


def test_where_nothing_is_left_of_the_quota_threads_are_taken_and_the_warning_names_it(run: Run, plain: dict[str, Any]) -> None:
    found = run("used_up")
    assert_same(found, plain)
    assert found["backend"] == "threads"
    assert len(found["warnings"]) == 1
    assert "fs.aio-max-nr" in found["warnings"][0]


@needs_libaio
def test_without_the_library_libaio_is_called_directly_and_nothing_changes(plain: dict[str, Any], tmp_path: Path) -> None:
    hidden, directory = tmp_path / "hidden", tmp_path / "run"
    hidden.mkdir()
    directory.mkdir()
    for name in ("libaio.so.1t64", "libaio.so.1"):
        (hidden / name).write_text("not a library")
    done = subprocess.run(
        COMMAND,
        cwd=ROOT,
        env={**ENVIRONMENT, "LD_LIBRARY_PATH": str(hidden)},
        input=f"train\t{directory}\tlibaio\n",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    found = json.loads(done.stdout)
    assert_same(found, plain)
    assert found["notes"] == ["libaio is not installed: its calls are made directly"]
