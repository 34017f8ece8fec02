"""``infinity tune io`` with tiny runs on a real file."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from infinity.cli import app, tune_io
from infinity.config import load_config
from infinity.io_bench import Direction
from infinity.io_tune import Search, Setting
from infinity.task_queue import Backend, BackendProbe

TINY = "--size 1MiB --block-size 16KiB,64KiB --queue-depth 2,4 --backend threads --threads 2 --budget 0.2s".split()  # noqa: SIM905
FASTER = Setting("threads", 16 << 10, 4, 2)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with a directory ``drive`` in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "drive").mkdir()
    return tmp_path


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drive on which one setting is truly twice as fast as the rest."""
    monkeypatch.setattr(tune_io.Drive, "measure", lambda _, setting, direction: 2e9 if setting == FASTER else 1e9)


@pytest.fixture
def same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drive on which nothing is faster."""
    monkeypatch.setattr(tune_io.Drive, "measure", lambda *_: 1e9)


def tune(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["tune", "io", "drive", *TINY, *arguments], env={"COLUMNS": "200"})


def summary_of(*arguments: str) -> dict[str, Any]:
    done = tune("--json", *arguments)
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


def test_a_run_shows_the_table_the_bars_the_verdict_and_the_block(here: Path) -> None:
    done = tune()
    assert done.exit_code == 0, done.output
    for text in ("both at once", "step", "default", "█", '"aio": {', '"block_size"', "sifting", "comparing"):
        assert text in done.stdout
    assert os.listdir(here / "drive") == []
    assert os.listdir(here) == ["drive"]


def test_the_json_is_alone_on_stdout_and_its_shape_is_frozen(here: Path) -> None:
    summary = summary_of()
    assert list(summary) == [
        "path", "interrupted", "seed", "run_bytes", "page_bytes", "measured_runs", "left_out", "verdict", "beats_default", "margin",
        "aio", "default", "compared", "sifted",
    ]  # fmt: skip
    assert list(summary["margin"]) == ["median", "low", "high", "confidence"]
    assert list(summary["compared"][0]) == ["aio", "step", "read", "write", "mixed"]
    assert list(summary["compared"][0]["read"]) == ["median", "low", "high"]
    assert all(row["read"]["low"] <= row["read"]["median"] <= row["read"]["high"] for row in summary["compared"])
    assert summary["default"] == {"block_size": 1 << 20, "queue_depth": 32, "intra_op_parallelism": 4, "backend": "auto"}


def test_where_nothing_is_faster_the_default_stays_in_its_own_words(here: Path, same: None) -> None:
    summary = summary_of()
    assert summary["aio"] == summary["default"]
    assert not summary["beats_default"]
    assert "nothing here beats the default by more than the noise of 1.0 %" in summary["verdict"]


def test_what_is_faster_wins_with_its_margin(here: Path, faster: None) -> None:
    summary = summary_of()
    assert summary["beats_default"]
    assert summary["aio"] == {"block_size": 16 << 10, "queue_depth": 4, "intra_op_parallelism": 2, "backend": "threads"}
    assert "beats the default by 100.0 % (between +100.0 % and +100.0 % in" in summary["verdict"]


def test_the_lists_are_what_is_tried(here: Path, same: None) -> None:
    summary = summary_of("--block-size", "4KiB,8KiB,32KiB", "--threads", "1,3", "--budget", "60s")
    tried = {(row["aio"]["block_size"], row["aio"]["intra_op_parallelism"]) for row in summary["compared"][1:] + summary["sifted"]}
    assert tried == {(block, threads) for block in (4 << 10, 8 << 10, 32 << 10) for threads in (1, 3)}


def test_every_backend_that_works_here_is_tried_where_none_is_named(here: Path) -> None:
    plan = tune_io.check(options())
    assert plan.backends == [name for name, probe in tune_io.probes().items() if probe.works]
    assert set(plan.backends) <= {backend.value for backend in Backend}


def test_a_backend_that_does_not_work_here_is_refused_with_the_reason(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_io, "probes", lambda: {"uring": BackendProbe("uring", False, "it is forbidden", "Allow it.")})
    done = tune("--backend", "uring")
    assert done.exit_code == 1
    assert "--backend: 'uring' does not work here: it is forbidden. Allow it." in done.stderr


def options(**changes: Any) -> tune_io.Options:
    values: dict[str, Any] = {
        "path": Path("drive"), "size": "1MiB", "block_size": "64KiB", "queue_depth": "4", "backend": None, "threads": "2", "budget": "1s",
        "runs": 7, "seed": 0, "output": None, "write_config": None, "plot": None, "json": False,
    }  # fmt: skip
    return tune_io.Options(**{**values, **changes})


def test_runs_are_at_least_so_many_rounds(here: Path) -> None:
    done = tune("--runs", "9", "--budget", "0.01s")
    assert "in 9 rounds" in done.stdout


def test_the_seed_is_that_of_the_search(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def search(**fields: Any) -> Search:
        seeds.append(fields["seed"])
        return Search(**fields)

    monkeypatch.setattr(tune_io, "Search", search)
    assert summary_of("--seed", "5")["seed"] == 5
    assert seeds == [5]


def test_output_is_a_config_block_that_loads(here: Path, faster: None) -> None:
    assert tune("--output", "aio.json").exit_code == 0
    written = json.loads((here / "aio.json").read_text())
    config = load_config({"train_batch_size": 1, **written})
    assert (config.aio.block_size, config.aio.queue_depth, config.aio.backend) == (16 << 10, 4, "threads")
    assert config.notices == ()


def test_write_config_changes_the_block_and_nothing_else(here: Path, faster: None) -> None:
    before = '{\n  "train_batch_size": 4,\n  "aio": {"thread_count": 3, "overlap_events": true},\n  "bf16":   {"enabled": true}\n}\n'
    (here / "config.json").write_text(before)
    assert tune("--write-config", "config.json").exit_code == 0
    after = (here / "config.json").read_text()
    block = '{"overlap_events": true, "block_size": 16384, "queue_depth": 4, "intra_op_parallelism": 2, "backend": "threads"}'
    assert after == before.replace('{"thread_count": 3, "overlap_events": true}', block)
    assert load_config(here / "config.json").aio.intra_op_parallelism == 2


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
@pytest.mark.parametrize("many", [True, False])
def test_plot_is_a_picture(here: Path, many: bool) -> None:
    arguments = ["--block-size", "4KiB,8KiB,16KiB,32KiB", "--budget", "1s"] if many else []
    assert tune("--plot", "tune.png", *arguments).exit_code == 0
    head = (here / "tune.png").read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    assert width > 400
    assert height > 400


def test_without_matplotlib_a_picture_is_refused_before_anything_is_measured(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    done = tune("--plot", "tune.png")
    assert done.exit_code == 1
    assert "pip install 'infinity-offload[plot]'" in done.stderr
    assert os.listdir(here) == ["drive"]


@pytest.mark.parametrize("after", [1, 12, 40])
def test_ctrl_c_ends_it_with_the_best_so_far_and_writes_nothing(here: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    measured = 0

    def measure(drive: tune_io.Drive, setting: Setting, direction: Direction) -> float:
        nonlocal measured
        measured += 1
        if measured > after:
            raise KeyboardInterrupt
        return 2e9 if setting == FASTER else 1e9

    monkeypatch.setattr(tune_io.Drive, "measure", measure)
    (here / "config.json").write_text('{"train_batch_size": 4}')
    done = tune(
        "--output", "aio.json", "--write-config", "config.json", "--block-size", "4KiB,8KiB,16KiB,64KiB", "--budget", "60s", "--json"
    )
    assert done.exit_code == 130
    summary = json.loads(done.stdout)
    assert summary["interrupted"]
    if after == 1:
        assert "stopped before anything was known: the default stays" in summary["verdict"]
    else:
        assert "stopped; the best so far is threads with blocks of 16.00 KiB, 2 threads, +100.0 %" in summary["verdict"]
    assert (here / "config.json").read_text() == '{"train_batch_size": 4}'
    assert sorted(os.listdir(here)) == ["config.json", "drive"]
    assert os.listdir(here / "drive") == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "10KiB"], "--size: give one size of at least 1.00 MiB"),
        (["--size", "1MiB,2MiB"], "--size: give one size"),
        (["--size", "900PiB"], "--size: as much memory is needed"),
        (["--block-size", "1MiB,5000"], "--block-size: "),
        (["--block-size", "32MiB"], "nothing to try beside the default"),
        (["--queue-depth", "0"], "--queue-depth: "),
        (["--queue-depth", "many"], "--queue-depth: 'many' is not a whole number"),
        (["--threads", "1000"], "--threads: "),
        (["--backend", "magic"], "--backend: 'magic' is not one of"),
        (["--budget", "soon"], "--budget: 'soon' is not a time such as '60s'"),
        (["--output", "missing/aio.json"], "--output: "),
        (["--write-config", "missing.json"], "--write-config: "),
        (["--plot", "missing/tune.png"], "--plot: "),
    ],
)
def test_what_cannot_be_is_refused_with_a_message(here: Path, arguments: list[str], message: str) -> None:
    done = tune(*arguments)
    assert done.exit_code == 1
    assert message in done.stderr
    assert "Traceback" not in done.output
    assert os.listdir(here / "drive") == []


def test_all_that_is_wrong_is_said_at_once(here: Path) -> None:
    done = CliRunner().invoke(app, ["tune", "io", "missing", "--threads", "0", "--budget", "-1"])
    assert done.exit_code == 1
    assert "3 problems with the options" in done.stderr
    assert "mkdir -p missing" in done.stderr


def test_a_config_that_is_wrong_is_refused_before_anything_is_measured(here: Path) -> None:
    (here / "config.json").write_text('{"train_batch_size": 4, "aoi": {}}')
    done = tune("--write-config", "config.json")
    assert done.exit_code == 1
    assert "Did you mean 'aio'?" in done.stderr


def test_fewer_rounds_than_can_tell_anything_are_refused(here: Path) -> None:
    assert tune("--runs", "6").exit_code == 2


def test_a_run_moves_less_where_it_takes_too_long(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_io, "RUN_NBYTES_MIN", 128 << 10)
    assert summary_of("--budget", "0.001s")["run_bytes"] < 1 << 20
    assert summary_of("--budget", "0.2s", "--size", "2MiB")["page_bytes"] <= 128 << 10


def test_help_names_every_option_of_tune_io() -> None:
    done = CliRunner().invoke(app, ["tune", "io", "--help"], env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"})
    names = "--size --block-size --queue-depth --backend --threads --budget --runs --seed --output --write-config --plot --json --traceback"
    assert [name for name in names.split() if name not in done.stdout] == []


def test_the_progress_of_a_search_is_shown_on_a_terminal(here: Path) -> None:
    from rich.console import Console

    console = Console(force_terminal=True, width=100)
    search = Search(default=FASTER, settings=[], measure=lambda *_: 1.0, budget_s=1.0)
    with console.capture() as shown, tune_io._Shown(console, search):
        search.ratios[FASTER] = [1.25]
        search.planned, search.measured = 10, 3
        search.progress(search)
    assert "best so far" in shown.get()
    assert "+25.0 %" in shown.get()
