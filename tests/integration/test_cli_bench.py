"""``infinity bench io`` as people run it, and the way from a run of training to its replay."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from infinity.io_trace import load_trace
from tests.integration.test_cli_train import environment, lines_of, train, write_config


def bench(here: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "infinity", "bench", "io", *arguments]
    return subprocess.run(command, cwd=here, env=environment(), capture_output=True, text=True, timeout=240, check=False)


def test_a_recorded_run_is_replayed_byte_for_byte(tmp_path: Path) -> None:
    write_config(tmp_path, memory={"device": "32MiB", "host": "512KiB"})  # less than the state: pages move
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog\n" * 300)
    done = train(tmp_path, "--steps", "4", "--io-trace", "t.jsonl", "--metrics", "m.jsonl", "--sample-bytes", "0")
    assert done.returncode == 0, done.stderr
    trace = load_trace(tmp_path / "t.jsonl")
    ops = [task.op for task in trace.tasks()]
    assert {"read", "write", "kernel"} <= set(ops)
    moved = {op: sum(task.nbytes for task in trace.tasks() if task.op == op) for op in ("read", "write")}
    assert moved == {"read": trace.end["read_nbytes"], "write": trace.end["write_nbytes"]}
    steps = lines_of(tmp_path / "m.jsonl")
    assert 0 < sum(step["read_bytes"] for step in steps) <= moved["read"]
    (tmp_path / "drive").mkdir()
    replayed = bench(tmp_path, "drive", "--trace", "t.jsonl", "--runs", "2", "--json")
    assert replayed.returncode == 0, replayed.stderr
    answer = json.loads(replayed.stdout)
    assert answer["tasks"] == {op: ops.count(op) for op in ("read", "write", "flush", "kernel")}
    assert [(run["read_bytes"], run["write_bytes"]) for run in answer["runs"]] == [(moved["read"], moved["write"])] * 2
    assert list((tmp_path / "drive").iterdir()) == []


def test_a_trace_that_cannot_be_written_is_a_message_before_anything_is_trained(tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog\n" * 300)
    done = train(tmp_path, "--steps", "1", "--io-trace", "no/such/t.jsonl")
    assert done.returncode == 1
    assert "--io-trace no/such/t.jsonl cannot be written" in done.stderr
    assert "step" not in done.stdout


def test_losses_are_equal_with_and_without_a_trace(tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog\n" * 300)
    losses = []
    for more in ([], ["--io-trace", "t.jsonl"]):
        assert train(tmp_path, "--steps", "3", "--metrics", "m.jsonl", "--sample-bytes", "0", *more).returncode == 0
        losses.append([line["loss"] for line in lines_of(tmp_path / "m.jsonl")])
    assert losses[0] == losses[1]


def test_ctrl_c_ends_it_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "infinity", "bench", "io", ".", "--size", "64MiB", "--rw", "read", "--runs", "100000"]
    run = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        limit_s = time.monotonic() + 120
        while not any(tmp_path.iterdir()):  # the directory of the file
            assert run.poll() is None, run.communicate()
            assert time.monotonic() < limit_s, "nothing was begun"
            time.sleep(0.02)
        time.sleep(1)
        run.send_signal(signal.SIGINT)
        _, err = run.communicate(timeout=60)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 130, err
    assert err.strip() == "interrupted"
    assert list(tmp_path.iterdir()) == []


def test_the_work_does_not_load_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from infinity.cli import app; "
        "app(['bench', 'io', '.', '--size', '64KiB', '--block-size', '4KiB', '--rw', 'read', '--runs', '1'], standalone_mode=False); "
        "print('torch' in sys.modules)"
    )
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "False"
