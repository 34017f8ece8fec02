"""Rows about a directory."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import pytest

from infinity.doctor import paths
from infinity.doctor.rows import Status
from infinity.task_queue import Files
from infinity.tiers.nvme import NvmeBacking

MOUNTINFO = """\
22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw
30 22 0:30 / /dev/shm rw,nosuid shared:2 - tmpfs tmpfs rw,size=1k
31 22 8:1 / /data\\040disk rw - xfs /dev/sda1 ro,usrquota
32 22 0:40 / /data\\040disk rw - nfs4 server:/export rw
not a mount
"""


def mount(kind: str, device: str = "0:1", source: str = "x") -> paths.Mount:
    return paths.Mount(device, "/mnt", kind, source, frozenset())


def disk(**fields: int) -> os.statvfs_result:
    names = ["f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_favail", "f_flag", "f_namemax"]
    values = {"f_frsize": 4096, "f_blocks": 1 << 30, "f_bavail": 1 << 29, "f_files": 100, "f_favail": 50, **fields}
    return os.statvfs_result([values.get(name, 0) for name in names])


def test_a_path_is_on_the_deepest_mount_and_the_last_of_those_at_one_place() -> None:
    mounts = paths.parse_mounts(MOUNTINFO)
    assert len(mounts) == 4
    kinds = {
        path: found.kind for path in ("/", "/home/a", "/dev/shm", "/dev/shmem", "/data disk/x") if (found := paths.mount_of(path, mounts))
    }
    assert kinds == {"/": "ext4", "/home/a": "ext4", "/dev/shm": "tmpfs", "/dev/shmem": "ext4", "/data disk/x": "nfs4"}


def test_without_mounts_no_file_system_is_known() -> None:
    assert paths.mount_of("/a", []) is None
    assert paths.file_system_row(None).status is Status.NOTICE


@pytest.mark.parametrize("kind", ["ext4", "xfs", "f2fs"])
def test_a_file_system_on_a_drive_is_ok(kind: str) -> None:
    assert paths.file_system_row(mount(kind)).status is Status.OK


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("tmpfs", "it is memory"), ("overlay", "layers of a container"), ("nfs4", "network"), ("9p", "network"), ("virtiofs", "network"),
        ("fuse.sshfs", "FUSE"), ("fuseblk", "FUSE"), ("btrfs", "copies on write"), ("zfs", "copies on write"),
    ],
)  # fmt: skip
def test_any_other_is_a_notice_that_says_why_and_what_instead(kind: str, text: str) -> None:
    found = paths.file_system_row(mount(kind))
    assert found.status is Status.NOTICE
    assert text in found.value
    assert found.remedy


def make_drive(root: Path, name: str, *, rotational: str, partition: str = "", where: str = "devices/pci0/nvme") -> None:
    drive = root / "sys" / where / name
    (drive / "queue").mkdir(parents=True)
    (drive / "device").mkdir()
    (drive / "device/model").write_text("Fast 9000\n")
    (drive / "queue/rotational").write_text(rotational)
    (drive / "queue/scheduler").write_text("[none] mq-deadline\n")
    node = drive / partition if partition else drive
    node.mkdir(exist_ok=True)
    (root / "sys/dev/block").mkdir(parents=True)
    (root / "sys/dev/block/259:1").symlink_to(node)


def test_a_partition_is_told_by_its_drive(tmp_path: Path) -> None:
    make_drive(tmp_path, "nvme0n1", rotational="0", partition="nvme0n1p1")
    found = paths.device_row(mount("ext4", "259:1"), tmp_path)
    assert found.status is Status.OK
    assert found.facts == {"device": "nvme0n1p1", "model": "Fast 9000", "rotational": False, "scheduler": "none"}


def test_a_drive_that_turns_is_a_notice_unless_it_is_virtual(tmp_path: Path) -> None:
    make_drive(tmp_path / "disk", "sda", rotational="1")
    make_drive(tmp_path / "virtual", "vda", rotational="1", where="devices/pci0/virtio1/block")
    assert paths.device_row(mount("ext4", "259:1"), tmp_path / "disk").status is Status.NOTICE
    assert paths.device_row(mount("ext4", "259:1"), tmp_path / "virtual").status is Status.OK


def test_a_device_that_sys_does_not_know_is_said(tmp_path: Path) -> None:
    assert paths.device_row(mount("btrfs", "0:30", "/dev/sdz1"), tmp_path).status is Status.OK
    assert paths.device_row(None, tmp_path).status is Status.OK


@pytest.mark.parametrize(("blocks", "status"), [(0, Status.PROBLEM), (1000, Status.NOTICE), (1 << 20, Status.OK)])
def test_free_space(blocks: int, status: Status) -> None:
    found = paths.space_row(disk(f_bavail=blocks))
    assert (found.status, found.facts["free_bytes"]) == (status, blocks * 4096)
    assert bool(found.remedy) == (status is not Status.OK)


def test_no_inode_left_is_a_problem_and_a_file_system_that_counts_none_is_ok() -> None:
    assert paths.inodes_row(disk(f_favail=0)).status is Status.PROBLEM
    assert paths.inodes_row(disk(f_files=0, f_favail=0)).status is Status.OK
    assert paths.inodes_row(disk()).facts == {"free": 50}


@pytest.mark.parametrize(
    ("hard", "soft", "used", "valid", "status", "limit"),
    [
        (10 << 20, 0, 0, 1, Status.OK, 10 << 30),
        (0, 10 << 20, 0, 1, Status.OK, 10 << 30),
        (10 << 20, 0, (10 << 30) - 1, 1, Status.NOTICE, 10 << 30),
        (0, 0, 5, 1, Status.OK, None),
        (10, 10, 5, 0, Status.OK, None),
    ],
)
def test_a_disk_quota(hard: int, soft: int, used: int, valid: int, status: Status, limit: int | None) -> None:
    found = paths.quota_of(struct.pack("=8QI4x", hard, soft, used, 0, 0, 0, 0, 0, valid))
    assert (found.status, found.facts.get("limit_bytes")) == (status, limit)


def test_a_missing_directory_is_one_problem_with_its_remedy(tmp_path: Path) -> None:
    (found,) = paths.path_rows(tmp_path / "missing. really", Path("/"))
    assert (found.status, found.value) == (Status.PROBLEM, "does not exist")
    assert f"mkdir -p {tmp_path / 'missing. really'}" in found.remedy


def test_a_directory_that_cannot_be_written_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refuse)
    rows = {row.name: row for row in paths.path_rows(tmp_path, Path("/"))}
    assert rows["directory"].status is Status.PROBLEM
    assert "Mount it writable" in rows["directory"].remedy
    assert "not tried" in rows["O_DIRECT"].value


def test_o_direct_is_tried_and_nothing_is_left(tmp_path: Path) -> None:
    found = paths.direct_row(str(tmp_path), writable=True)
    assert found.facts["works"] in (True, False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["open", "write"])
def test_o_direct_that_is_refused_is_a_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(*((Files, "open") if where == "open" else (os, "pwrite")), refuse)
    found = paths.direct_row(str(tmp_path), writable=True)
    assert (found.status, found.facts) == (Status.NOTICE, {"works": False})
    assert "page cache" in found.remedy
    assert list(tmp_path.iterdir()) == []


def test_a_drive_that_gives_back_something_else_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: len(buffers[0]))
    assert paths.direct_row(str(tmp_path), writable=True).status is Status.PROBLEM


def test_directories_of_dead_runs_are_listed_and_left_and_those_of_the_living_are_not(tmp_path: Path) -> None:
    dead = tmp_path / "infinity-1-0123456789abcdef"
    dead.mkdir()
    (tmp_path / "something else").mkdir()
    backing = NvmeBacking(Files(), tmp_path / "something else", page_nbytes=4096, n_slots=1)
    os.rename(dead, tmp_path / "something else" / dead.name)
    found = paths.leftovers_row(str(tmp_path / "something else"))
    backing.close()
    assert found.status is Status.NOTICE
    assert found.facts["directories"] == [str(tmp_path / "something else" / dead.name)]
    assert (tmp_path / "something else" / dead.name).is_dir()


def test_a_directory_of_this_machine_has_every_row(tmp_path: Path) -> None:
    names = ["directory", "file system", "device", "O_DIRECT", "free space", "inodes", "disk quota", "leftovers"]
    assert [row.name for row in paths.path_rows(tmp_path, Path("/"))] == names
