"""``infinity tune io`` as people run it, and ``infinity train`` with what it wrote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from infinity.config import load_config
from tests.integration.test_cli_train import TINY, environment, write_config

SMALL = "--size 4MiB --block-size 64KiB,256KiB --queue-depth 4,8 --threads 2 --budget 0.5s".split()  # noqa: SIM905


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "infinity", *arguments]


def run(here: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), cwd=here, env=environment(), capture_output=True, text=True, timeout=240, check=False)


def test_train_accepts_what_tune_wrote_as_it_is(tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog\n" * 300)
    before = json.loads((tmp_path / "config.json").read_text())
    tuned = run(tmp_path, "tune", "io", ".", *SMALL, "--write-config", "config.json", "--output", "aio.json", "--json")
    assert tuned.returncode == 0, tuned.stderr
    aio = json.loads(tuned.stdout)["aio"]
    assert json.loads((tmp_path / "config.json").read_text()) == {**before, "aio": aio}
    assert json.loads((tmp_path / "aio.json").read_text()) == {"aio": aio}
    assert load_config(tmp_path / "config.json").notices == ()
    trained = run(tmp_path, "train", "config.json", *TINY, "--data", "text", "--steps", "3", "--sample-bytes", "0")
    assert trained.returncode == 0, trained.stderr
    assert "step   3/3" in trained.stdout or "step 3/3" in trained.stdout
    assert sorted(os.listdir(tmp_path)) == ["aio.json", "config.json", "runs", "text"]


def test_ctrl_c_says_the_best_so_far_and_leaves_no_file(tmp_path: Path) -> None:
    arguments = command("tune", "io", ".", "--size", "4MiB", "--block-size", "64KiB,256KiB", "--budget", "300s", "--output", "aio.json")
    process = subprocess.Popen(arguments, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        lines = []
        for line in process.stdout:  # the search has begun
            lines.append(line)
            if line.startswith("sifting"):
                break
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "stopped" in out
    assert "Traceback" not in err
    assert os.listdir(tmp_path) == []
