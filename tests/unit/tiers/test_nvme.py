from __future__ import annotations

import errno
import fcntl
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from infinity.errors import ConfigError, EngineClosedError, IoError, SpaceError
from infinity.faults import Fault
from infinity.task_queue import FileOp, Files, TaskQueue
from infinity.tiers import nvme
from infinity.tiers.frames import FramePool
from infinity.tiers.nvme import NvmeBacking
from infinity.tiers.nvme_path import NvmePath, remove_leftovers

PAGE_NBYTES = 4096


@pytest.fixture
def files() -> Files:
    return Files()


def make_backing(files: Files, directory: Path | list[Path], n_slots: int = 8, **arguments: Any) -> NvmeBacking:
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


# ---- several paths


def several(parent: Path, n: int) -> list[Path]:
    paths = [parent / f"path{index}" for index in range(n)]
    for path in paths:
        path.mkdir()
    return paths


def paths_of(backing: NvmeBacking) -> list[int]:
    """The path of each slot, by its descriptor."""
    path_of = dict(backing.files())
    return [path_of[backing.place(slot)[0]] for slot in range(backing.n_slots)]


def test_slots_go_to_the_paths_by_weight_and_each_has_a_place_of_its_own(files: Files, tmp_path: Path) -> None:
    backing = make_backing(files, several(tmp_path, 3), 60, weights=[3, 2, 1], file_nbytes_max=7 * PAGE_NBYTES)
    of = paths_of(backing)
    assert [of.count(path) for path in range(3)] == [30, 20, 10]
    assert [sorted(of[begin : begin + 6]) for begin in range(0, 60, 6)] == [[0, 0, 0, 1, 1, 2]] * 10
    places = [backing.place(slot) for slot in range(60)]
    assert len(set(places)) == 60
    for (fd, offset), slot in zip(places, range(60), strict=True):
        assert os.fstat(fd).st_size >= offset + PAGE_NBYTES
        assert files.path(fd) == backing.path(slot)
        assert Path(backing.path(slot)).parents[1] == tmp_path / f"path{of[slot]}"
    assert [len(path.fds) for path in backing.paths] == [5, 3, 2]
    backing.close()
    assert [list((tmp_path / f"path{index}").iterdir()) for index in range(3)] == [[], [], []]


def test_shares_say_what_each_path_holds(files: Files, tmp_path: Path) -> None:
    backing = make_backing(files, several(tmp_path, 2), 40, weights=[1, 3])
    assert [(share.path, share.n_slots, share.share, share.bytes_per_s) for share in backing.shares] == [
        (str(tmp_path / "path0"), 10, 0.25, None),
        (str(tmp_path / "path1"), 30, 0.75, None),
    ]
    backing.close()


@contextmanager
def measuring(files: Files, n_paths: int) -> Iterator[dict[str, Any]]:
    """What a backing needs to measure its paths."""
    frames = FramePool(16 * PAGE_NBYTES, PAGE_NBYTES)
    queue = TaskQueue(files, backend="threads", n_paths=n_paths)
    try:
        yield {"queue": queue, "frames": frames}
        assert frames.free == frames.n_frames
    finally:
        queue.close()
        frames.close()


def test_several_paths_are_measured_through_their_own_lanes_and_one_is_not(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvme, "_PROBE_S", 60.0)
    with measuring(files, 2) as means:
        make_backing(files, tmp_path, 512, **means).close()
        assert means["queue"].stats().writes == 0
        backing = make_backing(files, several(tmp_path, 2), 512, **means)
        assert [(stats.writes, stats.reads) for stats in means["queue"].path_stats()] == [(768, 512), (768, 512)]
        assert all(share.bytes_per_s is not None and share.bytes_per_s > 0 for share in backing.shares)
        assert sum(share.n_slots for share in backing.shares) == 512
        backing.close()


def test_a_slow_path_gets_fewer_slots(files: Files, tmp_path: Path) -> None:
    """The first path is measured first: its writes and reads are the ones that are late."""
    for op in (FileOp.WRITE, FileOp.READ):
        files.fault(op, Fault.delay(20_000), times=32)
    with measuring(files, 2) as means:
        backing = make_backing(files, several(tmp_path, 2), 32, **means)
        slow, fast = backing.shares
        assert slow.bytes_per_s is not None
        assert fast.bytes_per_s is not None
        assert slow.bytes_per_s <= 2 * 32 * PAGE_NBYTES / 0.04
        exact = 32 * slow.bytes_per_s / (slow.bytes_per_s + fast.bytes_per_s)
        assert abs(slow.n_slots - exact) <= 1
        assert slow.n_slots < fast.n_slots
        backing.close()


@pytest.mark.parametrize(("op", "nth", "name"), [(FileOp.WRITE, 3, "path0"), (FileOp.READ, 40, "path1")], ids=["write", "read"])
def test_a_path_that_fails_while_it_is_measured_is_named(files: Files, tmp_path: Path, op: FileOp, nth: int, name: str) -> None:
    files.fault(op, Fault.error(errno.EIO), nth=nth)
    frames = FramePool(16 * PAGE_NBYTES, PAGE_NBYTES)
    queue = TaskQueue(files, backend="threads", n_paths=2)
    with pytest.raises(IoError) as caught:
        make_backing(files, several(tmp_path, 2), 32, queue=queue, frames=frames)
    queue.close()
    assert (caught.value.op, caught.value.errno) == (op.name.lower(), errno.EIO)
    assert Path(caught.value.path).parents[1] == tmp_path / name
    assert [list((tmp_path / f"path{index}").iterdir()) for index in range(2)] == [[], []]


