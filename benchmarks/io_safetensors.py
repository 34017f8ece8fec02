"""How fast are tensors saved to and loaded from a safetensors file, beside the library of that name and torch, and how fast can it be?

Every case saves the same incompressible tensors (bf16 weights of a transformer: large matrices and small vectors) and makes them durable:
ours by itself, the others with an fsync of file and directory after them. Loads begin with nothing of the file in the page cache and end
with every byte read (the library and torch map or copy; each tensor is then summed, in all cases). The cases take turns. The bound is the
queue alone: one write, or read, of as many bytes from aligned memory, in every round. Loads also need new memory, and on virtual
machines that give free pages back to their host that may be slower than the drive: ``fresh memory`` is what it takes to touch as much.

    python benchmarks/io_safetensors.py [--size 1GiB --rounds 7 --directory DIR]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import safetensors.torch
import torch
from _measure import emit, memory_bytes, provenance, reset_high_water_mark, say, scratch_directory, spread

import infinity.io
from infinity.sizes import format_rate, parse_bytes


def model(nbytes: int) -> dict[str, torch.Tensor]:
    """Blocks of a transformer, width 1,024: about 25 MB each."""
    torch.manual_seed(0)
    width, tensors, total = 1024, {}, 0
    block = {"attn.qkv": (3 * width, width), "attn.out": (width, width), "mlp.up": (4 * width, width), "mlp.down": (width, 4 * width)}
    for i in range(1 << 20):
        for name, shape in {**block, "norm1": (width,), "norm2": (width,), "mlp.bias": (4 * width,)}.items():
            bits = torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16)
            tensors[f"blocks.{i}.{name}"] = (bits & 0x3FFF).view(torch.bfloat16)  # no NaN, no infinity: sums compare
            total += bits.nbytes
            if total >= nbytes:
                return tensors
    return tensors


def durable(path: Path) -> None:
    for name, flags in ((path, os.O_RDONLY), (path.parent, os.O_RDONLY | os.O_DIRECTORY)):
        fd = os.open(name, flags)
        os.fsync(fd)
        os.close(fd)


def forget(path: Path) -> None:
    """Nothing of it is in the page cache afterwards."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def save_with_library(tensors: dict[str, torch.Tensor], path: Path) -> None:
    safetensors.torch.save_file(tensors, path)
    durable(path)


def save_with_torch(tensors: dict[str, torch.Tensor], path: Path) -> None:
    torch.save(tensors, path)
    durable(path)


def load_with_torch(path: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    return loaded


def touch(tensors: dict[str, torch.Tensor]) -> int:
    """Reads one byte in each page, so that what is only mapped is really read."""
    return sum(int(tensor.view(-1).view(torch.uint8)[::4096].sum()) for tensor in tensors.values())


Save, Load = Callable[[dict[str, torch.Tensor], Path], None], Callable[[Path], dict[str, torch.Tensor]]
CASES: dict[str, tuple[Save, Load]] = {
    "infinity": (infinity.io.save, infinity.io.load),
    "safetensors": (save_with_library, safetensors.torch.load_file),
    "torch": (save_with_torch, load_with_torch),
}


def raw(path: Path, memory: torch.Tensor, op: str) -> float:
    """Seconds of the queue alone: it writes a new file and flushes it, or reads it."""
    if op == "load":
        forget(path)
    else:
        path.unlink(missing_ok=True)
    begin_s = time.perf_counter()
    with infinity.io.open(path, "r" if op == "load" else "w") as file:
        if op == "load":
            file.read_into(memory).wait()
        else:
            file.reserve(memory.nbytes)
            file.write_from(memory).wait()
            file.flush().wait()
    return time.perf_counter() - begin_s


def touch_fresh(nbytes: int) -> float:
    """Seconds until so much new memory is there."""
    begin_s = time.perf_counter()
    infinity.io.empty(nbytes)[::4096] = 0
    return time.perf_counter() - begin_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=parse_bytes, default=parse_bytes("1GiB"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", default=None, help="on the drive to measure; default: runs/")
    arguments = parser.parse_args()
    where = provenance()
    where["versions"]["safetensors"] = safetensors.__version__

    tensors = model(arguments.size)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    expected = touch(tensors)
    seconds: dict[tuple[str, str], list[float]] = {}
    peak: dict[tuple[str, str], int] = {}
    with scratch_directory(arguments.directory) as directory:
        paths = {name: Path(directory) / name for name in CASES}
        memory = infinity.io.empty(nbytes // 4096 * 4096, torch.uint8).random_()

        def timed(name: str, op: str, run: Callable[[], object]) -> None:
            before = memory_bytes("VmRSS")
            reset_high_water_mark()
            begin_s = time.perf_counter()
            run()
            took_s = time.perf_counter() - begin_s
            seconds.setdefault((name, op), []).append(took_s)
            peak[name, op] = max(peak.get((name, op), 0), memory_bytes("VmHWM") - before)

        def check(loaded: dict[str, torch.Tensor]) -> None:
            if touch(loaded) != expected:
                raise SystemExit("what was loaded is not what was saved")

        for round_ in range(arguments.rounds + 1):
            order = list(CASES)[round_ % len(CASES) :] + list(CASES)[: round_ % len(CASES)]
            for op in ("save", "load"):
                seconds.setdefault(("raw", op), []).append(raw(Path(directory) / "raw", memory, op))
                if op == "load":
                    seconds.setdefault(("fresh memory", op), []).append(touch_fresh(nbytes))
                for name in order:
                    save, load = CASES[name]
                    path = paths[name]
                    if op == "save":
                        path.unlink(missing_ok=True)
                        timed(name, op, lambda save=save, path=path: save(tensors, path))  # type: ignore[misc]
                    else:
                        forget(path)
                        timed(name, op, lambda load=load, path=path: check(load(path)))  # type: ignore[misc]
            say(
                f"round {round_}/{arguments.rounds}{' (not counted)' if round_ == 0 else ''}: "
                + ", ".join(f"{name} {op} {format_rate(nbytes / taken[-1])}" for (name, op), taken in seconds.items())
            )
        for (name, op), all_taken in seconds.items():
            taken = all_taken[1:]
            ratios = [ours / theirs for ours, theirs in zip(seconds[name, op][1:], seconds["infinity", op][1:], strict=True)]
            emit(
                "io_safetensors",
                f"{name} {op}",
                {
                    "bytes": nbytes,
                    "tensors": len(tensors),
                    "seconds": spread(taken),
                    "bytes_per_s": nbytes / median(taken),
                    "infinity_over_this": spread(ratios),
                    "peak_bytes": peak.get((name, op), 0),
                },
                where,
            )


if __name__ == "__main__":
    main()
