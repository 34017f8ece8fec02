"""``infinity train`` as people run it: a process of its own, the real engine, state in files."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from infinity.cli.training import METRICS

TINY = ["--layers", "2", "--heads", "2", "--width", "64", "--context", "32"]
OFFLOADED = {"device": "nvme", "nvme_path": "./runs/nvme"}
ON_DEVICE = {"device": "none"}


def write_config(directory: Path, param: dict[str, Any] = OFFLOADED, optimizer: dict[str, Any] = OFFLOADED, **changes: Any) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.003}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": param,
            "offload_optimizer": optimizer,
            "stage3_param_persistence_threshold": 0,
        },
        "memory": {"device": "32MiB", "host": "8MiB"},
        **changes,
    }
    (directory / "config.json").write_text(json.dumps(config))


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A directory with a config and a text in it."""
    write_config(tmp_path)
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog\n" * 300)
    return tmp_path


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "infinity", "train", "config.json", *TINY, "--data", "text", *arguments]


def environment() -> dict[str, str]:
    """Without a terminal, one thread: the machine that runs tests may have other things to do."""
    root = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}


def train(here: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), cwd=here, env=environment(), capture_output=True, text=True, timeout=240, check=False)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_option_works_together_with_state_on_nvme(here: Path) -> None:
    done = train(
        here, "--steps", "12", "--batch", "2", "--seed", "3", "--metrics", "m.jsonl", "--sample-bytes", "5", "--checkpoint-activations",
        "--no-meta", "--json", "--traceback",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["steps"], summary["interrupted"]) == (12, False)
    assert summary["loss_last"] < summary["loss_first"]
    lines = lines_of(here / "m.jsonl")
    assert [tuple(line) for line in lines] == [METRICS] * 12
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert all(line["grad_norm"] > 0 and line["step_s"] > 0 for line in lines)
    assert all(line["host_bytes"] <= 8 << 20 and line["device_bytes"] <= 32 << 20 for line in lines)


def test_nothing_is_left_in_the_directory_of_the_files(here: Path) -> None:
    assert train(here, "--steps", "2").returncode == 0
    assert list((here / "runs" / "nvme").iterdir()) == []


def test_losses_are_equal_wherever_the_state_rests(here: Path) -> None:
    losses = []
    for param, optimizer in ((OFFLOADED, OFFLOADED), (ON_DEVICE, {"device": "cpu"}), (ON_DEVICE, ON_DEVICE)):
        write_config(here, param, optimizer, memory={"device": "32MiB", "host": "32MiB"})
        assert train(here, "--steps", "4", "--metrics", "m.jsonl", "--sample-bytes", "0").returncode == 0
        losses.append([line["loss"] for line in lines_of(here / "m.jsonl")])
    assert losses == [losses[0]] * 3


def test_a_model_on_meta_has_the_weights_of_one_built_whole(here: Path) -> None:
    losses = []
    for meta in ("--meta", "--no-meta"):
        assert train(here, "--steps", "2", meta, "--metrics", "m.jsonl", "--sample-bytes", "0").returncode == 0
        losses.append([line["loss"] for line in lines_of(here / "m.jsonl")])
    assert losses[0] == losses[1]


def test_accumulation_and_clipping_run(here: Path) -> None:
    write_config(here, gradient_accumulation_steps=2, gradient_clipping=0.5)
    done = train(here, "--steps", "3", "--metrics", "m.jsonl")
    assert done.returncode == 0, done.stderr
    assert len(lines_of(here / "m.jsonl")) == 3


def test_no_warning_of_torch_reaches_the_user(here: Path) -> None:
    done = train(here, "--steps", "2")
    assert "Warning" not in done.stderr, done.stderr


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_ends_with_the_summary_and_a_whole_file_of_metrics(here: Path, times: int) -> None:
    run = subprocess.Popen(
        command("--steps", "100000", "--metrics", "m.jsonl"),
        cwd=here, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        limit_s = time.monotonic() + 200
        while not ((here / "m.jsonl").exists() and (here / "m.jsonl").read_text().count("\n") > 3):
            assert run.poll() is None, run.communicate()
            assert time.monotonic() < limit_s, "no step was written"
            time.sleep(0.05)
        for _ in range(times):
            run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=200)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 130, err
    assert "Traceback" not in err
    assert "(interrupted)" in out
    assert [line["step"] for line in lines_of(here / "m.jsonl")] == list(range(1, len(lines_of(here / "m.jsonl")) + 1))
    assert list((here / "runs" / "nvme").iterdir()) == []
    if times == 1:
        assert "held-out loss" in out
        steps = int(out.split(" steps (interrupted)")[0].split()[-1])
        assert len(lines_of(here / "m.jsonl")) == steps


def test_a_missing_nvme_path_elsewhere_is_a_message(here: Path) -> None:
    elsewhere = {"device": "nvme", "nvme_path": str(here / "no" / "such")}
    write_config(here, elsewhere, elsewhere)
    done = train(here, "--steps", "1")
    assert done.returncode == 1
    assert str(here / "no" / "such") in done.stderr
    assert "Traceback" not in done.stderr


def test_several_paths_are_made_measured_and_shown_with_their_shares(here: Path) -> None:
    striped = {"device": "nvme", "nvme_path": ["./runs/a", "./runs/b"]}
    write_config(here, striped, striped)
    done = train(here, "--steps", "2")
    assert done.returncode == 0, done.stderr
    shown = done.stdout.split("Pages are striped over", 1)[1]
    shares = [int(share) for share in re.findall(r"(\d+)%", shown.split("pages of", 1)[0])]
    assert len(shares) == 2
    assert 99 <= sum(shares) <= 101
    assert len(re.findall(r"\d [kMG]B/s", shown.split("pages of", 1)[0])) == 2
    assert list((here / "runs" / "a").iterdir()) == list((here / "runs" / "b").iterdir()) == []


def test_each_path_that_cannot_be_used_is_named(here: Path) -> None:
    (here / "file").write_text("")
    (here / "link").symlink_to(here)
    striped = {"device": "nvme", "nvme_path": [".", "file", str(here / "no" / "such"), "link"]}
    write_config(here, striped, striped)
    done = train(here, "--steps", "1")
    assert done.returncode == 1
    said = " ".join(done.stderr.split())
    for text in ("3 problems", "path[1]: file is not a directory", "path[2]: ", "not exist", "path[3]: link is the same directory as ."):
        assert text in said, said


def test_a_budget_below_the_minimum_names_the_bytes_needed(here: Path) -> None:
    write_config(here, memory={"device": "32MiB", "host": "8KiB"})
    done = train(here, "--steps", "1")
    assert done.returncode == 1
    assert "memory.host" in done.stderr
    assert "Traceback" not in done.stderr


def test_traceback_shows_where_an_error_came_from(here: Path) -> None:
    (here / "config.json").write_text("{")
    assert "Traceback" not in train(here, "--steps", "1").stderr
    assert "Traceback" in train(here, "--steps", "1", "--traceback").stderr
