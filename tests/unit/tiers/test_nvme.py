from __future__ import annotations

import errno
import fcntl
import logging
import os
import resource
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import pytest

from infinity.errors import IoError, SpaceError
from infinity.faults import Fault
from infinity.task_queue import FileOp, Files
from infinity.tiers.nvme import NvmeBacking
from infinity.tiers.nvme_path import NvmePath, remove_leftovers

PAGE_NBYTES = 4096


@pytest.fixture
def files() -> Files:
    return Files()


def make_backing(files: Files, directory: Path, n_slots: int = 8, **arguments: int) -> NvmeBacking:
    return NvmeBacking(files, directory, page_nbytes=PAGE_NBYTES, n_slots=n_slots, **arguments)


def test_each_slot_has_a_place_of_its_own(files: Files, tmp_path: Path) -> None:
    backing = make_backing(files, tmp_path, 7, file_nbytes_max=3 * PAGE_NBYTES)
    places = [backing.place(slot) for slot in range(7)]
    assert len({fd for fd, _ in places}) == 3
    assert len(set(places)) == 7
    assert all(offset % PAGE_NBYTES == 0 for _, offset in places)
    backing.close()


def test_all_slots_are_reserved_at_the_start(files: Files, tmp_path: Path) -> None:
    backing = make_backing(files, tmp_path, 100)
    status = os.fstat(backing.place(0)[0])
    assert status.st_size == 100 * PAGE_NBYTES
    assert status.st_blocks * 512 >= 100 * PAGE_NBYTES
    backing.close()


