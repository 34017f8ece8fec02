"""How many bytes cross the disk per parameter and step, as the kernel counts them, beside what must?

bf16 weights in 16 + 16 bits, fp32 moments, one micro-step, nothing resident, nothing cached: both budgets are at
their minimum, but for the first row. The first two
steps do not count, because a read of a place that was never written is no transfer. The expected rows (bytes per parameter):

    fused, a unit's weights held from its backward gather to its update    14 read + 12 written = 26
    fused at the minimum of memory                                         16 read + 12 written = 28
    deferred at the minimum, gradients spilled in fp32                     20 read + 16 written = 36

    python benchmarks/bytes_moved.py [--layers 8 --width 512 --steps 4 --directory DIR]
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import torch
from _measure import MIB, emit, io_bytes, provenance, say, scratch_directory

from infinity import Engine
from infinity.data import BatchStream, open_corpus
from infinity.errors import BudgetError
from infinity.models.gpt import GPT, GPTConfig

SKIPPED_STEPS = 2
EXPECTED = {"fused, held": (14, 12), "fused, minimum": (16, 12), "deferred, minimum": (20, 16)}


class Budgets(NamedTuple):
    """In bytes."""

    host: int
    device: int


def config_of(directory: str, overlap: str, budgets: Budgets) -> dict[str, Any]:
    offload = {"device": "nvme", "nvme_path": directory}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": offload,
            "offload_optimizer": offload,
            "stage3_param_persistence_threshold": 0,
        },
        "memory": budgets._asdict(),
        "optimizer_overlap": overlap,
        "page": 256 * 1024,
    }


def minimum_bytes(shape: GPTConfig, directory: str, overlap: str) -> Budgets:
    """What an engine asks for when it is given next to nothing."""
    with torch.device("meta"):
        model = GPT(shape)
    needed = {"host": 4096, "device": 4096}
    for _ in range(4):
        try:
            with Engine(model, config_of(directory, overlap, Budgets(**needed))):
                break
        except BudgetError as error:
            needed[error.knob.removeprefix("memory.")] = error.needed_bytes
    return Budgets(**needed)


def measure(shape: GPTConfig, directory: str, overlap: str, budgets: Budgets, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    batches = iter(BatchStream(open_corpus().split()[0], batch=1, context=shape.context))
    with Engine(GPT(shape), config_of(directory, overlap, budgets)) as engine:
        for step in range(SKIPPED_STEPS + steps):
            if step == SKIPPED_STEPS:
                engine.finish()
                before = io_bytes()
            engine.backward(engine(*next(batches)))
            engine.step()
        engine.finish()
        after = io_bytes()
    read, written = ((end - begin) / steps / shape.numel for begin, end in zip(before, after, strict=True))
    return {"read": read, "written": written, "total": read + written}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--directory", default=None, help="on the drive to measure; default: runs/")
    arguments = parser.parse_args()
    shape = GPTConfig(layers=arguments.layers, heads=8, width=arguments.width, context=arguments.context)
    where = provenance()
    with scratch_directory(arguments.directory) as directory:
        least = minimum_bytes(shape, directory, "auto")
        two_units = 2 * 2 * (12 * shape.width**2 + 4 * shape.width)  # bytes of the weights of two blocks
        cases = {
            "fused, held": ("auto", least._replace(host=least.host + two_units + MIB)),
            "fused, minimum": ("auto", least),
            "deferred, minimum": ("deferred", minimum_bytes(shape, directory, "deferred")),
        }
        for case, (overlap, budgets) in cases.items():
            moved = measure(shape, directory, overlap, budgets, arguments.steps)
            read, written = EXPECTED[case]
            say(f"{case}: {moved['read']:.2f} read + {moved['written']:.2f} written = {moved['total']:.2f} (expected {read + written})")
            figures = {
                "parameters": shape.numel,
                "host_bytes": budgets.host,
                "device_bytes": budgets.device,
                "bytes_per_parameter": moved,
                "expected": {"read": read, "written": written, "total": read + written},
            }
            emit("bytes_moved", case, figures, where)


if __name__ == "__main__":
    main()
