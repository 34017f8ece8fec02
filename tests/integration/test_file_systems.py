"""Training on real file systems: the same bits on each, past the page cache where that works, and a full one is found or survived."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import functools
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from infinity.engine import EngineState
from infinity.errors import ConfigError, EngineFailedError, IoError, SpaceError
from infinity.faults import Fault
from infinity.task_queue import FileOp, Files, TaskQueue
from infinity.tiers import nvme
from infinity.tiers.frames import FramePool
from infinity.tiers.nvme import NvmeBacking
from tests.support import file_systems, models, runs
from tests.support.file_systems import MIB

WIDTH = 64
PAGE_NBYTES = 4096


class Odd(nn.Module):
    """Parameters of sizes that nothing divides."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 127), nn.Tanh(), nn.Linear(127, WIDTH)) for _ in range(3))
        self.odd = nn.ParameterList(nn.Parameter(torch.randn(numel) / numel) for numel in (1, 127, 513, 4095, 4097))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean() + sum((param.sin().sum() for param in self.odd), torch.zeros(()))


def build() -> nn.Module:
    return models.build(Odd, torch.bfloat16)


def batches() -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(4, WIDTH, generator=generator).bfloat16(),) for _ in range(3)]


@functools.cache
def expected() -> runs.Outcome:
    return runs.train(runs.PlainTrainer(build()), batches())


def config_for(paths: Path | Sequence[Path], **options: Any) -> dict[str, Any]:
    """With as little host memory as there can be, so that pages really move."""
    config = runs.engine_config(paths, precision="bf16", **options)
    return runs.with_host(config, runs.least_host_bytes(build, config))


class Kind(NamedTuple):
    """A file system, and what is known of it."""

    make: Callable[[Path], AbstractContextManager[Path]]
    name: str
    direct: bool | None
    """Does it take O_DIRECT? None: that depends on the kernel."""
    alignment: int | None = None


KINDS = {
    "tmpfs": Kind(lambda where: file_systems.tmpfs(where, 64 * MIB), "tmpfs", None),
    "ext4-1k": Kind(lambda where: file_systems.ext4(where, 64 * MIB, file_systems.EXT4_1K), "ext4", True, 512),
    "ext4-4k": Kind(lambda where: file_systems.ext4(where, 64 * MIB), "ext4", True, 512),
    "ext4-sectors-of-4k": Kind(lambda where: file_systems.ext4(where, 64 * MIB, sector_nbytes=4096), "ext4", True, 4096),
    "ext4-without-extents": Kind(lambda where: file_systems.ext4(where, 64 * MIB, file_systems.NO_EXTENTS), "ext4", True, 512),
    "xfs": Kind(lambda where: file_systems.xfs(where), "xfs", True, 512),
    "btrfs": Kind(lambda where: file_systems.btrfs(where), "btrfs", True, 4096),
    "overlay": Kind(lambda where: file_systems.overlay(where), "overlay", None),
    "ramfs": Kind(lambda where: file_systems.ramfs(where), "ramfs", False, 1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_training_gives_the_same_bits_and_says_once_where_the_page_cache_is_used(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, name, direct, alignment = KINDS[kind]
    with make(tmp_path / kind) as path:
        config = config_for(path)
        caplog.clear()
        with caplog.at_level(logging.WARNING), runs.EngineTrainer(build(), config) as trainer:
            found = runs.train(trainer, batches())
            (share,) = trainer.engine.placement().paths
            backing = trainer.engine._backing
            assert backing is not None
            assert (share.file_system, share.path) == (name, str(path))
            assert share.direct is bool(fcntl.fcntl(backing.place(0)[0], fcntl.F_GETFL) & os.O_DIRECT)
            if direct is not None:
                assert share.direct is direct
            if alignment is not None:
                assert backing.alignment == alignment
        runs.assert_same(expected(), found)
        notices = [record.message for record in caplog.records if "O_DIRECT" in record.message]
        assert len(notices) == (0 if share.direct else 1)
        assert all(f"{path} ({name})" in notice for notice in notices)
        assert list(path.glob("infinity-*")) == []


def test_where_direct_io_is_required_a_file_system_without_it_is_refused_and_named(tmp_path: Path) -> None:
    with file_systems.ramfs(tmp_path / "ramfs") as path:
        config = runs.engine_config([tmp_path / "disk", path])
        (tmp_path / "disk").mkdir()
        config["aio"]["direct_io"] = "required"
        model = build()
        with pytest.raises(ConfigError) as caught:
            runs.EngineTrainer(model, config)
        (problem,) = caught.value.problems
        assert problem.key == "aio.direct_io"
        assert f"{path} (ramfs)" in problem.message
        assert list(path.iterdir()) == []
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), build().parameters(), strict=True))


