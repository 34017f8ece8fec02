"""Files that someone else cuts, empties, lengthens or overwrites during a run: they have no name, but /proc/<pid>/fd has them.

A typed error with file, place and lengths, or the right result; never a wrong page.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from infinity.engine import EngineState
from infinity.errors import CorruptPageError, EngineFailedError, InfinityError, IoError
from infinity.layout import PageId
from infinity.residency import PageState
from tests.support import models, runs
from tests.support.queues import BACKENDS
from tests.support.stores import PAGE_NBYTES, StoreBench, store_bench

A, B, C, D = (PageId(0, index) for index in range(4))


@pytest.fixture(params=BACKENDS)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreBench]:
    with store_bench(tmp_path, n_frames=3, backend=request.param) as bench:
        bench.fill()
        yield bench
        bench.store.check()


def file_of(bench: StoreBench) -> int:
    assert bench.backing is not None
    ((fd, _),) = bench.backing.files()
    return fd


@pytest.mark.parametrize("nbytes", [0, PAGE_NBYTES, PAGE_NBYTES + 1, 2 * PAGE_NBYTES - 512])
def test_a_page_behind_the_end_of_a_cut_file_is_an_error_with_both_lengths(bench: StoreBench, nbytes: int) -> None:
    os.ftruncate(file_of(bench), nbytes)
    with pytest.raises(IoError) as caught:
        bench.fetch(B)
    error = caught.value
    assert (error.op, error.errno, error.offset, error.nbytes) == ("read", errno.ENODATA, PAGE_NBYTES, PAGE_NBYTES)
    assert error.file_nbytes == nbytes
    assert f"has {nbytes} bytes, and {2 * PAGE_NBYTES} are needed" in str(error)
    assert bench.store.state(B) is PageState.ABSENT
    if nbytes:
        assert bench.store.read_page(A) == bench.content(A)


def test_a_page_written_again_after_the_cut_is_whole(bench: StoreBench) -> None:
    os.ftruncate(file_of(bench), 0)
    for page in (C, A):
        bench.store.write_page(page, bench.content(page, seed=1))
        assert bench.store.read_page(page) == bench.content(page, seed=1)
    with pytest.raises(CorruptPageError):
        bench.store.read_page(B)  # the file is long enough again, but there is a hole


def test_a_file_that_got_longer_is_no_matter(bench: StoreBench) -> None:
    os.ftruncate(file_of(bench), 1 << 20)
    for page in bench.pages():
        assert bench.store.read_page(page) == bench.content(page)


def test_a_file_that_was_cut_and_made_as_long_again_is_corrupt(bench: StoreBench) -> None:
    fd = file_of(bench)
    nbytes = os.fstat(fd).st_size
    os.ftruncate(fd, 0)
    os.ftruncate(fd, nbytes)
    for page in bench.pages():
        with pytest.raises(CorruptPageError) as caught:
            bench.store.read_page(page)
        assert caught.value.offset == page.index * PAGE_NBYTES
        assert caught.value.expected != caught.value.found
        assert bench.store.state(page) is PageState.ABSENT


def test_two_pages_that_were_exchanged_are_corrupt(bench: StoreBench) -> None:
    fd = os.open(f"/proc/self/fd/{file_of(bench)}", os.O_RDWR)
    try:
        first, second = os.pread(fd, PAGE_NBYTES, 0), os.pread(fd, PAGE_NBYTES, PAGE_NBYTES)
        os.pwrite(fd, second, 0)
        os.pwrite(fd, first, PAGE_NBYTES)
    finally:
        os.close(fd)
    for page in (A, B):
        with pytest.raises(CorruptPageError):
            bench.store.read_page(page)
    assert bench.store.read_page(C) == bench.content(C)


@pytest.mark.parametrize("overlap", ["deferred", "fused"])
@pytest.mark.parametrize("how", ["emptied", "halved", "zeroed", "longer"])
@pytest.mark.parametrize("n_paths", [1, 2])
def test_a_run_whose_file_is_tampered_with_ends_right_or_says_so(tmp_path: Path, how: str, overlap: str, n_paths: int) -> None:
    def build() -> torch.nn.Module:
        return models.build(lambda: models.GPT(width=32, blocks=2), torch.bfloat16)

    paths = [tmp_path / f"path{index}" for index in range(n_paths)]
    for path in paths:
        path.mkdir()
    expected = runs.train(runs.PlainTrainer(build()), models.token_batches(4))
    config = runs.engine_config(paths, precision="bf16", overlap=overlap)
    config = runs.with_host(config, runs.least_host_bytes(build, config))
    model = build()
    trainer = runs.EngineTrainer(model, config)
    backing = trainer.engine._backing
    assert backing is not None
    error: InfinityError | None = None
    found: runs.Outcome | None = None
    try:
        for step, args in enumerate(models.token_batches(4)):
            if step == 2:
                fd, path = backing.files()[-1]
                nbytes = os.fstat(fd).st_size
                os.ftruncate(fd, {"emptied": 0, "halved": nbytes // 2, "zeroed": 0, "longer": nbytes + (1 << 20)}[how])
                if how == "zeroed":
                    os.ftruncate(fd, nbytes)
            trainer.backward(trainer(*args))
            trainer.step()
        found = trainer.outcome()
    except InfinityError as caught:
        error = caught
    if how != "halved":  # then it depends on what rests in which half
        assert (error is None) is (how == "longer")
    if found is not None:
        runs.assert_same(expected, found)
    else:
        cause = error.__cause__ if isinstance(error, EngineFailedError) else error
        assert isinstance(cause, (IoError, CorruptPageError))
        assert cause.path.startswith(str(paths[path]))
        assert isinstance(cause, CorruptPageError) or cause.errno == errno.ENODATA
    try:
        trainer.engine.close()
    except InfinityError:
        assert trainer.engine.state is EngineState.CLOSED
    assert how == "longer" or found is not None or all(param.is_meta or param.isfinite().all() for param in model.parameters())
