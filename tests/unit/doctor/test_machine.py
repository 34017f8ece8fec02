"""Rows about the machine, on machines that are not this one."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinity.doctor import machine
from infinity.doctor.rows import Status
from tests.unit.doctor.roots import root_with

GIB = 1 << 30
OWN = "sys/fs/cgroup/user.slice"


@pytest.mark.parametrize("name", ["SYSTEM", "PROCESSOR", "MEMORY"])
def test_a_machine_without_fault_has_only_rows_that_are_ok(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = root_with(tmp_path)
    rows = {row: check(root) for row, check in getattr(machine, name).items()}
    assert {row: found.status for row, found in rows.items()} == dict.fromkeys(rows, Status.OK)
    assert [found.name for found in rows.values()] == list(rows)


@pytest.mark.parametrize("name", ["SYSTEM", "PROCESSOR", "MEMORY"])
def test_where_nothing_can_be_read_every_row_is_still_there(tmp_path: Path, name: str) -> None:
    for row, check in getattr(machine, name).items():
        found = check(tmp_path)
        assert found.name == row
        assert found.value
        assert found.status is not Status.PROBLEM


def test_an_old_kernel_lacks_what_came_later(tmp_path: Path) -> None:
    found = machine.kernel_row(root_with(tmp_path, proc__sys__kernel__osrelease="5.4.0-150-generic"))
    assert found.status is Status.NOTICE
    assert "MREMAP_DONTUNMAP" in found.value
    assert "io_uring (from 5.1)" not in found.value
    assert found.facts == {"release": "5.4.0-150-generic"}


def test_a_kernel_of_two_digits_is_not_older_than_one_of_one(tmp_path: Path) -> None:
    assert machine.kernel_row(root_with(tmp_path, proc__sys__kernel__osrelease="6.10.3")).status is Status.OK


@pytest.mark.parametrize(
    ("changes", "sign"),
    [({".dockerenv": ""}, "/.dockerenv"), ({"proc__1__cgroup": "0::/kubepods/pod1"}, "the cgroup of process 1")],
)
def test_a_container_is_told_by_its_signs(tmp_path: Path, changes: dict[str, str], sign: str) -> None:
    found = machine.container_row(root_with(tmp_path, **changes))
    assert found.facts["container"] is True
    assert sign in found.value


def test_a_filter_of_system_calls_is_said(tmp_path: Path) -> None:
    found = machine.container_row(root_with(tmp_path, proc__self__status="Seccomp:\t2\n"))
    assert found.facts["seccomp"] is True


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"sys/fs/cgroup/user.slice/session-1.scope/cpu.max": "max 100000"}, None),
        ({"sys/fs/cgroup/user.slice/session-1.scope/cpu.max": "150000 100000"}, 1.5),
        ({"sys/fs/cgroup/user.slice/cpu.max": "50000 100000", "sys/fs/cgroup/cpu.max": "400000 100000"}, 0.5),
    ],
)
def test_the_least_quota_of_the_cgroups_binds(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    assert machine.cpu_quota(root_with(tmp_path, **files)) == quota


def test_a_quota_of_cgroups_of_version_1_is_read(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:cpu,cpuacct:/docker/abc\n1:name=systemd:/\n",
        "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "200000",
        "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
    }
    assert machine.cpu_quota(root_with(tmp_path, **files)) == 2


def test_a_quota_below_the_affinity_names_the_number_of_threads_to_set() -> None:
    found = machine.cores_of(8, 2.5)
    assert found.status is Status.NOTICE
    assert "OMP_NUM_THREADS=2" in found.remedy
    assert machine.cores_of(8, 8.0).status is Status.OK


def test_a_processor_without_avx2_is_a_notice_and_one_of_arm_is_not(tmp_path: Path) -> None:
    old = root_with(tmp_path / "old", proc__cpuinfo="processor : 0\nflags : sse2 sse4_2\n")
    arm = root_with(tmp_path / "arm", proc__cpuinfo="processor : 0\nFeatures : fp asimd crc32\n")
    assert machine.features_row(old).status is Status.NOTICE
    assert machine.features_row(arm).status is Status.OK
    assert machine.features_row(arm).facts["features"] == ["crc32", "asimd"]


def test_nodes_of_numa_are_counted(tmp_path: Path) -> None:
    found = machine.numa_row(root_with(tmp_path, sys__devices__system__node__node1__cpulist="2-3"))
    assert (found.status, found.facts["nodes"]) == (Status.NOTICE, 2)


def test_memory_and_swap_are_told_in_bytes(tmp_path: Path) -> None:
    root = root_with(tmp_path)
    assert machine.memory_row(root).facts == {"total_bytes": 16 * GIB, "available_bytes": 8 * GIB}
    assert machine.swap_row(root).facts == {"total_bytes": GIB, "used_bytes": GIB // 2}


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"sys/fs/cgroup/user.slice/session-1.scope/memory.max": "max"}, None),
        ({f"{OWN}/session-1.scope/memory.max": str(4 * GIB), f"{OWN}/memory.max": str(2 * GIB)}, 2 * GIB),
        ({"proc/self/cgroup": "9:memory:/a", "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "9223372036854771712"}, None),
        ({"proc/self/cgroup": "9:memory:/a", "sys/fs/cgroup/memory/a/memory.limit_in_bytes": str(3 * GIB)}, 3 * GIB),
    ],
)  # fmt: skip
def test_the_memory_limit_of_the_cgroups_is_the_least_and_below_the_machines(
    tmp_path: Path, files: dict[str, str], limit: int | None
) -> None:
    found = machine.memory_limit_row(root_with(tmp_path, **files))
    assert found.facts == {"limit_bytes": limit}
    assert found.status is (Status.OK if limit is None else Status.NOTICE)


def test_huge_pages_that_are_off_have_a_remedy(tmp_path: Path) -> None:
    found = machine.huge_pages_row(root_with(tmp_path, sys__kernel__mm__transparent_hugepage__enabled="always madvise [never]"))
    assert found.status is Status.NOTICE
    assert "echo madvise" in found.remedy


def test_few_mappings_have_a_remedy(tmp_path: Path) -> None:
    found = machine.map_count_row(root_with(tmp_path, proc__sys__vm__max_map_count="1000"))
    assert found.status is Status.NOTICE
    assert "vm.max_map_count" in found.remedy


def test_a_small_limit_of_locked_memory_binds_only_those_without_the_capability() -> None:
    assert machine.memlock_of(8 << 20, 8 << 20, False).status is Status.NOTICE
    assert machine.memlock_of(8 << 20, 8 << 20, True).status is Status.OK
    assert machine.memlock_of(None, None, False).status is Status.OK
    assert "ulimit -l unlimited" in machine.memlock_of(8 << 20, None, False).remedy


@pytest.mark.parametrize(
    ("soft", "status"), [(None, Status.OK), (1024, Status.OK), (512, Status.NOTICE), (64, Status.NOTICE), (63, Status.PROBLEM)]
)
def test_open_files(soft: int | None, status: Status) -> None:
    found = machine.nofile_of(soft, None)
    assert found.status is status
    assert bool(found.remedy) == (status is not Status.OK)


def test_limits_that_bind_are_notices_with_a_remedy() -> None:
    for found in (machine.fsize_of(1 << 20), machine.nproc_of(100), machine.address_space_of(1 << 32)):
        assert found.status is Status.NOTICE
        assert "ulimit" in found.remedy
    for found in (machine.fsize_of(None), machine.nproc_of(None), machine.nproc_of(4096), machine.address_space_of(None)):
        assert found.status is Status.OK
