"""The law: where it runs does not change what it computes. The legs it is tested on, and how one is run.

A leg is one value for each axis. Legs whose axes do not apply are not generated: without a plane on NVMe there is no backend to choose, no
number of paths, nothing to verify and no half of a host budget, and without an offloaded plane there is no host budget at all.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from tests.support import models, runs

TIERS = ("none", "cpu", "nvme")
PLACEMENTS = tuple(itertools.product(TIERS, TIERS))
PAGES = (4 << 10, 16 << 10, 64 << 10)
HOSTS = ("minimum", "half", "all")
BACKENDS = ("threads", "uring", "libaio")
VERIFY = ("write+read", "off")
PATHS = (1, 2, 3)
THREADS = (1, 2, 4)
OVERLAPS = ("deferred", "fused")
DEVICES = ("cpu", "simulated")
DEVICE_BUDGETS = ("minimum", "all")

STEPS = 10
SHARED_MEMORY = Path("/dev/shm")
UNUSED = "-"
"""Stands for an axis that does not apply to a leg."""


class Leg(NamedTuple):
    """One way to run the same training."""

    workload: str
    placement: tuple[str, str]
    """Of the parameters, and of the optimizer state."""
    page: int
    host: str
    backend: str
    verify: str
    paths: int | str
    threads: int
    overlap: str
    device: str
    device_memory: str

    def __str__(self) -> str:
        return "-".join("+".join(value) if isinstance(value, tuple) else str(value) for value in self)


class Workload(NamedTuple):
    """What is computed; the legs of one workload all have to give the same."""

    make: Callable[[], nn.Module]
    precision: str
    accumulation: int

    def batches(self) -> list[models.Tokens]:
        """The micro-batches of all steps; one in three leaves a block out."""
        return models.token_batches(STEPS * self.accumulation, skips=((), (), (1,)))


def _model(precision: str, **options: object) -> nn.Module:
    return models.build(lambda: models.GPT(width=32, blocks=3, **options), runs.DTYPES[precision])  # type: ignore[arg-type]


WORKLOADS = {
    "bf16": Workload(functools.partial(_model, "bf16", tied=True), "bf16", 1),
    "fp32": Workload(functools.partial(_model, "fp32", frozen_blocks=(2,)), "fp32", 1),
    "bf16_accumulated": Workload(functools.partial(_model, "bf16", checkpoint="non_reentrant"), "bf16", 2),
}


def legs(*, backends: Sequence[str] = BACKENDS) -> list[Leg]:
    """Every valid leg; ``backends`` are those that work here."""
    found = []
    for workload, placement, page, threads, overlap, device, device_memory in itertools.product(
        WORKLOADS, PLACEMENTS, PAGES, THREADS, OVERLAPS, DEVICES, DEVICE_BUDGETS
    ):
        hosts = HOSTS if "nvme" in placement else ("minimum", "all") if "cpu" in placement else (UNUSED,)
        if placement[0] == "none" and device_memory == "minimum":
            continue  # nothing is gathered: the least is all
        on_nvme = backends if "nvme" in placement else (UNUSED,)
        n_paths = PATHS if "nvme" in placement else (UNUSED,)
        verify = VERIFY if "nvme" in placement else (UNUSED,)
        for host, backend, verified, paths in itertools.product(hosts, on_nvme, verify, n_paths):
            found.append(Leg(workload, placement, page, host, backend, verified, paths, threads, overlap, device, device_memory))
    return found


def pairs(leg: Leg) -> set[tuple[int, object, int, object]]:
    """Every pair of values of two axes that a leg has."""
    return {(i, a, j, b) for (i, a), (j, b) in itertools.combinations(enumerate(leg), 2)}


def covering(every: Sequence[Leg], *, seed: int, candidates: int = 400) -> list[Leg]:
    """Few legs that have, together, every pair of values of two axes that any leg has; the same for the same seed."""
    draw = random.Random(seed)
    left = set().union(*map(pairs, every))
    chosen = []
    while left:
        wanted = min(left, key=repr)
        having = [leg for leg in every if leg[wanted[0]] == wanted[1] and leg[wanted[2]] == wanted[3]]
        best = max(draw.sample(having, min(candidates, len(having))), key=lambda leg: len(pairs(leg) & left))
        left -= pairs(best)
        chosen.append(best)
    return chosen


@functools.cache
def reference(workload: str) -> runs.Outcome:
    """The leg that is plain torch (bf16: the reference optimizer)."""
    work = WORKLOADS[workload]
    return runs.train(runs.PlainTrainer(work.make(), accumulation=work.accumulation), work.batches())


def run(leg: Leg, directory: Path) -> runs.Outcome:
    """The training of a leg, gradients included where the update is deferred. The third path is on another file system, if there is one."""
    with contextlib.ExitStack() as stack:
        paths = [directory / f"path{index}" for index in range(leg.paths if isinstance(leg.paths, int) else 1)]
        if len(paths) > 2 and SHARED_MEMORY.is_dir():
            paths[2] = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="infinity-law-", dir=SHARED_MEMORY)))
        for path in paths:
            path.mkdir(exist_ok=True)
        return _run(leg, paths)


def _run(leg: Leg, paths: list[Path]) -> runs.Outcome:
    work = WORKLOADS[leg.workload]
    config = runs.engine_config(
        paths,
        param=leg.placement[0],
        optimizer=leg.placement[1],
        precision=work.precision,
        accumulation=work.accumulation,
        overlap=leg.overlap,
        page=leg.page,
        backend="threads" if leg.backend == UNUSED else leg.backend,
        threads=leg.threads,
        device_memory="128MiB",
    )
    if leg.verify != UNUSED:
        config["verify"] = leg.verify
    if leg.device_memory == "minimum":
        config = runs.with_device(config, runs.least_device_bytes(work.make, config, leg.device))
    if leg.host != UNUSED:
        least = runs.least_host_bytes(work.make, config, leg.device)
        useful = max(least, runs.useful_host_bytes(work.make, config, leg.device))
        config = runs.with_host(config, {"minimum": least, "half": (least + useful) // 2, "all": useful}[leg.host])
    return runs.engine_run(work.make(), config, work.batches(), device=leg.device, read_gradients=leg.overlap == "deferred")


def wrong_of(leg: Leg, directory: Path) -> list[str]:
    """What a leg computes otherwise than plain torch, in words; nothing where the law holds."""
    with torch.random.fork_rng():
        return runs.differences(reference(leg.workload), run(leg, directory))
