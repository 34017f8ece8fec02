"""Files: exact bytes at any offset, length and address, past the page cache and through it."""

from __future__ import annotations

import errno
import gc
import os
import resource
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import infinity.io
from infinity.errors import ArrayError, EngineClosedError, IoError, SpaceError
from infinity.faults import Fault
from infinity.io import Queue
from infinity.io.file import DIRECT_NBYTES_MIN
from infinity.io.queue import GRAIN_NBYTES
from infinity.task_queue import FileOp
from tests.support.files import blank, noise

PAGE = GRAIN_NBYTES
LENGTHS = [0, 1, 511, PAGE - 1, PAGE, PAGE + 1, DIRECT_NBYTES_MIN + 2 * PAGE - 1, DIRECT_NBYTES_MIN + PAGE, (2 << 20) + 17]


def open_fds() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue
    return sorted(found)


# ---- exact bytes ----


@pytest.mark.parametrize("direct", ["auto", "off"])
@pytest.mark.parametrize("shift", [0, 1, 512])
@pytest.mark.parametrize("offset", [0, 1, PAGE - 1, PAGE, 5 * PAGE + 3])
def test_a_write_changes_its_bytes_and_no_others(directory: Path, queue: Queue, direct: str, shift: int, offset: int) -> None:
    path = directory / "a"
    for nbytes in LENGTHS:
        around = noise(offset + nbytes + 2 * PAGE + 1, seed=1).tobytes()
        path.write_bytes(around)
        data = noise(nbytes, seed=2, shift=shift)
        with infinity.io.open(path, "r+", direct=direct, queue=queue) as file:
            assert file.write_from(data, offset).wait() == nbytes
        assert path.read_bytes() == around[:offset] + data.tobytes() + around[offset + nbytes :]


@pytest.mark.parametrize("direct", ["auto", "off"])
@pytest.mark.parametrize("shift", [0, 1, 512])
@pytest.mark.parametrize("offset", [0, 1, PAGE - 1, PAGE, 5 * PAGE + 3])
def test_a_read_brings_its_bytes_and_no_others(directory: Path, queue: Queue, direct: str, shift: int, offset: int) -> None:
    path = directory / "a"
    content = noise((4 << 20) + 100, seed=1).tobytes()
    path.write_bytes(content)
    with infinity.io.open(path, direct=direct, queue=queue) as file:
        for nbytes in LENGTHS:
            array = blank(nbytes + 100, shift=shift)
            assert file.read_into(array, offset, nbytes).wait() == nbytes
            assert array.tobytes() == content[offset : offset + nbytes] + bytes(100)


@pytest.mark.parametrize("nbytes", LENGTHS)
def test_a_new_file_ends_where_its_last_byte_is(directory: Path, queue: Queue, nbytes: int) -> None:
    path = directory / "a"
    with infinity.io.open(path, "w", queue=queue) as file:
        file.write_from(noise(nbytes)).wait()
        assert file.nbytes == nbytes
    assert path.read_bytes() == noise(nbytes).tobytes()


def test_neighbours_that_share_a_page_are_written_at_once(directory: Path, queue: Queue) -> None:
    path = directory / "a"
    piece = DIRECT_NBYTES_MIN + 2 * PAGE + 1000
    data = noise(64 * piece)
    with infinity.io.open(path, "w", queue=queue) as file:
        order = np.random.default_rng(0).permutation(64)
        infinity.io.wait([file.write_from(data[i * piece : (i + 1) * piece], int(i) * piece) for i in order])
        array = blank(64 * piece, shift=3)
        infinity.io.wait([file.read_into(array[i * piece : (i + 1) * piece], int(i) * piece) for i in order])
    assert array.tobytes() == data.tobytes() == path.read_bytes()


def test_what_was_written_through_the_page_cache_is_read_past_it_and_the_other_way(directory: Path, queue: Queue) -> None:
    path = directory / "a"
    data, array = noise(1 << 20), blank(1 << 20)
    with infinity.io.open(path, "w", direct="off", queue=queue) as cached, infinity.io.open(path, "r+", queue=queue) as direct:
        for round_ in range(5):
            cached.write_from(data, 100).wait()
            direct.read_into(array, 100).wait()
            assert (array == data).all()
            data[:] = noise(1 << 20, seed=round_)
            direct.write_from(data, 100).wait()
            cached.read_into(array, 100).wait()
            assert (array == data).all()


def test_operations_on_the_same_bytes_take_effect_in_the_order_asked_for(directory: Path, queue: Queue) -> None:
    path = directory / "a"
    pieces = [noise(300_000, seed=i, shift=i) for i in range(8)]
    arrays = [blank(300_000, shift=9 - i) for i in range(8)]
    with infinity.io.open(path, "w", queue=queue) as file:
        futures = []
        for i in range(8):
            futures.append(file.write_from(pieces[i], 7 * i))
            futures.append(file.read_into(arrays[i], 7 * i))
        infinity.io.wait(futures)
    for piece, array in zip(pieces, arrays, strict=True):
        assert (piece == array).all()


