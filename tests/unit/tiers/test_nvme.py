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
from infinity.tiers.nvme import NvmeBacking, check_path, remove_leftovers

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
    assert [path.name for path in tmp_path.iterdir()] == [os.path.basename(backing.directory)]
    assert os.listdir(backing.directory) == []
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
    assert os.path.isdir(first.directory)
    first.close()


def buffered(backing: NvmeBacking) -> BinaryIO:
    fd, _ = backing.place(0)
    return open(f"/proc/self/fd/{fd}", "r+b", buffering=0)


def test_a_backing_without_slots_opens_no_file(files: Files, tmp_path: Path) -> None:
    make_backing(files, tmp_path, 0).close()
    assert files.count(FileOp.OPEN) == 0


def test_the_empty_directory_of_a_dead_process_is_removed(files: Files, tmp_path: Path) -> None:
    leftover = tmp_path / f"infinity-{os.getpid()}-0123456789abcdef"
    leftover.mkdir()
    backing = make_backing(files, tmp_path)
    assert not leftover.exists()
    backing.close()


def test_a_file_left_between_open_and_unlink_is_removed(tmp_path: Path) -> None:
    leftover = tmp_path / "infinity-1-0123456789abcdef"
    leftover.mkdir()
    (leftover / "pages-0").write_bytes(b"x")
    remove_leftovers(str(tmp_path))
    assert not leftover.exists()


@pytest.mark.parametrize("name", ["infinity-1-0123456789abcdef/notes.txt", "infinity-x/pages-0", "mine/pages-0"])
def test_what_is_not_ours_is_never_removed(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir()
    path.write_bytes(b"precious")
    remove_leftovers(str(tmp_path))
    assert path.read_bytes() == b"precious"


def test_a_link_with_our_name_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "elsewhere"
    precious.mkdir()
    (precious / "pages-0").write_bytes(b"precious")
    parent = tmp_path / "parent"
    parent.mkdir()
    (parent / "infinity-1-0123456789abcdef").symlink_to(precious)
    remove_leftovers(str(parent))
    assert (precious / "pages-0").read_bytes() == b"precious"


def test_the_directory_of_a_living_process_is_left_alone(tmp_path: Path) -> None:
    directory = tmp_path / "infinity-1-0123456789abcdef"
    directory.mkdir()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            fd = os.open(directory, os.O_RDONLY)
            fcntl.fcntl(fd, fcntl.F_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, 0, 0, 0))
            os.write(writer, b"locked")
            signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    try:
        assert os.read(reader, 6) == b"locked"
        remove_leftovers(str(tmp_path))
        assert directory.exists()
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    remove_leftovers(str(tmp_path))
    assert not directory.exists()


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


def test_a_file_size_limit_is_found_at_the_start(tmp_path: Path) -> None:
    program = f"""
import resource
from infinity.errors import SpaceError
from infinity.task_queue import Files
from infinity.tiers.nvme import NvmeBacking
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
try:
    NvmeBacking(Files(), {str(tmp_path)!r}, page_nbytes=4096, n_slots=1024)
except SpaceError as error:
    print(error.needed_bytes, error.free_bytes, "RLIMIT_FSIZE" in str(error))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(4 << 20), str(1 << 20), "True"]


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
    assert os.path.isdir(backing.directory)
    os.fstat(backing.place(0)[0])
    backing.close()


def test_a_good_path_has_no_problem_and_nothing_is_left_in_it(tmp_path: Path) -> None:
    assert check_path(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_missing_path_is_named_with_the_way_to_make_it(tmp_path: Path) -> None:
    problem = check_path(tmp_path / "missing")
    assert problem is not None
    assert f"mkdir -p {tmp_path / 'missing'}" in problem


def test_a_path_that_is_a_file_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    problem = check_path(tmp_path / "file")
    assert problem is not None
    assert "not a directory" in problem


@pytest.mark.parametrize(
    ("code", "text"), [(errno.EACCES, "right to write"), (errno.EROFS, "Mount it writable"), (errno.ENOSPC, "Free some space")]
)
def test_a_path_that_cannot_be_written_is_a_problem_with_a_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, text: str
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "open", refuse)
    problem = check_path(tmp_path)
    assert problem is not None
    assert text in problem


def test_a_path_that_is_full_is_found_by_the_write_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", lambda fd, data: 0)
    problem = check_path(tmp_path)
    assert problem is not None
    assert "No space left" in problem
    assert list(tmp_path.iterdir()) == []


def test_a_start_whose_directory_was_taken_for_a_leftover_begins_again(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_files = NvmeBacking._open_files
    taken: list[str] = []

    def after_a_cleaner(backing: NvmeBacking, files: Files) -> tuple[bool, int]:
        if not taken:
            taken.append(backing.directory)
            os.rmdir(backing.directory)  # it was looked at before it was locked, and goes before there is a file in it
        return open_files(backing, files)

    monkeypatch.setattr(NvmeBacking, "_open_files", after_a_cleaner)
    backing = make_backing(files, tmp_path)
    assert taken != [backing.directory]
    assert backing.place(0)[0] >= 0
    backing.close()
    assert list(tmp_path.iterdir()) == []
