"""Counters, spans and lines of JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from infinity import metrics
from infinity.metrics import Counters, JsonLines


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that spans read: its last entry."""
    times = [0.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: times[-1])
    return times


def test_a_counter_that_was_never_touched_reads_as_zero() -> None:
    assert Counters()["reads"] == 0


def test_amounts_add_up() -> None:
    counters = Counters()
    counters.add("reads")
    counters.add("reads", 2)
    assert counters["reads"] == 3


def test_a_peak_keeps_the_largest_value() -> None:
    counters = Counters()
    for value in (2, 5, 3):
        counters.peak("host_bytes", value)
    assert counters["host_bytes"] == 5


def test_set_replaces_the_value() -> None:
    counters = Counters()
    counters.add("frames", 3)
    counters.set("frames", 1)
    assert counters["frames"] == 1


def test_since_says_what_was_added_after_a_snapshot() -> None:
    counters = Counters()
    counters.add("reads", 2)
    before = counters.snapshot()
    counters.add("reads", 3)
    counters.add("writes")
    assert counters.since(before) == {"reads": 3, "writes": 1}


def test_a_snapshot_does_not_change_afterwards() -> None:
    counters = Counters()
    before = counters.snapshot()
    counters.add("reads")
    assert before == {}


def test_a_span_adds_the_seconds_inside_it(clock: list[float]) -> None:
    counters = Counters()
    with counters.span("stall_s"):
        clock.append(1.5)
    clock.append(10.0)
    with counters.span("stall_s"):
        clock.append(11.0)
    assert counters["stall_s"] == 2.5


def test_nested_entries_of_a_span_count_once(clock: list[float]) -> None:
    counters = Counters()
    with counters.span("stall_s"), counters.span("stall_s"):
        clock.append(2.0)
    assert counters["stall_s"] == 2.0


def test_a_span_ends_with_an_error_too(clock: list[float]) -> None:
    counters = Counters()

    def fail_inside() -> None:
        with counters.span("stall_s"):
            clock.append(1.0)
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    clock.append(5.0)
    assert counters["stall_s"] == 1.0


def test_a_line_is_in_the_file_when_write_returns(tmp_path: Path) -> None:
    with JsonLines(tmp_path / "steps.jsonl") as lines:
        lines.write({"step": 1, "loss": 0.5})
        assert json.loads((tmp_path / "steps.jsonl").read_text()) == {"step": 1, "loss": 0.5}


def test_each_record_is_one_line(tmp_path: Path) -> None:
    with JsonLines(tmp_path / "steps.jsonl") as lines:
        lines.write({"text": "a\nb"})
        lines.write({"step": 2})
    assert [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()] == [{"text": "a\nb"}, {"step": 2}]


def test_a_number_that_json_lacks_is_written_as_text_that_float_reads(tmp_path: Path) -> None:
    with JsonLines(tmp_path / "steps.jsonl") as lines:
        lines.write({"loss": math.nan, "norms": [math.inf, {"low": -math.inf}]})
    record = json.loads((tmp_path / "steps.jsonl").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert record == {"loss": "NaN", "norms": ["Infinity", {"low": "-Infinity"}]}
    assert math.isnan(float(record["loss"]))


def test_a_file_of_an_earlier_run_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text("old\n")
    JsonLines(path).close()
    assert path.read_text() == ""


def test_a_closed_writer_refuses_and_may_be_closed_again(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "steps.jsonl")
    lines.close()
    lines.close()
    with pytest.raises(ValueError, match="closed"):
        lines.write({})
