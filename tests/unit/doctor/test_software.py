"""Rows about versions, backends and tools."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from infinity.doctor import software
from infinity.doctor.rows import Status
from tests.unit.doctor.roots import root_with

ROOT = Path(__file__).resolve().parents[3]


def test_the_least_versions_are_those_of_pyproject() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert re.findall(r'requires-python = ">=(\d+)\.(\d+)"|"torch>=(\d+)\.(\d+)"', text) == [
        (*map(str, software.PYTHON_MIN), "", ""),
        ("", "", *map(str, software.TORCH_MIN)),
    ]


def test_versions_of_this_machine_are_there(tmp_path: Path) -> None:
    rows = {name: check(Path("/")) for name, check in software.VERSIONS.items()}
    assert [row.name for row in rows.values()] == list(rows)
    assert [name for name, row in rows.items() if row.status is Status.PROBLEM] == []
    assert str(rows["Python"].facts["version"]).count(".") == 2


def test_a_checksum_that_is_wrong_is_a_problem() -> None:
    assert software.crc_row(0xE3069283, 0xE3069283, 20e9, 1e9).status is Status.OK
    assert software.crc_row(0xE3069283, 0xE3069283, 1e9, 1e9).status is Status.NOTICE
    assert software.crc_row(1, 0xE3069283, 20e9, 1e9).status is Status.PROBLEM
    assert software.crc_row(0xE3069283, 1, 20e9, 1e9).status is Status.PROBLEM


def test_no_driver_and_no_device_is_no_cuda() -> None:
    found = software.cuda_devices_row(None, None, [])
    assert (found.status, found.value) == (Status.OK, "no CUDA: the CPU is the device")


@pytest.mark.parametrize(("built_for", "text"), [(None, "CPU build"), ("12.8", "finds no device")])
def test_a_driver_without_a_device_is_a_notice(built_for: str | None, text: str) -> None:
    found = software.cuda_devices_row("570.1", built_for, [])
    assert found.status is Status.NOTICE
    assert text in found.value
    assert found.remedy


def test_devices_are_listed_with_their_memory() -> None:
    found = software.cuda_devices_row("570.1", "12.8", [("A", 80 << 30), ("B", 24 << 30)])
    assert found.value == "A (80.00 GiB), B (24.00 GiB); torch built for 12.8, driver 570.1"
    assert found.facts["devices"] == [{"name": "A", "nbytes": 80 << 30}, {"name": "B", "nbytes": 24 << 30}]


@pytest.mark.parametrize(
    ("why", "changes", "remedy"),
    [
        ("[EPERM] x", {"proc__sys__kernel__io_uring_disabled": "2"}, "kernel.io_uring_disabled=0"),
        ("[EPERM] x", {"proc__sys__kernel__io_uring_disabled": "1", "proc__sys__kernel__io_uring_group": "1000"}, "(1000)"),
        ("[EPERM] x", {"proc__self__status": "Seccomp:\t2\n"}, "seccomp profile"),
        ("[ENOSYS] x", {"proc__sys__kernel__osrelease": "4.18.0-553"}, "5.1 or newer"),
        ("[ENOMEM] x", {}, "ulimit -l"),
        ("[ENOSYS] x", {}, "CONFIG_IO_URING"),
    ],
)
def test_why_io_uring_does_not_work_has_its_own_remedy(tmp_path: Path, why: str, changes: dict[str, str | None], remedy: str) -> None:
    found = software.uring_answer(why, root_with(tmp_path, **changes))
    assert found.status is Status.NOTICE
    assert why in found.value
    assert remedy in found.remedy
    assert found.facts["works"] is False


def test_io_uring_that_works_is_ok_whatever_the_settings_say(tmp_path: Path) -> None:
    assert software.uring_answer(None, root_with(tmp_path, proc__sys__kernel__io_uring_disabled="1")).status is Status.OK


def test_libaio_needs_no_library() -> None:
    assert "system calls" in software.libaio_answer(None, None).value
    assert "libaio.so.1" in software.libaio_answer(None, "libaio.so.1").value
    assert "fs.aio-max-nr" in software.libaio_answer("[EAGAIN] x", None).remedy
    assert "CONFIG_AIO" in software.libaio_answer("[ENOSYS] x", None).remedy


def test_a_quota_of_libaio_that_is_used_up_has_a_remedy(tmp_path: Path) -> None:
    found = software.aio_quota_row(root_with(tmp_path, **{"proc/sys/fs/aio-nr": "65000"}))
    assert (found.status, found.facts) == (Status.NOTICE, {"used": 65000, "limit": 65536})
    assert "fs.aio-max-nr" in found.remedy


def test_a_tool_that_is_missing_says_what_it_would_be_for() -> None:
    found = software.tool_row("fio", ("no-such-command",), "compares")
    assert (found.status, found.value, found.facts) == (Status.OK, "not installed; compares", {"path": None})
    assert software.tool_row("sh", ("no-such-command", "sh"), "x").facts["path"]
