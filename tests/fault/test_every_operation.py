"""Every file operation of a training run goes wrong, in turn and in every way: the right weights or a typed error, and nothing left.

`make faults` prints the table of all of them; here are some of each, and all of them under `slow`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator

import pytest
import torch

from infinity.task_queue import FileOp
from tests.support.faulting import KINDS, Ending, Expected, Injection, Setup, clean_calls, injections, run_each
from tests.support.queues import BACKENDS


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def endings(setup: Setup, *, sample: int | None, kinds: Iterable[str] = ()) -> list[tuple[Injection, Ending]]:
    expected = Expected.of(setup)
    every = injections(clean_calls(setup, expected), sample=sample)
    chosen = [injection for injection in every if not kinds or injection.kind.name in kinds]
    return list(run_each(setup, expected, chosen, jobs=len(os.sched_getaffinity(0))))


def check(found: list[tuple[Injection, Ending]]) -> None:
    wrong = [f"{injection}: {'; '.join(ending.wrong)}" for injection, ending in found if ending.wrong]
    assert not wrong, f"{len(wrong)} of {len(found)}:\n" + "\n".join(wrong[:10])
    # What was set did happen: each way to fail made at least one run of its own see an error.
    seen = Counter((injection.kind.name, injection.op) for injection, ending in found if ending.error)
    for kind in KINDS:
        for op in set(kind.ops) - set(kind.masked) - {FileOp.CLOSE, FileOp.DATASYNC}:
            assert seen[kind.name, op], f"no run saw {kind.name} at {op.name.lower()}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_some_calls_of_each_operation_in_every_way(backend: str) -> None:
    check(endings(Setup(backend), sample=3))


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("overlap", ["fused", "deferred"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_call_of_each_operation_in_every_way(backend: str, precision: str, overlap: str) -> None:
    every = precision == "fp32" and overlap == "fused"
    check(endings(Setup(backend, precision=precision, overlap=overlap), sample=None if every else 40))


def test_without_verification_a_disk_that_lies_is_believed() -> None:
    """What ``verify`` is for. The other ways to go wrong do not need it."""
    lies = [kind.name for kind in KINDS if kind.silent]
    found = endings(Setup("threads", verify="off"), sample=3, kinds=lies)
    assert not any(ending.error or ending.hung for _, ending in found)
    assert {injection.kind.name for injection, ending in found if ending.wrong} == set(lies)


def test_without_verification_everything_else_is_noticed() -> None:
    others = [kind.name for kind in KINDS if not kind.silent]
    found = endings(Setup("threads", verify="off"), sample=0, kinds=others)
    wrong = [f"{injection}: {'; '.join(ending.wrong)}" for injection, ending in found if ending.wrong]
    assert not wrong, "\n".join(wrong)


# ---- the harness sees what it is there to see ----


def test_a_run_that_hangs_is_a_row_and_not_the_end() -> None:
    setup = Setup("threads")
    expected = Expected.of(setup)
    hanging = Injection(KINDS[0], FileOp.READ, 1)
    endless = _Endless()
    ((_, ending),) = run_each(endless, expected, [hanging], limit_s=1.0)
    assert ending.word == "hung"
    assert "sleep" in ending.wrong[0] or "config" in ending.wrong[0]


class _Endless(Setup):
    def config(self, directory: object) -> dict[str, object]:
        while True:
            pass


def test_a_wrong_weight_is_seen() -> None:
    setup = Setup("threads")
    expected = Expected.of(setup)
    expected.outcome.exp_avg["head.weight"].view(-1)[3] += 1e-7
    harmless = Injection(KINDS[2], FileOp.READ, 5)
    ((_, ending),) = run_each(setup, expected, [harmless])
    assert ending.word == "wrong"
    assert "exp_avg of head.weight: element 3" in ending.wrong[0]
