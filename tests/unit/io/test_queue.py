"""Queues: their options, the shared one, several paths."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

import infinity.io
from infinity.errors import ConfigError
from infinity.io import Queue
from infinity.io.queue import default_queue
from tests.support.files import blank, noise
from tests.support.queues import native_threads


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"backend": "aio"}, "backend"),
        ({"block_size": "1 potato"}, "block_size"),
        ({"block_size": 1000}, "block_size"),
        ({"block_size": 0}, "block_size"),
        ({"in_flight": "0"}, "in_flight"),
        ({"queue_depth": 0}, "queue_depth"),
        ({"queue_depth": 4097}, "queue_depth"),
        ({"queue_depth": "32"}, "queue_depth"),
        ({"io_threads": 0}, "io_threads"),
        ({"paths": ["/"] * 17}, "paths"),
    ],
)
def test_an_option_that_cannot_be_is_a_config_error_with_its_key(options: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Queue(**options)  # type: ignore[arg-type]
    assert [problem.key for problem in caught.value.problems] == [key]


@pytest.mark.parametrize("options", [{}, {"block_size": "64KiB", "queue_depth": 1}, {"block_size": 1 << 30}, {"in_flight": "1MiB"}])
def test_options_change_no_byte(options: dict[str, object], tmp_path: Path) -> None:
    data, array = noise(9_999_999, shift=1), blank(9_999_999, shift=2)
    with Queue(**options) as queue, infinity.io.open(tmp_path / "a", "w", queue=queue) as file:  # type: ignore[arg-type]
        file.write_from(data, 5)
        file.read_into(array, 5).wait()
    assert (array == data).all()


def test_blocks_are_as_large_as_asked_for(tmp_path: Path) -> None:
    with Queue(backend="threads", block_size="256KiB") as queue, infinity.io.open(tmp_path / "a", "w", queue=queue) as file:
        file.write_from(noise(1 << 20)).wait()
        assert queue._queue.path_stats()[0].writes == 4


def test_files_without_a_queue_share_one_that_is_opened_for_them(tmp_path: Path) -> None:
    with infinity.io.open(tmp_path / "a", "w") as first, infinity.io.open(tmp_path / "b", "w") as second:
        assert first._queue is second._queue is default_queue()


def test_the_shared_queue_is_opened_again_when_somebody_closed_it(tmp_path: Path) -> None:
    closed = default_queue()
    closed.close()
    with infinity.io.open(tmp_path / "a", "w") as file:
        file.write_from(b"abc").wait()
        assert file._queue is not closed


def test_threads_that_open_the_first_file_at_once_share_the_queue(tmp_path: Path) -> None:
    default_queue().close()
    queues = []
    barrier = threading.Barrier(8)

    def work() -> None:
        barrier.wait()
        queues.append(default_queue())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, queues))) == 1


def test_each_path_carries_the_files_that_lie_in_it(tmp_path: Path) -> None:
    roots = [tmp_path / "a", tmp_path / "b", tmp_path / "b" / "c"]
    for root in roots:
        root.mkdir()
    (tmp_path / "link").symlink_to(roots[1])
    with Queue(backend="threads", paths=roots) as queue:
        for directory, nbytes in [
            (roots[0], 4096),
            (roots[1], 2 * 4096),
            (roots[2], 3 * 4096),
            (tmp_path, 4 * 4096),
            (tmp_path / "link", 5 * 4096),
        ]:
            with infinity.io.open(directory / "file", "w", queue=queue) as file:
                file.write_from(blank(nbytes)).wait()
        assert [stats.write_nbytes // 4096 for stats in queue._queue.path_stats()] == [1 + 4, 2 + 5, 3]


def test_a_closed_queue_leaves_no_thread_no_descriptor_and_no_memory_of_its_own(tmp_path: Path) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    data = noise(8 << 20, shift=1)
    before = len(os.listdir("/proc/self/fd")), native_threads()
    sizes = []
    for _ in range(6):
        with Queue() as queue, infinity.io.open(tmp_path / "a", "w", queue=queue) as file:
            file.write_from(data).wait()
        del queue, file
        sizes.append(resident())
    assert (len(os.listdir("/proc/self/fd")), native_threads()) == before
    assert sizes[-1] - sizes[1] < 8 << 20
