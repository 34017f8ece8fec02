"""However a process ends, its pages' files end with it, and nobody else's are touched."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

RUN = """
import os, sys
from infinity.task_queue import Files
from pathlib import Path
from tests.support.stores import StoreBench

def work(bench, seed):
    bench.fill(seed)
    for page in bench.pages():
        assert bench.store.read_page(page) == bench.content(page, seed)
        assert bench.at_rest(page) == bench.content(page, seed)

bench = StoreBench(Path(sys.argv[1]), n_frames=2)
work(bench, 0)
"""
WORK_FOR_EVER = """
print("ready", flush=True)
seed = 0
while True:
    seed += 1
    work(bench, seed)
"""
WORK_AS_TOLD = """
print("ready", flush=True)
for seed, line in enumerate(sys.stdin):
    work(bench, seed)
    print("worked", flush=True)
bench.close()
"""
START_FOR_EVER = """
print("ready", flush=True)
while True:
    second = StoreBench(Path(sys.argv[1]), n_frames=2)
    second.close()
"""
FORK_A_WORKER = """
child = os.fork()
if child == 0:
    sys.stdin.close()
    import time
    while os.getppid() != 1 and time.monotonic() < {deadline}:
        time.sleep(0.05)
    os._exit(0)
print("ready", child, flush=True)
work(bench, 1)
while True:
    work(bench, 2)
"""
FORK_WORKERS_THAT_EXIT = """
import gc
for how in ("os._exit", "sys.exit", "close"):
    child = os.fork()
    if child == 0:
        if how == "os._exit":
            os._exit(0)
        if how == "close":
            bench.close()
        del bench
        gc.collect()
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0, how
    work(bench, 3)
    assert os.path.isdir(bench.backing.paths[0].directory)
print("unharmed", flush=True)
bench.close()
"""


def start(directory: Path, program: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", RUN + program, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], 60)
    assert readable, "the process says nothing"
    return process.stdout.readline().strip()


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def run_to_end(directory: Path) -> None:
    """The next start, which does its work and closes."""
    process = start(directory, WORK_AS_TOLD)
    assert line_of(process) == "ready"
    out, _ = process.communicate("go\n", timeout=60)
    assert out.strip() == "worked"
    assert process.returncode == 0


def files_in(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if not path.is_dir()]


@pytest.mark.parametrize("seed", range(3))
def test_sigkill_while_working_leaves_no_file_and_the_next_start_removes_the_directory(tmp_path: Path, seed: int) -> None:
    process = start(tmp_path, WORK_FOR_EVER)
    assert line_of(process) == "ready"
    time.sleep(random.Random(seed).random() * 0.1)
    kill(process)
    assert files_in(tmp_path) == []
    run_to_end(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seed", range(3))
def test_sigkill_while_starting_leaves_nothing_that_the_next_start_does_not_remove(tmp_path: Path, seed: int) -> None:
    process = start(tmp_path, START_FOR_EVER)
    assert line_of(process) == "ready"
    time.sleep(random.Random(seed).random() * 0.1)
    kill(process)
    run_to_end(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_living_neighbour_is_not_touched_by_the_death_of_another_or_by_the_next_start(tmp_path: Path) -> None:
    neighbour = start(tmp_path, WORK_AS_TOLD)
    assert line_of(neighbour) == "ready"
    mine = [path.name for path in tmp_path.iterdir()]
    victim = start(tmp_path, WORK_FOR_EVER)
    assert line_of(victim) == "ready"
    kill(victim)
    run_to_end(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == mine
    out, _ = neighbour.communicate("go\n", timeout=60)
    assert out.strip() == "worked"
    assert neighbour.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_forked_workers_that_exit_do_no_damage(tmp_path: Path) -> None:
    process = start(tmp_path, FORK_WORKERS_THAT_EXIT)
    out, _ = process.communicate(timeout=60)
    assert out.strip() == "unharmed"
    assert process.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_a_restart_at_once_works_though_a_worker_of_the_killed_run_still_lives(tmp_path: Path) -> None:
    process = start(tmp_path, FORK_A_WORKER.format(deadline=time.monotonic() + 60))
    word, worker = line_of(process).split()
    assert word == "ready"
    os.kill(int(worker), signal.SIGSTOP)
    kill(process)
    try:
        run_to_end(tmp_path)
        assert list(tmp_path.iterdir()) == []
    finally:
        os.kill(int(worker), signal.SIGKILL)


def test_an_exit_without_close_leaves_nothing(tmp_path: Path) -> None:
    process = start(tmp_path, "sys.exit(0)")
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_an_error_that_nobody_catches_leaves_nothing(tmp_path: Path) -> None:
    process = start(tmp_path, "sys.stderr.close(); raise KeyboardInterrupt")
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert list(tmp_path.iterdir()) == []
