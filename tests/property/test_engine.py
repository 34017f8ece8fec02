"""Any course of events - steps, evaluations, errors, edits, dropped gradients - on any placement computes what plain torch computes."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import infinity
from tests.support import models, runs

EDITED = ("blocks.1.up.weight", "tokens.weight", "blocks.0.norm1.bias")
BATCHES = models.token_batches(64)


class UserError(Exception):
    """An error of the user's own."""


class Faulty(models.GPT):
    """Calls ``fault`` in the forward, or in the backward, of one block."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.fault: Callable[[], None] | None = None
        self.fault_in_backward: Callable[[], None] | None = None

    def watch(self, index: int) -> None:
        self.blocks[index].register_forward_hook(self._pass)

    def _pass(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if self.fault is not None:
            self.fault()
        if self.fault_in_backward is not None and output.requires_grad:
            fault = self.fault_in_backward
            output.register_hook(lambda grad: fault())
        return output


def throw(kind: type[BaseException]) -> Callable[[], None]:
    def fault() -> None:
        raise kind()

    return fault


class Actions:
    """What can happen; the same calls on both sides, with what each returns kept for comparison."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.model = trainer.model
        self.seen: list[Tensor | None] = []
        self.count = 0
        self.is_engine = isinstance(trainer, runs.EngineTrainer)

    def _args(self, skip: frozenset[int]) -> models.Tokens:
        self.count += 1
        return BATCHES[self.count % len(BATCHES)]._replace(skip=skip)

    def step(self, skip: frozenset[int]) -> None:
        self.trainer.backward(self.trainer(*self._args(skip)))
        self.trainer.step()

    def plain_step(self, skip: frozenset[int]) -> None:
        self.trainer(*self._args(skip)).backward()
        self.trainer.step()

    def forward(self, skip: frozenset[int]) -> None:
        self.seen.append(self.trainer(*self._args(skip)).detach())

    def evaluate(self, skip: frozenset[int]) -> None:
        self.trainer.eval()
        with torch.no_grad():
            self.seen.append(self.trainer(*self._args(skip)))
        self.trainer.train()

    def drop(self, skip: frozenset[int]) -> None:
        self.trainer(*self._args(skip)).backward()
        self.trainer.zero_grad()

    def fail_forward(self, kind: type[BaseException]) -> None:
        self.model.fault = throw(kind)
        with pytest.raises(kind):
            self.trainer(*self._args(frozenset()))
        self.model.fault = None

    def fail_backward(self, kind: type[BaseException]) -> None:
        self.model.fault_in_backward = throw(kind)
        loss = self.trainer(*self._args(frozenset()))
        with pytest.raises(kind):
            loss.backward()
        self.model.fault_in_backward = None
        self.trainer.zero_grad()

    def edit(self, name: str) -> None:
        param = self.trainer.params.get(name)
        if param is None:
            return
        with torch.no_grad():
            param.mul_(0.75)
        if not self.is_engine and param.dtype == torch.bfloat16 and param in self.trainer.optimizer.state:
            self.trainer.optimizer.state[param]["residual"].zero_()

    def read(self, name: str) -> None:
        self.seen.append(self.model.get_parameter(name).sum().detach())

    def gather(self, name: str) -> None:
        with infinity.gathered(self.model.get_parameter(name)):
            self.seen.append(self.model.get_parameter(name).data.clone())

    def read_gradient(self, name: str) -> None:
        self.trainer(*self._args(frozenset())).backward()
        param = self.model.get_parameter(name)
        if self.is_engine:
            self.seen.append(None if param.grad is None else param.grad.float())
        else:
            grad = self.trainer.gradient(param)
            self.seen.append(None if grad is None else grad.to(param.dtype).float())
        self.trainer.step()

    def rate(self, lr: float) -> None:
        self.trainer.optimizer.param_groups[0]["lr"] = lr

    def freeze(self, index: int) -> None:
        for param in self.model.blocks[index].parameters():
            param.requires_grad_(not param.requires_grad)


skips = st.sampled_from([frozenset(), frozenset(), frozenset(), frozenset({1}), frozenset({0, 2})])
errors = st.sampled_from([UserError, KeyboardInterrupt])
names = st.sampled_from(EDITED)
actions = st.one_of(
    st.tuples(st.just("step"), skips),
    st.tuples(st.just("step"), st.just(frozenset())),
    st.tuples(st.sampled_from(["plain_step", "forward", "evaluate", "drop"]), skips),
    st.tuples(st.sampled_from(["fail_forward", "fail_backward"]), errors),
    st.tuples(st.sampled_from(["edit", "read", "gather", "read_gradient"]), names),
    st.tuples(st.just("rate"), st.sampled_from([1e-2, 3e-3])),
    st.tuples(st.just("freeze"), st.sampled_from([0, 2])),
)
tiers = st.sampled_from(["none", "cpu", "nvme"])


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    program=st.lists(actions, min_size=3, max_size=14),
    precision=st.sampled_from(["fp32", "bf16"]),
    placement=st.tuples(tiers, tiers),
    overlap=st.sampled_from(["auto", "deferred"]),
    page=st.sampled_from([4 << 10, 16 << 10]),
    least=st.tuples(st.booleans(), st.booleans()),
    device=st.sampled_from(["cpu", "simulated"]),
    tied=st.booleans(),
    checkpoint=st.sampled_from(["none", "reentrant", "non_reentrant"]),
    around=st.sampled_from(["block", "several", "inside"]),
    watched=st.sampled_from([0, 2]),
)
def test_a_course_of_events_computes_what_it_computes_in_plain_torch(
    program: list[tuple[str, Any]],
    precision: str,
    placement: tuple[str, str],
    overlap: str,
    page: int,
    least: tuple[bool, bool],
    device: str,
    tied: bool,
    checkpoint: models.Checkpoint,
    around: models.Around,
    watched: int,
) -> None:
    make = functools.partial(
        models.build, functools.partial(Faulty, blocks=3, tied=tied, checkpoint=checkpoint, around=around), runs.DTYPES[precision]
    )

    def run(trainer: Any) -> tuple[runs.Outcome, list[Tensor | None]]:
        trainer.model.watch(watched)
        actions = Actions(trainer)
        for name, argument in program:
            getattr(actions, name)(argument)
        return trainer.outcome(), actions.seen

    plain, seen = run(runs.PlainTrainer(make()))
    with tempfile.TemporaryDirectory() as directory:
        config = runs.engine_config(
            Path(directory), param=placement[0], optimizer=placement[1], precision=precision, overlap=overlap, page=page
        )
        if least[0] and not (checkpoint == "non_reentrant" and around == "inside"):  # frozen weights stay there until backward ends
            config = runs.with_device(config, runs.least_device_bytes(make, config, device))
        if least[1]:
            config = runs.with_host(config, runs.least_host_bytes(make, config, device))
        with runs.EngineTrainer(make(), config, device=device) as trainer:
            found, found_seen = run(trainer)
    runs.assert_same(plain, found)
    assert len(seen) == len(found_seen)
    for a, b in zip(seen, found_seen, strict=True):
        assert (a is None) == (b is None)
        assert a is None or b is None or torch.equal(runs.bits(a), runs.bits(b))
