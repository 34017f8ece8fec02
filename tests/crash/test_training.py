"""A run that is killed, and runs side by side: nothing is left, nothing is touched, and the next start works at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SCRIPT = textwrap.dedent(
    """
    import sys
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    import infinity

    directory, steps = sys.argv[1], int(sys.argv[2])
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    offload = {"device": "nvme", "nvme_path": directory}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage3_param_persistence_threshold": 0, "offload_param": offload, "offload_optimizer": offload},
        "memory": {"host": "256KiB", "device": "32MiB"},
        "page": "4KiB",
    }
    data = TensorDataset(torch.randn(4 * steps, 64), torch.randn(4 * steps, 64))
    engine = infinity.Engine(model, config, device="cpu")
    for number, (x, y) in enumerate(DataLoader(data, batch_size=4, num_workers=2)):
        loss = (engine(x) - y).square().mean()
        engine.backward(loss)
        engine.step()
        print(f"step {number} {loss.item():.9g}", flush=True)
    engine.close()
    """
)


@contextmanager
def training(directory: Path, steps: int) -> Iterator[subprocess.Popen[str]]:
    """A process that trains; killed at the end if it still runs."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", SCRIPT, str(directory), str(steps)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read_until(process: subprocess.Popen[str], begin: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(begin):
            return
    raise AssertionError(f"the run ended before {begin!r}")


def lines_of(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    lines = process.stdout.read().splitlines()
    assert process.wait() == 0
    return lines


def files_below(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if not path.is_dir()]


def test_a_killed_run_with_loader_workers_leaves_no_file_and_starts_again_at_once(tmp_path: Path) -> None:
    with training(tmp_path, steps=1000) as process:
        read_until(process, "step 5")
        os.kill(process.pid, signal.SIGKILL)  # its loader's workers live on for a moment
        process.wait()
        assert files_below(tmp_path) == []
        with training(tmp_path, steps=6) as again:
            assert len(lines_of(again)) == 6
    assert files_below(tmp_path) == []


def test_two_runs_in_one_directory_do_not_touch_each_other(tmp_path: Path) -> None:
    with training(tmp_path, steps=20) as first, training(tmp_path, steps=20) as second:
        a, b = lines_of(first), lines_of(second)
    assert len(a) == 20
    assert a == b
    assert files_below(tmp_path) == []
