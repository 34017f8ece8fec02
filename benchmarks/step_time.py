"""How long is a step where the state rests on NVMe, in host memory, on the device, or in plain torch, and how long must it be?

All cases are alive in one process and take turns, some steps at a time, from idle to idle: updates still in flight after the last step
of a turn count. The bound is max(compute + AdamW, bytes / disk rate): compute is forward and backward of plain torch, AdamW our kernel
on this machine's memory, bytes what the ``nvme`` case moved, the disk rate that of reads and writes in turn through the same queue,
each measured in every round. Plain torch is the usual recipe: bf16 weights, fp32 masters, ``torch.optim.AdamW(fused=True)``.

    python benchmarks/step_time.py [--layers 8 --width 512 --context 128 --batch 8 --rounds 5 --steps 4 --directory DIR]
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from _measure import Disk, adamw_rate, emit, io_bytes, provenance, say, scratch_directory, spread
from torch import Tensor

from infinity import Engine
from infinity.data import Batch, BatchStream, open_corpus
from infinity.models.gpt import GPT, GPTConfig

PLACEMENTS = {"nvme": "nvme", "cpu": "cpu", "resident": "none"}
FILLING_STEPS = 3
"""Steps before anything is measured: after them every slot of the files has been written."""


class Plain:
    """Plain torch with the interface that the turns need."""

    def __init__(self, model: GPT) -> None:
        self.module = model.bfloat16()
        self.weights = list(self.module.parameters())
        self.masters = [weight.detach().float().requires_grad_() for weight in self.weights]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-4, fused=True)
        self.compute_s: list[float] = []

    def run_step(self, tokens: Tensor, targets: Tensor) -> None:
        begin_s = time.perf_counter()
        self.module(tokens, targets).backward()
        self.compute_s.append(time.perf_counter() - begin_s)
        for weight, master in zip(self.weights, self.masters, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        self.optimizer.step()
        with torch.no_grad():
            for weight, master in zip(self.weights, self.masters, strict=True):
                weight.copy_(master)
                master.grad = None


def run_engine_step(engine: Engine, tokens: Tensor, targets: Tensor) -> None:
    engine.backward(engine(tokens, targets))
    engine.step()


def config_of(placement: str, directory: str, arguments: argparse.Namespace) -> dict[str, Any]:
    offload = {"device": placement, **({"nvme_path": directory} if placement == "nvme" else {})}
    return {
        "train_micro_batch_size_per_gpu": arguments.batch,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
        "memory": {"device": "auto", "host": arguments.host if placement == "nvme" else "auto"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="of each case in each round")
    parser.add_argument("--host", default="64MiB", help="memory.host of the nvme case")
    parser.add_argument("--directory", default=None, help="on the drive to measure; default: runs/")
    arguments = parser.parse_args()
    shape = GPTConfig(layers=arguments.layers, heads=8, width=arguments.width, context=arguments.context)
    where = provenance()

    with scratch_directory(arguments.directory) as directory, contextlib.ExitStack() as stack:
        torch.manual_seed(0)
        batches: Iterator[Batch] = iter(BatchStream(open_corpus().split()[0], batch=arguments.batch, context=arguments.context))
        steps: dict[str, Callable[[Tensor, Tensor], None]] = {}
        idle: dict[str, Callable[[], None]] = {}
        for name, placement in PLACEMENTS.items():
            engine = stack.enter_context(Engine(GPT(shape), config_of(placement, directory, arguments)))
            steps[name] = lambda tokens, targets, engine=engine: run_engine_step(engine, tokens, targets)  # type: ignore[misc]
            idle[name] = engine.finish
        plain = Plain(GPT(shape))
        steps["plain torch"], idle["plain torch"] = plain.run_step, lambda: None
        disk = Disk(directory)
        stack.callback(disk.close)

        def turn(name: str, count: int) -> float:
            """Seconds per step."""
            begin_s = time.perf_counter()
            for _ in range(count):
                steps[name](*next(batches))
            idle[name]()
            return (time.perf_counter() - begin_s) / count

        for name in steps:
            turn(name, FILLING_STEPS)
        plain.compute_s.clear()
        step_s: dict[str, list[float]] = {name: [] for name in steps}
        moved: list[tuple[float, float]] = []
        mixed_rates, update_rates = [], []
        for round_ in range(arguments.rounds):
            for name in list(steps)[round_ % len(steps) :] + list(steps)[: round_ % len(steps)]:
                before = io_bytes()
                step_s[name].append(turn(name, arguments.steps))
                after = io_bytes()
                if name == "nvme":
                    moved.append(((after[0] - before[0]) / arguments.steps, (after[1] - before[1]) / arguments.steps))
            mixed_rates.append(disk.rates().mixed)
            update_rates.append(adamw_rate())
            say(f"round {round_ + 1}/{arguments.rounds}: " + ", ".join(f"{name} {seconds[-1]:.3f} s" for name, seconds in step_s.items()))

        numel = shape.numel
        read_bytes, write_bytes = (median(column) for column in zip(*moved, strict=True))
        compute_s, update_s = median(plain.compute_s), numel / median(update_rates)
        disk_s = (read_bytes + write_bytes) / median(mixed_rates)
        bound_s = {"nvme": max(compute_s + update_s, disk_s), "plain torch": compute_s + update_s}
        for name, seconds in step_s.items():
            bound = bound_s.get(name, compute_s + update_s)
            emit(
                "step_time",
                name,
                {
                    "parameters": numel,
                    "tokens": arguments.batch * arguments.context,
                    "step_s": spread(seconds),
                    "bound_s": bound,
                    "step_over_bound": median(seconds) / bound,
                    "step_over_plain": median(seconds) / median(step_s["plain torch"]),
                    "compute_s": compute_s,
                    "adamw_s": update_s,
                    "disk_s": disk_s if name == "nvme" else 0.0,
                    "read_bytes": read_bytes if name == "nvme" else 0,
                    "write_bytes": write_bytes if name == "nvme" else 0,
                    "disk_bytes_per_s": spread(mixed_rates),
                    "adamw_params_per_s": spread(update_rates),
                },
                where,
            )


if __name__ == "__main__":
    main()
