"""What do checksums cost: `"verify": "write+read"` against `"off"`, a step and a kernel at a time?

Both engines are alive in one process and take turns in the same rounds, each from idle to idle, so that what else the machine does meets
both; a round's ratio is of its own two turns. The kernels run on one thread over memory that no cache holds: AdamW as it is, AdamW between
passes of VERIFY and CHECKSUM over each page, and AdamW that checks and sums its pages itself, which is what training uses.

    python benchmarks/verify_cost.py [--layers 12 --width 768 --context 128 --batch 2 --host 256MiB --rounds 9 --steps 3 --directory DIR]
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import numpy as np
import torch
from _measure import MIB, emit, provenance, say, scratch_directory, spread

from infinity import Engine
from infinity.data import Batch, BatchStream, open_corpus
from infinity.kernel_args import Check, Kernel, Segment, pack_check, pack_checksum, pack_verify
from infinity.models.gpt import GPT, GPTConfig
from infinity.native import check, ffi, lib
from infinity.optim.adamw import AdamW

VERIFY = ("off", "write+read")
FILLING_STEPS = 3
"""Steps before anything is measured: after them every slot of the files has been written."""
BYTES_MOVED = 26
"""By AdamW in bf16, for each parameter: what `byte_rate` counts. The checks move nothing."""


def config_of(verify: str, directory: str, arguments: argparse.Namespace) -> dict[str, Any]:
    offload = {"device": "nvme", "nvme_path": directory}
    return {
        "train_micro_batch_size_per_gpu": arguments.batch,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
        "memory": {"device": "auto", "host": arguments.host},
        "verify": verify,
    }


def measure_steps(arguments: argparse.Namespace, where: dict[str, Any]) -> None:
    shape = GPTConfig(layers=arguments.layers, heads=8, width=arguments.width, context=arguments.context)
    batches: Iterator[Batch] = iter(BatchStream(open_corpus().split()[0], batch=arguments.batch, context=arguments.context))
    with scratch_directory(arguments.directory) as directory, contextlib.ExitStack() as stack:
        engines = {}
        for verify in VERIFY:
            torch.manual_seed(0)
            engines[verify] = stack.enter_context(Engine(GPT(shape), config_of(verify, directory, arguments)))

        def turn(verify: str, steps: int) -> tuple[float, float]:
            """(seconds, seconds of CPU) per step."""
            engine = engines[verify]
            begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
            for _ in range(steps):
                tokens, targets = next(batches)
                engine.backward(engine(tokens, targets))
                engine.step()
            engine.finish()
            return (time.perf_counter() - begin_s) / steps, (time.process_time() - begin_cpu_s) / steps

        for verify in VERIFY:
            turn(verify, FILLING_STEPS)
        step_s: dict[str, list[float]] = {verify: [] for verify in VERIFY}
        cpu_s: dict[str, list[float]] = {verify: [] for verify in VERIFY}
        for round_ in range(arguments.rounds):
            for verify in VERIFY if round_ % 2 == 0 else VERIFY[::-1]:
                seconds, cpu_seconds = turn(verify, arguments.steps)
                step_s[verify].append(seconds)
                cpu_s[verify].append(cpu_seconds)
            say(f"round {round_ + 1}/{arguments.rounds}: " + ", ".join(f"{verify} {step_s[verify][-1]:.3f} s" for verify in VERIFY))
        ratios = {
            name: [on / off for off, on in zip(values["off"], values["write+read"], strict=True)]
            for name, values in {"step": step_s, "cpu": cpu_s}.items()
        }
        for verify in VERIFY:
            emit(
                "verify_cost",
                f"step, verify {verify}",
                {
                    "parameters": shape.numel,
                    "tokens": arguments.batch * arguments.context,
                    "step_s": spread(step_s[verify]),
                    "cpu_s": spread(cpu_s[verify]),
                    **({f"{name}_over_off": spread(values) for name, values in ratios.items()} if verify != "off" else {}),
                },
                where,
            )
        say(f"{shape.numel / 1e6:.1f} M parameters, everything on NVMe, memory.host {arguments.host}; median of {arguments.rounds} rounds")
        say(f"{'verify':12}{'step':>10}{'CPU':>10}")
        for verify in VERIFY:
            say(f"{verify:12}{median(step_s[verify]):8.3f} s{median(cpu_s[verify]):8.3f} s")
        say(f"{'cost':12}{median(ratios['step']) - 1:10.1%}{median(ratios['cpu']) - 1:10.1%}")


class Planes:
    """bf16 parameters in two halves, moments in two pages each, and bf16 gradients, tile by tile."""

    def __init__(self, numel: int, page_nbytes: int) -> None:
        self.numel = numel
        self.page_nbytes = page_nbytes
        self.tile_numel = page_nbytes // 2
        self.param, self.residual, self.grad = (np.full(numel, 0x3C00, np.uint16) for _ in range(3))
        self.exp_avg, self.exp_avg_sq = (np.full(numel, 0.01, np.float32) for _ in range(2))
        self.sums = np.zeros((numel // self.tile_numel, 6), np.uint32)
        self.algorithm = AdamW()
        self.scalars = self.algorithm.scalars(self.algorithm.defaults, 1, 1.0)

    def tiles(self) -> Iterator[tuple[bytes, list[int], list[int]]]:
        """AdamW's arguments, the addresses of the pages, and of the places of their checksums."""
        for number, begin in enumerate(range(0, self.numel, self.tile_numel)):
            halves = [plane.ctypes.data + 2 * begin for plane in (self.param, self.residual)]
            moments = [
                [plane.ctypes.data + 4 * begin + page * self.page_nbytes for page in (0, 1)] for plane in (self.exp_avg, self.exp_avg_sq)
            ]
            segment = Segment(self.grad.ctypes.data + 2 * begin, 0, self.tile_numel, True, self.scalars)
            args = self.algorithm.pack(*halves, moments, self.tile_numel // 2, [segment])
            places = [self.sums[number].ctypes.data + 4 * page for page in range(6)]
            yield args, [*halves, *moments[0], *moments[1]], places

    def take_sums(self) -> None:
        """So that what VERIFY and the checks expect is what is there."""
        for number, (_, pages, _) in enumerate(self.tiles()):
            for page, address in enumerate(pages):
                self.sums[number, page] = lib.inf_crc32c(ffi.cast("void *", address), self.page_nbytes, 0)

    def alone(self) -> list[tuple[int, bytes]]:
        """Kernels and their arguments, in order."""
        return [(Kernel.ADAMW, args) for args, _, _ in self.tiles()]

    def in_passes(self) -> list[tuple[int, bytes]]:
        kernels: list[tuple[int, bytes]] = []
        for number, (args, pages, _) in enumerate(self.tiles()):
            sums = [int(crc) for crc in self.sums[number]]
            kernels += [(Kernel.VERIFY, pack_verify(page, self.page_nbytes, crc)) for page, crc in zip(pages, sums, strict=True)]
            kernels.append((Kernel.ADAMW, args))
            kernels += [(Kernel.CHECKSUM, pack_checksum(page, self.page_nbytes)) for page in pages]
        return kernels

    def checking(self) -> list[tuple[int, bytes]]:
        flags = Check.BEFORE | Check.AFTER
        kernels: list[tuple[int, bytes]] = []
        for number, (args, pages, places) in enumerate(self.tiles()):
            checks = (
                pack_check(page, self.page_nbytes, flags, int(crc), place, 0)
                for page, crc, place in zip(pages, self.sums[number], places, strict=True)
            )
            kernels.append((Kernel.ADAMW, args + b"".join(checks)))
        return kernels


def measure_kernels(rounds: int, where: dict[str, Any]) -> None:
    planes = Planes(numel=1 << 24, page_nbytes=MIB // 2)
    forms: dict[str, Callable[[], list[tuple[int, bytes]]]] = {
        "AdamW alone": planes.alone,
        "AdamW between passes": planes.in_passes,
        "AdamW that checks": planes.checking,
    }
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    value = ffi.new("uint64_t *")
    for _ in range(rounds):
        for name, form in forms.items():
            planes.take_sums()
            calls = [(kernel, ffi.from_buffer(args), len(args)) for kernel, args in form()]
            begin_s = time.thread_time()  # they run on this thread, and wait for nothing
            for kernel, args, nbytes in calls:
                check(lib.inf_kernel_run(kernel, args, nbytes, value), name)
            seconds[name].append(time.thread_time() - begin_s)
    say(f"\n{'kernel, one thread':24}{'per parameter':>15}{'memory':>12}{'over AdamW alone':>20}")
    for name, values in seconds.items():
        over = median(a / b for a, b in zip(values, seconds["AdamW alone"], strict=True))
        rate = BYTES_MOVED * planes.numel / median(values)
        emit(
            "verify_cost",
            name,
            {
                "parameters": planes.numel,
                "page_bytes": planes.page_nbytes,
                "seconds": spread(values),
                "byte_rate": rate,
                "over_alone": over,
            },
            where,
        )
        say(f"{name:24}{median(values) / planes.numel * 1e9:12.2f} ns{rate / 1e9:7.1f} GB/s{over:20.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3, help="of each engine in each round")
    parser.add_argument("--host", default="256MiB", help="memory.host")
    parser.add_argument("--directory", default=None, help="on the drive to measure; default: runs/")
    parser.add_argument("--only", choices=("steps", "kernels"), default=None)
    arguments = parser.parse_args()
    where = provenance()
    if arguments.only != "kernels":
        measure_steps(arguments, where)
    if arguments.only != "steps":
        measure_kernels(arguments.rounds, where)


if __name__ == "__main__":
    main()
