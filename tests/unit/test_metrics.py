"""Lines of JSON, and histograms."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from infinity.metrics import Histogram, JsonLines


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


def histogram(values: list[int], unit: float = 1.0) -> Histogram:
    """As the native queue fills it."""
    counts = [0] * 608
    for value in values:
        exponent = value.bit_length() - 1
        counts[value if value < 16 else (exponent - 3) * 16 + (value >> (exponent - 4) & 15)] += 1
    return Histogram(counts, sum(values), max(values, default=0), unit)


def test_a_histogram_without_values_has_no_mean_and_no_percentile() -> None:
    empty = histogram([])
    assert (empty.count, empty.total, empty.max, empty.buckets()) == (0, 0, 0, [])
    assert math.isnan(empty.mean)
    assert math.isnan(empty.percentile(50))


def test_small_numbers_are_exact() -> None:
    values = histogram([*range(32)])
    assert [values.percentile(p) for p in (0, 50, 75, 99, 100)] == [0, 15, 23, 31, 31]
    assert values.buckets() == [(i, i + 1, 1) for i in range(32)]


@pytest.mark.parametrize("value", [16, 31, 33, 1000, 4095, 4096, 123_456_789, (1 << 40) - 1, 1 << 40])
def test_a_value_lies_in_its_bucket_which_is_narrow(value: int) -> None:
    [(first, end, count)] = histogram([value]).buckets()
    assert first <= value < end
    assert (end - first) * 16 <= value
    assert count == 1


def test_a_percentile_is_at_most_a_sixteenth_above_the_value_and_none_is_above_the_largest() -> None:
    values = sorted((i * 7919) % 1_000_003 + 100 for i in range(1000))
    of_values = histogram(values)
    for p in (1, 25, 50, 90, 99, 99.9, 100):
        exact = values[math.ceil(len(values) * p / 100) - 1]
        assert exact <= of_values.percentile(p) <= min(exact * 17 / 16, values[-1])


def test_a_histogram_answers_in_its_unit() -> None:
    values = histogram([1000, 3000], unit=1e-9)
    assert values.total == pytest.approx(4e-6)
    assert values.mean == pytest.approx(2e-6)
    assert values.max == pytest.approx(3e-6)
    assert values.percentile(100) == pytest.approx(3e-6)
    assert values.buckets()[0][0] == pytest.approx(992e-9)


@pytest.mark.parametrize("p", [-1, 100.5, math.nan])
def test_a_percentile_that_cannot_be_is_refused(p: float) -> None:
    with pytest.raises(ValueError, match="percentile"):
        histogram([1]).percentile(p)