def test_the_files_have_no_name(files: Files, tmp_path: Path) -> None:
    backing = make_backing(files, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [os.path.basename(backing.paths[0].directory)]
    assert os.listdir(backing.paths[0].directory) == []
    assert os.fstat(backing.place(0)[0]).st_nlink == 0
    backing.close()


def test_close_leaves_nothing_and_may_be_called_twice(files: Files, tmp_path: Path) -> None:
    backing = make_backing(files, tmp_path)
    fd, _ = backing.place(0)
    backing.close()
    backing.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_forgotten_backing_leaves_nothing(files: Files, tmp_path: Path) -> None:
    backing = make_backing(files, tmp_path)
    del backing
    assert list(tmp_path.iterdir()) == []


def test_the_numbers_of_a_forgotten_backing_are_not_given_to_another_file(files: Files, tmp_path: Path) -> None:
    backing = make_backing(files, tmp_path)
    fd, _ = backing.place(0)
    del backing
    assert os.readlink(f"/proc/self/fd/{fd}") == os.devnull
    os.close(fd)


def test_two_backings_in_one_directory_do_not_touch_each_other(files: Files, tmp_path: Path) -> None:
    first = make_backing(files, tmp_path)
    with buffered(first) as file:
        file.write(b"first" * 100)
    second = make_backing(files, tmp_path)
    with buffered(second) as file:
        file.write(b"other" * 100)
    assert len(list(tmp_path.iterdir())) == 2
    second.close()
    with buffered(first) as file:
        assert file.read(500) == b"first" * 100
    assert os.path.isdir(first.paths[0].directory)
    first.close()


def buffered(backing: NvmeBacking) -> BinaryIO:
    fd, _ = backing.place(0)
    return open(f"/proc/self/fd/{fd}", "r+b", buffering=0)


def test_a_backing_without_slots_opens_no_file(files: Files, tmp_path: Path) -> None:
    make_backing(files, tmp_path, 0).close()
    assert files.count(FileOp.OPEN) == 0


def test_more_slots_than_the_disk_has_room_for_are_refused_with_both_numbers(files: Files, tmp_path: Path) -> None:
    n_slots = 1 << 50
    with pytest.raises(SpaceError) as caught:
        make_backing(files, tmp_path, n_slots)
    assert caught.value.needed_bytes == n_slots * PAGE_NBYTES
    assert 0 < caught.value.free_bytes < n_slots * PAGE_NBYTES
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_disk_that_fills_up_while_reserving_is_refused_and_nothing_is_left(files: Files, tmp_path: Path, code: int) -> None:
    files.fault(FileOp.FALLOCATE, Fault.error(code))
    with pytest.raises(SpaceError) as caught:
        make_backing(files, tmp_path, 10)
    assert caught.value.needed_bytes == 10 * PAGE_NBYTES
    assert list(tmp_path.iterdir()) == []


LIMITED = """
import resource
from infinity.errors import SpaceError
from infinity.task_queue import Files
from infinity.tiers.nvme import NvmeBacking
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
try:
    backing = NvmeBacking(Files(), {directory!r}, page_nbytes=4096, n_slots=1024)
    print(len(backing.files()), max(backing.place(slot)[1] for slot in range(1024)))
except SpaceError as error:
    print(error.needed_bytes, error.free_bytes, "RLIMIT_FSIZE" in str(error))
"""


def under_a_file_size_limit(directory: Path, limit: int) -> list[str]:
    program = LIMITED.format(directory=str(directory), limit=limit)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()


def test_where_files_may_not_be_large_there_are_more_of_them(tmp_path: Path) -> None:
    assert under_a_file_size_limit(tmp_path, 1 << 20) == ["4", str((1 << 20) - 4096)]
    assert under_a_file_size_limit(tmp_path, (1 << 20) + 1) == ["4", str((1 << 20) - 4096)]


def test_a_file_size_limit_that_would_take_too_many_files_is_found_at_the_start(tmp_path: Path) -> None:
    assert under_a_file_size_limit(tmp_path, 4096) == [str(2 * 4096), "4096", "True"]
    assert under_a_file_size_limit(tmp_path, 100) == [str(2 * 4096), "100", "True"]


def test_the_limits_of_this_process_are_not_changed(files: Files, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    make_backing(files, tmp_path).close()
    assert resource.getrlimit(resource.RLIMIT_FSIZE) == before


def test_where_o_direct_does_not_work_pages_go_through_the_page_cache_and_that_is_said(
    files: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files.fault(FileOp.OPEN, Fault.error(errno.EINVAL))
    with caplog.at_level(logging.INFO):
        backing = make_backing(files, tmp_path, 6, file_nbytes_max=2 * PAGE_NBYTES)
    assert not backing.direct
    assert backing.alignment == 1
    assert not any(fcntl.fcntl(backing.place(slot)[0], fcntl.F_GETFL) & os.O_DIRECT for slot in range(6))
    assert [record.message.count("O_DIRECT") for record in caplog.records] == [1]
    backing.close()


def test_alignment_is_a_power_of_two_that_divides_a_slot(files: Files, tmp_path: Path) -> None:
    backing = make_backing(files, tmp_path)
    assert backing.slot_nbytes % backing.alignment == 0
    backing.close()


@pytest.mark.parametrize("op", [FileOp.OPEN, FileOp.FALLOCATE, FileOp.UNLINK], ids=lambda op: op.name)
def test_a_failure_at_the_start_is_an_io_error_and_leaves_no_file(files: Files, tmp_path: Path, op: FileOp) -> None:
    files.fault(op, Fault.error(errno.EIO))
    with pytest.raises(IoError) as caught:
        make_backing(files, tmp_path)
    assert caught.value.errno == errno.EIO
    assert str(tmp_path) in caught.value.path
    remove_leftovers(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_that_cannot_reserve_still_works(files: Files, tmp_path: Path) -> None:
    files.fault(FileOp.FALLOCATE, Fault.error(errno.EOPNOTSUPP))
    backing = make_backing(files, tmp_path, 10)
    assert os.fstat(backing.place(0)[0]).st_size == 10 * PAGE_NBYTES
    backing.close()


def test_a_missing_directory_is_an_io_error(files: Files, tmp_path: Path) -> None:
    with pytest.raises(IoError) as caught:
        make_backing(files, tmp_path / "missing")
    assert caught.value.errno == errno.ENOENT


def test_a_forked_child_closes_nothing_of_its_parent(files: Files, tmp_path: Path) -> None:
    backing = make_backing(files, tmp_path)
    child = os.fork()
    if child == 0:
        backing.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert os.path.isdir(backing.paths[0].directory)
    os.fstat(backing.place(0)[0])
    backing.close()


def test_a_start_whose_directory_was_taken_for_a_leftover_begins_again(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_first = NvmePath._open_first
    taken: list[str] = []

    def after_a_cleaner(path: NvmePath) -> tuple[bool, int]:
        if not taken:
            taken.append(path.directory)
            os.rmdir(path.directory)  # it was looked at before it was locked, and goes before there is a file in it
        return open_first(path)

    monkeypatch.setattr(NvmePath, "_open_first", after_a_cleaner)
    backing = make_backing(files, tmp_path)
    assert taken != [backing.paths[0].directory]
    assert backing.place(0)[0] >= 0
    backing.close()
    assert list(tmp_path.iterdir()) == []
