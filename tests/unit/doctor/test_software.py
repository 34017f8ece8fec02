"""Rows about versions, backends and tools."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from infinity.doctor import software
from infinity.doctor.rows import Status
from infinity.task_queue import Backend, BackendProbe
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


@pytest.mark.parametrize("name", ["uring", "libaio"])
def test_a_backend_that_does_not_work_is_a_notice_with_its_reason_and_its_remedy(name: str) -> None:
    found = software.backend_row(BackendProbe(name, False, "it is forbidden", "Allow it."))
    assert (found.name, found.status, found.value) == (name, Status.NOTICE, "does not work: it is forbidden")
    assert found.remedy.startswith("Allow it.")
    assert found.facts["works"] is False


def test_no_backend_works_without_threads() -> None:
    found = software.backend_row(BackendProbe("threads", False, "no thread can be started", ""))
    assert found.status is Status.PROBLEM
    assert found.remedy


def test_a_backend_that_works_not_as_asked_says_why() -> None:
    found = software.backend_row(BackendProbe("libaio", True, "fs.aio-max-nr is 8", "Raise it."))
    assert (found.status, found.value, found.remedy) == (Status.NOTICE, "works, but fs.aio-max-nr is 8", "Raise it.")


def test_a_backend_that_works_is_ok() -> None:
    found = software.backend_row(BackendProbe("libaio", True, "", ""), "through libaio.so.1", library="libaio.so.1")
    assert (found.status, found.value) == (Status.OK, "works, through libaio.so.1")
    assert found.facts == {"works": True, "reason": "", "library": "libaio.so.1"}


def test_every_backend_of_this_build_is_probed_and_threads_work() -> None:
    assert set(software.probes()) == {backend.value for backend in Backend if backend is not Backend.AUTO}
    assert software.probes()["threads"].works


def test_a_quota_of_libaio_that_is_used_up_has_a_remedy(tmp_path: Path) -> None:
    found = software.aio_quota_row(root_with(tmp_path, **{"proc/sys/fs/aio-nr": "65000"}))
    assert (found.status, found.facts) == (Status.NOTICE, {"used": 65000, "limit": 65536})
    assert "fs.aio-max-nr" in found.remedy


def test_a_tool_that_is_missing_says_what_it_would_be_for() -> None:
    found = software.tool_row("fio", ("no-such-command",), "compares")
    assert (found.status, found.value, found.facts) == (Status.OK, "not installed; compares", {"path": None})
    assert software.tool_row("sh", ("no-such-command", "sh"), "x").facts["path"]
