"""``infinity bench io``: options into cases, figures into a table, a picture and JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from infinity.cli import app
from infinity.cli.bench_io import UNLIKE_MEMORY, Options, check, name_of
from infinity.errors import OptionsError
from infinity.io_bench import Bench, Direction
from infinity.io_trace import IoTrace
from infinity.task_queue import Backend, Batch
from tests.support.peers import install_deepspeed, install_fio, runs_of

KIB, MIB = 1 << 10, 1 << 20
TINY = ["--size", "256KiB", "--block-size", "16KiB", "--queue-depth", "4", "--runs", "2"]


def bench(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["bench", "io", *map(str, arguments)], env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"})


def json_of(*arguments: str | Path) -> dict[str, Any]:
    done = bench(*arguments, "--json")
    assert done.exit_code == 0, done.output
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def problems_of(**options: Any) -> list[str]:
    with pytest.raises(OptionsError) as caught:
        check(Options(**options))
    return [problem.key for problem in caught.value.problems]


# ---- options ----


def test_help_names_every_option_and_the_jobs_of_deepspeed() -> None:
    done = bench("--help")
    assert done.exit_code == 0
    options = (
        "--rw --size --block-size --queue-depth --backend --pages --runs --against --peer-huge-pages --deepspeed-python --trace --paced "
        "--json --traceback"
    )
    words = ["PATH", "--pages 8MiB", "--size 1GiB --pages 1", *options.split()]
    assert [word for word in words if word not in done.stdout] == []


def test_the_cases_are_every_combination_of_the_lists(tmp_path: Path) -> None:
    directory, cases = check(
        Options(path=tmp_path, rw="read,mixed", size="1GiB", block_size="1MiB,8MiB", queue_depth="8,32", backend="uring,threads")
    )
    assert directory == tmp_path
    found = [(case.direction, case.block_nbytes, case.queue_depth, case.backend) for case in cases]
    assert len(found) == len(set(found)) == 16
    assert found[0] == (Direction.READ, MIB, 8, Backend.URING)
    assert found[-1] == (Direction.MIXED, 8 * MIB, 32, Backend.THREADS)
    assert {case.nbytes for case in cases} == {1 << 30}


def test_the_defaults_are_all_three_directions_over_2_gib(tmp_path: Path) -> None:
    _, cases = check(Options(path=tmp_path))
    assert [name_of(case) for case in cases] == ["read 1MiB x 32", "write 1MiB x 32", "mixed 1MiB x 32"]
    assert {case.nbytes for case in cases} == {2 << 30}


@pytest.mark.parametrize(("pages", "nbytes"), [("64", 4 * MIB), ("4MiB", 4 * MIB), ("1", 256 * MIB), ("4194304B", 4 * MIB)])
def test_pages_are_a_number_or_a_size(tmp_path: Path, pages: str, nbytes: int) -> None:
    _, cases = check(Options(path=tmp_path, rw="read", size="256MiB", pages=pages))
    assert [case.page_nbytes for case in cases] == [nbytes]


def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    keys = problems_of(
        path=tmp_path / "no" / "such",
        rw="read,wrte",
        size="64Q",
        block_size="0,x",
        queue_depth="0,9999,1.5",
        backend="libio",
        against=("foo",),
        paced=True,
    )
    assert keys == ["PATH", "--size", "--rw", "--block-size", "--block-size", *["--queue-depth"] * 3, "--backend", "--against", "--paced"]


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"size": "1MiB,2MiB"}, "--size"),
        ({"size": "1000000", "rw": "read"}, "read 1MiB x 32"),
        ({"size": "3MiB", "rw": "mixed"}, "mixed 1MiB x 32"),
        ({"size": "1MiB", "pages": "3"}, "--pages"),
        ({"size": "1MiB", "pages": "0"}, "--pages"),
        ({"size": "2MiB", "pages": "1", "rw": "mixed"}, "mixed 1MiB x 32 in 1 of 2MiB"),
        ({"size": "1PiB", "pages": "1", "rw": "read"}, "--pages, --size"),
        ({"size": "1PiB", "block_size": "1TiB", "rw": "read"}, "--block-size, --queue-depth"),
    ],
)
def test_a_size_that_makes_no_sense_is_named(tmp_path: Path, options: dict[str, str], key: str) -> None:
    assert problems_of(path=tmp_path, **options) == [key]


def test_blocks_that_o_direct_refuses_are_named_before_anything_is_measured(tmp_path: Path) -> None:
    done = bench(tmp_path, "--size", "10000", "--block-size", "1000", "--rw", "read")
    with Bench(tmp_path, file_nbytes=4096, memory_nbytes=4096) as probe:
        needs_alignment = probe.alignment > 8
    assert (done.exit_code == 1) == needs_alignment
    assert ("multiples of" in done.output) == needs_alignment


def test_a_file_that_exists_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("precious")
    done = bench(tmp_path / "data", *TINY)
    assert done.exit_code == 1
    assert "no file is written that was not made here" in done.stderr
    assert (tmp_path / "data").read_text() == "precious"


def test_the_name_of_a_new_file_means_its_directory(tmp_path: Path) -> None:
    assert bench(tmp_path / "new", *TINY, "--rw", "read").exit_code == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert problems_of(path=tmp_path) == ["PATH"]


def test_a_disk_that_is_too_small_is_an_error_with_needed_and_free(tmp_path: Path) -> None:
    done = bench(tmp_path, "--size", "1024PiB", "--rw", "read")
    assert done.exit_code == 1
    assert "1,099,511,627,776.00 MiB are needed" in done.stderr
    assert "lower --size" in done.stderr
    assert list(tmp_path.iterdir()) == []


# ---- figures ----

CASE_KEYS = [
    "rw", "size_bytes", "block_bytes", "queue_depth", "page_bytes", "backend", "bytes_per_s", "requests_per_s", "cpu_s_per_gb", "shorts",
    "retries", "latency_us", "in_flight", "runs", "peers", "ratios",
]  # fmt: skip


def test_the_json_is_frozen(tmp_path: Path) -> None:
    answer = json_of(tmp_path, *TINY, "--rw", "mixed")
    assert list(answer) == ["path", "direct", "alignment_bytes", "file_bytes", "versions", "cpus", "load", "cases", "notes"]
    assert answer["path"] == str(tmp_path)
    (case,) = answer["cases"]
    assert list(case) == CASE_KEYS
    assert (case["rw"], case["size_bytes"], case["block_bytes"], case["queue_depth"], case["page_bytes"]) == (
        "mixed",
        262144,
        16384,
        4,
        None,
    )
    assert list(case["bytes_per_s"]) == ["median", "min", "max"]
    assert list(case["latency_us"]) == ["read", "write"]
    for stages in case["latency_us"].values():
        assert list(stages) == ["submission", "completion", "total"]
        for figures in stages.values():
            assert list(figures) == ["p50", "p90", "p99", "p99.9", "max"]
            assert 0 <= figures["p50"] <= figures["p99.9"] <= figures["max"]
    assert sum(bucket["count"] for bucket in case["in_flight"]) == 16
    assert all(list(bucket) == ["from", "below", "count"] and 1 <= bucket["from"] <= 4 for bucket in case["in_flight"])
    assert [list(run) for run in case["runs"]] == [["seconds", "read_bytes", "write_bytes", "cpu_s"]] * 2
    assert {(run["read_bytes"], run["write_bytes"]) for run in case["runs"]} == {(131072, 131072)}
    assert (case["shorts"], case["retries"], case["peers"], case["ratios"]) == (0, 0, [], {})


def test_with_json_nothing_else_is_on_stdout(tmp_path: Path) -> None:
    done = bench(tmp_path, *TINY, "--json")
    assert json.loads(done.stdout)["cases"]
    assert "Throughput" in done.stderr


def test_table_and_picture_have_a_line_for_each_case(tmp_path: Path) -> None:
    done = bench(tmp_path, *TINY, "--pages", "4", "--backend", "auto,threads")
    assert done.exit_code == 0, done.output
    for direction in ("read", "write", "mixed"):
        for name in (f"{direction} 16KiB x 4 in 4 of 64KiB", f"{direction} 16KiB x 4 in 4 of 64KiB by threads"):
            assert sum(line.strip().startswith(name) for line in done.stdout.splitlines()) >= 4, name
    assert done.stdout.count("█") >= 6
    assert done.stdout.count("completion") == 8


def test_a_backend_that_does_not_exist_here_is_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from infinity import task_queue

    real = task_queue.TaskQueue.__init__

    def refuse(self: Any, files: Any, **options: Any) -> None:
        if options.get("backend") is Backend.URING:
            raise OSError(38, "task queue (uring): Function not implemented")
        real(self, files, **options)

    monkeypatch.setattr(task_queue.TaskQueue, "__init__", refuse)
    done = bench(tmp_path, *TINY, "--backend", "uring")
    assert done.exit_code == 1
    assert "Function not implemented" in done.stderr
    assert "Traceback" not in done.output


# ---- peers ----


def test_fio_is_measured_and_the_ratio_to_its_better_engine_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = install_fio(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    answer = json_of(tmp_path, *TINY, "--against", "fio", "--rw", "read,mixed")
    assert answer["notes"] == [UNLIKE_MEMORY]
    for case in answer["cases"]:
        assert [(peer["name"], peer["variant"], peer["version"]) for peer in case["peers"]] == [
            ("fio", "io_uring", "3.33"),
            ("fio", "libaio", "3.33"),
        ]
        assert case["peers"][1]["bytes_per_s"]["median"] == 262144 / 0.010
        ratio = case["ratios"]["fio"]
        assert ratio["variant"] == "libaio"
        expected = sorted(262144 / run["seconds"] / (262144 / 0.010) for run in case["runs"])
        assert (ratio["min"], ratio["max"]) == (pytest.approx(expected[0]), pytest.approx(expected[-1]))
    assert [run["rw"] for run in runs_of(log)] == ["read"] * 6 + ["rw"] * 6


def test_peers_may_have_huge_pages_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "fio"
    program.write_text(f'#!/bin/sh\necho "$GLIBC_TUNABLES" >> {tmp_path}/tunables\necho fio-3.33\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    for more in ([], ["--peer-huge-pages"]):
        bench(tmp_path, *TINY, "--against", "fio", "--rw", "read", *more)
    seen = (tmp_path / "tunables").read_text().splitlines()
    assert set(seen[: len(seen) // 2]) == {""}
    assert set(seen[len(seen) // 2 :]) == {"glibc.malloc.hugetlb=1"}


def test_the_table_says_how_many_times_as_fast_we_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_fio(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    done = bench(tmp_path, *TINY, "--against", "fio", "--rw", "read")
    assert done.exit_code == 0, done.output
    assert "infinity is" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if "fio libaio" in line and "x (" in line]
    assert "26 MB/s" in line


def test_peers_that_are_not_there_cost_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "deepspeed.py").write_text("raise ImportError('No module named deepspeed')")
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("PATH", str(tmp_path))
    answer = json_of(tmp_path, *TINY, "--against", "fio", "--against", "deepspeed", "--rw", "read")
    assert len(answer["notes"]) == 2
    assert answer["notes"][0].startswith("fio is not installed")
    assert answer["notes"][1].startswith("DeepSpeed is not installed")
    assert answer["cases"][0]["bytes_per_s"]["median"] > 0


def test_deepspeed_is_measured_in_the_python_that_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", install_deepspeed(tmp_path / "site")["PYTHONPATH"])
    answer = json_of(tmp_path, *TINY, "--against", "deepspeed", "--pages", "4", "--rw", "read")
    (peer,) = answer["cases"][0]["peers"]
    assert (peer["name"], peer["version"]) == ("deepspeed", "0.19-fake")
    assert answer["cases"][0]["ratios"]["deepspeed"]["variant"] == "aio_handle"


# ---- traces ----


def make_trace(path: Path) -> None:
    with IoTrace(path) as trace:
        trace.begin({"backend": "uring", "queue_depth": 8, "block_nbytes": 65536}, str)
        batch = Batch()
        first = batch.read(3, 0, 131072, 1 << 40)
        batch.write(4, 4096, 65536, 1 << 40, [first])
        trace.record(1, batch)
        trace.end({"read_nbytes": 131072, "write_nbytes": 65536, "io_busy_s": 0.5})


def test_a_trace_is_replayed_beside_the_time_of_the_recorded_run(tmp_path: Path) -> None:
    make_trace(tmp_path / "t")
    answer = json_of(tmp_path, "--trace", tmp_path / "t", "--runs", "2")
    assert answer["tasks"] == {"read": 1, "write": 1, "flush": 0, "kernel": 0}
    assert answer["recorded"]["io_busy_s"] == 0.5
    assert [(run["read_bytes"], run["write_bytes"]) for run in answer["runs"]] == [(131072, 65536)] * 2
    assert sum(bucket["count"] for bucket in answer["in_flight"]) == 3
    done = bench(tmp_path, "--trace", tmp_path / "t", "--runs", "1", "--queue-depth", "1", "--block-size", "4KiB", "--paced")
    assert done.exit_code == 0, done.output
    assert "recorded, the whole run" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_options_that_a_trace_decides_are_refused_with_it(tmp_path: Path) -> None:
    make_trace(tmp_path / "t")
    done = bench(tmp_path, "--trace", tmp_path / "t", "--rw", "read", "--size", "1MiB", "--pages", "1", "--against", "fio")
    assert done.exit_code == 1
    assert [option for option in ("--rw", "--size", "--pages", "--against") if f"{option}: the trace says" not in done.stderr] == []


def test_a_bad_trace_is_a_message_with_the_line(tmp_path: Path) -> None:
    (tmp_path / "t").write_text('{"format": "infinity-io-trace", "version": 9}\n')
    done = bench(tmp_path, "--trace", tmp_path / "t")
    assert done.exit_code == 1
    assert f"{tmp_path / 't'}, line 1: a trace of version 9" in done.stderr
