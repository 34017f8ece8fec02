"""Where it runs does not change what it computes: no leg differs in any bit from plain torch."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from tests.support import law
from tests.support.queues import WORKING_BACKENDS

SEED = 2
LAW_SECONDS = float(os.environ.get("INFINITY_LAW_SECONDS", "3600"))
LAW_SEED = int(os.environ.get("INFINITY_LAW_SEED", "0"))

EVERY = law.legs(backends=WORKING_BACKENDS)
CHOSEN = law.covering(EVERY, seed=SEED)


@pytest.mark.parametrize("leg", CHOSEN, ids=str)
def test_a_leg_equals_plain_torch_bit_for_bit(leg: law.Leg, tmp_path: Path) -> None:
    wrong = law.wrong_of(leg, tmp_path)
    assert not wrong, f"{len(wrong)} differences, the first: " + "; ".join(wrong[:5])


def test_the_chosen_legs_have_every_pair_of_values_that_any_leg_has() -> None:
    assert set().union(*map(law.pairs, CHOSEN)) == set().union(*map(law.pairs, EVERY))


def test_a_seed_always_chooses_the_same_legs() -> None:
    assert law.covering(EVERY, seed=SEED) == CHOSEN


def test_no_leg_is_there_twice() -> None:
    assert len(set(EVERY)) == len(EVERY)


@pytest.mark.law
def test_the_sampled_matrix_equals_plain_torch_bit_for_bit(tmp_path: Path) -> None:
    """Legs in a seeded order until ``INFINITY_LAW_SECONDS`` are over; ``INFINITY_LAW_SEED`` is another order."""
    order = random.Random(LAW_SEED).sample(EVERY, len(EVERY))
    deadline = time.monotonic() + LAW_SECONDS
    failures = []
    done = 0
    print(f"\n{len(EVERY)} valid legs; seed {LAW_SEED}, at most {LAW_SECONDS:.0f} s")
    for leg in order:
        if time.monotonic() >= deadline:
            break
        directory = tmp_path / str(done)
        directory.mkdir()
        try:
            wrong = law.wrong_of(leg, directory)
        except Exception as error:  # the other legs are run all the same
            wrong = [f"{type(error).__name__}: {error}"]
        done += 1
        if wrong:
            failures.append(f"{leg}: {len(wrong)} differences, the first: {wrong[0]}")
            print(failures[-1])
        if done % 50 == 0:
            print(f"{done} legs run, {len(failures)} failed")
    print(f"{done} of {len(EVERY)} legs run, {len(failures)} failed")
    assert not failures, "\n".join(failures)
