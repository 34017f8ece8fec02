"""A disk that is slow, stands still, fails while something else goes wrong, or whose files somebody else cut: what the user sees."""

from __future__ import annotations

import errno
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from infinity.engine import EngineState
from infinity.errors import CorruptPageError, InfinityError, IoError, StallError
from infinity.faults import Fault
from infinity.task_queue import FileOp
from tests.support import models, runs
from tests.support.faulting import Expected, Setup
from tests.support.queues import native_threads

SETUP = Setup("threads")


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trainer(directory: Path) -> runs.EngineTrainer:
    return runs.EngineTrainer(SETUP.model(), SETUP.config(directory))


def step(trained: runs.EngineTrainer, args: models.Tokens) -> None:
    trained.backward(trained(*args))
    trained.step()


def finish(trained: runs.EngineTrainer, first: int) -> None:
    """The other steps; the result is right to the bit."""
    for args in SETUP.batches()[first:]:
        step(trained, args)
    found, expected = trained.outcome(), Expected.of(SETUP).outcome
    found.losses, found.norms = [], expected.norms
    runs.assert_same(expected, found)


# ---- an error of the user's while transfers are in flight ----


class Own(Exception):
    """Raised by a model."""


@pytest.mark.parametrize("disk", ["slow", "failing"])
def test_an_error_in_a_forward_is_what_is_reported_whatever_the_disk_does_and_nothing_is_left(
    tmp_path: Path, disk: str, caplog: pytest.LogCaptureFixture
) -> None:
    descriptors = sorted(os.listdir("/proc/self/fd"))
    trained = trainer(tmp_path)
    engine, batches = trained.engine, SETUP.batches()

    def raise_own(*_: object) -> None:
        if disk == "failing":
            engine._files.fault(FileOp.READ, Fault.error(errno.EIO), times=10**6)
        raise Own

    def use() -> None:
        with engine:
            step(trained, batches[0])
            if disk == "slow":
                for op in (FileOp.READ, FileOp.WRITE):
                    engine._files.fault(op, Fault.delay(5_000), times=10**6)
            engine.module.norm.register_forward_pre_hook(raise_own)
            trained(*batches[1])

    with pytest.raises(Own):
        use()
    assert engine.state is EngineState.CLOSED
    assert (disk == "failing") == any("[EIO]" in record.message for record in caplog.records if record.levelno >= logging.ERROR)
    assert list(tmp_path.iterdir()) == []
    assert not native_threads()
    assert sorted(os.listdir("/proc/self/fd")) == descriptors


def test_an_error_of_close_is_raised_where_there_is_no_other(tmp_path: Path) -> None:
    engine = trainer(tmp_path).engine
    with pytest.raises(IoError), engine:
        engine._files.fault(FileOp.READ, Fault.error(errno.EIO), times=10**6)
    assert engine.state is EngineState.CLOSED


# ---- a disk that stands still ----


def test_a_disk_that_stands_still_is_a_stall_that_lists_the_transfers_and_training_goes_on_afterwards(tmp_path: Path) -> None:
    config = SETUP.config(tmp_path)
    trained = runs.EngineTrainer(SETUP.model(), {**config, "aio": {**config["aio"], "stall_s": 1.0}})
    batches = SETUP.batches()
    step(trained, batches[0])
    trained.engine._files.fault(FileOp.READ, Fault.delay(2_500_000))
    with pytest.raises(StallError) as caught:
        trained(*batches[1])
    assert "read of 4096 bytes at byte" in str(caught.value)
    assert f"{tmp_path}/infinity-" in str(caught.value)
    assert trained.engine.state is EngineState.READY
    time.sleep(1.5)
    trained.zero_grad()
    finish(trained, 1)
    trained.engine.close()


# ---- files that somebody else cut ----


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("emptied", IoError),
        ("cut in the middle of a page", IoError),
        ("emptied and filled with zeros", CorruptPageError),
        ("made longer", None),
    ],
)
def test_a_file_that_was_cut_is_a_typed_error_and_never_a_wrong_weight(
    tmp_path: Path, what: str, expected: type[InfinityError] | None
) -> None:
    trained = trainer(tmp_path)
    step(trained, SETUP.batches()[0])
    backing = trained.engine._backing
    assert backing is not None
    for fd, _ in backing.files():
        nbytes = os.fstat(fd).st_size
        if what.startswith("emptied"):
            os.ftruncate(fd, 0)
        if what.endswith("zeros"):
            os.ftruncate(fd, nbytes)
        if what.startswith("cut"):
            os.ftruncate(fd, 4096 + 512)
        if what.startswith("made"):
            os.ftruncate(fd, 2 * nbytes)
    if expected is None:
        finish(trained, 1)
        trained.engine.close()
        return
    with pytest.raises(expected) as caught:
        finish(trained, 1)
    assert str(tmp_path) in caught.value.path  # type: ignore[attr-defined]
    assert caught.value.offset % 4096 == 0  # type: ignore[attr-defined]
    if expected is IoError:
        assert caught.value.errno == errno.ENODATA  # type: ignore[attr-defined]
    with pytest.raises(InfinityError):
        trained.engine.close()
    assert all(param.is_meta or param.isfinite().all() for param in trained.model.parameters())


# ---- what the start and the end ask of the system beside the table of file operations ----


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE], ids=errno.errorcode.get)
@pytest.mark.parametrize("name", ["listdir", "mkdir", "open", "pwrite", "preadv", "rmdir", "stat", "statvfs", "unlink"])
def test_a_call_of_start_or_end_that_fails_is_a_typed_error_or_harmless_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    config, real, expected = SETUP.config(tmp_path), getattr(os, name), Expected.of(SETUP).weights
    for nth in range(1, 100):
        calls = 0

        def fail(*args: object, nth: int = nth, **options: object) -> object:
            nonlocal calls
            if sys._getframe(1).f_globals["__name__"].startswith("infinity.tiers"):
                calls += 1
                if calls == nth:
                    raise OSError(code, os.strerror(code))
            return real(*args, **options)

        descriptors = sorted(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(os, name, fail)
        model, refused = SETUP.model(), None
        try:
            trained = runs.EngineTrainer(model, config)
            step(trained, SETUP.batches()[0])
            trained.engine.close()
        except InfinityError as error:
            refused = str(error)
        monkeypatch.undo()
        assert refused is None or str(tmp_path) in refused
        assert torch.equal(model.head.weight, expected[0 if refused else 1]["head.weight"])
        left = list(tmp_path.iterdir())
        if name == "rmdir" and left:  # an empty directory: the next start removes it
            assert [list(directory.iterdir()) for directory in left] == [[]]
            left[0].rmdir()
        else:
            assert left == []
        assert sorted(os.listdir("/proc/self/fd")) == descriptors
        assert not native_threads()
        if calls < nth:
            return
    raise AssertionError("there is no end of calls")