def test_a_path_that_is_full_while_it_is_measured_says_what_is_free(files: Files, tmp_path: Path) -> None:
    files.fault(FileOp.WRITE, Fault.error(errno.ENOSPC), nth=2)
    frames = FramePool(16 * PAGE_NBYTES, PAGE_NBYTES)
    queue = TaskQueue(files, backend="threads", n_paths=2)
    with pytest.raises(IoError) as caught:
        make_backing(files, several(tmp_path, 2), 32, queue=queue, frames=frames)
    queue.close()
    assert caught.value.free_bytes is not None
    assert "are free there" in str(caught.value)


def test_an_interrupted_measurement_leaves_nothing_in_flight_and_no_file(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.fault(FileOp.WRITE, Fault.delay(5_000), times=32)
    frames = FramePool(16 * PAGE_NBYTES, PAGE_NBYTES)
    queue = TaskQueue(files, backend="threads", n_paths=2)

    def interrupt(ids: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(queue, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make_backing(files, several(tmp_path, 2), 32, queue=queue, frames=frames)
    with pytest.raises(EngineClosedError):
        queue.poll()
    assert [list((tmp_path / f"path{index}").iterdir()) for index in range(2)] == [[], []]


def free_space(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *slots: int | None) -> None:
    """Each path is on a file system of its own with so many slots free (None: it does not say)."""
    free = {str(tmp_path / f"path{index}"): None if n is None else n * PAGE_NBYTES for index, n in enumerate(slots)}
    monkeypatch.setattr(nvme, "free_bytes", lambda path: free[path])
    monkeypatch.setattr(nvme, "file_system_id", lambda path: list(free).index(path))


def test_a_small_path_takes_what_it_can_but_a_little_and_the_others_the_rest(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = several(tmp_path, 3)
    free_space(monkeypatch, tmp_path, 64, None, 1000)
    backing = make_backing(files, paths, 300, weights=[1, 1, 1])
    assert [share.n_slots for share in backing.shares] == [63, 119, 118]
    backing.close()


def test_paths_that_are_too_small_together_are_refused_with_what_each_has(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = several(tmp_path, 2)
    free_space(monkeypatch, tmp_path, 64, 128)
    with pytest.raises(SpaceError) as caught:
        make_backing(files, paths, 190, weights=[1, 1])
    assert caught.value.needed_bytes == 190 * PAGE_NBYTES
    assert caught.value.free_bytes_by_path == {str(paths[0]): 63 * PAGE_NBYTES, str(paths[1]): 126 * PAGE_NBYTES}
    assert caught.value.free_bytes == 189 * PAGE_NBYTES
    assert all(str(path) in str(caught.value) for path in paths)
    assert [list(path.iterdir()) for path in paths] == [[], []]
    make_backing(files, paths, 189, weights=[1, 1]).close()


def test_two_directories_of_one_file_system_have_its_room_together(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = several(tmp_path, 2)
    monkeypatch.setattr(nvme, "free_bytes", lambda path: 100 * PAGE_NBYTES)
    make_backing(files, paths, 100, weights=[1, 1]).close()
    with pytest.raises(SpaceError) as caught:
        make_backing(files, paths, 101, weights=[1, 1])
    assert caught.value.free_bytes == 100 * PAGE_NBYTES


@pytest.mark.parametrize("op", [FileOp.OPEN, FileOp.FALLOCATE, FileOp.UNLINK], ids=lambda op: op.name)
def test_a_failure_of_the_second_path_leaves_nothing_of_the_first(files: Files, tmp_path: Path, op: FileOp) -> None:
    files.fault(op, Fault.error(errno.EIO), nth=2)
    with pytest.raises(IoError) as caught:
        make_backing(files, several(tmp_path, 2), 8, weights=[1, 1])
    assert Path(caught.value.path).parents[1] == tmp_path / "path1"
    remove_leftovers(str(tmp_path / "path1"))
    assert [list((tmp_path / f"path{index}").iterdir()) for index in range(2)] == [[], []]


def test_leftovers_are_removed_from_every_path(files: Files, tmp_path: Path) -> None:
    paths = several(tmp_path, 2)
    for path in paths:
        (path / "infinity-1-0123456789abcdef").mkdir()
    make_backing(files, paths, 8, weights=[1, 1]).close()
    assert [list(path.iterdir()) for path in paths] == [[], []]


def test_paths_without_o_direct_are_named_in_one_warning(files: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files.fault(FileOp.OPEN, Fault.error(errno.EINVAL), nth=1)
    files.fault(FileOp.OPEN, Fault.error(errno.EINVAL), nth=4)
    with caplog.at_level(logging.WARNING):
        backing = make_backing(files, several(tmp_path, 3), 9, weights=[1, 1, 1])
    assert [share.direct for share in backing.shares] == [False, True, False]
    assert not backing.direct
    assert backing.alignment == backing.paths[1].alignment
    (record,) = caplog.records
    assert "O_DIRECT" in record.message
    assert [str(path) in record.message for path in (tmp_path / "path0", tmp_path / "path1", tmp_path / "path2")] == [True, False, True]
    backing.close()


def test_where_o_direct_is_required_a_path_without_it_is_refused(files: Files, tmp_path: Path) -> None:
    make_backing(files, tmp_path, 4, direct_required=True).close()
    files.fault(FileOp.OPEN, Fault.error(errno.EINVAL), nth=2)
    with pytest.raises(ConfigError) as caught:
        make_backing(files, several(tmp_path, 2), 9, weights=[1, 1], direct_required=True)
    (problem,) = caught.value.problems
    assert problem.key == "aio.direct_io"
    assert str(tmp_path / "path1") in problem.message
    assert str(tmp_path / "path0") not in problem.message
    assert [list((tmp_path / f"path{index}").iterdir()) for index in range(2)] == [[], []]