def test_tensors_of_any_dtype_are_moved_as_they_lie(directory: Path, queue: Queue) -> None:
    tensor = torch.randn(1000, 300).to(torch.bfloat16)
    with infinity.io.open(directory / "a", "w", queue=queue) as file:
        file.write_from(tensor).wait()
        arrived = infinity.io.empty((1000, 300), torch.bfloat16)
        assert file.read_into(arrived).wait() == 600_000
        row = torch.zeros(300, dtype=torch.bfloat16)
        file.read_into(row, 600 * 7).wait()
    assert torch.equal(arrived, tensor)
    assert torch.equal(row, tensor[7])


def test_a_refused_transfer_moves_nothing(one_queue: Queue, tmp_path: Path) -> None:
    with infinity.io.open(tmp_path / "a", "w", queue=one_queue) as file:
        with pytest.raises(ArrayError, match="has 4"):
            file.write_from(b"abcd", 0, 5)
        with pytest.raises(ArrayError):
            file.write_from(b"abcd", 0, -1)
        with pytest.raises(ValueError, match="negative"):
            file.write_from(b"abcd", -1)
        assert file.nbytes == 0
    with infinity.io.open(tmp_path / "a", queue=one_queue) as file, pytest.raises(ValueError, match=r"'r\+' or 'w'"):
        file.write_from(b"abcd")


# ---- the end of the file ----


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(
    ("offset", "nbytes"), [(0, 200_001), (0, 300_000), (150_000, 100_000), (200_000, 1), (1 << 20, 8 * PAGE), (4096, 200_000)]
)
def test_a_read_beyond_the_end_is_an_error_with_its_numbers(directory: Path, queue: Queue, shift: int, offset: int, nbytes: int) -> None:
    path = directory / "a"
    path.write_bytes(bytes(200_000))
    with infinity.io.open(path, queue=queue) as file:
        future = file.read_into(blank(nbytes, shift=shift), offset)
        with pytest.raises(IoError, match="The file has 200000 bytes") as caught:
            future.wait()
    error = caught.value
    assert (error.op, error.path, error.offset, error.nbytes, error.errno) == ("read", str(path), offset, nbytes, errno.ENODATA)
    assert error.file_nbytes == 200_000


