"""Lines of JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from infinity.metrics import JsonLines


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
