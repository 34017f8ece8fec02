"""The search for the best setting, on drives that are made up: what they truly give is known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.io_bench import Direction
from infinity.io_tune import (
    FINALISTS,
    GROUP,
    MARGIN_MIN,
    RUNS_MAX,
    Search,
    Setting,
    Trial,
    grid,
    judge,
    margin_between,
    step_rate,
)

DEFAULT = Setting("uring", 1 << 20, 32, 4)
BEST = Setting("uring", 4 << 20, 64, 4)
SETTINGS = grid(DEFAULT, backends=["uring"], blocks=[1 << 18, 1 << 20, 4 << 20], depths=[8, 32, 64, 128], threads=[4])


class Drive:
    """Gives ``rates`` (1 GB/s for what is not named), times ``drift`` of the time, with noise; each run takes ``run_s``."""

    def __init__(
        self,
        rates: dict[Setting, float] | None = None,
        *,
        drift: Callable[[float], float] = lambda _: 1.0,
        noise: float = 0.0,
        run_s: float = 0.1,
        seed: int = 0,
    ) -> None:
        self.now = 0.0
        self.measured: list[tuple[Setting, Direction]] = []
        self._rates = rates or {}
        self._drift = drift
        self._noise = noise
        self._run_s = run_s
        self._random = random.Random(seed)

    def measure(self, setting: Setting, direction: Direction) -> float:
        self.now += self._run_s
        self.measured.append((setting, direction))
        return 1e9 * self._rates.get(setting, 1.0) * self._drift(self.now) * self._random.lognormvariate(0, self._noise)

    def search(self, settings: list[Setting] = SETTINGS, *, budget_s: float = 30.0, seed: int = 0) -> Search:
        return Search(default=DEFAULT, settings=settings, measure=self.measure, budget_s=budget_s, seed=seed, clock=lambda: self.now)


def test_a_step_is_as_long_as_its_reads_alone_and_its_reads_and_writes_at_once() -> None:
    assert 26 / step_rate(mixed=4.0, read=2.0) == pytest.approx(24 / 4.0 + 2 / 2.0)
    assert step_rate(3.0, 3.0) == pytest.approx(3.0)


def test_the_grid_has_every_combination_once_and_not_the_default() -> None:
    assert len(SETTINGS) == len(set(SETTINGS)) == 11
    assert DEFAULT not in SETTINGS


def test_threads_have_as_many_requests_in_flight_as_threads() -> None:
    settings = grid(DEFAULT, backends=["threads", "uring"], blocks=[1 << 20], depths=[8, 16], threads=[2, 32])
    assert [setting for setting in settings if setting.backend == "threads"] == [
        Setting("threads", 1 << 20, 16, 2),
        Setting("threads", 1 << 20, 32, 32),
    ]
    assert {setting.io_threads for setting in settings if setting.backend == "uring"} == {DEFAULT.io_threads}


@pytest.mark.parametrize(("rounds", "outer"), [(1, 0), (5, 0), (7, 0), (10, 0), (11, 1), (20, 4), (60, 20)])
def test_the_interval_is_of_the_order_statistics_that_hold_the_median_in_98_of_100_cases(rounds: int, outer: int) -> None:
    ratios = [1 + index / 100 for index in range(rounds)]
    margin = margin_between(ratios, [1.0] * rounds)
    assert (margin.low, margin.high) == (pytest.approx(ratios[outer] - 1), pytest.approx(ratios[-1 - outer] - 1))
    outside = 2 * sum(math.comb(rounds, k) for k in range(outer + 1)) / 2**rounds
    assert outside <= 0.02 or outer == 0


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=40), st.floats(0.1, 10))
def test_a_margin_lies_in_its_interval_and_knows_no_unit(pairs: list[tuple[float, float]], unit: float) -> None:
    ours, theirs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    margin = margin_between(ours, theirs)
    assert margin.low <= margin.median <= margin.high
    assert margin_between([unit * rate for rate in ours], [unit * rate for rate in theirs]).median == pytest.approx(margin.median)


def test_a_margin_counts_where_its_whole_interval_is_above_the_default() -> None:
    assert margin_between([1.1] * 7, [1.0] * 7).counts
    assert not margin_between([1.1] * 6 + [0.9], [1.0] * 7).counts


def test_a_margin_of_few_rounds_or_of_little_does_not_count() -> None:
    assert not margin_between([2.0] * 6, [1.0] * 6).counts
    assert not margin_between([1 + MARGIN_MIN / 2] * 7, [1.0] * 7).counts
    assert margin_between([1 + MARGIN_MIN / 2] * 7, [1.0] * 7).noise == MARGIN_MIN


def trial(setting: Setting, *rates: float) -> Trial:
    return Trial(setting, {direction: list(rates) for direction in Direction})


def test_rounds_that_were_cut_off_are_not_looked_at() -> None:
    cut = trial(BEST, *[1.5] * 7, 0.1)
    cut.rates[Direction.WRITE].pop()
    verdict = judge([trial(DEFAULT, *[1.0] * 8), cut])
    assert verdict.margin is not None
    assert (verdict.margin.rounds, verdict.winner) == (7, cut)


def test_of_those_that_count_the_fastest_wins_not_one_that_is_faster_but_uncertain() -> None:
    certain, uncertain = trial(SETTINGS[0], *[1.1] * 7), trial(SETTINGS[1], *[1.3] * 6, 0.5)
    verdict = judge([trial(DEFAULT, *[1.0] * 7), uncertain, certain])
    assert verdict.winner is certain


def test_without_a_whole_round_the_default_stays_and_nothing_is_claimed() -> None:
    default = trial(DEFAULT, 1.0)
    assert judge([default]).winner is default
    assert judge([default, Trial(BEST)]).margin is None


def test_the_best_is_found_on_a_steady_drive_with_its_margin() -> None:
    drive = Drive({BEST: 1.25, SETTINGS[0]: 0.5}, noise=0.02)
    verdict = drive.search().run()
    assert verdict.winner.setting == BEST
    assert verdict.margin is not None
    assert verdict.margin.low < 0.25 < verdict.margin.high


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "drift",
    [
        lambda now: 1 + 0.5 * math.sin(now / 3),
        lambda now: 2.0 if now > 8 else 1.0,
        lambda now: math.exp(-now / 20),
    ],
    ids=["wave", "step", "decay"],
)
def test_the_best_is_found_on_a_drive_that_drifts(seed: int, drift: Callable[[float], float]) -> None:
    drive = Drive({BEST: 1.2}, drift=drift, noise=0.02, seed=seed)
    assert drive.search(seed=seed).run().winner.setting == BEST


def test_where_all_are_the_same_the_default_stays() -> None:
    winners = [Drive(noise=0.1, seed=seed).search(seed=seed).run().winner.setting for seed in range(40)]
    assert winners.count(DEFAULT) >= 38


def test_a_drive_that_drifts_makes_no_winner_where_all_are_the_same() -> None:
    drives = [Drive(drift=lambda now: 1 + 0.5 * math.sin(now / 3), noise=0.05, seed=seed) for seed in range(20)]
    winners = [drive.search(seed=seed).run().winner.setting for seed, drive in enumerate(drives)]
    assert winners.count(DEFAULT) >= 18


def test_a_default_that_is_best_stays() -> None:
    verdict = Drive(dict.fromkeys(SETTINGS, 0.8), noise=0.02).search().run()
    assert verdict.winner.setting == DEFAULT
    assert verdict.margin is not None
    assert verdict.margin.high < 0


@pytest.mark.parametrize("budget_s", [10.0, 30.0, 100.0])
def test_the_budget_is_kept_and_used(budget_s: float) -> None:
    drive = Drive(noise=0.02)
    search = drive.search(budget_s=budget_s)
    search.run()
    round_s = 0.1 * len(search.trials) * len(Direction)
    group_s = 0.1 * (GROUP + 1)
    used_up = drive.now >= budget_s - round_s or search.trials[0].rounds == RUNS_MAX
    assert used_up
    assert drive.now <= budget_s + round_s + group_s


def test_a_budget_that_is_too_small_still_gives_the_rounds_that_were_asked_for() -> None:
    drive = Drive(run_s=5.0)
    search = drive.search(budget_s=10.0)
    search.run()
    assert [trial.rounds for trial in search.trials] == [7] * len(search.trials)


def test_with_little_time_what_differs_in_one_thing_is_tried_first_and_the_rest_is_named() -> None:
    search = Drive(run_s=1.0).search(budget_s=20.0)
    search.run()
    tried = {*search.ratios, *(trial.setting for trial in search.trials[1:])}
    assert 0 < len(tried) < len(SETTINGS)
    assert tried | set(search.left_out) == set(SETTINGS)
    assert all(setting.block_nbytes == DEFAULT.block_nbytes or setting.queue_depth == DEFAULT.queue_depth for setting in tried)


def test_what_is_tried_is_between_two_measurements_of_the_default() -> None:
    drive = Drive()
    drive.search().run()
    sifting = [setting for setting, direction in drive.measured if direction is Direction.MIXED][: 11 + 3]
    assert sifting[:3] == [DEFAULT] * 3
    for begin in range(2, len(sifting) - GROUP, GROUP + 1):
        assert sifting[begin] == DEFAULT
        assert DEFAULT not in sifting[begin + 1 : begin + 1 + GROUP]


def test_the_finalists_are_compared_in_all_directions_in_orders_that_differ() -> None:
    drive = Drive()
    search = drive.search()
    search.run()
    assert len(search.trials) == 1 + FINALISTS
    reads = [setting for setting, direction in drive.measured if direction is Direction.READ]
    rounds = [tuple(reads[begin : begin + 4]) for begin in range(0, len(reads), 4)]
    assert all(set(order) == {trial.setting for trial in search.trials} for order in rounds)
    assert len(set(rounds)) > 1


def test_a_seed_gives_the_same_order_again_and_another_one_another() -> None:
    def order(seed: int) -> list[tuple[Setting, Direction]]:
        drive = Drive()
        drive.search(seed=seed).run()
        return drive.measured

    assert order(1) == order(1)
    assert order(1) != order(2)


@pytest.mark.parametrize("after", [1, 2, 3, 10, 30, 100])
def test_an_interrupt_passes_and_what_was_measured_stays(after: int) -> None:
    drive = Drive({BEST: 1.3})
    search = drive.search()

    def interrupt(search: Search) -> None:
        if search.measured == after:
            raise KeyboardInterrupt

    search.progress = interrupt
    with pytest.raises(KeyboardInterrupt):
        search.run()
    assert search.measured == after == len(drive.measured)
    if search.trials:
        judge(search.trials)
    assert all(ratio > 0 for _, ratio in search.ranking())


def test_the_standing_is_that_of_sifting_until_the_finalists_were_compared_once() -> None:
    search = Drive().search()
    search.ratios = {SETTINGS[0]: [1.1], SETTINGS[1]: [0.9, 1.3, 1.2]}
    search.trials = [trial(DEFAULT, 1.0, 2.0), Trial(SETTINGS[0]), Trial(SETTINGS[1])]
    assert search.standing() == [(SETTINGS[1], 1.2), (SETTINGS[0], 1.1)]
    search.trials[1:] = [trial(SETTINGS[0], 1.5, 3.0), trial(SETTINGS[1], 0.5)]
    assert search.standing() == [(SETTINGS[0], 1.5), (SETTINGS[1], 0.5)]


def test_progress_is_told_of_every_run_and_ends_where_it_was_planned() -> None:
    seen: list[tuple[int, int]] = []
    search = Drive(run_s=0.1).search()
    search.progress = lambda search: seen.append((search.measured, search.planned))
    search.run()
    assert [measured for measured, _ in seen] == list(range(1, len(seen) + 1))
    assert seen[-1][0] == seen[-1][1]


def test_one_setting_alone_is_compared_at_once() -> None:
    search = Drive({BEST: 2.0}).search([BEST])
    verdict = search.run()
    assert verdict.winner.setting == BEST
    assert search.ratios == {}
    assert search.left_out == []
    assert median(verdict.winner.steps) == pytest.approx(2e9)
