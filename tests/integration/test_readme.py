"""What README.md shows is true: its code runs, its config loads, its links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from infinity.config import load_config

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def block(language: str) -> str:
    """The only code block of a language."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return str(found)


def test_its_config_loads_without_a_notice() -> None:
    config = load_config(block("json"))
    assert config.nvme_paths
    assert config.notices == ()


def test_its_python_runs_with_its_config_and_saves_a_trained_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(block("json"))
    (tmp_path / "train.py").write_text(block("python"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.pt", "train.py"]


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#]+)", README))))
def test_its_links_lead_to_files(link: str) -> None:
    assert (ROOT / link).exists()


def test_the_section_it_links_to_exists() -> None:
    headings = re.findall(r"^#+ (.*)$", (ROOT / "docs" / "design.md").read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"design\.md#([a-z0-9-]+)", README)) <= anchors


def test_every_option_and_target_it_names_exists() -> None:
    commands = "".join((ROOT / "infinity" / "cli" / name).read_text() for name in ("train.py", "bench.py", "tune.py", "doctor.py"))
    for option in re.findall(r"--([a-z]+)", README):
        assert option in commands or option == "help"
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"`?make ([a-z]+)", README)) <= set(targets)
