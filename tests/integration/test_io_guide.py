"""What docs/io.md shows of `infinity.io` runs, and what it says of it is so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from infinity.errors import SafetensorsError

ROOT = Path(__file__).resolve().parents[2]
SECTION = (ROOT / "docs" / "io.md").read_text().split("\n## The engine alone: infinity.io\n", 1)[1].split("\n## ", 1)[0]


def test_its_examples_run_one_after_the_other(tmp_path: Path) -> None:
    examples = re.findall(r"^```python\n(.*?)^```$", SECTION, re.DOTALL | re.MULTILINE)
    assert len(examples) == 3
    (tmp_path / "guide.py").write_text("\n".join(examples))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "guide.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{i} 1048576" for i in range(4)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["guide.py", "model.safetensors", "weights.bin"]
    assert (tmp_path / "weights.bin").read_bytes() == b"".join(bytes([i]) * (1 << 20) for i in range(8))


def test_its_table_has_every_problem_of_a_safetensors_file() -> None:
    source = "".join((ROOT / "infinity" / "io" / name).read_text() for name in ("header.py", "safetensors.py"))
    raised = set(re.findall(rf'{SafetensorsError.__name__}\(\s*"(\w+)"', source))
    table = SECTION.split("| `problem` | |", 1)[1]
    assert set(re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `")))) == raised
