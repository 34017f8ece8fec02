from __future__ import annotations

import errno
import fcntl
import os
import signal
import struct
from pathlib import Path

import pytest

from infinity.task_queue import Files
from infinity.tiers.nvme_path import NvmePath, check_path, check_paths, file_system, free_bytes, remove_leftovers


def test_the_empty_directory_of_a_dead_process_is_removed(tmp_path: Path) -> None:
    leftover = tmp_path / f"infinity-{os.getpid()}-0123456789abcdef"
    leftover.mkdir()
    path = NvmePath(Files(), tmp_path, slot_nbytes=4096, n_slots_max=1)
    assert not leftover.exists()
    path.close()


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


def test_a_directory_under_two_names_is_a_problem_of_the_second(tmp_path: Path) -> None:
    first, other, link = tmp_path / "first", tmp_path / "other", tmp_path / "link"
    first.mkdir()
    other.mkdir()
    link.symlink_to(first)
    problems = check_paths([first, other, link, tmp_path / "missing"])
    assert problems[:2] == [None, None]
    assert problems[2] is not None
    assert f"the same directory as {first}" in problems[2]
    assert problems[3] is not None
    assert "does not exist" in problems[3]


def test_a_dangling_link_is_a_directory_that_does_not_exist(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    problem = check_path(tmp_path / "link")
    assert problem is not None
    assert "does not exist" in problem


def test_the_file_system_of_a_path_is_named_as_the_kernel_does() -> None:
    assert file_system("/proc") == "proc"
    assert file_system("/proc/self") == "proc"
    assert file_system("/proc-not-there") != "proc"


def test_where_the_file_system_does_not_say_what_is_free_nothing_is_claimed() -> None:
    assert free_bytes("/proc") is None
    assert (free_bytes("/") or 0) > 0


def test_reserving_less_than_before_gives_the_rest_back(tmp_path: Path) -> None:
    path = NvmePath(Files(), tmp_path, slot_nbytes=4096, n_slots_max=100, file_nbytes_max=40 * 4096)
    path.reserve(100)
    assert [os.fstat(fd).st_size // 4096 for fd in path.fds] == [40, 40, 20]
    path.reserve(50)
    assert [os.fstat(fd).st_size // 4096 for fd in path.fds] == [40, 10, 0]
    assert os.fstat(path.fds[0]).st_blocks * 512 >= 40 * 4096
    path.reserve(90)
    assert [os.fstat(fd).st_size // 4096 for fd in path.fds] == [40, 40, 10]
    path.close()
