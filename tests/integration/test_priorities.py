"""What goes first when a model is trained: gathers for a visit, then updates, then gathers ahead."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import EngineClosedError, StallError
from infinity.faults import Fault
from infinity.task_queue import Batch, FileOp, Priority, TaskQueue
from tests.support.runs import engine_config, least_host_bytes, with_host

Row = tuple[str, Priority]


class Recorder:
    """What every queue is handed while the test runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[list[Row]] = []
        self.promoted: list[int] = []
        submit, promote = TaskQueue.submit, TaskQueue.promote

        def recording_submit(queue: TaskQueue, batch: Batch) -> int:
            self.batches.append([(op, Priority(priority)) for op, _, _, _, _, _, priority, _ in batch.rows()])
            return submit(queue, batch)

        def recording_promote(queue: TaskQueue, ids: Iterable[int]) -> None:
            ids = list(ids)
            self.promoted += ids
            promote(queue, ids)

        monkeypatch.setattr(TaskQueue, "submit", recording_submit)
        monkeypatch.setattr(TaskQueue, "promote", recording_promote)

    def take(self) -> list[list[Row]]:
        batches, self.batches = self.batches, []
        return batches


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))


def priorities(batches: list[list[Row]], op: str) -> set[Priority]:
    return {priority for batch in batches for name, priority in batch if name == op}


@pytest.mark.parametrize("overlap", ["auto", "deferred"])
@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_gathers_for_a_visit_are_demand_updates_write_back_and_gathers_ahead_prefetch(
    recorder: Recorder, tmp_path: Path, device: str, overlap: str
) -> None:
    config = engine_config(tmp_path, overlap=overlap)
    config = with_host(config, 2 * least_host_bytes(make, config, device))
    data = torch.randn(2, 64)
    with infinity.Engine(make(), config, device=device) as engine:
        engine._files.fault(FileOp.READ, Fault.delay(1000), times=1 << 30)
        recorder.take()
        loss = engine(data).square().mean()
        recorded_forward = recorder.take()
        engine.backward(loss)
        engine.step()
        engine.finish()
        for _ in range(3):
            engine.backward(engine(data).square().mean())
            engine.step()
        engine.finish()
        later = recorder.take()
        assert engine.totals().prefetch_hits > 0
        engine._files.mend()
    assert priorities(recorded_forward, "read") == {Priority.DEMAND}  # nothing is known yet, so nothing is read ahead
    assert priorities(later, "write") == {Priority.WRITE_BACK}
    assert priorities(later, "read") == set(Priority)
    for batch in later:
        assert len({priority for _, priority in batch}) == 1  # a read, its check and its copy; a chain to its end
    assert recorder.promoted  # gathers ahead that a visit had to wait for


@pytest.mark.parametrize("fails", [True, False])
def test_only_a_failed_engine_cancels_what_is_not_begun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fails: bool) -> None:
    cancelled: list[TaskQueue] = []
    monkeypatch.setattr(TaskQueue, "cancel", lambda queue: cancelled.append(queue))
    engine = infinity.Engine(make(), engine_config(tmp_path))
    engine.backward(engine(torch.randn(2, 64)).square().mean())
    engine.step()
    if fails:
        engine._flight.fail(KeyboardInterrupt())
    engine.close()
    assert cancelled == [engine._queue] * fails


def test_an_engine_whose_queue_stands_still_can_be_closed_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine = infinity.Engine(make(), engine_config(tmp_path))
    close = TaskQueue.close

    def stand_still(queue: TaskQueue) -> None:
        raise StallError("1 of 1 tasks did not end")

    monkeypatch.setattr(TaskQueue, "close", stand_still)
    with pytest.raises(StallError):
        engine.close()
    assert engine._queue is not None
    assert engine._queue.stats().in_flight == 0  # it is still open
    monkeypatch.setattr(TaskQueue, "close", close)
    engine.close()
    with pytest.raises(EngineClosedError):
        engine._queue.stats()
    engine.close()