@contextmanager
def three_paths(tmp_path: Path) -> Iterator[list[Path]]:
    """Two directories of a disk, and one in shared memory."""
    with tempfile.TemporaryDirectory(prefix="infinity-test-", dir="/dev/shm") as shared:
        paths = [tmp_path / "a", tmp_path / "b", Path(shared)]
        for path in paths[:2]:
            path.mkdir()
        yield paths


@pytest.mark.parametrize("n_paths", [1, 2, 3])
def test_the_number_of_paths_changes_no_bit(tmp_path: Path, n_paths: int) -> None:
    with three_paths(tmp_path) as paths:
        config = config_for(paths[3 - n_paths :])
        with runs.EngineTrainer(build(), config) as trainer:
            found = runs.train(trainer, batches())
            assert trainer.engine._queue is not None
            stats = trainer.engine._queue.path_stats()
            assert len(stats) == n_paths
            assert all(path.reads > 0 and path.writes > 0 for path in stats)
            assert sum(share.share for share in trainer.engine.placement().paths) == pytest.approx(1)
        runs.assert_same(expected(), found)


def test_weights_of_paths_change_no_bit(tmp_path: Path) -> None:
    with three_paths(tmp_path) as paths:
        config = config_for(paths)
        config["aio"]["path_weights"] = [1, 5, 2]
        with runs.EngineTrainer(build(), config) as trainer:
            found = runs.train(trainer, batches())
            assert [round(share.share * 8, 1) for share in trainer.engine.placement().paths] == [1, 5, 2]
        runs.assert_same(expected(), found)


def test_a_small_path_is_filled_at_most_and_the_others_take_the_rest(tmp_path: Path) -> None:
    with file_systems.tmpfs(tmp_path / "small", 192 << 10) as small:
        (tmp_path / "disk").mkdir()
        config = config_for([small, tmp_path / "disk"])
        config["aio"]["path_weights"] = [1, 1]
        with runs.EngineTrainer(build(), config) as trainer:
            found = runs.train(trainer, batches())
            first, second = trainer.engine.placement().paths
            assert 40 <= first.n_slots <= 47  # 48 pages, less a 64th of what is free and what the directory takes
            assert second.n_slots > 100
        runs.assert_same(expected(), found)


def test_what_was_reserved_to_measure_a_slow_path_is_there_for_the_fast_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme, "_PROBE_S", 60.0)  # so many waves as there can be
    with file_systems.tmpfs(tmp_path / "disk", 8 * MIB) as disk:
        paths = [disk / "fast", disk / "slow"]
        for path in paths:
            path.mkdir()
        n_slots = 8 * MIB // PAGE_NBYTES - 16
        files, frames = Files(), FramePool(64 * PAGE_NBYTES, PAGE_NBYTES)
        queue = TaskQueue(files, backend="threads", n_paths=2)
        files.fault(FileOp.WRITE, Fault.delay(5_000), nth=256 + 512 + 1000 + 1, times=1 << 20)  # those of the fast path come first
        try:
            backing = NvmeBacking(files, paths, page_nbytes=PAGE_NBYTES, n_slots=n_slots, queue=queue, frames=frames)
            fast, slow = backing.shares
            assert fast.n_slots + slow.n_slots == n_slots
            assert slow.n_slots < 400  # less than it was measured with
            backing.close()
        finally:
            queue.close()
            frames.close()


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_what_does_not_fit_is_refused_with_needed_and_free_bytes_and_the_model_is_as_it_was(tmp_path: Path, kind: str) -> None:
    nbytes = {"tmpfs": 256 << 10, "ext4": MIB}[kind]
    make = {"tmpfs": file_systems.tmpfs, "ext4": file_systems.ext4}[kind]
    with make(tmp_path / kind, nbytes) as path:
        disk = os.statvfs(path)
        model = build()
        with pytest.raises(SpaceError) as caught:
            runs.EngineTrainer(model, runs.engine_config(path))
        error = caught.value
        assert error.needed_bytes > error.free_bytes
        assert error.free_bytes == disk.f_bavail * disk.f_frsize
        assert error.needed_bytes % PAGE_NBYTES == 0
        assert str(path) in str(error)
        assert [name for name in os.listdir(path) if name != "lost+found"] == []
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), build().parameters(), strict=True))


def assert_same_state(found: runs.Outcome) -> None:
    """No bit of the weights and the optimizer's state differs; losses were read more than once where steps were tried again."""
    runs.assert_same(dataclasses.replace(expected(), losses=[], gradients=[], norms=[]), dataclasses.replace(found, losses=[], norms=[]))


