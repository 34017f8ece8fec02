"""What the command line needs of an engine, made of plain torch: nothing is offloaded, and the figures are made up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from infinity.engine import StepMetrics, Totals
from infinity.placement import Placement, PlacementRow
from infinity.tiers.nvme import PathShare

MIB = 1 << 20


class PlainEngine:
    """Stands in for ``infinity.engine.Engine``."""

    late = False
    """Are the figures of a step known only a step later?"""
    after_step: Callable[[int], object] = staticmethod(lambda step: None)
    """Called with the number of each step at its end."""

    def __init__(self, model: nn.Module, config: Any, *, seed: int = 0) -> None:
        if any(parameter.is_meta for parameter in model.parameters()):
            model = model.to_empty(device="cpu")
            torch.manual_seed(seed)
            for module in model.modules():
                getattr(module, "reset_parameters", bool)()
        self.module = model
        self.config = config
        self.device = torch.device("cpu")
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=config.optimizer.params.lr)
        self.global_steps = 0
        self._finished: list[StepMetrics] = []
        self._pending: StepMetrics | None = None
        self._micro_steps = 0

    def __enter__(self) -> PlainEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.module = nn.Module()

    def __call__(self, *args: Any) -> Tensor:
        result: Tensor = self.module(*args)
        return result

    def backward(self, loss: Tensor) -> None:
        (loss / self.gradient_accumulation_steps()).backward()

    def step(self) -> None:
        self._micro_steps += 1
        if self._micro_steps % self.gradient_accumulation_steps():
            return
        lr = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.global_steps += 1
        self.finish()
        self._pending = _figures(self.global_steps, lr)
        if not self.late:
            self.finish()
        self.after_step(self.global_steps)

    def train(self) -> None:
        self.module.train()

    def eval(self) -> None:
        self.module.eval()

    def finish(self) -> None:
        if self._pending is not None:
            self._finished.append(self._pending)
            self._pending = None

    def take_finished_steps(self) -> list[StepMetrics]:
        steps, self._finished = self._finished, []
        return steps

    def train_batch_size(self) -> int:
        size: int = self.config.train_batch_size
        return size

    def gradient_accumulation_steps(self) -> int:
        steps: int = self.config.gradient_accumulation_steps
        return steps

    def placement(self) -> Placement:
        return Placement(
            rows=(PlacementRow("weights", "nvme", 2 * MIB), PlacementRow("optimizer state", "host", 8 * MIB)),
            n_params=sum(param.numel() for param in self.module.parameters()),
            n_trainable=0,
            page_nbytes=MIB,
            backend="threads",
            paths=(PathShare(path="/drive", file_system="ext4", n_slots=2, share=1.0, bytes_per_s=None, direct=True, free_bytes=MIB),),
            host_budget_bytes=16 * MIB,
            host_minimum_bytes=4 * MIB,
            device_budget_bytes=64 * MIB,
            device_minimum_bytes=3 * MIB,
        )

    def totals(self) -> Totals:
        return Totals(
            read_bytes=3000 * self.global_steps,
            write_bytes=2000 * self.global_steps,
            stall_s=0.25 * self.global_steps,
            prefetch_hits=0,
            demand_gathers=0,
        )


def _figures(step: int, lr: float) -> StepMetrics:
    return StepMetrics(
        step=step,
        lr=lr,
        grad_norm=1.5,
        clip_factor=1.0,
        step_s=0.5,
        stall_s=0.25,
        read_bytes=3000,
        write_bytes=2000,
        host_bytes=8 * MIB,
        device_bytes=MIB,
        prefetch_hits=0,
        demand_gathers=0,
    )
