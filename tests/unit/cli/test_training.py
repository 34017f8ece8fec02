"""The main job, with an engine of plain torch in place of ours."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from infinity.cli import app, training
from infinity.cli.training import METRICS, lr_factor, printable
from tests.support.plain_engine import PlainEngine

TINY = ["--layers", "1", "--heads", "2", "--width", "16", "--context", "16"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory with a config and a text in it; the engine is plain torch."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training, "Engine", PlainEngine)
    write_config(tmp_path)
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    return tmp_path


def write_config(directory: Path, **changes: Any) -> None:
    nvme = {"device": "nvme", "nvme_path": "./runs/nvme"}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
        **changes,
    }
    (directory / "config.json").write_text(json.dumps(config))


def train(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["train", "config.json", *TINY, "--data", "text", *arguments])


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_shows_table_progress_and_summary(here: Path) -> None:
    done = train("--steps", "4")
    assert done.exit_code == 0, done.output
    for text in (
        "What lives where",
        "2.00 MiB",
        "budget",
        "step 1/4",
        "step 4/4",
        "held-out loss",
        "read",
        "written",
        "(median)",
        "sample",
    ):
        assert text in done.stdout


@pytest.mark.parametrize("verify", ["write+read", "off"])
def test_the_start_says_whether_pages_are_checked(here: Path, verify: str) -> None:
    write_config(here, verify=verify)
    assert f", verify {verify}\n" in train("--steps", "1").stdout


@pytest.mark.parametrize("late", [False, True])
def test_metrics_has_one_line_per_step_in_order(here: Path, monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    monkeypatch.setattr(PlainEngine, "late", late)
    assert train("--steps", "5", "--metrics", "m.jsonl").exit_code == 0
    lines = lines_of(here / "m.jsonl")
    assert [tuple(line) for line in lines] == [METRICS] * 5
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]


def test_a_metrics_line_has_the_mean_loss_of_its_micro_steps(here: Path) -> None:
    write_config(here, gradient_accumulation_steps=1, train_micro_batch_size_per_gpu=4)
    assert train("--steps", "1", "--metrics", "whole.jsonl").exit_code == 0
    write_config(here, gradient_accumulation_steps=2, train_micro_batch_size_per_gpu=2)
    assert train("--steps", "1", "--metrics", "halves.jsonl").exit_code == 0
    assert lines_of(here / "halves.jsonl")[0]["loss"] == pytest.approx(lines_of(here / "whole.jsonl")[0]["loss"])


def test_the_learning_rate_warms_up_and_falls(here: Path) -> None:
    assert train("--steps", "40", "--metrics", "m.jsonl").exit_code == 0
    rates = [line["lr"] for line in lines_of(here / "m.jsonl")]
    assert rates[:10] == pytest.approx([0.001 * step for step in range(1, 11)])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.001)


@pytest.mark.parametrize("steps", [1, 2, 3, 10, 1000])
def test_the_factor_of_the_learning_rate_stays_between_0_and_1(steps: int) -> None:
    assert all(0 < lr_factor(step, steps) <= 1 for step in range(steps + 1))


def test_meta_changes_no_loss(here: Path) -> None:
    assert train("--steps", "3", "--meta", "--metrics", "meta.jsonl").exit_code == 0
    assert train("--steps", "3", "--no-meta", "--metrics", "whole.jsonl").exit_code == 0
    assert (here / "meta.jsonl").read_text() == (here / "whole.jsonl").read_text()


def test_checkpointing_changes_no_loss(here: Path) -> None:
    assert train("--steps", "3", "--metrics", "all.jsonl").exit_code == 0
    assert train("--steps", "3", "--checkpoint-activations", "--metrics", "some.jsonl").exit_code == 0
    assert (here / "some.jsonl").read_text() == (here / "all.jsonl").read_text()


def test_the_seed_changes_the_losses(here: Path) -> None:
    assert train("--steps", "1", "--metrics", "zero.jsonl").exit_code == 0
    assert train("--steps", "1", "--seed", "1", "--metrics", "one.jsonl").exit_code == 0
    assert (here / "one.jsonl").read_text() != (here / "zero.jsonl").read_text()


def test_batch_replaces_that_of_the_config(here: Path) -> None:
    write_config(here, train_batch_size=4, gradient_accumulation_steps=2)
    done = train("--steps", "1", "--batch", "3")
    assert done.exit_code == 0, done.output
    assert "1 steps of 96 bytes" in done.stdout


def test_json_is_alone_on_stdout(here: Path) -> None:
    done = train("--steps", "3", "--json")
    summary = json.loads(done.stdout)
    assert (summary["steps"], summary["interrupted"], summary["read_bytes"], summary["step_s_median"]) == (3, False, 9000, 0.5)
    assert "What lives where" in done.stderr


def test_sample_bytes_is_the_length_of_the_sample(here: Path) -> None:
    assert len(json.loads(train("--steps", "1", "--sample-bytes", "7", "--json").stdout)["sample"].encode("utf-8", "replace")) >= 7
    assert json.loads(train("--steps", "1", "--sample-bytes", "0", "--json").stdout)["sample"] is None


def test_the_first_interrupt_ends_the_run_after_its_step_with_the_whole_summary(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlainEngine, "late", True)
    monkeypatch.setattr(PlainEngine, "after_step", staticmethod(lambda step: os.kill(os.getpid(), signal.SIGINT) if step == 3 else None))
    done = train("--steps", "50", "--metrics", "m.jsonl")
    assert done.exit_code == 130
    assert [line["step"] for line in lines_of(here / "m.jsonl")] == [1, 2, 3]
    assert "after 3 steps (interrupted)" in done.stdout
    assert "held-out loss" in done.stdout
    assert "sample" in done.stdout


def test_the_second_interrupt_ends_the_run_at_once_with_what_is_known(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt_twice(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(PlainEngine, "after_step", staticmethod(interrupt_twice))
    done = train("--steps", "50", "--metrics", "m.jsonl")
    assert done.exit_code == 130
    lines = lines_of(here / "m.jsonl")
    assert [(line["step"], line["loss"] is None) for line in lines] == [(1, False), (2, False), (3, True)]
    assert "after 3 steps (interrupted)" in done.stdout
    assert "held-out loss" not in done.stdout


def test_an_interrupt_while_evaluating_ends_it_at_once(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlainEngine, "eval", lambda self: os.kill(os.getpid(), signal.SIGINT))
    done = train("--steps", "2")
    assert done.exit_code == 130
    assert "after 2 steps (interrupted)" in done.stdout
    assert "held-out loss" not in done.stdout


def test_the_handler_of_interrupts_is_put_back(here: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    assert train("--steps", "1").exit_code == 0
    assert signal.getsignal(signal.SIGINT) is before


def test_a_relative_nvme_path_below_here_is_made_and_said(here: Path) -> None:
    done = train("--steps", "1")
    assert (here / "runs" / "nvme").is_dir()
    assert f"made the directory {here / 'runs' / 'nvme'}" in done.stdout.replace("\n", "")


def test_a_missing_nvme_path_elsewhere_is_not_made(here: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for path in (elsewhere / "absolute", here / "absolute"):
        write_config(here, zero_optimization={"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(path)}})
        train("--steps", "1")
        assert not path.exists()
    write_config(here, zero_optimization={"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "../upwards"}})
    train("--steps", "1")
    assert not (here.parent / "upwards").exists()


def test_a_link_that_leads_away_is_not_followed_to_make_a_directory(here: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (here / "runs").symlink_to(elsewhere)
    train("--steps", "1")
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--metrics", "no/such/m.jsonl"], "--metrics no/such/m.jsonl cannot be written"),
        (["--data", "missing"], "missing"),
        (["--heads", "3"], "not a multiple of heads"),
        (["--context", "100000"], "too little text"),
    ],
)
def test_what_cannot_be_is_refused_with_a_message(here: Path, arguments: list[str], message: str) -> None:
    done = train("--steps", "1", *arguments)
    assert done.exit_code == 1
    assert message in done.stderr
    assert "Traceback" not in done.output


def test_all_problems_of_the_config_are_listed(here: Path) -> None:
    write_config(here, gradient_cliping=1.0, train_batch_size=-1)
    done = train("--steps", "1")
    assert done.exit_code == 1
    assert "2 problems" in done.stderr
    assert "gradient_cliping" in done.stderr
    assert "train_batch_size" in done.stderr


def test_a_number_out_of_range_is_refused(here: Path) -> None:
    assert train("--steps", "0").exit_code == 2


def test_what_would_move_a_terminals_cursor_is_not_printed() -> None:
    assert printable("a\x1b[2Jb\rc\n\td\x07é") == "a\ufffd[2Jb\ufffdc\n\td\ufffdé"