def train_and_make_room(trainer: runs.EngineTrainer, make_room: Callable[[], None]) -> tuple[runs.Outcome, list[IoError]]:
    """Every step; after an error there is room again, and the step is tried once more. Several transfers may have failed by then."""
    errors: list[IoError] = []
    for (x,) in batches():
        steps, attempts = trainer.engine.global_steps, 0
        while trainer.engine.global_steps == steps:
            try:
                if attempts:
                    trainer.engine.zero_grad()
                trainer.engine.backward(trainer(x))
                trainer.engine.step()
            except IoError as error:
                errors.append(error)
                attempts += 1
                assert attempts < 50
                if attempts == 1:
                    make_room()
    return trainer.outcome(), errors


def test_a_disk_that_someone_else_fills_is_an_error_with_what_is_free_and_with_room_again_the_run_ends_right(tmp_path: Path) -> None:
    """On a file system that cannot reserve; the writes that fail are real."""
    with file_systems.ext4(tmp_path / "disk", 16 * MIB, file_systems.NO_EXTENTS) as path:
        config = config_for(path, overlap="deferred")
        with runs.EngineTrainer(build(), config) as trainer:
            filler = file_systems.fill(path, 32 << 10)
            found, errors = train_and_make_room(trainer, lambda: filler.unlink(missing_ok=True))
            assert errors
            assert {(error.op, error.errno) for error in errors} == {("write", errno.ENOSPC)}
            assert errors[0].free_bytes is not None
            assert errors[0].free_bytes <= 32 << 10
            assert errors[0].path.startswith(str(path))
            assert errors[0].nbytes > 0
            assert "are free there" in str(errors[0])
            assert trainer.engine.state is EngineState.READY
        assert_same_state(found)


@pytest.mark.parametrize("kind", ["tmpfs", "ext4-4k", "xfs", "btrfs"])
def test_a_reserved_file_is_not_hurt_by_a_disk_that_fills_up(tmp_path: Path, kind: str) -> None:
    with KINDS[kind].make(tmp_path / kind) as path:
        config = config_for(path)
        with runs.EngineTrainer(build(), config) as trainer:
            file_systems.fill(path, 0)
            found = runs.train(trainer, batches())
        runs.assert_same(expected(), found)


def test_a_full_disk_in_a_fused_step_stops_the_engine_and_close_leaves_no_wrong_weight(tmp_path: Path) -> None:
    with file_systems.ext4(tmp_path / "disk", 16 * MIB, file_systems.NO_EXTENTS) as path:
        trainer = runs.EngineTrainer(build(), config_for(path, overlap="fused"))
        try:
            file_systems.fill(path, 0)
            with pytest.raises((IoError, EngineFailedError)) as caught:  # the latter where an update had failed before it was asked for
                runs.train(trainer, batches())
            error = caught.value.__cause__ if isinstance(caught.value, EngineFailedError) else caught.value
            assert isinstance(error, IoError)
            assert error.errno == errno.ENOSPC
            assert error.free_bytes is not None
            failed = trainer.engine.state is EngineState.FAILED
        finally:
            with contextlib.suppress(IoError, EngineFailedError):
                trainer.engine.close()
        assert trainer.engine.state is EngineState.CLOSED
        assert not failed or all(param.is_meta for param in trainer.model.parameters())


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_quota_or_a_full_disk_found_by_a_write_says_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    files = Files()
    config = config_for(tmp_path, overlap="deferred")
    monkeypatch.setattr("infinity.engine.Files", lambda: files)
    with runs.EngineTrainer(build(), config) as trainer:
        files.fault(FileOp.WRITE, Fault.error(code), nth=5)
        _, errors = train_and_make_room(trainer, lambda: None)
        assert [error.errno for error in errors] == [code]
        disk = os.statvfs(tmp_path)
        assert errors[0].free_bytes == pytest.approx(disk.f_bavail * disk.f_frsize, rel=0.2)


@pytest.mark.parametrize("nth", [1, 40, 200])
def test_a_path_that_fails_is_named_by_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    with three_paths(tmp_path) as paths:
        config = config_for(paths, overlap="deferred")
        files = Files()
        monkeypatch.setattr("infinity.engine.Files", lambda: files)
        with runs.EngineTrainer(build(), config) as trainer:
            files.fault(FileOp.READ, Fault.error(errno.EIO), nth=nth)
            error: BaseException | None
            try:
                found, (error,) = train_and_make_room(trainer, lambda: None)
            except EngineFailedError as stopped:  # the read was part of an update
                error, text = stopped.__cause__, str(stopped)
            else:
                assert_same_state(found)
                text = str(error)
        assert isinstance(error, IoError)
        assert error.path in text
        assert (error.op, error.errno) == ("read", errno.EIO)
        assert sum(error.path.startswith(f"{path}/infinity-") for path in paths) == 1
