"""The whole report, and the command that shows it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from infinity import doctor
from infinity.cli import app
from infinity.doctor import Report, Row, Section, Status, examine, machine
from infinity.doctor.rows import guarded
from tests.unit.doctor.roots import root_with

SECTIONS = ["system", "versions", "processor", "memory", "I/O backends", "limits of this process", "path", "tools"]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"})


def report_of(*statuses: Status) -> Report:
    rows = (Row(f"row {index}", status, "a [value]", "" if status is Status.OK else "do [this]") for index, status in enumerate(statuses))
    return Report((Section("section", tuple(rows)),))


def test_this_machine_can_run_infinity(tmp_path: Path) -> None:
    done = run(str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "infinity works here" in done.stdout


def test_the_shape_of_the_json_is_frozen(tmp_path: Path) -> None:
    done = run(str(tmp_path), str(tmp_path / "missing"), "--json")
    assert done.exit_code == 1
    report = json.loads(done.stdout)
    assert list(report) == ["infinity", "problems", "notices", "sections"]
    names = [section["name"] for section in report["sections"]]
    assert names == [*SECTIONS[:-2], f"path {tmp_path}", f"path {tmp_path / 'missing'}", "tools"]
    rows = [row for section in report["sections"] for row in section["rows"]]
    assert all(list(row) == ["name", "status", "value", "remedy", "facts"] for row in rows)
    assert {row["status"] for row in rows} <= {"ok", "notice", "problem"}
    assert report["problems"] == sum(row["status"] == "problem" for row in rows) == 1


def test_the_rows_of_the_json_are_frozen(tmp_path: Path) -> None:
    sections = json.loads(run(str(tmp_path), "--json").stdout)["sections"]
    assert {section["name"].split()[0]: [row["name"] for row in section["rows"]] for section in sections} == {
        "system": ["kernel", "container"],
        "versions": ["Python", "infinity", "native module", "page checksums", "numpy", "torch", "CUDA"],
        "processor": ["model", "cores", "features", "NUMA"],
        "memory": ["memory", "memory limit", "swap", "huge pages", "memory mappings"],
        "I/O": ["uring", "libaio", "threads", "quota of libaio"],
        "limits": ["locked memory", "open files", "length of a file", "processes and threads", "address space"],
        "path": ["directory", "file system", "device", "O_DIRECT", "free space", "inodes", "disk quota", "leftovers"],
        "tools": ["fio", "C++ compiler"],
    }


def test_the_current_directory_is_looked_at_where_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [section["name"] for section in json.loads(run("--json").stdout)["sections"]][-2] == "path ."


@pytest.mark.parametrize(
    ("statuses", "code", "text"),
    [
        ((Status.OK,), 0, "infinity works here: no problems, no notices"),
        ((Status.NOTICE, Status.NOTICE), 0, "infinity works here: no problems, 2 notices"),
        ((Status.PROBLEM, Status.NOTICE), 1, "infinity will not work here as it is: 1 problem, 1 notice"),
    ],
)
def test_only_problems_make_the_exit_code_1(statuses: tuple[Status, ...], code: int, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda paths: report_of(*statuses))
    done = run()
    assert done.exit_code == code
    assert text in done.stdout
    assert "a [value]" in done.stdout
    assert ("-> do [this]" in done.stdout) == (statuses != (Status.OK,))


def test_no_problem_of_any_machine_is_without_remedy(tmp_path: Path) -> None:
    files = {"proc/cpuinfo": "", "proc/meminfo": "", "proc/sys/vm/max_map_count": "x", "proc/self/cgroup": None}
    worst = root_with(tmp_path, proc__sys__kernel__osrelease="3.10.0", **files)
    for root in (worst, tmp_path / "nothing", Path("/")):
        for row in examine([tmp_path, tmp_path / "missing", tmp_path / "proc/cpuinfo"], root).having(Status.PROBLEM):
            assert row.remedy, row
    assert all(row.remedy for row in (machine.nofile_of(1, 1),))


def test_a_check_that_fails_is_a_row_and_the_others_are_there() -> None:
    def fail() -> Row:
        raise ZeroDivisionError("by zero")

    found = guarded("the row", fail)
    assert (found.name, found.status) == ("the row", Status.NOTICE)
    assert "ZeroDivisionError: by zero" in found.value


def test_without_the_native_module_the_report_is_made_and_says_how_to_build_it(tmp_path: Path) -> None:
    code = (
        "import sys, json; sys.modules['infinity._native'] = None\n"
        "from infinity.cli import app\n"
        f"app(['doctor', {str(tmp_path)!r}, '--json'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    rows = {row["name"]: row for section in json.loads(done.stdout)["sections"] for row in section["rows"]}
    assert rows["native module"]["status"] == "problem"
    assert "C++17" in rows["native module"]["remedy"]
    assert rows["free space"]["status"] in ("ok", "notice")


def test_help_names_every_option_of_doctor() -> None:
    done = run("--help")
    assert [option for option in ("[PATH]...", "--json", "--traceback") if option not in done.stdout] == []
