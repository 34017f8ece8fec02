"""What tests of `infinity.io` share: directories of several file systems, arrays that lie badly, queues of every backend."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

import infinity.io

TMPFS = Path("/dev/shm")
PLACES = ["disk", "tmpfs"] if TMPFS.is_dir() and os.access(TMPFS, os.W_OK) else ["disk"]


@contextmanager
def directory_on(place: str) -> Iterator[Path]:
    """An empty directory; ``disk`` is where temporary files of this system are."""
    path = Path(tempfile.mkdtemp(prefix="infinity-test-", dir=TMPFS if place == "tmpfs" else None))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def noise(nbytes: int, seed: int = 0, shift: int = 0) -> NDArray[np.uint8]:
    """Random bytes, ``shift`` bytes behind a page."""
    memory = infinity.io.empty(nbytes + shift, np.uint8)[shift:]
    memory[:] = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    return memory


def blank(nbytes: int, shift: int = 0) -> NDArray[np.uint8]:
    """Zeros, ``shift`` bytes behind a page."""
    return infinity.io.empty(nbytes + shift, np.uint8)[shift:]


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def direct_works(directory: Path) -> bool:
    path = directory / "probe"
    with infinity.io.open(path, "w") as file:
        answer = file.direct
    path.unlink()
    return answer