def test_a_read_clipped_to_the_end_is_none(one_queue: Queue, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    array = np.zeros(100, np.uint8)
    with infinity.io.open(tmp_path / "a", queue=one_queue) as file:
        assert file.read_into(array, 4, min(100, file.nbytes - 4)).wait() == 6
    assert array.tobytes() == b"456789" + bytes(94)


def test_truncate_waits_and_makes_the_file_so_long(directory: Path, queue: Queue) -> None:
    path = directory / "a"
    with infinity.io.open(path, "w", queue=queue) as file:
        file.write_from(noise(3 << 20))
        file.truncate(1_000_001)
        assert file.nbytes == 1_000_001
        file.truncate(1_000_010)
    assert path.read_bytes() == noise(3 << 20).tobytes()[:1_000_001] + bytes(9)


def test_reserve_lengthens_and_never_shortens(directory: Path, one_queue: Queue) -> None:
    with infinity.io.open(directory / "a", "w", queue=one_queue) as file:
        file.reserve(1 << 20)
        assert file.nbytes == 1 << 20
        assert os.stat(file.path).st_blocks * 512 >= 1 << 20
        file.reserve(10)
        assert file.nbytes == 1 << 20


def test_reserve_refuses_what_does_not_fit_with_the_numbers(one_queue: Queue, tmp_path: Path) -> None:
    with infinity.io.open(tmp_path / "a", "w", queue=one_queue) as file:
        one_queue.files.fault(FileOp.FALLOCATE, Fault.error(errno.ENOSPC))
        with pytest.raises(SpaceError) as caught:
            file.reserve(1 << 30)
        assert caught.value.needed_bytes == 1 << 30
        one_queue.files.fault(FileOp.FALLOCATE, Fault.error(errno.EOPNOTSUPP))
        file.reserve(1000)
        assert file.nbytes == 1000


# ---- opening ----


@pytest.mark.parametrize(("name", "code"), [("missing", errno.ENOENT), (".", errno.EISDIR)])
def test_what_cannot_be_opened_is_an_error_with_its_path(one_queue: Queue, tmp_path: Path, name: str, code: int) -> None:
    before = open_fds()
    with pytest.raises(IoError) as caught:
        infinity.io.open(tmp_path / name, queue=one_queue)
    assert (caught.value.op, caught.value.path, caught.value.errno) == ("open", str(tmp_path / name), code)
    assert open_fds() == before


def test_a_device_without_places_is_refused(one_queue: Queue) -> None:
    with pytest.raises(IoError, match="regular file"):
        infinity.io.open("/dev/null", queue=one_queue)


@pytest.mark.parametrize(("mode", "direct"), [("a", "auto"), ("rb", "auto"), ("r", "yes")])
def test_modes_are_few(one_queue: Queue, tmp_path: Path, mode: str, direct: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        infinity.io.open(tmp_path / "a", mode, direct=direct, queue=one_queue)


def test_a_file_is_made_by_w_with_the_rights_that_the_umask_leaves(one_queue: Queue, tmp_path: Path) -> None:
    mask = os.umask(0o027)
    try:
        infinity.io.open(tmp_path / "a", "w", queue=one_queue).close()
    finally:
        os.umask(mask)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("refused", [(2, errno.EINVAL)])
def test_without_o_direct_auto_goes_through_the_page_cache_and_required_refuses(
    one_queue: Queue, tmp_path: Path, refused: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    nth, code = refused
    path = tmp_path / "a"
    path.write_bytes(noise(1 << 20).tobytes())
    before = open_fds()
    one_queue.files.fault(FileOp.OPEN, Fault.error(code), nth=nth)
    with caplog.at_level("INFO", "infinity"), infinity.io.open(path, queue=one_queue) as file:
        assert not file.direct
        array = blank(1 << 20)
        file.read_into(array).wait()
    assert array.tobytes() == path.read_bytes()
    assert [record.message for record in caplog.records if str(path) in record.message]
    one_queue.files.fault(FileOp.OPEN, Fault.error(code), nth=nth)
    with pytest.raises(IoError, match="does not do O_DIRECT"):
        infinity.io.open(path, direct="required", queue=one_queue)
    assert open_fds() == before


def test_another_error_of_the_second_open_is_not_taken_for_a_refusal(one_queue: Queue, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    before = open_fds()
    one_queue.files.fault(FileOp.OPEN, Fault.error(errno.EMFILE), nth=2)
    with pytest.raises(IoError) as caught:
        infinity.io.open(tmp_path / "a", queue=one_queue)
    assert caught.value.errno == errno.EMFILE
    assert open_fds() == before


@pytest.mark.parametrize("mode", ["r", "r+", "w"])
def test_where_the_kernel_does_not_tell_the_alignment_it_is_tried_and_the_file_stays_as_it_is(
    directory: Path, one_queue: Queue, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(type(one_queue.files), "direct_alignment", lambda self, fd: (0, 0))
    path = directory / "a"
    content = b"" if mode == "w" else b"x" * 5000
    path.write_bytes(content)
    with infinity.io.open(path, mode, queue=one_queue):
        pass
    assert path.read_bytes() == content


# ---- closing ----


def test_close_waits_for_what_was_asked_for(directory: Path, queue: Queue) -> None:
    path = directory / "a"
    data = noise(8 << 20, shift=1)
    with infinity.io.open(path, "w", queue=queue) as file:
        for begin in range(0, 8 << 20, 1 << 19):
            file.write_from(data[begin : begin + (1 << 19)], begin)
    assert path.read_bytes() == data.tobytes()


def test_close_raises_what_nobody_asked_about(one_queue: Queue, tmp_path: Path) -> None:
    file = infinity.io.open(tmp_path / "a", "w", queue=one_queue)
    one_queue.files.fault(FileOp.WRITE, Fault.error(errno.EIO))
    file.write_from(noise(1 << 20), 4096)
    with pytest.raises(IoError) as caught:
        file.close()
    assert (caught.value.op, caught.value.offset, caught.value.errno) == ("write", 4096, errno.EIO)
    file.close()


def test_close_does_not_raise_what_was_asked_about(one_queue: Queue, tmp_path: Path) -> None:
    with infinity.io.open(tmp_path / "a", "w", queue=one_queue) as file:
        one_queue.files.fault(FileOp.WRITE, Fault.error(errno.EIO))
        assert file.write_from(noise(1 << 20)).exception() is not None


def test_an_exception_in_the_block_is_the_one_that_is_seen(one_queue: Queue, tmp_path: Path) -> None:
    before = open_fds()

    def fail() -> None:
        with infinity.io.open(tmp_path / "a", "w", queue=one_queue) as file:
            one_queue.files.fault(FileOp.WRITE, Fault.error(errno.EIO))
            file.write_from(noise(1 << 20))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert open_fds() == before


def test_an_exception_in_the_block_cancels_reads_and_finishes_writes(one_queue: Queue, tmp_path: Path) -> None:
    (tmp_path / "read").write_bytes(bytes(64 << 20))
    data = noise(4 << 20)
    one_queue.files.fault(FileOp.READ, Fault.delay(50_000), times=1000)
    futures = []

    def fail() -> None:
        with infinity.io.open(tmp_path / "read", "r+", queue=one_queue) as file:
            futures.append(file.read_into(blank(32 << 20)))
            file.write_from(data, 32 << 20)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    error = futures[0].exception()
    assert error is not None
    assert error.errno == errno.ECANCELED
    assert (tmp_path / "read").read_bytes()[32 << 20 : 36 << 20] == data.tobytes()


def test_a_closed_file_refuses_everything_but_close(one_queue: Queue, tmp_path: Path) -> None:
    file = infinity.io.open(tmp_path / "a", "w", queue=one_queue)
    file.close()
    file.close()
    for act in (
        lambda: file.read_into(bytearray(1)),
        lambda: file.write_from(b"a"),
        file.flush,
        lambda: file.nbytes,
        lambda: file.reserve(1),
    ):
        with pytest.raises(EngineClosedError, match="closed"):
            act()


def test_a_file_nobody_closed_is_closed_when_its_last_operation_is_over(one_queue: Queue, tmp_path: Path) -> None:
    before = open_fds()
    future = infinity.io.open(tmp_path / "a", "w", queue=one_queue).write_from(noise(8 << 20, shift=1))
    gc.collect()
    assert future.wait() == 8 << 20
    gc.collect()
    assert open_fds() == before
    assert (tmp_path / "a").stat().st_size == 8 << 20


def test_an_error_of_closing_is_raised(one_queue: Queue, tmp_path: Path) -> None:
    before = open_fds()
    file = infinity.io.open(tmp_path / "a", "w", queue=one_queue)
    one_queue.files.fault(FileOp.CLOSE, Fault.error(errno.EIO))
    with pytest.raises(IoError, match="close failed"):
        file.close()
    assert open_fds() == before


# ---- flush, threads, limits ----


def test_flush_waits_for_the_writes_and_syncs_once(one_queue: Queue, tmp_path: Path) -> None:
    with infinity.io.open(tmp_path / "a", "w", queue=one_queue) as file:
        writes = [file.write_from(noise(1 << 20), i << 20) for i in range(8)]
        before = one_queue.files.count(FileOp.DATASYNC)
        file.flush().wait()
        assert all(write.done() for write in writes)
        assert one_queue.files.count(FileOp.DATASYNC) == before + 1


@pytest.mark.parametrize("early", [False, True])
def test_flush_behind_a_write_that_failed_fails_and_names_it(one_queue: Queue, tmp_path: Path, early: bool) -> None:
    with infinity.io.open(tmp_path / "a", "w", queue=one_queue) as file:
        one_queue.files.fault(FileOp.WRITE, Fault.delay(50_000))
        one_queue.files.fault(FileOp.WRITE, Fault.error(errno.ENOSPC), nth=2)
        writes = [file.write_from(noise(1 << 20), i << 20) for i in range(2)]
        if early:
            while not any(write.done() for write in writes):
                pass
        error = file.flush().exception()
        assert [write.exception() is None for write in writes].count(False) == 1
        assert file.flush().exception() is None  # they are known now
    assert error is not None
    assert error.errno == errno.ECANCELED
    assert isinstance(error.__cause__, IoError)
    assert error.__cause__.errno == errno.ENOSPC


def test_threads_share_a_file(directory: Path, queue: Queue) -> None:
    piece, n = 100_003, 24
    data = noise(piece * n * 4)
    problems: list[BaseException] = []
    with infinity.io.open(directory / "a", "w", queue=queue) as file:

        def work(lane: int) -> None:
            try:
                for i in range(n):
                    begin = (i * 4 + lane) * piece
                    file.write_from(data[begin : begin + piece], begin).wait()
                    array = blank(piece, shift=lane)
                    file.read_into(array, begin).wait()
                    assert (array == data[begin : begin + piece]).all()
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=work, args=(lane,)) for lane in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not problems
    assert (directory / "a").read_bytes() == data.tobytes()


def test_more_unaligned_transfers_than_there_is_memory_for_them_wait_for_each_other(directory: Path, queue: Queue) -> None:
    data = noise((64 << 20) + 1)
    (directory / "a").write_bytes(data.tobytes())
    array = blank(64 << 20, shift=1)
    with infinity.io.open(directory / "a", queue=queue) as file:
        infinity.io.wait([file.read_into(array[begin : begin + (1 << 19)], begin + 1) for begin in range(0, 64 << 20, 1 << 19)])
    assert (array == data[1:]).all()


def test_a_limit_on_file_sizes_is_a_typed_error(one_queue: Queue, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with infinity.io.open(tmp_path / "a", "w", queue=one_queue) as file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        try:
            error = file.write_from(noise(1 << 20), 1 << 20).exception()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error is not None
    assert error.errno == errno.EFBIG
